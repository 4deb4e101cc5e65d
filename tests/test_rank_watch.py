"""A divided model whose ranks are lost, or end as they should."""

import os
import signal
from time import monotonic, sleep

import pytest
import torch

from oscar_mm import OscarVLPipeline
from tests.pipelines.divided import ranks_of
from tests.processes import Forked

LOST = b"rank 1 of 2 was killed or has crashed; rank 0 ends too"


def ask_on(how: str) -> None:
    """Ask a divided model; rank 1 ends early, rank 0 asks or sleeps until it is ended."""
    pipe = OscarVLPipeline("pocket-vl", dtype="bfloat16", tp_plan="auto")
    asks = how == "asks"
    pipe([], "Hi", max_new_tokens=2)
    print("ready", flush=True)
    if os.environ["RANK"] == "1" and how != "asks" and how != "sleeps":
        if how == "raises":
            raise RuntimeError("out of memory")
        return
    for _ in range(100 if how == "ends" else 10_000):
        if asks:
            pipe([], "Go on.", max_new_tokens=200)
        else:
            sleep(0.02)


def ready(process: Forked) -> None:
    found = b""
    while b"ready" not in found:
        part = process.stdout.read(1 << 12)
        assert part, process.stderr.read(1 << 16)
        found += part


@pytest.mark.slow
@pytest.mark.parametrize("how", ["asks", "raises"])
def test_the_others_end_with_a_lost_rank(how) -> None:
    with ranks_of(ask_on, how) as processes:
        for process in processes:
            ready(process)
        if how != "raises":
            os.kill(processes[1].pid, signal.SIGKILL)
        started = monotonic()
        code, _, errors = processes[0].end(seconds=30)
        assert monotonic() - started < 10
        assert code == 1
        assert LOST in errors


def test_a_rank_may_end_before_the_others() -> None:
    with ranks_of(ask_on, "ends") as processes:
        for process in processes:
            ready(process)
        assert processes[1].end()[0] == 0
        code, _, errors = processes[0].end()
        assert code == 0, errors
        assert LOST not in errors


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("how", ["sleeps", "asks"])
def test_on_two_gpus(how) -> None:
    test_the_others_end_with_a_lost_rank(how)
