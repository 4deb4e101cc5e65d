"""Cluster: two workers on a real local Ray cluster give the rows of one process, also killed."""

import json
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from oscar_mm import InputError
from oscar_mm.apps.audio_qa import audio_qa, cluster
from oscar_mm.apps.audio_qa.rows import by_recording, read_rows
from oscar_mm.apps.audio_qa.server_worker import ServerSettings
from tests.apps.audio_qa.conftest import assert_same, questions, read_lines, write_lines

OPTIONS = {"max_new_tokens": 5, "batch_size": 4, "device": "cpu"}


def actors() -> list[psutil.Process]:
    """Processes of this test's Ray that answer rows."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("ray::MapWorker") or any(
                "ray::MapWorker" in part for part in process.cmdline()
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_same_rows_with_a_killed_worker(worker, recordings, tmp_path) -> None:
    pytest.importorskip("ray", reason="needs ray: run pip install '.[batch]'")
    records = [*questions(6, 9), {"id": "bad\ud800", "audio": "gone.wav", "question": "?"}]
    file = write_lines(recordings / "q.jsonl", records)
    expected = {row["id"]: row for row in worker.run(by_recording(read_rows(file)))}
    out, killed = tmp_path / "a.jsonl", []

    def kill() -> None:
        """One of the workers, once the first rows are there."""
        deadline = time.monotonic() + 250
        while time.monotonic() < deadline and not killed:
            if out.exists() and out.read_bytes().count(b"\n") >= 2:
                for process in actors()[:1]:
                    killed.append(process.pid)
                    process.send_signal(signal.SIGKILL)
            time.sleep(0.005)

    killer = threading.Thread(target=kill)
    killer.start()
    summary = audio_qa(file, out, worker.plan.model, ray="local", workers=2, **OPTIONS)
    killer.join(1)
    assert killed
    found = read_lines(out)
    assert_same(found, expected)
    assert list(found) == [record["id"] for record in records], "in the order of the questions"
    assert (summary["rows"], summary["failed"], summary["work"]["rows"]) == (55, 1, 55)
    assert summary["work"]["kv_peak_bytes"] > 0


def test_groups_that_kill_their_workers(worker, recordings) -> None:
    rows = read_rows(write_lines(recordings / "q.jsonl", questions(1)))
    answering = cluster.ClusterWorker.__new__(cluster.ClusterWorker)
    attempts = cluster.Attempts()
    answering._worker, answering._name, answering._begin = worker, "one", attempts.begin
    batch = {"rows": [json.dumps([asdict(row) for row in rows])]}
    for attempt in range(1, 5):
        found = [json.loads(one["result"][0]) for one in answering(batch)]
        errors = {one["error"] for one in found}
        assert errors == ({None} if attempt <= cluster.TRIES else {"its worker died 3 times"})
        assert {one["id"] for one in found} == {row.id for row in rows}
    assert attempts.begin("another") == 1


def test_rows_and_results_cross_as_they_are(worker, recordings) -> None:
    file = write_lines(recordings / "q.jsonl", questions(1))
    file.write_text(f'no JSON\n{file.read_text()}{{"id": "\\ud800", "question": "?"}}\n')
    groups = by_recording(read_rows(file))
    answering = cluster.ClusterWorker.__new__(cluster.ClusterWorker)
    answering._worker, answering._name = worker, "one"
    answering._begin = cluster.Attempts().begin
    batch = {"rows": [json.dumps([asdict(row) for row in group]) for group in groups]}
    found = [json.loads(one["result"][0]) for one in answering(batch)]
    expected = {row["id"]: row for row in worker.run(groups)}
    assert_same({row["id"]: row for row in found}, expected)
    assert {"line 1", "\ud800"} < expected.keys()


def test_shares_of_a_cluster(plan) -> None:
    def shares(resources: dict[str, float], workers: int | None = None, cpus: int = 1) -> tuple:
        return cluster._share_cluster(resources, plan, workers, cpus)

    assert shares({"CPU": 6.0}, cpus=4) == (1, {"num_cpus": 4})
    assert shares({"CPU": 6.0}, 3, 2) == (3, {"num_cpus": 2})
    on_cpu = {"CPU": 2.0, "GPU": 8.0}
    assert shares(on_cpu) == (2, {"num_cpus": 1}), "the plan says cpu"
    for workers, cpus, expected in (
        (7, 1, "enough for 6"),
        (0, 1, "workers=0"),
        (1, 0, "_worker=0"),
    ):
        with pytest.raises(InputError, match=expected):
            shares({"CPU": 6.0}, workers, cpus)


def test_shares_of_requests(plan) -> None:
    """Many groups at once, or many requests of a group, never more than the plan says."""
    asking = ServerSettings("http://127.0.0.1:1", plan.settings, concurrency=8)
    for groups, expected in ((1, (1, 8)), (3, (3, 2)), (8, (8, 1)), (100, (8, 1))):
        shared, at_once = cluster._share_requests(asking, groups)
        assert isinstance(shared, ServerSettings)
        assert (at_once, shared.concurrency) == expected
    assert cluster._share_requests(plan, 100) == (plan, 1)


def test_no_such_cluster(plan, recordings: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: run pip install '.[batch]'")
    file = write_lines(recordings / "q.jsonl", questions(1))
    with pytest.raises(InputError, match="no cluster can be reached"):
        audio_qa(file, tmp_path / "a.jsonl", plan.model, ray="127.0.0.1:1", **OPTIONS)
