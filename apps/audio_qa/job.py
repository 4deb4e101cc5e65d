"""Run an audio QA job, from reading the questions to writing the summary."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from oscar_mm.apps.audio_qa.engine import AnswerSettings, WorkerSettings
from oscar_mm.apps.audio_qa.results import RUN, AnswerFile, Work, summarize, write_samples
from oscar_mm.apps.audio_qa.rows import Row, by_recording, check_overwrites, read_rows
from oscar_mm.apps.audio_qa.server_worker import Plan, ServerSettings, VllmSettings
from oscar_mm.apps.audio_qa.settings import JobSettings
from oscar_mm.apps.serve.vllm_server import check_installed
from oscar_mm.apps.terminal import rows_bar
from oscar_mm.errors import InputError
from oscar_mm.files import whole_file, writing
from oscar_mm.policy import KVPolicy
from oscar_mm.sizes import parse_bytes

SUMMARY = ".summary.json"
"""Suffix of the summary file."""


def audio_qa(
    questions: str | Path | Iterable[Mapping[str, Any]],
    out: str | Path,
    model: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Answer many questions about recordings, images and videos, reading each media item only once.

    ::

        summary = audio_qa("questions.jsonl", "answers.jsonl", "Qwen/Qwen3-Omni-30B-A3B-Instruct")

    Answers are written as they are ready, and each answer is flushed to disk before the next, so
    repeating the call resumes an interrupted run. At the end, the file is sorted into the order of
    the questions. A row that cannot be answered gets an ``error``, and the run continues.

    Args:
        questions: JSONL or CSV file, folder of media, or dicts; see ``rows.read_rows``.
        out: JSONL file for the answers, see ``results.Result``. Two more files are written:
            ``out``.run.json identifies the run, and ``out``.summary.json contains the summary.
        model: see ``JobSettings``.
        options: fields of ``JobSettings``, such as ``system`` and ``max_new_tokens``.

    Returns:
        The summary, see ``results.summarize``.

    Raises:
        InputError: if a file or argument cannot be used, ``out`` belongs to another run, the disk
            is full, vLLM is missing, or the server no longer answers. Finished answers are kept.
    """
    name = None if model is None else str(model)
    return run_job(questions, out, JobSettings(name, **options))


def run_job(
    questions: str | Path | Iterable[Mapping[str, Any]], out: str | Path, settings: JobSettings
) -> dict[str, Any]:
    """Run an audio QA job with the given settings, and return the summary; see ``audio_qa``."""
    rows = read_rows(questions, question=settings.question, group_by=settings.group_by)
    file = questions if isinstance(questions, str | Path) else None
    written = {"answers": out, "run": f"{out}{RUN}", "summary": f"{out}{SUMMARY}"}
    check_overwrites(written | {"samples": settings.samples}, rows, file)
    plan, fingerprint = _plan(settings, rows)
    answers = AnswerFile(out, fingerprint, overwrite=settings.overwrite)
    try:
        answers.resume(rows, retry_failed=settings.retry_failed)
        left = [row for row in rows if row.id not in answers.done]
        if settings.ray is None:
            work = _run_here(plan, left, answers)
        else:
            from oscar_mm.apps.audio_qa.cluster import run_on_cluster

            cluster = settings.ray, settings.workers, settings.cpus_per_worker
            work = run_on_cluster(plan, left, answers, *cluster)
        answers.sort(rows)
        done = {row.id: answers.done[row.id] for row in rows}
    finally:
        answers.close()
    # The groups in the questions file may have changed since an earlier run.
    summary = summarize([done[row.id] | {"group": row.group} for row in rows], work)
    path = Path(f"{out}{SUMMARY}")
    with writing(path), whole_file(path) as part:
        part.write_text(json.dumps(summary, indent=1) + "\n")
    if settings.samples is not None:
        write_samples(settings.samples, rows, done)
    return summary


def _run_here(plan: Plan, rows: list[Row], answers: AnswerFile) -> Work:
    """Answer rows in this process."""
    with closing(plan.start()) as worker:
        answers.confirm(worker.fingerprint)
        start = time.perf_counter()
        with rows_bar(len(rows)) as shown:
            for count, result in enumerate(worker.run(by_recording(rows)), 1):
                answers.write(result)
                audio = worker.report["audio_seconds"]
                shown.update(count, audio, time.perf_counter() - start, worker.kv_bytes)
        return Work(rows=len(rows), seconds=time.perf_counter() - start, **worker.report)


_LOCAL = ("batch_size", "use_audio_in_video", "video_fps", "device")
"""Settings that apply only to a model in this process."""
_NOT_OF_A_SERVER = ("policy", "kv_budget", "dtype")
"""Settings that, in addition, do not apply to a server that is already running."""


def _plan(settings: JobSettings, rows: Iterable[Row]) -> tuple[Plan, dict[str, Any]]:
    """Return the settings of each worker, and the fingerprint of the run."""
    name, budget = settings.model, settings.kv_budget
    if budget is not None:
        budget = parse_bytes("kv_budget", budget)
    answers = AnswerSettings(
        policy=KVPolicy.of(settings.policy) if settings.server is None else None,
        system=settings.system,
        max_new_tokens=settings.max_new_tokens,
        list_choices=settings.list_choices,
        use_audio_in_video=settings.use_audio_in_video,
        video_fps=settings.video_fps,
        dtype=settings.dtype,
        engine=None if settings.engine == "oscar" else settings.engine,
    )
    media = settings.allow_remote, settings.limits
    if settings.server is not None:
        _check_for_server("server", rows, settings, (*_LOCAL, *_NOT_OF_A_SERVER))
        how = name, settings.concurrency, settings.api_key
        return ServerSettings(settings.server, answers, *how, *media), answers.fingerprint()
    if name is None:
        raise InputError("model: must be the name of a bundled model, a folder or a hub id")
    if settings.engine == "oscar":
        how = settings.batch_size, budget, settings.device
        return WorkerSettings(name, answers, *how, *media), answers.fingerprint()
    _check_for_server("engine vllm", rows, settings, _LOCAL)
    if not isinstance(settings.policy, str):
        raise InputError("engine vllm: policy must be the name of a preset")
    plan = VllmSettings(name, settings.policy, answers, settings.concurrency, budget, *media)
    if settings.ray is None:
        check_installed()
    return plan, answers.fingerprint(name)


def _check_for_server(
    asked: str, rows: Iterable[Row], settings: JobSettings, local: Iterable[str]
) -> None:
    """Refuse options and choices that a server does not support.

    Args:
        asked: name of the server for error messages.
        rows: the questions.
        settings: settings of the job.
        local: names of the options that apply only to a model in this process.
    """
    if given := settings.changed(local):
        raise InputError(
            f"{asked}: {', '.join(given)}: only supported without a server; leave it out"
        )
    count = sum(bool(row.choices) for row in rows)
    if count and not settings.list_choices:
        raise InputError(
            f"{asked}: {count} rows have choices, which a server does not score; use list_choices "
            "(--list-choices), so that its reply names a letter"
        )
