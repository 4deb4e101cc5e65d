"""The memory panel: what a conversation holds, piece by piece, and how many fit on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

import oscar_mm
from oscar_mm.apps.demo.charts import Line, chart
from oscar_mm.apps.demo.measured_chat import PARTS, Curve
from oscar_mm.apps.demo.session import Visitor
from oscar_mm.capacity import ModelShape
from oscar_mm.chat.conversation import Segment
from oscar_mm.decoding.answer import Timings
from oscar_mm.gpus import GPUS
from oscar_mm.modality import Modality
from oscar_mm.policy import KVPolicy
from oscar_mm.sizes import format_bytes

_POINTS = 160
_NOTE = (
    '<p class="how">Tokens stay in 16 bit until 128 of their modality fill a page, so a short '
    "conversation gains little. Every byte that is in use counts.</p>"
)
_LEAST_TOKENS, _LEAST_BYTES = 256, 100_000
"""Where the axes end before there is much to show."""
SCRIPT = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-index]');
  if (!button || button.disabled) return;
  button.disabled = true;
  trigger('click', {index: Number(button.dataset.index)});
});
"""
"""Tells the page which button was pressed."""
MODELS = {
    "Qwen3-VL-2B": ModelShape(28, 8, 128, 2_100_000_000),
    "Qwen3-VL-4B": ModelShape(36, 8, 128, 4_400_000_000),
    "Qwen3-VL-8B": ModelShape(36, 8, 128, 8_800_000_000),
    "Qwen3-VL-32B": ModelShape(64, 8, 128, 33_400_000_000),
    "Qwen3-VL-30B-A3B": ModelShape(48, 4, 128, 31_100_000_000),
    "Qwen3-Omni-30B-A3B": ModelShape(48, 4, 128, 35_300_000_000),
    "LLaVA-v1.6-Mistral-7B": ModelShape(32, 8, 128, 7_600_000_000),
    "LLaVA-v1.6-Vicuna-7B": ModelShape(32, 32, 128, 7_100_000_000),
    "LLaVA-v1.6-Vicuna-13B": ModelShape(40, 40, 128, 13_400_000_000),
}
"""Layers, KV heads, head_dim and parameters, about, of published checkpoints."""
LENGTHS = {"this long": 0, "8K tokens": 8192, "32K tokens": 32768, "128K tokens": 131072}
"""Tokens of a conversation with this mix of modalities; 0 for as many as there are."""
_EXAMPLE = {"text": 1, "image": 7}
"""The mix before anything was said."""


def memory_panel(curve: Curve, timings: Timings | None, other: Curve | None = None) -> str:
    """Tiles and chart.

    Args:
        curve: of the conversation.
        timings: of the latest answer, as far as it goes.
        other: of the same conversation over a 16-bit cache, where that runs beside it.
    """
    now = curve.last
    speed = f"{timings.tokens_per_s:.0f}" if timings and timings.tokens_per_s else "-"
    wait = f"{timings.prefill_s:.2f} s" if timings else "-"
    tiles = "".join(
        f'<div class="tile{" lead" if lead else ""}"><dt>{escape(name)}</dt>'
        f"<dd>{escape(value)}</dd><small>{escape(note)}</small></div>"
        for name, value, note, lead in (
            ("16 bit takes", f"{now.ratio:.2f}x", "as much", True),
            ("Held now", format_bytes(now.held), f"{now.stored:,} tokens", True),
            ("In 16 bit", format_bytes(now.plain), "the same tokens", False),
            ("Bits per value", f"{now.bits_per_value:.2f}", "all counted", False),
            ("Speed", speed, "tokens/s", False),
            ("First token", wait, "media and prompt", False),
        )
    )
    return f'<dl class="tiles">{tiles}</dl>{memory_chart(curve, other)}{_NOTE}'


def memory_chart(curve: Curve, other: Curve | None) -> str:
    """Bytes over tokens, stacked by modality, below what 16 bit would take."""
    samples = curve.thinned(_POINTS)
    shown = [part for part in PARTS if any(sample.parts[part] for sample in samples)]
    lines, below = [], [0.0] * len(samples)
    for part in shown or PARTS[:1]:
        below = [height + one.parts[part] for height, one in zip(below, samples, strict=True)]
        points = [(one.tokens, height) for one, height in zip(samples, below, strict=True)]
        lines.append(Line(part, f"c-{part}", points, filled=True))
    plain = [(sample.tokens, sample.plain) for sample in samples]
    lines.append(Line("the same in 16 bit", "c-plain", plain, dashed=True))
    if other is not None:
        measured = [(sample.tokens, sample.held) for sample in other.thinned(_POINTS)]
        lines.append(Line("16 bit, measured", "c-other", measured))
    now = curve.last
    summary = (
        f"{now.stored} tokens hold {format_bytes(now.held)}; in 16 bit they would hold "
        f"{format_bytes(now.plain)}, {now.ratio:.2f} times as much"
    )
    return chart(
        lines,
        title="Memory of keys and values",
        summary=summary,
        x_label="tokens of the conversation",
        show_y=_short,
        least_x=_LEAST_TOKENS,
        least_y=_LEAST_BYTES,
    )


def _short(count: float) -> str:
    """Bytes for an axis, where the steps are round."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g}"


def segment_table(segments: Sequence[Segment], pictures: Sequence[Sequence[str]]) -> str:
    """The table.

    Args:
        segments: of the conversation.
        pictures: HTML of the media of each turn, in the order of its segments; empty where there
            are none.
    """
    if not segments:
        return (
            '<p class="empty">What you show and ask is listed here, with its tokens and bytes.</p>'
        )
    media = {turn: iter(shown) for turn, shown in enumerate(pictures)}
    rows = "".join(
        _row(one, "" if one.modality is Modality.TEXT else next(media[one.turn], ""))
        for one in segments
    )
    return (
        '<table class="segments"><caption class="sr">Segments of the conversation</caption>'
        '<thead><tr><th scope="col" class="what">Segment</th><th scope="col">Tokens</th>'
        '<th scope="col">Bytes</th><th scope="col"><span class="sr">Forget</span></th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _row(one: Segment, picture: str) -> str:
    label, kind = escape(one.label), one.modality.label
    mark = picture or f'<i class="glyph c-{kind}" aria-hidden="true">{kind[0].upper()}</i>'
    action = ""
    if one.forgotten:
        action = '<span class="gone">forgotten</span>'
    elif one.modality is not Modality.TEXT:
        action = (
            f'<button type="button" data-index="{one.index}" aria-label="Forget {label}" '
            'title="Free its memory; the conversation goes on">Forget</button>'
        )
    return (
        f'<tr class="{"is-gone" if one.forgotten else ""}"><th scope="row"><div class="piece">'
        f'<span class="mark">{mark}</span><span class="name"><b>{label}</b>'
        f'<small class="c-{kind}">{kind}</small></span></div></th>'
        f"<td>{one.tokens:,}</td><td>{format_bytes(one.bytes)}</td><td>{action}</td></tr>"
    )


def how_many(
    stored: Mapping[str, int], policy: KVPolicy, gpu: str, shape: ModelShape, length: str
) -> str:
    """Two counts and how they come about.

    Args:
        stored: tokens of the conversation by modality.
        policy: of the conversation.
        gpu: a key of ``oscar_mm.gpus.GPUS``.
        shape: of the model.
        length: a key of LENGTHS.
    """
    mix = stored if sum(stored.values()) else _EXAMPLE
    wanted = LENGTHS[length] or sum(stored.values()) or 1024
    tokens = scaled(mix, wanted)
    plain = KVPolicy.preset("bf16")
    room = GPUS[gpu] * 1e9
    packed, whole = (shape.conversations(room, one, tokens) for one in (policy, plain))
    if not whole and not packed:
        weights = format_bytes(shape.weight_bytes)
        return f'<p class="fits none">Weights of {weights} leave no room on this GPU.</p>'
    one, other = (format_bytes(shape.kv_bytes(policy, tokens)) for policy in (policy, plain))
    total = sum(tokens.values())
    return (
        f'<p class="fits"><strong>{packed:,}</strong> conversations like this fit, '
        f"<b>{whole:,}</b> in 16 bit.</p>"
        f'<p class="how">{total:,} tokens: {escape(one)} each instead of {escape(other)}, beside '
        f"weights of {format_bytes(shape.weight_bytes)}. By the formats, not measured.</p>"
    )


def scaled(mix: Mapping[str, int], total: int) -> dict[str, int]:
    """So many tokens of a mix of modalities; the rest of the division is text."""
    count = sum(mix.values())
    tokens = {name: total * part // count for name, part in mix.items()}
    tokens["text"] = tokens.get("text", 0) + total - sum(tokens.values())
    return tokens


def report(visitor: Visitor) -> dict[str, Any]:
    """Model, policy, memory, segments (without names) and the speed of the latest answer."""
    side, pipe = visitor.side, visitor.side.chat.pipe
    policy = asdict(pipe.policy) | {"bits": pipe.policy.bits._asdict()}
    found = {
        "oscar_mm": oscar_mm.__version__,
        "model": {"family": pipe.family.name, "fingerprint": pipe.fingerprint},
        "dtype": str(pipe.model.dtype).removeprefix("torch."),
        "device": pipe.family.device.type,
        "policy": {"preset": visitor.settings.name, **policy},
        "turns": len(side.chat.turns),
        "memory": side.memory.to_dict(),
        "segments": [
            {
                "modality": one.modality.label,
                "tokens": one.tokens,
                "bytes": one.bytes,
                "forgotten": one.forgotten,
            }
            for one in side.segments
        ],
        "timings": asdict(side.timings) if side.timings else None,
    }
    if visitor.other is not None:
        found["sixteen_bit"] = {"memory": visitor.other.memory.to_dict()}
    return found


def report_json(visitor: Visitor) -> str:
    """The same as text."""
    return json.dumps(report(visitor), indent=1, allow_nan=False)


def memory_view(visitor: Visitor) -> str:
    """Numbers and chart of the memory."""
    other = visitor.other.curve if visitor.other else None
    return memory_panel(visitor.side.curve, visitor.side.timings, other)


def segments_view(visitor: Visitor) -> str:
    """What the conversation is made of."""
    return segment_table(
        visitor.side.segments, [[shown.html for shown in one.shown] for one in visitor.turns]
    )


def status_view(visitor: Visitor) -> str:
    """A line about this conversation and the server."""
    policy = visitor.settings.policy
    bits = ", ".join(f"{name} {count}" for name, count in policy.bits._asdict().items())
    return (
        f'<p class="status"><b>{escape(visitor.settings.name)}</b> · bits: {escape(bits)} · '
        f"window {policy.window} · {escape(visitor.hall.status)}</p>"
    )
