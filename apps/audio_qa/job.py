"""Run an audio QA job, from reading the rows to writing the summary."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from oscar_mm.apps.audio_qa.engine import AnswerSettings, WorkerSettings
from oscar_mm.apps.audio_qa.results import RUN, AnswerFile, Work, summarize, write_samples
from oscar_mm.apps.audio_qa.rows import Row, by_recording, read_rows
from oscar_mm.apps.audio_qa.server_worker import Plan, ServerSettings, VllmSettings
from oscar_mm.apps.serve.vllm_server import check_installed
from oscar_mm.apps.terminal import rows_bar
from oscar_mm.errors import InputError
from oscar_mm.files import whole_file, writing
from oscar_mm.media import MediaLimits
from oscar_mm.media.source import is_address
from oscar_mm.policy import DEFAULT, KVPolicy
from oscar_mm.sizes import parse_bytes

SUMMARY = ".summary.json"
"""Suffix of the file with the summary."""


def audio_qa(
    questions: str | Path | Iterable[Mapping[str, Any]],
    out: str | Path,
    model: str | Path | None = None,
    *,
    engine: str = "oscar",
    policy: str | KVPolicy = DEFAULT,
    question: str | None = None,
    system: str | None = None,
    max_new_tokens: int = 64,
    list_choices: bool = False,
    group_by: str = "group",
    batch_size: int = 32,
    kv_budget: int | str | None = None,
    overwrite: bool = False,
    retry_failed: bool = False,
    samples: str | Path | None = None,
    use_audio_in_video: bool = False,
    video_fps: float = 2.0,
    limits: MediaLimits | None = None,
    allow_remote: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    server: str | None = None,
    concurrency: int = 32,
    api_key: str | None = None,
    ray: str | None = None,
    workers: int | None = None,
    cpus_per_worker: int = 1,
) -> dict[str, Any]:
    """Answer many questions about recordings, images and videos, reading each medium once.

    ::

        summary = audio_qa("questions.jsonl", "answers.jsonl", "Qwen/Qwen3-Omni-30B-A3B-Instruct")

    Every answer is flushed to disk before the next one is written, and repeating the call resumes
    an interrupted run. Answers are written as they are ready; at the end the file is sorted in the
    order of the questions. A row that cannot be answered gets an ``error``, and the run continues.

    Args:
        questions: JSONL or CSV file, folder of media, or dicts; see ``rows.read_rows``.
        out: JSONL file of the answers, see ``results.Result``. Two more files are written:
            ``out``.run.json identifies the run, and ``out``.summary.json has its summary.
        model: name of a bundled model, folder or hub id; with ``server`` the name of the server's
            model, or None for its only one.
        engine: "oscar", or "vllm": each worker starts its own vLLM server, with pages of this
            package, and uses it like ``server``; then ``policy`` must be the name of a preset, and
            ``batch_size``, ``use_audio_in_video``, ``video_fps`` and ``device`` do not apply.
        policy: policy for keys and values.
        question: question for rows that have none, and for all media of a folder.
        system: system prompt.
        max_new_tokens: maximum tokens of a free answer.
        list_choices: whether to write choices under the question and choose among their letters.
        group_by: field whose value groups the rows of the summary.
        batch_size: maximum number of rows at once.
        kv_budget: maximum bytes ("8GB") of keys and values together; None for no limit.
        overwrite: whether to start over, whatever ``out`` contains.
        retry_failed: whether to answer rows with an error again.
        samples: file to which the answers are also written in lmms-eval's layout.
        use_audio_in_video: whether to read the sound of videos too.
        video_fps: frames per second that are sampled from videos.
        limits: limits on media.
        allow_remote: whether to fetch media that are http(s) addresses.
        device: torch device of the model; by default a GPU if there is one.
        dtype: dtype of the weights.
        server: address of an OpenAI server to use instead of a model in this process. It gets
            recordings and images, and answers choices only with ``list_choices``: its reply names
            a letter. ``policy``, ``batch_size``, ``kv_budget``, ``use_audio_in_video``,
            ``video_fps``, ``device`` and ``dtype`` apply only to a model in this process.
        concurrency: maximum number of concurrent requests of each worker to the server.
        api_key: key of the server.
        ray: address of a Ray cluster, "local" for one on this machine; None to run without Ray.
        workers: number of Ray workers, each of which loads the model, starts a vLLM server or
            sends requests to the server; by default one per GPU, or without GPUs and with
            ``server`` as many as the CPUs allow.
        cpus_per_worker: CPUs of a worker.

    Returns:
        The summary, see ``results.summarize``.

    Raises:
        InputError: if a file or argument cannot be used, ``out`` belongs to another run, the disk
            is full, vLLM is missing, or the server no longer answers; finished answers are kept.
    """
    rows = read_rows(questions, question=question, group_by=group_by)
    _check_overwrites(questions if isinstance(questions, str | Path) else None, rows, out, samples)
    if type(batch_size) is not int or batch_size < 1:
        raise InputError(f"batch_size={batch_size!r}: must be a whole number, at least 1")
    if kv_budget is not None:
        kv_budget = parse_bytes("kv_budget", kv_budget)
    if engine not in ("oscar", "vllm"):
        raise InputError(f"engine={engine!r}: must be oscar or vllm")
    if server is not None and engine != "oscar":
        raise InputError(f"server with engine {engine}: the server's engine answers")
    settings = AnswerSettings(
        policy=KVPolicy.of(policy) if server is None else None,
        system=system,
        max_new_tokens=max_new_tokens,
        list_choices=list_choices,
        use_audio_in_video=use_audio_in_video,
        video_fps=video_fps,
        dtype=dtype,
        engine=None if engine == "oscar" else engine,
    )
    limits = limits or MediaLimits()
    plan: Plan
    name = None if model is None else str(model)
    local = {
        "batch_size": (batch_size, 32),
        "use_audio_in_video": (use_audio_in_video, False),
        "video_fps": (video_fps, 2.0),
        "device": (device, None),
    }
    fingerprint = settings.fingerprint()
    if server is not None:
        local |= {
            "policy": (policy, DEFAULT),
            "kv_budget": (kv_budget, None),
            "dtype": (dtype, None),
        }
        _check_for_server("server", rows, local, list_choices)
        plan = ServerSettings(server, settings, name, concurrency, api_key, allow_remote, limits)
    elif name is None:
        raise InputError("model: must be a bundled model's name, a folder or a hub id")
    elif engine == "oscar":
        plan = WorkerSettings(name, settings, batch_size, kv_budget, device, allow_remote, limits)
    else:
        _check_for_server("engine vllm", rows, local, list_choices)
        if not isinstance(policy, str):
            raise InputError("engine vllm: policy must be a preset's name")
        plan = VllmSettings(name, policy, settings, concurrency, kv_budget, allow_remote, limits)
        fingerprint = settings.fingerprint(name)
        if ray is None:
            check_installed()
    answers = AnswerFile(out, fingerprint, overwrite=overwrite)
    try:
        answers.resume(rows, retry_failed=retry_failed)
        left = [row for row in rows if row.id not in answers.done]
        if ray is None:
            work = _run_here(plan, left, answers)
        else:
            from oscar_mm.apps.audio_qa.cluster import run_on_cluster

            work = run_on_cluster(plan, left, answers, ray, workers, cpus_per_worker)
        answers.sort(rows)
        done = {row.id: answers.done[row.id] for row in rows}
    finally:
        answers.close()
    # The groups in the file of questions may have changed since an earlier run.
    summary = summarize([done[row.id] | {"group": row.group} for row in rows], work)
    path = Path(f"{out}{SUMMARY}")
    with writing(path), whole_file(path) as part:
        part.write_text(json.dumps(summary, indent=1) + "\n")
    if samples is not None:
        write_samples(samples, rows, done)
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


def _check_for_server(
    asked: str, rows: Iterable[Row], local: Mapping[str, tuple[Any, Any]], list_choices: bool
) -> None:
    """Refuse options that apply only to a model in this process, and choices that a server cannot
    score.

    Args:
        asked: name of the server in messages.
        rows: the questions.
        local: value and default of each such option.
        list_choices: whether choices are listed in the prompt.
    """
    given = [name for name, (value, default) in local.items() if value != default]
    if given:
        raise InputError(f"{asked}: {', '.join(given)}: only a model of this process takes it")
    count = sum(bool(row.choices) for row in rows)
    if count and not list_choices:
        raise InputError(
            f"{asked}: {count} rows have choices, which a server does not score; with list_choices "
            "(--list-choices) its reply names a letter"
        )


def _check_overwrites(
    questions: str | Path | None, rows: Iterable[Row], out: str | Path, samples: str | Path | None
) -> None:
    """Refuse to overwrite the questions, their media, or one output with another."""
    files = {"answers": out, "run": f"{out}{RUN}", "summary": f"{out}{SUMMARY}", "samples": samples}
    taken = {} if questions is None else {_file_identity(questions): "the file of the questions"}
    where = {medium: row.where for row in rows for medium in sum(row.recording, ())}
    for medium, line in where.items():
        if not is_address(medium):
            taken.setdefault(_file_identity(medium), f"what {line} asks about")
    for name, path in files.items():
        if path is None:
            continue
        if (file := _file_identity(path)) in taken:
            raise InputError(f"{path}: is {taken[file]}; give another for the {name}")
        taken[file] = f"the file of the {name}"


def _file_identity(path: str | Path) -> tuple[int, int] | str:
    """Return a value that all paths to a file share, including hard and symbolic links."""
    try:
        status = os.stat(path)
        return status.st_dev, status.st_ino
    except OSError:
        return os.path.realpath(path)
    except ValueError:  # not a valid path
        return str(path)
