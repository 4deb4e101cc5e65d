"""`oscar-mm ask`: one question about images, videos and sound, answered as it is generated."""

import json
import sys
from dataclasses import asdict
from itertools import chain
from typing import Annotated, Any

import typer

import oscar_mm
from oscar_mm.apps import progress
from oscar_mm.apps.terminal import warnings_as_lines, write
from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits, load_image
from oscar_mm.media.source import existing_file, is_address, read_bytes
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
    audio: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A recording (Qwen3-Omni); may be repeated."),
    ] = None,
    audio_in_video: Annotated[
        bool, typer.Option("--audio-in-video", help="Hear the sound of the videos (Qwen3-Omni).")
    ] = False,
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
        bool, typer.Option("--allow-remote", help="Fetch media that are http(s) addresses.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
    ] = False,
) -> None:
    """Answer one question about images, videos and sound.

    The answer goes to stdout as it is generated, the memory table to stderr.
    """
    # Whatever can be wrong with the request is told before the model takes its seconds to load.
    KVPolicy.preset(policy)
    _check_request(prompt, model, images, video, audio)
    pictures = [load_image(name, allow_remote=allow_remote) for name in images or []]
    for name in video or []:
        existing_file(name, name)
    limits = MediaLimits()
    sounds = [
        read_bytes(name, allow_remote=allow_remote, limits=limits, label=name)
        if is_address(name)
        else existing_file(name, name)
        for name in audio or []
    ]
    from oscar_mm.sampling import Sampling  # brings torch, which the checks above do without

    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    progress.on_loading()
    from oscar_mm.pipelines.loading import reader  # brings transformers' models, slow to import

    kind = reader(model)
    media: dict[str, Any] = {"images": pictures, "videos": video}
    if kind == "OscarOmniPipeline":
        media |= {"audio": sounds, "use_audio_in_video": audio_in_video}
    elif sounds or audio_in_video:
        option = "--audio" if sounds else "--audio-in-video"
        raise InputError(f"{option}: {model} hears nothing; take a Qwen3-Omni checkpoint")
    pipe = getattr(oscar_mm, kind)(model, policy=policy, device=device, dtype=dtype)
    with progress.prefill(pipe.model):
        with warnings_as_lines():
            stream = pipe.stream(prompt=prompt, system=system, **media, **asdict(sampling))
        pieces = iter(stream)
        first = next(pieces, "")
    if as_json:
        for _ in pieces:
            pass
        print(json.dumps(_as_dict(stream.result), ensure_ascii=False), flush=True)
        return
    for piece in chain([first], pieces):
        write(piece)
    print(flush=True)
    timings = stream.result.timings
    print(stream.result.memory, file=sys.stderr)
    print(
        f"prefill {timings.prefill_s:.2f} s, decode {timings.decode_s:.2f} s, "
        f"{timings.tokens_per_s:.1f} tokens/s",
        file=sys.stderr,
    )


def _check_request(prompt: str, model: str | None, *media: list[str] | None) -> None:
    if model is None:
        raise InputError(
            "--model is missing: pass a local model folder or a hub id, "
            "for example --model Qwen/Qwen3-VL-8B-Instruct"
        )
    if not prompt.strip():
        raise InputError("--prompt is empty: pass the question as text")
    if not any(media):
        raise InputError("nothing to ask about: pass an IMAGE, --video FILE or --audio FILE")


def _as_dict(result: Any) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "memory": result.memory.to_dict(),
        "timings": asdict(result.timings),
        "prompt_tokens": result.prompt_tokens,
    }
