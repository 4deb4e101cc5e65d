"""Loops that numba compiles: where no file can be written, on several threads, without numba."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numba
import numpy as np
import pytest
import torch

from oscar_mm.kernels import launch, loops
from oscar_mm.kernels.loops import call_all, compiled


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

    def write() -> None:
        time.sleep(0.3)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        call_all([(write,), (interrupt,), (write,)])
    assert len(ended) == 2


@pytest.mark.usefixtures("two_threads")
def test_no_call_outlives_an_error() -> None:
    ended = []

    def write() -> None:
        time.sleep(0.3)
        ended.append(True)

    def fail() -> None:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        call_all([(fail,), (write,)])
    assert ended


@pytest.mark.usefixtures("two_threads")
def test_calls_while_python_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools take no more then, but threads that are not daemons go on."""
    pool, called = ThreadPoolExecutor(1), []
    pool.shutdown()
    monkeypatch.setattr(loops, "_pool", lambda *_: pool)
    call_all([(called.append, 1), (called.append, 2)])
    assert called == [1, 2]


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
        assert not launch.has_loops("an operation")
    finally:
        launch.numba_failure.cache_clear()
    assert "an operation uses PyTorch operations" in caplog.text
    assert "needs NumPy 2.3" in caplog.text
