"""`oscar-mm verify`: check what page formats cost and save with a model that you have."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from oscar_mm.apps import options, terminal
from oscar_mm.apps.audio_qa.rows import Row, check_overwrites, read_rows
from oscar_mm.apps.verify import lmms_tasks
from oscar_mm.errors import InputError
from oscar_mm.models import SAMPLES, bundled
from oscar_mm.policy import KVPolicy

_FORMATS = tuple(name for name in KVPolicy.preset_names() if KVPolicy.preset(name).packs)
_MOST_TOKENS = 1024
"""Maximum of --max-new-tokens, because the logits after each token of an answer stay in memory."""


def verify(
    model: options.Model = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSONL: an object with question, images, audio or videos (paths relative to the "
            "file) and, if known, answer on each line; or CSV. Default: questions about the "
            "pictures and clips in the package, as far as the model supports them.",
        ),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Cache formats, separated by commas; with changes such as compact:window=128.",
        ),
    ] = ",".join(_FORMATS),
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Use only the first N questions (of each task)."),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(metavar="N", min=2, max=_MOST_TOKENS, help="Maximum tokens of an answer."),
    ] = 128,
    repeats: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Number of timings of each format.")
    ] = 5,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Also run these tasks of lmms-eval, such as ocrbench,mmmu_val (if installed).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the results; default: verify-MODEL.json."),
    ] = None,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="bfloat16, float16, float32, or auto for the checkpoint's, also on a CPU.",
        ),
    ] = "auto",
    allow_remote: options.AllowRemote = False,
) -> None:
    """Check quality, speed and memory of a model with a packed cache, against a 16-bit cache.

    The model answers each question greedily with a 16-bit cache and with each format. Each format
    is also fed the 16-bit answer token by token, and its next-token distributions are compared with
    those of the 16-bit cache. Decode speed and first-token time are measured on the longest
    question, memory at the end of each answer.

    Results are printed as tables and as one row for docs/results.md, and are written as JSON after
    each question. The exit code is 1 if a question failed.
    """
    policies, task_names = policies_of(formats), _names(tasks or "")
    lmms_tasks.check(task_names)
    rows = _rows(questions)
    audio = questions is not None and any(row.audio for row in rows)
    model = options.model_or_bundled(model, supports_audio=audio)
    name = _model_name(model)
    path = _results_file(out, name)
    check_overwrites({"results": path}, rows, questions)
    terminal.quiet_transformers()
    from oscar_mm.apps.verify.report import print_report
    from oscar_mm.apps.verify.run import Verification, supported
    from oscar_mm.pipelines import pipeline_for

    pipe = pipeline_for(model)(
        model,
        policy="bf16",
        device=device,
        device_map=device_map,
        dtype=dtype,
        allow_remote=allow_remote,
    )
    if questions is None:
        rows = supported(pipe, rows)
        if not rows:
            raise InputError(
                f"{model} reads text only, and the questions in the package are about media: pass "
                "your own with --questions FILE"
            )
    source = "the package" if questions is None else questions.name
    verification = Verification(pipe, name, source, policies, max_new_tokens, path)
    try:
        with terminal.warnings_as_lines():
            verification.ask(rows[:limit])
            verification.measure_speed(repeats)
            if task_names:
                verification.run_tasks(task_names, limit)
        verification.finish()
    except KeyboardInterrupt:
        print(f"oscar-mm: interrupted; {path} has the results so far", file=sys.stderr)
        raise
    print_report(verification.record)
    print(f"The results are in {path}.")
    if verification.record["failed"]:
        raise typer.Exit(1)


def _model_name(model: str) -> str:
    """Return a hub id or the name of a bundled model as it is, and the last part of a path."""
    is_folder = bundled(model) is None and Path(model).is_dir()
    return Path(model).resolve().name if is_folder else model


def _results_file(out: Path | None, name: str) -> Path:
    """Return the path of the results, after a check of its folder.

    Raises:
        InputError: if no file can be there.
    """
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", Path(name).name).strip("-")
    path = Path(f"verify-{slug}.json") if out is None else out
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"--out {path}: must be a file in an existing folder")
    return path


def policies_of(formats: str) -> dict[str, KVPolicy]:
    """Return the policies of a list such as "standard,compact:window=128,bits=3/2,kivi", by name.

    Raises:
        InputError: if a policy is unknown or invalid, packs nothing, or none is named.
    """
    names: list[str] = []
    for part in formats.split(","):
        # Changes of a policy are separated by commas, too.
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part)
    policies = {name: KVPolicy.preset(name) for name in _names(names)}
    if not policies:
        raise InputError(f"--formats is empty: name one or more of {', '.join(_FORMATS)}")
    for name, policy in policies.items():
        if not policy.packs:
            raise InputError(
                f"--formats {name}: packs nothing, and a 16-bit cache is measured anyway; choose "
                f"from {', '.join(_FORMATS)}"
            )
    return policies


def _names(names: str | list[str]) -> list[str]:
    """Return the different names of a list, without spaces around them."""
    listed = names.split(",") if isinstance(names, str) else names
    return list(dict.fromkeys(name.strip() for name in listed if name.strip()))


def _rows(questions: Path | None) -> list[Row]:
    if questions is not None and not questions.is_file():
        there = "is not a file; pass a JSONL or CSV file"
        raise InputError(
            f"--questions {questions}: {there if questions.exists() else 'no such file'}"
        )
    return read_rows(SAMPLES / "questions.jsonl" if questions is None else questions)
