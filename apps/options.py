"""Options that several commands have."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from oscar_mm.media.source import KIND
from oscar_mm.models import BUNDLED
from oscar_mm.policy import KVPolicy

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|DIR|ID",
        help=f"A bundled model ({', '.join(BUNDLED)}), a model folder or a hub id; default: "
        "pocket-vl, for sound pocket-omni.",
    ),
]
Media = Annotated[
    list[str] | None,
    typer.Argument(metavar="MEDIA", help="Images, videos and recordings, told by suffix."),
]
Policy = Annotated[
    str,
    typer.Option(metavar="NAME", help=f"Cache format: {', '.join(KVPolicy.preset_names())}."),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Longest answer, in tokens.")]
Longest = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        metavar="N",
        help="Longest answer, in tokens, with its reasoning; thinking models get more by default.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="F",
        help="0 takes the likeliest token, above 0 samples. Default: as the checkpoint says.",
    ),
]
TopP = Annotated[
    float | None, typer.Option(metavar="F", help="Sample from this much probability mass.")
]
TopK = Annotated[
    int | None, typer.Option(metavar="N", help="Sample from the N likeliest tokens; 0 is all.")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Repeatable sampling.")]
Device = Annotated[
    str | None,
    typer.Option(metavar="D", help="cpu, cuda, cuda:1, ...; default: a GPU if any."),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(metavar="auto", help="Spread the model's layers over several GPUs."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="bfloat16, float16 or float32; default: the checkpoint's, on a CPU float32.",
    ),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Most tokens of a conversation with its answer; more is refused. Default: the "
        "model's own.",
    ),
]
AudioInVideo = Annotated[
    bool, typer.Option("--audio-in-video", help="Hear the sound of the videos (Qwen3-Omni).")
]
AllowRemote = Annotated[
    bool, typer.Option("--allow-remote", help="Fetch media that are http(s) addresses.")
]

TEXT_NEEDS_MODEL = (
    "--text needs --model, the folder or hub id of a language model: the bundled models are asked "
    "about pictures and sound"
)
TEXT_NEEDS_LANGUAGE_MODEL = (
    "--text is for language models, and {} is none that transformers loads as such; ask it "
    "questions with media instead"
)


def checked_sampling(**given: Any) -> dict[str, Any]:
    """Those options of an answer that were given, checked before a model takes its time to load.

    Raises:
        InputError: a value that is not allowed.
    """
    from oscar_mm.generation.sampling import Sampling  # brings torch

    chosen = {name: value for name, value in given.items() if value is not None}
    Sampling(**chosen)
    return chosen


def by_kind(media: list[str]) -> dict[str, list[str]]:
    """Names of files under "images", "videos" and "audio"; an unknown suffix is an image's."""
    kinds: dict[str, list[str]] = {"images": [], "videos": [], "audio": []}
    for name in media:
        kinds[KIND.get(Path(name).suffix.lower(), "images")].append(name)
    return kinds


def chosen_model(model: str | None, *, hears: bool = False) -> str:
    """``model``, or a bundled one if none was named, which a line on stderr then says.

    Args:
        hears: whether it has to take sound.
    """
    if model is not None:
        return model
    name = "pocket-omni" if hears else "pocket-vl"
    what = f"{name}, a tiny demo model that {BUNDLED[name]}"
    print(f"oscar-mm: no --model given, so this is {what}", file=sys.stderr)
    return name
