"""Compiling at first use, and the folder that keeps the results."""

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from oscar_mm.kernels import compile
from oscar_mm.kernels.compile import Cubin, KernelError, cache_folder, compile_kernel

pytest.importorskip("cuda.core", reason="needs cuda-core")

SOURCE = """
#include <cuda_fp16.h>
#include "factor.cuh"
extern "C" __global__ void scale(__half* x) { x[threadIdx.x] *= __half(FACTOR * BY); }
extern "C" __global__ void turn(float* x) {
  __shared__ float all[64];
  all[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = all[63 - threadIdx.x];
}
"""
MACROS = {"BY": 2}


def use_folders(patch: pytest.MonkeyPatch, csrc: Path, cache: Path) -> None:
    patch.setattr(compile, "csrc_folder", lambda: csrc)
    patch.setenv("OSCAR_MM_CACHE", str(cache))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def csrc(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small folder of sources in the place of ours."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "scale.cu").write_text(SOURCE)
    (folder / "factor.cuh").write_text('#pragma once\n  #  include "three.cuh"\n')
    (folder / "three.cuh").write_text("#define FACTOR 3\n")
    use_folders(monkeypatch, folder, cache)
    return folder


@pytest.fixture
def compiled(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sources that were compiled, not loaded."""
    names: list[str] = []
    compile_text = compile.compile_text

    def counted(name: str, *rest: object) -> Cubin:
        names.append(name)
        return compile_text(name, *rest)

    monkeypatch.setattr(compile, "compile_text", counted)
    return names


def test_reports(csrc: Path) -> None:
    cubin = compile_kernel("scale.cu", "sm_90a", MACROS)
    assert cubin.code.startswith(b"\x7fELF")
    assert {name: report.shared for name, report in cubin.reports.items()} == {
        "scale": 0,
        "turn": 256,
    }
    for report in cubin.reports.values():
        assert 0 < report.registers < 32
        assert (report.stack, report.spill_stores, report.spill_loads) == (0, 0, 0)


def test_second_call_does_not_compile(compiled: list[str], cache: Path) -> None:
    first = compile_kernel("scale.cu", "sm_80", MACROS)
    assert compile_kernel("scale.cu", "sm_80", {"BY": "2"}) == first
    assert compiled == ["scale.cu"]
    (kept,) = cache.iterdir()
    assert kept.name.startswith("scale-sm_80-")


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(csrc: Path) -> None:
        path = csrc / name
        path.write_text(path.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "arch", "macros"),
    [
        (edit("scale.cu", "63 -", "63u -"), "sm_80", MACROS),
        (edit("factor.cuh", "once", "once\n"), "sm_80", MACROS),
        (edit("three.cuh", "3", "4"), "sm_80", MACROS),
        (edit("three.cuh", "", ""), "sm_86", MACROS),
        (edit("three.cuh", "", ""), "sm_80", {"BY": 3}),
        (edit("three.cuh", "", ""), "sm_80", {"BY": 2, "UNUSED": 1}),
    ],
    ids=["source", "header", "header of a header", "arch", "macro", "one more macro"],
)
def test_what_a_cubin_depends_on(
    compiled: list[str],
    csrc: Path,
    change: Callable[[Path], None],
    arch: str,
    macros: dict[str, int],
) -> None:
    compile_kernel("scale.cu", "sm_80", MACROS)
    change(csrc)
    compile_kernel("scale.cu", arch, macros)
    assert len(compiled) == 2


def test_new_compiler_compiles_again(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_kernel("scale.cu", "sm_80", MACROS)
    monkeypatch.setattr(compile, "_nvrtc_version", lambda: (99, 0))
    compile_kernel("scale.cu", "sm_80", MACROS)
    assert len(compiled) == 2


def test_header_that_is_not_included_does_not_count(compiled: list[str], csrc: Path) -> None:
    compile_kernel("scale.cu", "sm_80", MACROS)
    (csrc / "other.cuh").write_text("#error\n")
    compile_kernel("scale.cu", "sm_80", MACROS)
    assert len(compiled) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:40],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content.replace(b'"registers": ', b'"registers": 1', 1),
        lambda content: content + b"\n",
    ],
    ids=["empty", "checksum only", "half", "one byte short", "one bit", "report", "longer"],
)
def test_damaged_file_is_made_again(
    compiled: list[str], cache: Path, damage: Callable[[bytes], bytes]
) -> None:
    first = compile_kernel("scale.cu", "sm_80", MACROS)
    (kept,) = cache.iterdir()
    content = kept.read_bytes()
    kept.write_bytes(damage(content))
    assert compile_kernel("scale.cu", "sm_80", MACROS) == first
    assert len(compiled) == 2
    assert kept.read_bytes() == content


def test_file_of_another_key_is_not_taken(compiled: list[str], cache: Path) -> None:
    compile_kernel("scale.cu", "sm_80", MACROS)
    (kept,) = cache.iterdir()
    content = kept.read_bytes()
    three = compile_kernel("scale.cu", "sm_80", {"BY": 3})
    (other,) = set(cache.iterdir()) - {kept}
    other.write_bytes(content)
    assert compile_kernel("scale.cu", "sm_80", {"BY": 3}) == three
    assert len(compiled) == 3


def compile_with_others(csrc: Path, cache: Path, start: object, results: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_folders(patch, csrc, cache)
        start.wait()
        results.put(compile_kernel("scale.cu", "sm_80", MACROS))


def test_several_processes_at_once(csrc: Path, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    workers = [
        context.Process(target=compile_with_others, args=(csrc, cache, start, results))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert found[0] == found[1] == found[2] == compile_kernel("scale.cu", "sm_80", MACROS)
    assert len(list(cache.iterdir())) == 1


def test_folder_that_cannot_be_made(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    monkeypatch.setenv("OSCAR_MM_CACHE", str(folder))
    with pytest.warns(
        RuntimeWarning, match=f"cannot be stored in {folder}.*OSCAR_MM_CACHE"
    ) as said:
        for _ in range(2):
            assert compile_kernel("scale.cu", "sm_80", MACROS).code
    assert len(said) == 1 and len(compiled) == 2


def test_failed_write_leaves_nothing(
    compiled: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert compile_kernel("scale.cu", "sm_80", MACROS).code
    assert list(cache.iterdir()) == []


def test_user_without_a_home(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OSCAR_MM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as of a user who has none
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_kernel("scale.cu", "sm_80", MACROS).code


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "/home/somebody/.cache/oscar_mm"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/oscar_mm"),
        ({"OSCAR_MM_CACHE": "chosen", "XDG_CACHE_HOME": "/xdg"}, "chosen"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="folders of Linux")
def test_cache_folder(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("OSCAR_MM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/somebody"} | variables).items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


def test_error_of_the_compiler(compiled: list[str], csrc: Path, cache: Path) -> None:
    (csrc / "scale.cu").write_text("__global__ void scale() { int x = ; }\n")
    with pytest.raises(
        KernelError, match=r"(?s)scale\.cu does not compile for sm_80 with BY=2"
    ) as e:
        compile_kernel("scale.cu", "sm_80", MACROS)
    assert "scale.cu(1): error: expected an expression" in str(e.value)
    assert not cache.exists()


def test_unknown_architecture(csrc: Path) -> None:
    with pytest.raises(KernelError, match=r"(?s)for sm_1 with BY=2:.*invalid value.*arch"):
        compile_kernel("scale.cu", "sm_1", MACROS)


def test_missing_source_and_header(csrc: Path) -> None:
    with pytest.raises(KernelError, match=r"cannot read .*nothing\.cu: No such file"):
        compile_kernel("nothing.cu", "sm_80", MACROS)
    (csrc / "three.cuh").unlink()
    with pytest.raises(KernelError, match=r"three\.cuh, which factor\.cuh includes: No such file"):
        compile_kernel("scale.cu", "sm_80", MACROS)


@pytest.mark.parametrize("module", ["cuda.core", "cuda.bindings"])
def test_package_that_is_not_installed(
    csrc: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    compile._nvrtc_version.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KernelError, match=r"needs cuda-core.*pip install cuda-core"):
        compile_kernel("scale.cu", "sm_80", MACROS)


def test_headers_that_are_not_there(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.pathfinder

    compile._cuda_headers.cache_clear()
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda name: None)
    with pytest.raises(KernelError, match=r"cuda_fp16\.h.*nvidia-cuda-runtime"):
        compile_kernel("scale.cu", "sm_80", MACROS)
