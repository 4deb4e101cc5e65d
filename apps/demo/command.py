"""`oscar-mm demo`: serve the web demo on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from oscar_mm.apps import options, terminal
from oscar_mm.extras import require
from oscar_mm.models import BUNDLED
from oscar_mm.policy import DEFAULT, KVPolicy
from oscar_mm.sizes import parse_bytes

DEFAULT_MODEL = "pocket-omni"
"""A bundled model that supports images and audio."""


def demo(
    model: Annotated[
        str,
        typer.Option(
            *("--model", "-m"),
            metavar="NAME|DIR|ID",
            help=f"A bundled model ({', '.join(BUNDLED)}), a model folder or a hub id.",
        ),
    ] = DEFAULT_MODEL,
    policy: options.Policy = DEFAULT,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also answer with a 16-bit cache, side by side.")
    ] = False,
    port: Annotated[
        int, typer.Option(metavar="N", min=1, max=65535, help="Port of the page.")
    ] = 7860,
    host: Annotated[
        str, typer.Option(metavar="NAME", help="Address to listen on; 0.0.0.0 for all of them.")
    ] = "127.0.0.1",
    kv_budget: Annotated[
        str, typer.Option(metavar="SIZE", help="Maximum KV memory of all conversations together.")
    ] = "2GB",
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            file_okay=False,
            help="Store conversations here, so that they survive a restart of the demo.",
        ),
    ] = None,
    max_context: options.MaxContext = None,
    device: options.Device = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="bfloat16, float16 or float32. Default: the checkpoint's; on a CPU, bfloat16.",
        ),
    ] = None,
) -> None:
    """Serve a web page: a long conversation with a live view of its memory.

    Needs the extra "demo". The default model is tiny; it reads printed codes and understands spoken
    digits.
    """
    KVPolicy.preset(policy)
    parse_bytes("--kv-budget", kv_budget)
    require("demo", "demo", "gradio", "markdown_it", "python_multipart", "webrtcvad", "wsproto")
    options.model_or_bundled(model)
    terminal.quiet_transformers()
    from oscar_mm.apps.demo.server import serve  # imports gradio and torch

    serve(
        model,
        policy=policy,
        compare=compare,
        port=port,
        host=host,
        kv_budget=kv_budget,
        max_context=max_context,
        device=device,
        dtype=dtype,
        keep=keep,
    )
