"""`oscar-mm inspect`: token norms by modality, and what quantizing a prompt's keys does."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from oscar_mm.apps import options, progress
from oscar_mm.errors import InputError
from oscar_mm.media.source import existing_file
from oscar_mm.whole_file import whole_file, writing

_PROMPT = "Describe what you see and hear, in detail."


def inspect(
    media: options.Media = None,
    model: options.Model = None,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", metavar="TEXT", help="The question.")
    ] = _PROMPT,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write inspection.json, .png and .html (needs matplotlib)."
        ),
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Show why a model needs token scaling, or that it does not.

    Reads one prompt with the media and measures, in every layer: norms of keys by modality,
    outlier channels, and errors of quantization with token scaling and without.
    """
    given: dict[str, Any] = {
        kind: [existing_file(name, name) for name in names]
        for kind, names in options.by_kind(media or []).items()
    }
    if out is not None:
        there = next(path for path in (out, *out.absolute().parents) if path.exists())
        if not there.is_dir():
            raise InputError(f"--out {out}: {there} is a file; give a folder")
        from oscar_mm.inspect.figure import require_matplotlib  # brings torch

        require_matplotlib()
    model = options.chosen_model(model, hears=bool(given["audio"]))
    progress.on_loading()
    from oscar_mm.pipelines import OscarOmniPipeline, pipeline_for  # slow to import

    kind = pipeline_for(model)
    if given["audio"] and kind is not OscarOmniPipeline:
        raise InputError(
            f"{given['audio'][0]}: {model} hears nothing; take a Qwen3-Omni model or pocket-omni"
        )
    pipe = kind(model, device=device, dtype=dtype)
    pipe.check_texts(prompt, None)
    prepared = pipe.prepare(prompt, pipe.read_media(**given), None)
    pipe.check_length(prepared, 1)

    from oscar_mm.inspect.findings import findings
    from oscar_mm.inspect.inspection import inspect_prompt
    from oscar_mm.inspect.tables import tables

    with progress.prefill(pipe.model):
        inspection = inspect_prompt(pipe.model, prepared)
    said, shown = findings(inspection), tables(inspection)
    _print(said, shown)
    if out is not None:
        names = [Path(name).name for name in media or []]
        _save(out, inspection, said, shown, model=model, media=names, prompt=prompt)


def _print(said: list[str], shown: list[Any]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    for one in shown:
        table = Table(
            title=one.title,
            title_justify="left",
            title_style="bold",
            box=SIMPLE,
            pad_edge=False,
            collapse_padding=True,
        )
        for head in one.heads:
            table.add_column(head, justify="right")
        for row in one.rows:
            table.add_row(*row)
        console.print(table)
    for sentence in said:
        console.print(sentence)


def _save(
    out: Path,
    inspection: Any,
    said: list[str],
    shown: list[Any],
    *,
    model: str,
    media: list[str],
    prompt: str,
) -> None:
    from oscar_mm.inspect.figure import png
    from oscar_mm.inspect.page import page
    from oscar_mm.inspect.tables import details

    name = "/".join(Path(model).parts[-2:])
    figure = png(inspection, f"{name}: keys of {sum(inspection.tokens.values()):,} tokens")
    counts = ", ".join(f"{count:,} {modality}" for modality, count in inspection.tokens.items())
    what = f"Tokens: {counts}. Media: {', '.join(media) or 'none'}."
    record = {"model": model, "media": media, "prompt": prompt, "findings": said}
    shown = [*shown, *details(inspection)]
    files = {
        "inspection.json": json.dumps(record | inspection.to_dict(), indent=1).encode(),
        "inspection.png": figure,
        "inspection.html": page(f"Inspection of {name}", what, said, figure, shown).encode(),
    }
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            with whole_file(out / file) as part:
                part.write_bytes(content)
    for file in files:
        print(out / file, file=sys.stderr)
