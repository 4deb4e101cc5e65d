"""`oscar-mm ask`: one question about images and videos, answered as it is generated."""

import json
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import Annotated, Any

import typer

from oscar_mm.apps import progress
from oscar_mm.errors import InputError
from oscar_mm.media import load_image
from oscar_mm.media.source import existing_file
from oscar_mm.policy import KVPolicy


def ask(
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="The question.")],
    images: Annotated[
        list[str] | None, typer.Argument(metavar="IMAGE", help="Image files, in order.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="DIR|ID", help="Local model folder or hub id."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"Cache format: {', '.join(KVPolicy.preset_names())}."),
    ] = "compact",
    video: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="A video file; may be repeated.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Longest answer, in tokens.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(metavar="F", help="0 takes the likeliest token; above 0 samples.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(metavar="F", help="Sample from this much probability mass.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(metavar="N", help="Sample from the N likeliest tokens; 0 is all.")
    ] = 0,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Repeatable sampling.")] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="D", help="cpu, cuda, cuda:1, ...; default: a GPU if any."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="bfloat16, float16 or float32; default: the checkpoint's, on a CPU float32.",
        ),
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Fetch images that are http(s) addresses.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
    ] = False,
) -> None:
    """Answer one question about images and videos.

    The answer goes to stdout as it is generated, the memory table to stderr.
    """
    # Whatever can be wrong with the request is told before the model takes its seconds to load.
    KVPolicy.preset(policy)
    _check_request(images, video, prompt, model)
    pictures = [load_image(name, allow_remote=allow_remote) for name in images or []]
    for name in video or []:
        existing_file(name, name)
    from oscar_mm.sampling import Sampling  # brings torch, which the checks above do without

    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    progress.on_loading()
    from oscar_mm import OscarVLPipeline  # brings transformers' models, slow to import

    pipe = OscarVLPipeline(model, policy=policy, device=device, dtype=dtype)
    with progress.prefill(pipe.model):
        stream = pipe.stream(pictures, prompt, videos=video, system=system, **asdict(sampling))
        pieces = iter(stream)
        first = next(pieces, "")
    if as_json:
        for _ in pieces:
            pass
        print(json.dumps(_as_dict(stream.result), ensure_ascii=False), flush=True)
        return
    _write(first, pieces)
    timings = stream.result.timings
    print(stream.result.memory, file=sys.stderr)
    print(
        f"prefill {timings.prefill_s:.2f} s, decode {timings.decode_s:.2f} s, "
        f"{timings.tokens_per_s:.1f} tokens/s",
        file=sys.stderr,
    )


def _check_request(
    images: list[str] | None, videos: list[str] | None, prompt: str, model: str | None
) -> None:
    if model is None:
        raise InputError(
            "--model is missing: pass a local model folder or a hub id, "
            "for example --model Qwen/Qwen3-VL-8B-Instruct"
        )
    if not prompt.strip():
        raise InputError("--prompt is empty: pass the question as text")
    if not images and not videos:
        raise InputError("nothing to look at: pass at least one IMAGE or --video FILE")


def _write(first: str, rest: Iterator[str]) -> None:
    for piece in chain([first], rest):
        print(_harmless(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    print(flush=True)


def _harmless(text: str) -> str:
    """Without the control characters by which text in a picture could command a terminal."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(one) == "Cc" and one not in "\n\t"
        else one
        for one in text
    )


def _as_dict(result: Any) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "memory": result.memory.to_dict(),
        "timings": asdict(result.timings),
        "prompt_tokens": result.prompt_tokens,
    }
