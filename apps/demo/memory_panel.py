"""Memory panel: memory by segment, capacity of a GPU, and comparison with a 16-bit cache."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from difflib import SequenceMatcher
from html import escape
from typing import Any

import oscar_mm
from oscar_mm.admission.capacity import ModelShape
from oscar_mm.apps.demo.charts import Line, Note, chart
from oscar_mm.apps.demo.measured_chat import (
    PARTS,
    STATES,
    TABLES,
    MeasuredChat,
    MemoryCurve,
    MemorySample,
)
from oscar_mm.apps.demo.session import Session
from oscar_mm.apps.demo.transcript import KINDS, Exchange, counted
from oscar_mm.chat.conversation import Segment
from oscar_mm.engine.answer import Timings
from oscar_mm.modality import Modality
from oscar_mm.policy import KVPolicy
from oscar_mm.sizes import GPUS, format_bytes

_MAX_POINTS = 160
_MAX_READOUTS, _MAX_EVENTS = 48, 40
_MIN_TOKENS, _MIN_BYTES = 256, 100_000
"""Minimum ranges of the chart's horizontal and vertical axes."""
FORGET_SCRIPT = """
const table = document.getElementById('segments');
table.tabIndex = 0;
table.setAttribute('role', 'region');
table.setAttribute('aria-label', 'Segments of the conversation');
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-index]');
  if (!button || button.disabled) return;
  button.disabled = true;
  trigger('click', {index: Number(button.dataset.index)});
});
"""
"""Script that makes the table scrollable by keyboard, and sends the index of a segment when its
button is pressed."""
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
"""Dimensions of published checkpoints: layers, KV heads, head_dim, approximate parameter count."""
LENGTHS = {"this long": 0, "8K tokens": 8192, "32K tokens": 32768, "128K tokens": 131072}
"""Conversation lengths in tokens, by label; 0 stands for the current length."""
_NOT_COMPARED = (
    '<p class="empty">Start comparing, and every question is also answered with a plain 16-bit '
    "cache and the same sampling. Earlier questions are asked again.</p>"
)
_MAX_WORDS = 2000
"""Maximum number of words to compare per answer."""
_MAX_PAIRS = 20
"""Maximum number of questions, from the latest, whose answers are compared."""
_EXAMPLE_MIX = {"text": 1, "image": 7}
"""Mix of modalities to assume for an empty conversation."""


def memory_view(session: Session) -> str:
    """Return a conversation's memory as HTML: numbers, and a curve over its tokens."""
    chat, baseline = session.conversation, session.baseline
    return memory_panel(
        chat.curve,
        chat.timings,
        baseline.curve if baseline else None,
        events=curve_events(chat),
        packs=session.settings.policy.packs,
    )


def memory_panel(
    curve: MemoryCurve,
    timings: Timings | None,
    baseline: MemoryCurve | None = None,
    *,
    events: Sequence[Note] = (),
    packs: bool = True,
) -> str:
    """Return the memory of a conversation as HTML: a headline, tiles and a chart.

    Args:
        curve: memory of the conversation.
        timings: timings of the latest answer so far.
        baseline: memory of the same conversation with a 16-bit cache; None if there is no
            comparison.
        events: events to mark; each position is the number of tokens in the conversation when the
            event happened.
        packs: whether the policy packs any tokens.
    """
    now = curve.last
    speed, wait = _speed_and_wait(timings)
    tiles = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt>'
        f"<dd>{escape(value)}</dd><dd><small>{escape(note)}</small></dd></div>"
        for name, value, note in (
            ("Stored now", format_bytes(now.used_bytes), f"{now.stored_tokens:,} tokens"),
            ("Bits per value", f"{now.bits_per_value:.2f}", "tables included"),
            ("Speed", speed, "tokens/s"),
            ("First token", wait, "media included"),
        )
    )
    headline = f'<div class="headline">{_headline(now, packs=packs)}</div>'
    return f'{headline}<dl class="tiles">{tiles}</dl>{memory_chart(curve, baseline, events)}'


def _headline(now: MemorySample, *, packs: bool) -> str:
    if not now.bf16_bytes:
        return "<p><strong>Nothing is stored yet.</strong></p>"
    used, plain = format_bytes(now.used_bytes), format_bytes(now.bf16_bytes)
    if now.gains:
        return (
            f"<p><strong>{now.ratio:.1f}x smaller than 16-bit</strong>: "
            f"<b>{used}</b> instead of {plain}</p>"
        )
    reason = escape(no_gain_reason(now, packs=packs))
    return f'<p><strong>{used}</strong>, against {plain} in 16-bit</p><p class="how">{reason}</p>'


def no_gain_reason(now: MemorySample, *, packs: bool) -> str:
    """Explain why a conversation takes hardly less, or more, memory than in 16-bit precision."""
    tables = f"The tables of token positions take {format_bytes(now.parts[TABLES])}."
    if now.parts[STATES]:
        tables += f" The states of linear attention take {format_bytes(now.parts[STATES])}."
    if not packs:
        return f"This conversation is stored in 16-bit precision, as set. {tables}"
    return (
        "It is too short to benefit: the latest tokens, and tokens that do not yet fill a page of "
        f"128 of their modality, stay in 16-bit precision. {tables}"
    )


def curve_events(chat: MeasuredChat) -> list[Note]:
    """Return notes for the latest media that were shown or forgotten.

    The position of a note is the number of tokens in the conversation at that time.
    """
    events = []
    for turn in chat.chat.turns:
        counts = Counter(KINDS[span.modality] for span in turn.media)
        shown = ", ".join(counted(n, kind) for kind, n in counts.items())
        if shown:
            events.append(Note(turn.start, f"{shown} shown at {turn.start:,} tokens"))
    events += [
        Note(tokens, f"{name} forgotten at {tokens:,} tokens") for tokens, name in chat.forgotten
    ]
    return sorted(events, key=lambda event: event.x)[-_MAX_EVENTS:]


def memory_chart(
    curve: MemoryCurve, baseline: MemoryCurve | None, events: Sequence[Note] = ()
) -> str:
    """Return a chart of bytes over tokens, stacked by modality, with a 16-bit line to compare."""
    samples = curve.thinned(_MAX_POINTS)
    parts = [part for part in PARTS if any(sample.parts[part] for sample in samples)]
    lines, below = [], [0.0] * len(samples)
    for part in parts or PARTS[:1]:
        below = [height + sample.parts[part] for height, sample in zip(below, samples, strict=True)]
        points = [(sample.tokens, height) for sample, height in zip(samples, below, strict=True)]
        lines.append(Line(part, f"c-{part}", points, filled=True))
    plain = [(sample.tokens, sample.bf16_bytes) for sample in samples]
    lines.append(Line("the same in 16-bit", "c-plain", plain, dashed=True))
    if baseline is not None:
        points = [(sample.tokens, sample.used_bytes) for sample in baseline.thinned(_MAX_POINTS)]
        lines.append(Line("16-bit, measured", "c-other", points))
    now = curve.last
    return chart(
        lines,
        title="Memory of keys and values",
        summary=_readout(now).text,
        x_label="tokens of the conversation",
        show_y=axis_bytes,
        min_x=_MIN_TOKENS,
        min_y=_MIN_BYTES,
        events=events,
        readouts=[_readout(sample, events) for sample in curve.thinned(_MAX_READOUTS)],
    )


def _readout(sample: MemorySample, events: Sequence[Note] = ()) -> Note:
    used, plain = format_bytes(sample.used_bytes), format_bytes(sample.bf16_bytes)
    text = f"{sample.tokens:,} tokens: {used}, {plain} in 16-bit"
    latest = [event.text for event in events if event.x <= sample.tokens][-1:]
    return Note(sample.tokens, "; ".join([text, *latest]))


def axis_bytes(count: float) -> str:
    """Format a number of bytes for a tick of the vertical axis."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g}"


def comparison_view(session: Session) -> str:
    """Return the comparison of both caches as HTML: memory, speed and the latest answers."""
    packed, baseline = session.conversation, session.baseline
    if baseline is None:
        return _NOT_COMPARED
    pairs = [turn for turn in session.turns if turn.baseline is not None][-_MAX_PAIRS:]
    complete = [turn for turn in pairs if turn is not session.baseline_exchange]
    same = sum(turn.answer == turn.baseline for turn in complete)
    verdict = "The next answer is compared."
    if complete:
        verdict = f"{same} of {len(complete)} answers are the same."
        if same < len(complete):
            verdict += " Marked words differ."
    now, reason = packed.curve.last, ""
    if now.bf16_bytes and not now.gains:
        text = escape(no_gain_reason(now, packs=session.settings.policy.packs))
        reason = f'<p class="how">{text}</p>'
    cards = _card(session.settings.name, packed) + _card("16-bit", baseline)
    return (
        f'<div class="pair">{cards}</div>{reason}'
        f'<p class="verdict" role="status">{verdict}</p>'
        f"{''.join(_pair(turn, turn in complete) for turn in reversed(pairs))}"
        f"{memory_chart(packed.curve, baseline.curve)}"
    )


def _card(name: str, chat: MeasuredChat) -> str:
    speed, wait = _speed_and_wait(chat.timings)
    used = format_bytes(chat.curve.last.used_bytes)
    return (
        f"<section><h2>{escape(name)}</h2><p><b>{used}</b></p>"
        f"<footer>{speed} tokens/s, first token {wait}</footer></section>"
    )


def _speed_and_wait(timings: Timings | None) -> tuple[str, str]:
    """Return tokens per second and seconds to the first token, or "-"; one token has no speed."""
    if timings is None:
        return "-", "-"
    speed = f"{timings.tokens_per_s:.0f}" if timings.tokens_per_s else "-"
    return speed, f"{timings.prefill_s:.2f} s"


def _pair(turn: Exchange, is_complete: bool) -> str:
    answers = turn.answer, turn.baseline or ""
    left, right = mark_differences(*answers) if is_complete else map(escape, answers)
    return (
        f'<article class="compared"><p class="asked">{escape(turn.question)}</p><div class="pair">'
        f'<p class="answer">{left}</p><p class="answer">{right}</p></div></article>'
    )


def mark_differences(left: str, right: str) -> tuple[str, str]:
    """Return both texts as HTML, with <mark> around words that are missing in the other text."""
    words = [re.findall(r"\s+|\w+|[^\w\s]", text)[:_MAX_WORDS] for text in (left, right)]
    htmls: tuple[list[str], list[str]] = ([], [])
    for kind, *ranges in SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        for html, text, (start, stop) in zip(htmls, words, (ranges[:2], ranges[2:]), strict=True):
            part = escape("".join(text[start:stop]))
            html.append(part if kind == "equal" or not part.strip() else f"<mark>{part}</mark>")
    return "".join(htmls[0]), "".join(htmls[1])


def segments_view(session: Session) -> str:
    """Return the segments of a conversation as HTML."""
    previews = [[preview.html for preview in turn.previews] for turn in session.turns]
    forgets = not session.conversation.chat.pipe.family.keeps_states
    return segment_table(session.conversation.segments, previews, forgets=forgets)


def segment_table(
    segments: Sequence[Segment], previews: Sequence[Sequence[str]], *, forgets: bool = True
) -> str:
    """Return a table of segments as HTML: tokens, bytes, and a button to forget each media item.

    Args:
        segments: segments of the conversation.
        previews: for each turn, the HTML of its media previews in the order of its segments; "" for
            an item without a preview.
        forgets: whether the model can forget media; if not, there are no buttons.
    """
    if not segments:
        return (
            '<p class="empty">What you show and ask is listed here, with its tokens and bytes.</p>'
        )
    media = {turn: iter(htmls) for turn, htmls in enumerate(previews)}
    numbers: Counter[Modality] = Counter()
    rows = ""
    for segment in segments:
        kind, preview = KINDS.get(segment.modality), ""
        if kind is not None:
            numbers[segment.modality] += 1
            preview = next(media[segment.turn], "")
        name = f"{kind} {numbers[segment.modality]}" if kind else ""
        rows += _segment_row(segment, preview, name, forgets=forgets)
    return (
        '<table class="segments"><caption class="sr">Segments of the conversation</caption>'
        '<thead><tr><th scope="col" class="what">Segment</th><th scope="col">Tokens</th>'
        '<th scope="col">Bytes</th><th scope="col"><span class="sr">Forget</span></th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _segment_row(segment: Segment, preview: str, name: str, *, forgets: bool) -> str:
    """Return the row of a segment, given the name of a medium in the conversation, or ""."""
    label, kind = escape(segment.label), segment.modality.label
    number = f'<a href="#" data-show="{name}">{name}</a>' if name else kind
    mark = preview or f'<i class="glyph c-{kind}" aria-hidden="true">{kind[0].upper()}</i>'
    action = ""
    if segment.forgotten:
        action = '<span class="gone">forgotten</span>'
    elif forgets and segment.modality is not Modality.TEXT:
        action = (
            f'<button type="button" data-index="{segment.index}" aria-label="Forget {label}" '
            'title="Free its memory; the conversation goes on">Forget</button>'
        )
    return (
        f'<tr class="{"is-gone" if segment.forgotten else ""}"><th scope="row"><div class="piece">'
        f'<span class="mark">{mark}</span><span class="name"><b>{label}</b>'
        f'<small class="c-{kind}">{number}</small></span></div></th>'
        f"<td>{segment.tokens:,}</td><td>{format_bytes(segment.bytes)}</td><td>{action}</td></tr>"
    )


def capacity(
    stored: Mapping[str, int],
    policy: KVPolicy,
    gpu: str,
    model: str,
    shape: ModelShape,
    length: str,
) -> str:
    """Return, as HTML, how many conversations like this one fit on a GPU.

    The number is computed from the dimensions of the model.

    Args:
        stored: number of tokens in the conversation, by modality.
        policy: policy of the conversation.
        gpu: a key of ``oscar_mm.sizes.GPUS``.
        model: name of the model.
        shape: dimensions of the model.
        length: a key of LENGTHS.
    """
    mix = stored if sum(stored.values()) else _EXAMPLE_MIX
    tokens = scale_mix(mix, LENGTHS[length] or sum(stored.values()) or 1024)
    plain = KVPolicy.preset("bf16")
    gpu_bytes = GPUS[gpu] * 1e9
    packed, unpacked = (
        shape.conversations(gpu_bytes, cache_format, tokens) for cache_format in (policy, plain)
    )
    if not unpacked and not packed:
        weights = format_bytes(shape.weight_bytes)
        return (
            f'<p class="fits none">The weights of {escape(model)}, {weights}, leave no memory on '
            f"one {escape(gpu)}.</p>"
        )
    packed_size, size = (
        escape(format_bytes(shape.kv_bytes(cache_format, tokens)))
        for cache_format in (policy, plain)
    )
    total = sum(tokens.values())
    return (
        f'<p class="fits"><strong>{packed:,}</strong> such conversations of {total:,} tokens '
        f"with {escape(model)} fit on one {escape(gpu)}, <b>{unpacked:,}</b> in 16-bit.</p>"
        f'<p class="how">{packed_size} each instead of {size}, in addition to weights of '
        f"{format_bytes(shape.weight_bytes)}. Computed from the formats, not measured.</p>"
    )


def format_label(preset: str, shape: ModelShape) -> str:
    """Return a label for a preset: its bits, and its memory saving for a long conversation.

    Args:
        preset: name of the preset.
        shape: dimensions of the model.
    """
    policy, tokens = KVPolicy.preset(preset), scale_mix(_EXAMPLE_MIX, LENGTHS["32K tokens"])
    if not policy.packs:
        return f"{preset}: 16 bits"
    plain = shape.kv_bytes(KVPolicy.preset("bf16"), tokens)
    ratio = plain / shape.kv_bytes(policy, tokens)
    return f"{preset}: {policy.bits.text} bits, {ratio:.1f}x smaller"


def scale_mix(mix: Mapping[str, int], total: int) -> dict[str, int]:
    """Scale a mix of modalities to ``total`` tokens; the rounding remainder goes to text."""
    count = sum(mix.values())
    tokens = {name: total * part // count for name, part in mix.items()}
    tokens["text"] = tokens.get("text", 0) + total - sum(tokens.values())
    return tokens


def memory_report(session: Session) -> str:
    """Return a JSON report of model, policy, memory, segments (without names) and speed.

    The report is safe to share, because it contains nothing that was said or shown.
    """
    conversation, pipe = session.conversation, session.conversation.chat.pipe
    now = conversation.curve.last
    policy = asdict(pipe.policy) | {"bits": pipe.policy.bits._asdict()}
    record: dict[str, Any] = {
        "oscar_mm": oscar_mm.__version__,
        "model": {"family": pipe.family.name, "fingerprint": pipe.fingerprint},
        "dtype": str(pipe.family.model.dtype).removeprefix("torch."),
        "device": pipe.family.device.type,
        "policy": {"preset": session.settings.name, **policy},
        "turns": len(conversation.chat.turns),
        "memory": conversation.memory.to_dict(),
        "used_bytes": now.used_bytes,
        "note": None if now.gains else no_gain_reason(now, packs=pipe.policy.packs),
        "segments": [
            {
                "modality": segment.modality.label,
                "tokens": segment.tokens,
                "bytes": segment.bytes,
                "forgotten": segment.forgotten,
            }
            for segment in conversation.segments
        ],
        "timings": asdict(conversation.timings) if conversation.timings else None,
    }
    if session.baseline is not None:
        record["sixteen_bit"] = {"memory": session.baseline.memory.to_dict()}
    return json.dumps(record, indent=1, allow_nan=False)


def status_view(session: Session) -> str:
    """Return a status line about the conversation and the server as HTML."""
    policy, tokens = session.settings.policy, session.conversation.tokens
    context = session.sessions.pipe.admission.max_context
    bits = ", ".join(f"{name} {count}" for name, count in policy.bits._asdict().items())
    return (
        f'<p class="status"><b>{escape(session.settings.name)}</b> · bits: {escape(bits)} · '
        f"window {policy.window} · {tokens:,} of {context:,} tokens of the context · "
        f"{escape(session.sessions.status)}</p>"
    )
