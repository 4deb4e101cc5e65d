"""A first call that waits for kernels to be compiled says so, once."""

import logging
import time

import pytest

from oscar_mm.kernels import compile


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    compile._announce.cache_clear()
    monkeypatch.setattr(compile, "_SILENT_S", 0.05)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with compile.announced("CPU"):
            time.sleep(0.2)
    [message] = messages(caplog)
    assert message.startswith("compiling CPU kernels, which are then cached")


def test_not_said_of_what_is_quick_or_fails_at_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with compile.announced("CPU"):
            pass
    with pytest.raises(ValueError, match="no"), compile.announced("CPU"):
        raise ValueError("no")
    time.sleep(0.2)
    assert not messages(caplog)


def test_cpu_kernels(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of a file with an empty cache, which their first call compiles."""
    import numpy as np

    from oscar_mm.kernels import numba_vectors

    @numba_vectors.compiled
    def double(values: np.ndarray) -> None:
        for index in range(len(values)):
            values[index] *= 2

    monkeypatch.setattr(compile, "_SILENT_S", 0.0)
    values = np.ones(4)
    double(values)
    double(values)
    assert values.tolist() == [4] * 4
    assert len(messages(caplog)) == 1


def test_cuda_kernels(caplog: pytest.LogCaptureFixture, monkeypatch, tmp_path) -> None:
    def slow(*_: object) -> compile.Cubin:
        time.sleep(0.2)
        return compile.Cubin(b"code", {}, "")

    monkeypatch.setenv("OSCAR_MM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "compile_text", slow)
    compile.compile_kernel("unpack/unpack.cu", "sm_80", {})
    assert len(messages(caplog)) == 1 and "CUDA" in messages(caplog)[0]
    compile._announce.cache_clear()
    monkeypatch.setattr(compile, "compile_text", pytest.fail)
    compile.compile_kernel("unpack/unpack.cu", "sm_80", {})
    assert len(messages(caplog)) == 1
