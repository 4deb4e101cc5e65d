"""`oscar-mm inspect`: measure a prompt's key norms by modality and its quantization errors."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from oscar_mm.apps import options, terminal
from oscar_mm.errors import InputError
from oscar_mm.extras import require
from oscar_mm.files import read_text, whole_file, writing
from oscar_mm.media.source import existing_file
from oscar_mm.modality import Modality

_PROMPT = "Describe what you see and hear, in detail."
_TOKENS = 4096


def inspect(
    media: options.Media = None,
    model: options.Model = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help=f"The question; default: {_PROMPT!r}"),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text file for a language model, instead of a prompt."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of tokens read from --text.")
    ] = _TOKENS,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write inspection.json, .png and .html (needs matplotlib)."
        ),
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Show whether a model needs token scaling, and why.

    The model reads a prompt with the media; a language model reads a text. The command then
    measures, in every layer, the key norms by modality, the outlier channels, and the quantization
    errors with and without token scaling.
    """
    if text is not None and (media or prompt is not None):
        raise InputError("--text cannot be combined with media or --prompt")
    text_content = None if text is None else read_text(text)
    given: dict[str, Any] = {
        kind: [existing_file(name, name) for name in names]
        for kind, names in options.by_kind(media or []).items()
    }
    if out is not None:
        existing = next(path for path in (out, *out.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise InputError(f"--out {out}: {existing} is a file; pass a folder")
        require("--out", "plots", "matplotlib")
    if text is not None and model is None:
        raise InputError(options.TEXT_NEEDS_MODEL)
    model = options.model_or_bundled(model, supports_audio=bool(given["audio"]))
    terminal.quiet_transformers()
    question = _PROMPT if prompt is None else prompt
    network, prepared = _load(model, given, question, text_content, tokens, device, dtype)

    from oscar_mm.inspect.inspection import inspect_prompt
    from oscar_mm.inspect.report import findings, tables

    with terminal.prefill_bar(network):
        inspection = inspect_prompt(network, prepared)
    sentences, shown_tables = findings(inspection), tables(inspection)
    _print_inspection(sentences, shown_tables)
    if out is not None:
        names = [Path(name).name for name in media or []]
        source = {"media": names, "prompt": question} if text is None else {"text": text.name}
        _save(out, inspection, sentences, shown_tables, model=model, source=source)


def _load(
    model: str,
    given: dict[str, Any],
    prompt: str,
    text_content: str | None,
    tokens: int,
    device: str | None,
    dtype: str | None,
) -> tuple[Any, Any]:
    """Load a model and prepare its prompt: either a question with media, or a text."""
    from oscar_mm.engine.message_lists import conversation_from
    from oscar_mm.pipelines import OscarOmniPipeline, pipeline_for  # Slow to import.
    from oscar_mm.pipelines.registry import readers
    from oscar_mm.pipelines.text import is_text_model, load_text_model

    if is_text_model(model):
        if text_content is None:
            raise InputError(f"{model} is a language model: pass a text with --text FILE")
        language = load_text_model(model, device=device, dtype=dtype)
        max_tokens = min(tokens, language.context)
        read = language.prompt(text_content, max_tokens)
        if read.tokens == max_tokens:
            print(
                f"oscar-mm: the first {max_tokens:,} tokens of the text are read", file=sys.stderr
            )
        return language.model, read
    if text_content is not None:
        raise InputError(options.TEXT_NEEDS_LANGUAGE_MODEL.format(model))
    kind = pipeline_for(model)
    if given["audio"] and kind is not OscarOmniPipeline:
        raise InputError(
            f"{given['audio'][0]}: {model} does not support audio; use {readers(Modality.AUDIO)}"
        )
    pipe = kind(model, device=device, dtype=dtype)
    media = given["images"], given["videos"], given["audio"]
    prepared = pipe.read_request(conversation_from(prompt, media, None, None))
    return pipe.model, prepared


def _print_inspection(sentences: list[str], shown_tables: list[Any]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    for content in shown_tables:
        table = Table(
            title=content.title,
            title_justify="left",
            title_style="bold",
            box=SIMPLE,
            pad_edge=False,
            collapse_padding=True,
        )
        for head in content.heads:
            table.add_column(head, justify="right")
        for row in content.rows:
            table.add_row(*row)
        console.print(table)
    for sentence in sentences:
        console.print(sentence)


def _save(
    out: Path,
    inspection: Any,
    sentences: list[str],
    shown_tables: list[Any],
    *,
    model: str,
    source: dict[str, Any],
) -> None:
    from oscar_mm.inspect.report import details, page, png

    name = "/".join(Path(model).parts[-2:])
    figure = png(inspection, f"{name}: keys of {sum(inspection.tokens.values()):,} tokens")
    counts = ", ".join(f"{count:,} {modality}" for modality, count in inspection.tokens.items())
    read = f"Media: {', '.join(source.get('media', [])) or 'none'}."
    if "text" in source:
        read = f"Text: {source['text']}."
    what = f"Tokens: {counts}. {read}"
    record = {"model": model, **source, "findings": sentences}
    shown_tables = [*shown_tables, *details(inspection)]
    files = {
        "inspection.json": json.dumps(record | inspection.to_dict(), indent=1).encode(),
        "inspection.png": figure,
        "inspection.html": page(
            f"Inspection of {name}", what, sentences, figure, shown_tables
        ).encode(),
    }
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            with whole_file(out / file) as part:
                part.write_bytes(content)
    for file in files:
        print(out / file, file=sys.stderr)
