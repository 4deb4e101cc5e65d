"""Answer rows on a Ray cluster: Ray Data distributes them over actors that each run a worker."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any
from uuid import uuid4

from oscar_mm.apps.audio_qa.chat_client import ServerLost
from oscar_mm.apps.audio_qa.engine import WorkerSettings
from oscar_mm.apps.audio_qa.results import AnswerFile, Work, error_result
from oscar_mm.apps.audio_qa.rows import Row, by_recording
from oscar_mm.apps.audio_qa.server_worker import Plan, VllmSettings
from oscar_mm.apps.terminal import rows_bar
from oscar_mm.errors import InputError
from oscar_mm.extras import missing

LOCAL = "local"
TRIES = 3
"""Number of workers that may die while answering a group of rows before the group fails."""
_STORE_BYTES = 256 << 20
"""Size of a local cluster's object store in bytes; the store contains only text."""
_MAX_BLOCKS = 5000
_CONNECT_S = 5
_PEAKS = ("kv_peak_bytes", "process_peak_bytes")


class Attempts:
    """Actor that counts the starts of each group of rows, because a group may kill workers."""

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()

    def begin(self, group: str) -> int:
        """Count another start of a group, and return the group's number of starts so far."""
        self._begun[group] += 1
        return self._begun[group]


class ClusterWorker:
    """Actor that starts its worker once, then answers groups of rows.

    If the worker loses its own server, the actor exits and Ray starts a new actor.

    Args:
        plan: settings of the worker.
        begin: function that counts a start of a group, named by the id of the group's first row,
            and returns the number of starts so far.
    """

    def __init__(self, plan: Plan, begin: Callable[[str], int]) -> None:
        self._worker, self._name, self._begin = plan.start(), uuid4().hex, begin
        self._owns_server = isinstance(plan, VllmSettings)

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[str]]]:
        """Answer groups of rows in JSON format; yield results with the worker's totals so far."""
        for group in batch["rows"]:
            rows = [_row_of_fields(fields) for fields in json.loads(group)]
            if self._begin(rows[0].id) > TRIES:
                results = iter(
                    [error_result(row, f"its worker died {TRIES} times") for row in rows]
                )
            else:
                results = self._worker.run([rows])
            try:
                for result in results:
                    about = {
                        "fingerprint": self._worker.fingerprint,
                        "report": self._worker.report,
                        "kv_bytes": self._worker.kv_bytes,
                        "worker": self._name,
                    }
                    yield {"result": [json.dumps(result)], "about": [json.dumps(about)]}
            except ServerLost:
                if self._owns_server:
                    os._exit(1)
                raise


def run_on_cluster(
    plan: Plan,
    rows: list[Row],
    answers: AnswerFile,
    address: str,
    workers: int | None,
    cpus_per_worker: int,
) -> Work:
    """Answer rows on a Ray cluster; its machines must have the media at the same paths.

    Ray Data distributes the groups of rows, keeps the workers busy and restarts workers that die.
    If a worker dies, another worker answers its group from the start.

    Args:
        plan: settings of each worker.
        rows: rows to answer.
        answers: output file, written by this process.
        address: address of the cluster, or "local" to start a cluster on this machine for this job.
        workers: number of workers, or None for the default, see ``JobSettings``.
        cpus_per_worker: number of CPUs for each worker.

    Raises:
        InputError: if Ray is not installed, or the cluster cannot be reached or is too small.
    """
    if not rows:
        return Work(0, 0.0, 0.0, 0.0, 0, 0)
    ray, ours = _connect(address)
    try:
        return _run(ray, plan, rows, answers, workers, cpus_per_worker)
    except ray.exceptions.RayError as error:
        # The last line is the worker's error message.
        message = str(error).strip().splitlines()[-1]
        _, refused, told = message.rpartition(f"{InputError.__name__}: ")
        if refused:
            raise InputError(f"Ray: {told}") from error
        raise RuntimeError(f"Ray: {message}") from error
    finally:
        if ours:
            ray.shutdown()


def _connect(address: str) -> tuple[Any, bool]:
    """Import Ray and connect to a cluster.

    Returns:
        The Ray module, and whether this call made the connection.
    """
    # Turn off usage statistics; Ray reads this variable when it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # pyright: ignore[reportMissingImports] an extra
        import ray.data  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing("--ray", error.name, "batch") from None
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # Ray also raises what it logs.
    if ray.is_initialized():
        return ray, False
    _check_reachable(address)
    options: dict[str, Any] = {"address": address}
    if address == LOCAL:
        options |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    try:
        ray.init(**options, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"--ray {address}: no cluster can be reached: {error}") from None
    return ray, True


def _check_reachable(address: str) -> None:
    """Refuse an address that accepts no connections; Ray itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "://" in address:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"--ray {address}: no cluster can be reached: {error}") from None


def _run(
    ray: Any,
    plan: Plan,
    rows: list[Row],
    answers: AnswerFile,
    workers: int | None,
    cpus_per_worker: int,
) -> Work:
    groups = by_recording(rows)
    count, resources = _share_cluster(ray.cluster_resources(), plan, workers, cpus_per_worker)
    plan, at_once = _share_requests(plan, math.ceil(len(groups) / count))
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    attempts = ray.remote(num_cpus=0, max_restarts=-1)(Attempts).remote()

    def begin(group: str) -> int:
        return ray.get(attempts.begin.remote(group))

    items = [{"rows": json.dumps([asdict(row) for row in group])} for group in groups]
    results = ray.data.from_items(
        items, override_num_blocks=min(len(groups), _MAX_BLOCKS)
    ).map_batches(
        ClusterWorker,
        fn_constructor_args=(plan, begin),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            size=min(count, len(groups)),
            max_tasks_in_flight_per_actor=at_once + 1,
            max_concurrent_calls_per_actor=at_once,
            enable_true_multi_threading=at_once > 1,
        ),
        **resources,
    )
    start, reports = time.perf_counter(), {}
    left = {row.id: row for row in rows}
    with rows_bar(len(rows)) as shown:
        for output in results.iter_rows():
            result, about = json.loads(output["result"]), json.loads(output["about"])
            if not reports:
                answers.confirm(about["fingerprint"])
            reports[about["worker"]] = about["report"]
            if left.pop(result["id"], None) is not None:
                answers.write(result)
            audio = sum(report["audio_seconds"] for report in reports.values())
            spent = time.perf_counter() - start
            shown.update(len(rows) - len(left), audio, spent, about["kv_bytes"])
    all_reports = list(reports.values())
    return Work(
        rows=len(rows),
        seconds=time.perf_counter() - start,
        **{
            name: sum(report[name] for report in all_reports)
            for name in ("cpu_seconds", "audio_seconds")
        },
        **{name: max(report[name] for report in all_reports) for name in _PEAKS},
    )


def _share_cluster(
    cluster: dict[str, float],
    plan: Plan,
    workers: int | None,
    cpus: int,
) -> tuple[int, dict[str, Any]]:
    """Return the number of workers and the Ray resources of each worker.

    Args:
        cluster: resources of the cluster.
        plan: settings of each worker.
        workers: requested number of workers; None for the default.
        cpus: number of CPUs for each worker.

    Raises:
        InputError: if a number is invalid, or the cluster is too small.
    """
    for name, value in (("workers", workers), ("cpus_per_worker", cpus)):
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{name}={value!r}: must be a whole number, at least 1")
    gpus = int(cluster.get("GPU", 0)) if plan.uses_gpu else 0
    max_workers = gpus or int(cluster.get("CPU", 0) // cpus)
    wanted = max_workers if workers is None else workers
    if not 1 <= wanted <= max_workers:
        has = f"{gpus} GPUs" if gpus else f"{cluster.get('CPU', 0):.0f} CPUs"
        raise InputError(
            f"--workers {wanted}: the cluster has {has}, enough for {max_workers} workers"
        )
    return wanted, {"num_gpus": 1} if gpus else {"num_cpus": cpus}


def _share_requests(plan: Plan, groups: int) -> tuple[Plan, int]:
    """Divide a worker's concurrent requests among several groups of rows.

    Ray passes groups to a worker one by one, so a server stays busy only if the worker answers
    several groups at once.

    Args:
        plan: settings of a worker.
        groups: number of groups for each worker.

    Returns:
        The worker settings for each group, and the number of groups that a worker answers at once.
    """
    if isinstance(plan, WorkerSettings):
        return plan, 1
    at_once = min(plan.concurrency, groups)
    return replace(plan, concurrency=plan.concurrency // at_once), at_once


def _row_of_fields(fields: dict[str, Any]) -> Row:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    fields |= lists
    return Row(**fields)
