"""`oscar-mm audio-qa`: answer many questions about recordings, images and videos."""

from pathlib import Path
from typing import Annotated

import typer

from oscar_mm.apps import options, terminal
from oscar_mm.apps.audio_qa.rows import read_rows
from oscar_mm.apps.options import KEY_VARIABLE, api_key
from oscar_mm.apps.terminal import warnings_as_lines
from oscar_mm.media import MediaLimits
from oscar_mm.policy import DEFAULT, KVPolicy


def audio_qa_command(
    questions: Annotated[
        str,
        typer.Argument(
            metavar="QUESTIONS",
            help="JSONL or CSV file of id, audio | images | videos, question, choices, answer; or "
            "a folder of recordings with --question.",
        ),
    ],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="JSONL of the answers.")],
    model: options.Model = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="oscar, or vllm: start vLLM's server, with pages of this package, for the job.",
        ),
    ] = "oscar",
    policy: options.Policy = DEFAULT,
    question: Annotated[
        str | None,
        typer.Option("--question", "-q", metavar="TEXT", help="Question of rows that have none."),
    ] = None,
    system: options.System = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Longest answer, in tokens.")
    ] = 64,
    list_choices: Annotated[
        bool,
        typer.Option("--list-choices", help="Write choices into the prompt and score letters."),
    ] = False,
    group_by: Annotated[
        str, typer.Option(metavar="FIELD", help="Field that groups the summary.")
    ] = "group",
    batch_size: Annotated[int, typer.Option(metavar="N", help="Most rows at once.")] = 32,
    kv_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help='Bound on the KV memory, such as "8GB".')
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--overwrite",
            help="Go on with the answers that are there (default), or begin anew.",
        ),
    ] = True,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Answer rows again that have an error.")
    ] = False,
    samples: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write lmms-eval's samples layout.")
    ] = None,
    audio_in_video: options.AudioInVideo = False,
    max_audio_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Longer recordings are refused.")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    allow_remote: options.AllowRemote = False,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask an OpenAI server, whose name for the model --model is, and load none.",
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(metavar="N", help="Most requests to a server at once.")
    ] = 32,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help=f"Holds the server's key; default: {KEY_VARIABLE}, or none."
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help='Run on a Ray cluster; "local" for this machine.'),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Models on the cluster; default: one per GPU.")
    ] = None,
    cpus_per_worker: Annotated[int, typer.Option(metavar="N", help="CPUs of a worker.")] = 1,
) -> None:
    """Answer many questions about recordings, images and videos.

    Each recording is read once and its questions share its pages. Answers are written row by row;
    repeating the command resumes an interrupted run. Exit code 1 if a row failed.
    """
    # Check the arguments before the model is loaded, which takes long.
    KVPolicy.preset(policy)
    rows = read_rows(questions, question=question, group_by=group_by)
    limits = MediaLimits()
    if max_audio_seconds is not None:
        limits = MediaLimits(max_audio_seconds=max_audio_seconds)
    if server is None:
        hears = audio_in_video or any(row.audio for row in rows)
        model = options.model_or_bundled(model, hears=hears)
    terminal.quiet_transformers()
    from oscar_mm.apps.audio_qa.job import audio_qa  # brings torch
    from oscar_mm.apps.audio_qa.results import print_summary

    with warnings_as_lines():
        summary = audio_qa(
            questions,
            out,
            model,
            engine=engine,
            policy=policy,
            question=question,
            system=system,
            max_new_tokens=max_new_tokens,
            list_choices=list_choices,
            group_by=group_by,
            batch_size=batch_size,
            kv_budget=kv_budget,
            overwrite=not resume,
            retry_failed=retry_failed,
            samples=samples,
            use_audio_in_video=audio_in_video,
            limits=limits,
            allow_remote=allow_remote,
            device=device,
            dtype=dtype,
            server=server,
            concurrency=concurrency,
            api_key=None if server is None else api_key(api_key_file),
            ray=ray,
            workers=workers,
            cpus_per_worker=cpus_per_worker,
        )
    print_summary(summary)
    if summary["failed"]:
        raise typer.Exit(1)
