"""Loops that numba compiles: where no file can be written, on threads, without numba; vectors."""

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType

import numba
import numpy as np
import pytest
import torch
from filelock import FileLock
from numba import njit

from oscar_mm.kernels import launch
from oscar_mm.kernels.numba_vectors import (
    LANES,
    aligned,
    as_floats,
    as_words,
    compiled,
    from_words,
    larger,
    largest,
    load,
    prefetch,
    shuffle,
    splat,
    splat_one,
    store,
    threads_for,
    total,
)
from oscar_mm.kernels.run_parallel import run_parallel
from tests.processes import Forked

REVERSED_SECOND = shuffle(*(2 * LANES - 1 - lane for lane in range(LANES)))
FLOATS = np.linspace(-3, 4, 3 * LANES, dtype=np.float32)
WORDS = np.arange(3 * LANES, dtype=np.int32) * 0x07654321 - 5
FIRST, SECOND = slice(1, 1 + LANES), slice(20, 20 + LANES)


def double(numbers: np.ndarray) -> None:
    for index in range(len(numbers)):
        numbers[index] *= 2


def doubles() -> bool:
    numbers = np.arange(3)
    compiled(double)(numbers)
    return numbers.tolist() == [0, 2, 4]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where numba writes what it compiles."""
    folder = tmp_path / "compiled"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    return folder


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("length", [0, 30])
def test_a_damaged_file_is_not_used(folder: Path, suffix: str, length: int) -> None:
    assert doubles()
    (file,) = folder.rglob(f"*.{suffix}")
    os.truncate(file, length)
    assert doubles()


def test_a_file_that_cannot_be_written(folder: Path) -> None:
    function, numbers = compiled(double), np.arange(3)
    (inside,) = folder.iterdir()
    inside.rmdir()
    inside.write_bytes(b"")
    for _ in range(2):
        function(numbers)
    assert numbers.tolist() == [0, 4, 8]


def test_no_folder_that_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    assert doubles()


ADDS = """
import sys
import numba
import numpy as np
from numba.core import caching

numba.config.CACHE_DIR = sys.argv[2]
from oscar_mm.kernels.numba_vectors import compiled

save = caching.IndexDataCacheFile._save_data

def save_later(self, *data):
    print("noted", flush=True)
    sys.stdin.read()
    save(self, *data)

@compiled
def add_up(numbers, found):
    for number in numbers:
        found[0] += number

if sys.argv[3:] == ["slow"]:
    caching.IndexDataCacheFile._save_data = save_later
numbers, found = np.arange(8).astype(sys.argv[1]), np.zeros(1)
print("calls", flush=True)
add_up(numbers, found)
print(found[0], flush=True)
"""


def run_script(script: Path, *words: str) -> None:
    """As a process of its own."""
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")


def test_no_process_runs_code_for_other_types(tmp_path: Path) -> None:
    """One has noted where its code will be, where there is code of before for other types."""
    script = tmp_path / "adds.py"

    def adds(dtype: str, *how: str) -> Forked:
        return Forked(run_script, script, dtype, str(tmp_path / "files"), *how)

    script.write_text(ADDS)
    with adds("float32") as before:
        assert before.end()[:2] == (0, b"calls\n28.0\n")
    script.write_text(ADDS + "# a newer version")
    with adds("float64", "slow") as first:
        assert [first.stdout.readline() for _ in range(2)] == [b"calls\n", b"noted\n"]
        with adds("float64") as second:
            assert second.stdout.readline() == b"calls\n"
            time.sleep(0.5)
            assert first.end()[:2] == (0, b"28.0\n")  # It may warn that it compiles.
            assert second.end()[:2] == (0, b"28.0\n")


def test_a_lock_that_is_never_free_is_waited_for_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process that compiles was stopped."""
    monkeypatch.setattr(compiled, "patience_s", 1.5)
    assert doubles()
    (inside,) = folder.iterdir()
    with FileLock(inside / "oscar_mm.lock"):
        for at_least, at_most in ((1.5, 10.0), (0.0, 1.4)):
            start = time.monotonic()
            assert doubles()
            assert at_least <= time.monotonic() - start < at_most
    assert doubles()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_no_call_outlives_an_interrupt(request: pytest.FixtureRequest) -> None:
    # A shell lets what it runs in the background ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    ended = []

    def interrupt() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_parallel([(time.sleep, 0.5), (interrupt,)])
    assert ended


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.usefixtures("two_threads")
def test_no_call_outlives_an_error(first: bool) -> None:
    begun, ended = [], []

    def write() -> None:
        begun.append(True)
        time.sleep(0.3)
        ended.append(True)

    def fail() -> None:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        run_parallel([(fail,), (write,)] if first else [(write,), (fail,)])
    seen = len(ended)
    assert seen == len(begun)
    time.sleep(0.4)
    assert len(begun) == seen


@pytest.mark.usefixtures("two_threads")
def test_the_thread_that_calls_works_too() -> None:
    threads, both = set[int](), threading.Barrier(2, timeout=10)

    def work() -> None:
        both.wait()
        threads.add(threading.get_ident())

    run_parallel([(work,), (work,)])
    assert len(threads) == 2 and threading.get_ident() in threads


@pytest.mark.usefixtures("two_threads")
def test_little_work_is_one_threads() -> None:
    assert [threads_for(us) for us in (0, 90, 120, 1e6)] == [1, 1, 2, 2]


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.usefixtures("two_threads")
def test_without_more_threads_one_makes_all_calls_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user has too many, or Python is ending."""
    called = []
    monkeypatch.setattr(os, "getpid", lambda: -1)  # which has no threads yet
    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", no_thread)
        run_parallel([(called.append, 1), (called.append, 2)])
    assert called == [1, 2]
    run_parallel([(called.append, 3), (called.append, 4)])
    assert called[:2] == [1, 2] and sorted(called[2:]) == [3, 4]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("number", range(6))
def test_an_interrupt_as_a_function_is_entered(number: int) -> None:
    """The calling thread is interrupted as it enters its n-th function."""
    begun, ended = threading.Event(), threading.Event()
    entered = 0

    def work() -> None:
        begun.set()
        time.sleep(0.05)
        ended.set()

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        nonlocal entered
        if event == "call" and frame.f_code.co_filename == run_parallel.__code__.co_filename:
            entered += 1
            if entered == number + 1:
                raise KeyboardInterrupt

    run_parallel([(begun.wait, 0), (int,)])  # The thread exists.
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        run_parallel([(begun.wait, 5), (work,)])
    except KeyboardInterrupt:
        sys.settrace(before)
        assert begun.is_set() == ended.is_set()
        time.sleep(0.01)
        assert begun.is_set() == ended.is_set()
    finally:
        sys.settrace(before)
    assert entered > number


@pytest.mark.usefixtures("two_threads")
def test_interrupts_at_any_time(request: pytest.FixtureRequest) -> None:
    """No call outlives one, and threads go on with later calls."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGALRM, before))
    running, ended = [], []

    def write(number: int) -> None:
        running.append(number)
        time.sleep(0.0005)
        ended.append(number)

    interrupted = 0
    for round_ in range(200):
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + round_ * 4e-6)
            run_parallel([(write, number) for number in range(3)])
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
            # This thread's own call may have been left in the middle.
            assert len(running) - len(ended) <= 1
        running.clear()
        ended.clear()
        run_parallel([(write, number) for number in range(3)])
        assert sorted(ended) == [0, 1, 2]
        running.clear()
        ended.clear()
    assert interrupted > 20


class Unusable(Loader):
    """A numba that refuses the numpy that is there, as released ones do."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "numba" else None

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError(f"{module.__name__} needs NumPy 2.3 or less")


def test_a_numba_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(launch.SWITCH, raising=False)
    monkeypatch.delitem(sys.modules, "numba")
    monkeypatch.setattr(sys, "meta_path", [Unusable(), *sys.meta_path])
    launch.numba_failure.cache_clear()
    try:
        assert not launch.cpu_kernels_available("an operation")
    finally:
        launch.numba_failure.cache_clear()
    assert "an operation: falling back to PyTorch operations" in caplog.text
    assert "needs NumPy 2.3" in caplog.text


@njit
def sums_and_products(numbers, result):
    one, two = load(numbers, 1), load(numbers, 20)
    prefetch(numbers, 0)
    store(result, 0, one + two * splat(np.float32(0.5)))
    store(result, LANES, (one - two) * splat_one(numbers, 7))
    store(result, 2 * LANES, larger(one, two))
    store(result, 3 * LANES, REVERSED_SECOND(one, two))
    return total(one), largest(two)


def test_floats() -> None:
    result = np.zeros(4 * LANES, np.float32)
    sums = sums_and_products(FLOATS, result)
    one, two = FLOATS[FIRST], FLOATS[SECOND]
    expected = [one + two / 2, (one - two) * FLOATS[7], np.maximum(one, two), two[::-1]]
    np.testing.assert_allclose(result, np.concatenate(expected), rtol=1e-6)
    np.testing.assert_allclose(sums, [one.sum(), two.max()], rtol=1e-6)


@njit
def bits_and_shifts(words, result):
    one, two = load(words, 1), load(words, 20)
    for number in range(2):
        store(result, number * LANES, (one >> 4 * number) & splat(15) | (two << 8))
    store(result, 2 * LANES, one | two)
    store(result, 3 * LANES, as_words(as_floats(one >> 1)))
    store(result, 4 * LANES, as_words(from_words(one)))


def test_words() -> None:
    result = np.zeros(5 * LANES, np.uint32)
    bits_and_shifts(WORDS, result)
    one, two = (WORDS[part].view(np.uint32) for part in (FIRST, SECOND))
    expected = [(one >> 4 * number) & 15 | two << 8 for number in range(2)]
    expected += [one | two, (one >> 1).astype(np.float32).view(np.uint32), one]
    np.testing.assert_array_equal(result, np.concatenate(expected))


@njit
def larger_ones(numbers, result):
    store(result, 0, larger(load(numbers, 0), load(numbers, LANES)))


def test_larger_keeps_nan_of_the_first() -> None:
    numbers, result = np.zeros(2 * LANES, np.float32), np.zeros(LANES, np.float32)
    numbers[3] = np.nan
    larger_ones(numbers, result)
    assert np.isnan(result[3]) and np.isnan(result).sum() == 1


@njit
def aligned_address(count):
    array = aligned(count)
    return array.ctypes.data % 64, len(array)


@pytest.mark.parametrize("count", [1, 16, 1000, 100_000])
def test_aligned(count: int) -> None:
    assert aligned_address(count) == (0, count)
