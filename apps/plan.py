"""`oscar-mm plan`: what a conversation would take with a model, before anything is loaded."""

import json
import re
import sys
from typing import Annotated, Any

import typer

from oscar_mm.admission.gpus import GPUS
from oscar_mm.apps import options, progress
from oscar_mm.errors import InputError
from oscar_mm.policy import DEFAULT, KVPolicy
from oscar_mm.sizes import format_bytes, parse_bytes

_GIGABYTE = 10**9


def plan(
    model: options.Model = None,
    images: Annotated[int, typer.Option(metavar="N", min=0, max=10_000, help="Images shown.")] = 0,
    image_size: Annotated[
        str, typer.Option(metavar="WxH", help="Pixels of each image.")
    ] = "1280x960",
    audio_minutes: Annotated[
        float, typer.Option(metavar="F", min=0, help="Length of a recording (Qwen3-Omni).")
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
    """Tell tokens, KV bytes in 16 bit and packed, and how many such sessions fit a GPU.

    Configuration and processor of the model say all this; its weights are not read. Of a language
    model the configuration is enough, and --text-tokens is all that there is.
    """
    KVPolicy.preset(policy)
    gpus = _gpus(gpu)
    sizes = {"image_size": _pixels("--image-size", image_size)}
    sizes["video_size"] = _pixels("--video-size", video_size)
    model = options.chosen_model(model, hears=audio_minutes > 0)
    progress.on_loading()
    from oscar_mm.pipelines.plan import Session
    from oscar_mm.pipelines.plan import plan as planned

    session = Session(
        images=images,
        audio_s=60 * audio_minutes,
        video_s=60 * video_minutes,
        text_tokens=text_tokens,
        **sizes,
    )
    made = planned(model, session, policy)
    fits = {name: made.fits(size) for name, size in gpus.items()}
    if as_json:
        found = [
            {"gpu": name, "bytes": gpus[name], "sessions_16_bit": plain, "sessions": packed}
            for name, (plain, packed) in fits.items()
        ]
        print(json.dumps({"model": model, "policy": policy} | made.to_dict() | {"gpus": found}))
        return
    _print(made, policy, fits)
    if made.total > made.context:
        print(
            f"oscar-mm: {made.total:,} tokens are over the model's context of {made.context:,}: "
            "the pipeline would refuse them; show fewer, smaller or shorter media",
            file=sys.stderr,
        )


def _print(made: Any, policy: str, fits: dict[str, tuple[int, int]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from oscar_mm.admission.capacity import RESERVED

    def table(*heads: str) -> Table:
        made_table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
        for index, head in enumerate(heads):
            made_table.add_column(head, justify="right" if index else "left", no_wrap=True)
        return made_table

    by_modality = table("KV cache", "tokens", "16 bit", policy, "ratio")
    plain = KVPolicy.preset("bf16")
    kinds = {name: {name: count} for name, count in made.tokens.items() if count}
    for name, tokens in (kinds | {"all": made.tokens}).items():
        whole, packed = (made.shape.kv_bytes(one, tokens) for one in (plain, made.policy))
        sizes = (format_bytes(whole), format_bytes(packed), f"{whole / packed:.2f}x")
        by_modality.add_row(name, f"{sum(tokens.values()):,}", *sizes)
    sessions = table("GPU", "sessions in 16 bit", f"with {policy}")
    for name, counts in fits.items():
        sessions.add_row(name, *(f"{count:,}" for count in counts))
    console = Console(highlight=False, markup=False)
    console.print(by_modality)
    weights = format_bytes(made.shape.weight_bytes)
    millions = made.shape.parameters / 1e6
    console.print(f"{made.family}, {millions:,.0f} million parameters: {weights} in 16 bit")
    console.print(sessions)
    console.print(f"A session fits where weights and it leave {RESERVED:.0%} of the memory free.")


def _gpus(gpu: str | None) -> dict[str, float]:
    """Names and bytes of those that are asked for."""
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
            f"--gpu {gpu!r}: give {', '.join(GPUS)}, or its memory, such as 24GB"
        ) from None
    return {format_bytes(size): size}


def _pixels(name: str, size: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(\d{1,6})\s*[xX\u00d7]\s*(\d{1,6})\s*", size)
    if not found:
        raise InputError(f"{name} {size!r}: give width and height in pixels, such as 1280x960")
    return int(found[1]), int(found[2])
