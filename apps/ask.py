"""`oscar-mm ask`: answer one question about images, videos and audio."""

import json
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from oscar_mm.apps import options, terminal
from oscar_mm.apps.terminal import print_pieces, warnings_as_lines
from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits, load_image
from oscar_mm.media.image import eighth
from oscar_mm.media.source import existing_file, is_address, read_bytes
from oscar_mm.modality import Modality
from oscar_mm.policy import DEFAULT, KVPolicy


@options.grouped
def ask(
    *,
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="The question.")],
    media: options.Media = None,
    model: options.Model = None,
    policy: options.Policy = DEFAULT,
    video: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A video, whatever its suffix; repeatable."),
    ] = None,
    audio: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="A recording, whatever its suffix; repeatable. For models that support audio.",
        ),
    ] = None,
    audio_in_video: options.AudioInVideo = False,
    system: options.System = None,
    sampling: options.SamplingOptions,
    placement: options.PlacementOptions,
    max_context: options.MaxContext = None,
    allow_remote: options.AllowRemote = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
    ] = False,
) -> None:
    """Answer one question about images, videos and audio.

    The answer is streamed to stdout; a thinking model's reasoning and the memory table go to
    stderr.
    """
    # Check the arguments first, because loading the model takes a long time.
    KVPolicy.preset(policy)
    given = options.by_kind(media or [])
    given["videos"] += video or []
    given["audio"] += audio or []
    _check_request(prompt, given, model)
    for name in given["videos"]:
        existing_file(name, name)
    pictures, sounds = (
        [_file_or_bytes(name, allow_remote) for name in given[kind]] for kind in ("images", "audio")
    )
    for name, picture in zip(given["images"], pictures, strict=True):
        load_image(picture, label=name, fit=eighth)
    answer_options = sampling.checked()
    is_default = model is None
    model = options.model_or_bundled(model, supports_audio=bool(sounds) or audio_in_video)
    terminal.quiet_transformers()
    from oscar_mm.pipelines import OscarOmniPipeline, pipeline_for  # slow to import
    from oscar_mm.pipelines.registry import readers

    kind = pipeline_for(model)
    media_options: dict[str, Any] = {"images": pictures, "videos": given["videos"]}
    if kind is OscarOmniPipeline:
        media_options |= {"audio": sounds, "use_audio_in_video": audio_in_video}
    elif sounds or audio_in_video:
        source = given["audio"][0] if sounds else "--audio-in-video"
        raise InputError(f"{source}: {model} does not support audio; use {readers(Modality.AUDIO)}")
    pipe = kind(
        model,
        policy=policy,
        **asdict(placement),
        max_context=max_context,
    )
    if not is_default and not as_json and sys.stderr.isatty():
        print(terminal.model_description(model, pipe), file=sys.stderr)
    with terminal.prefill_bar(pipe.model):
        with warnings_as_lines():
            stream = pipe.stream(prompt=prompt, system=system, **media_options, **answer_options)
        pieces = stream.with_reasoning()
        first = next(pieces, "")
    if as_json:
        for _ in pieces:
            pass
        print(json.dumps(_as_dict(stream.result), ensure_ascii=False), flush=True)
        return
    for _ in print_pieces(chain([first], pieces)):
        pass
    print(flush=True)
    terminal.print_hint(pipe, prompt)
    timings = stream.result.timings
    print(terminal.memory_text(stream.result.memory), file=sys.stderr)
    print(
        f"prefill {timings.prefill_s:.2f} s, decode {timings.decode_s:.2f} s, "
        f"{timings.tokens_per_s:.1f} tokens/s",
        file=sys.stderr,
    )


def _check_request(prompt: str, given: dict[str, list[str]], model: str | None) -> None:
    if not prompt.strip():
        raise InputError("--prompt is empty: pass the question as text")
    if model is None and not any(given.values()):
        raise InputError(
            "nothing to ask about: pass an image, a video or a recording, or a model with --model"
        )


def _file_or_bytes(name: str, allow_remote: bool) -> Path | bytes:
    """Return the path of a local file, or the bytes downloaded from a URL."""
    if not is_address(name):
        return existing_file(name, name)
    return read_bytes(name, allow_remote=allow_remote, limits=MediaLimits(), label=name)


def _as_dict(result: Any) -> dict[str, Any]:
    return {
        "text": result.text,
        "reasoning": result.reasoning,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "memory": result.memory.to_dict(),
        "timings": asdict(result.timings),
        "prompt_tokens": result.prompt_tokens,
    }
