"""`oscar-mm audio-qa`: answer many questions about recordings, images and videos."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from oscar_mm.apps import options, terminal
from oscar_mm.apps.audio_qa.rows import read_rows
from oscar_mm.apps.audio_qa.settings import JobSettings
from oscar_mm.apps.options import KEY_VARIABLE, api_key
from oscar_mm.apps.terminal import warnings_as_lines
from oscar_mm.media import MediaLimits
from oscar_mm.policy import KVPolicy


@options.grouped
def audio_qa_command(
    questions: Annotated[
        str,
        typer.Argument(
            metavar="QUESTIONS",
            help="JSONL or CSV file of id, audio | images | videos, question, choices, answer; or "
            "a folder of recordings, with --question.",
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="JSONL file for the answers.")
    ],
    *,
    settings: JobSettings,
    max_audio_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Maximum length of a recording.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"File with the server's API key; default: ${KEY_VARIABLE}, or none.",
        ),
    ] = None,
) -> None:
    """Answer many questions about recordings, images and videos.

    Each recording is read once, and all questions about it share its pages. Answers are written row
    by row; repeating the command resumes an interrupted run. The exit code is 1 if a row failed.
    """
    # Check the arguments first, because loading the model takes a long time.
    KVPolicy.of(settings.policy)
    rows = read_rows(questions, question=settings.question, group_by=settings.group_by)
    if max_audio_seconds is not None:
        settings = replace(settings, limits=MediaLimits(max_audio_seconds=max_audio_seconds))
    if settings.server is None:
        supports_audio = settings.use_audio_in_video or any(row.audio for row in rows)
        model = options.model_or_bundled(settings.model, supports_audio=supports_audio)
        settings = replace(settings, model=model)
    else:
        settings = replace(settings, api_key=api_key(api_key_file))
    terminal.quiet_transformers()
    from oscar_mm.apps.audio_qa.job import run_job  # brings torch
    from oscar_mm.apps.audio_qa.results import print_summary

    with warnings_as_lines():
        summary = run_job(questions, out, settings)
    print_summary(summary)
    if summary["failed"]:
        raise typer.Exit(1)
