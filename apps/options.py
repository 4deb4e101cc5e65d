"""Options that several commands have."""

from typing import Annotated

import typer

from oscar_mm.errors import InputError
from oscar_mm.policy import KVPolicy

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="DIR|ID", help="Local model folder or hub id."),
]
Policy = Annotated[
    str,
    typer.Option(metavar="NAME", help=f"Cache format: {', '.join(KVPolicy.preset_names())}."),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Longest answer, in tokens.")]
Temperature = Annotated[
    float, typer.Option(metavar="F", help="0 takes the likeliest token; above 0 samples.")
]
TopP = Annotated[float, typer.Option(metavar="F", help="Sample from this much probability mass.")]
TopK = Annotated[
    int, typer.Option(metavar="N", help="Sample from the N likeliest tokens; 0 is all.")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Repeatable sampling.")]
Device = Annotated[
    str | None,
    typer.Option(metavar="D", help="cpu, cuda, cuda:1, ...; default: a GPU if any."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="bfloat16, float16 or float32; default: the checkpoint's, on a CPU float32.",
    ),
]
AudioInVideo = Annotated[
    bool, typer.Option("--audio-in-video", help="Hear the sound of the videos (Qwen3-Omni).")
]
AllowRemote = Annotated[
    bool, typer.Option("--allow-remote", help="Fetch media that are http(s) addresses.")
]


def require_model(model: str | None) -> None:
    """Raise InputError if no model was named."""
    if model is None:
        raise InputError(
            "--model is missing: pass a local model folder or a hub id, "
            "for example --model Qwen/Qwen3-VL-8B-Instruct"
        )
