"""`oscar-mm plan`: compute the memory that a conversation needs, without loading a model."""

import json
import re
import sys
from typing import Annotated, Any

import typer

from oscar_mm.apps import options, terminal
from oscar_mm.errors import InputError
from oscar_mm.models.released import released_model
from oscar_mm.policy import DEFAULT, KVPolicy
from oscar_mm.sizes import GPUS, format_bytes, parse_bytes

_GIGABYTE = 10**9


def plan(
    model: options.Model = None,
    images: Annotated[int, typer.Option(metavar="N", min=0, max=10_000, help="Images shown.")] = 0,
    image_size: Annotated[
        str, typer.Option(metavar="WxH", help="Pixels of each image.")
    ] = "1280x960",
    audio_minutes: Annotated[
        float,
        typer.Option(
            metavar="F", min=0, help="Length of a recording; for models that support audio."
        ),
    ] = 0.0,
    video_minutes: Annotated[
        float, typer.Option(metavar="F", min=0, help="Length of a video.")
    ] = 0.0,
    video_size: Annotated[
        str, typer.Option(metavar="WxH", help="Pixels of the video's frames.")
    ] = "1280x720",
    text_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens of all questions and answers.")
    ] = 512,
    policy: options.Policy = DEFAULT,
    weights: options.Weights = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|SIZE", help=f"{', '.join(GPUS)}, or memory such as 24GB; default: all."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the tables.")
    ] = False,
) -> None:
    """Show tokens, KV memory in 16-bit precision and packed, and how many sessions fit on a GPU.

    Only the model's configuration and processor are read, not its weights. The sizes of released
    models (qwen2.5-vl-3b to -72b, qwen3-vl-2b to -32b and -30b-a3b, qwen3-omni-30b-a3b,
    llava-v1.6-vicuna-7b, -13b, -mistral-7b, -34b) are built in and need no download. A language
    model needs only its configuration, and supports only --text-tokens.
    """
    KVPolicy.preset(policy)
    gpus = _gpus(gpu)
    sizes = {"image_size": _pixels("--image-size", image_size)}
    sizes["video_size"] = _pixels("--video-size", video_size)
    if model is None or released_model(model) is None:
        model = options.model_or_bundled(model, supports_audio=audio_minutes > 0)
    terminal.quiet_transformers()
    from oscar_mm.pipelines.plan import Session
    from oscar_mm.pipelines.plan import plan as plan_session

    session = Session(
        images=images,
        audio_s=60 * audio_minutes,
        video_s=60 * video_minutes,
        text_tokens=text_tokens,
        **sizes,
    )
    estimate = plan_session(model, session, policy, weights=weights)
    fits = {name: estimate.fits(size) for name, size in gpus.items()}
    if as_json:
        records = [
            {"gpu": name, "bytes": gpus[name], "sessions_16_bit": plain, "sessions": packed}
            for name, (plain, packed) in fits.items()
        ]
        print(
            json.dumps({"model": model, "policy": policy} | estimate.to_dict() | {"gpus": records})
        )
        return
    _print(estimate, policy, fits)
    if estimate.total > estimate.context:
        print(
            f"oscar-mm: {estimate.total:,} tokens exceed the model's context of "
            f"{estimate.context:,}: the pipeline would refuse them; send fewer, smaller or shorter "
            "media",
            file=sys.stderr,
        )


def _print(estimate: Any, policy: str, fits: dict[str, tuple[int, int]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from oscar_mm.admission.capacity import RESERVED

    def table(*heads: str) -> Table:
        new = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
        for index, head in enumerate(heads):
            new.add_column(head, justify="right" if index else "left", no_wrap=True)
        return new

    by_modality = table("KV cache", "tokens", "16-bit", policy, "ratio")
    rows = estimate.by_modality() | {"all": (estimate.bf16_bytes, estimate.kv_bytes)}
    for name, (unpacked, packed) in rows.items():
        sizes = (format_bytes(unpacked), format_bytes(packed), f"{unpacked / packed:.2f}x")
        by_modality.add_row(name, f"{estimate.tokens.get(name, estimate.total):,}", *sizes)
    sessions = table("GPU", "sessions in 16-bit", f"with {policy}")
    for name, counts in fits.items():
        sessions.add_row(name, *(f"{count:,}" for count in counts))
    console = Console(highlight=False, markup=False)
    if estimate.policy.packs:
        console.print(terminal.headline(estimate.kv_bytes, estimate.bf16_bytes))
    console.print(by_modality)
    weights = format_bytes(estimate.shape.weight_bytes)
    millions = estimate.shape.parameters / 1e6
    console.print(
        f"{estimate.family}, {millions:,.0f} million parameters: {weights} in {estimate.weights}"
    )
    console.print(sessions)
    console.print(f"A session fits if it and the weights leave {RESERVED:.0%} of the memory free.")


def _gpus(gpu: str | None) -> dict[str, float]:
    """Return the GPUs to plan for: their names, and their memory sizes in bytes."""
    if gpu is None:
        return {f"{name}, {size} GB": size * _GIGABYTE for name, size in GPUS.items()}
    known = {name.lower(): name for name in GPUS}
    if name := known.get(gpu.strip().lower()):
        return {f"{name}, {GPUS[name]} GB": GPUS[name] * _GIGABYTE}
    try:
        size = parse_bytes(
            "--gpu", f"{gpu}GB" if gpu.strip().replace(".", "", 1).isdigit() else gpu
        )
    except InputError:
        raise InputError(
            f"--gpu {gpu!r}: must be {', '.join(GPUS)}, or the memory of a GPU, such as 24GB"
        ) from None
    return {format_bytes(size): size}


def _pixels(name: str, size: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d{1,6})\s*[xX\u00d7]\s*(\d{1,6})\s*", size)
    if not match:
        raise InputError(f"{name} {size!r}: must be width x height in pixels, such as 1280x960")
    return int(match[1]), int(match[2])
