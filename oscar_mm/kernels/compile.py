"""Compile the sources in csrc with NVRTC on first use, and cache the cubins on disk.

Users need no compiler, and compiling needs no GPU: NVRTC and the CUDA headers come with torch's
dependencies, and ``cuda-core`` calls NVRTC. Compiling takes seconds, so the result is cached in a
folder: ``$OSCAR_MM_CACHE``, or ``oscar_mm`` in the system's cache folder.

The key of a cached file is a hash of everything that the file depends on, so no file can be out of
date. The folder can be deleted at any time and be used by several processes at once. Its content
runs on the GPU, so the folder and its files are used only if they belong to the user and are not
writable by others.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import logging
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from oscar_mm.files import whole_file

_SILENT_S = 1.0
"""Seconds of compiling without a message."""
_log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """Return the folder for files shared between processes; None if the user has no home folder."""
    chosen = os.environ.get("OSCAR_MM_CACHE")
    if chosen:
        return Path(chosen)
    try:
        folder = user_cache_path("oscar_mm", appauthor=False)
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # Older versions do not expand "~".


def key_of(content: Any) -> str:
    """Return a hash of JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_file(path: Path, key: str) -> bytes | None:
    """Return the content that ``store_file`` wrote under a key; None if there is no file, or if the
    file was altered or could have been written by others."""
    try:
        checksum, _, content = _private_bytes(path).partition(b"\n")
    except OSError:
        return None
    return content if checksum == _checksum(key, content) else None


def store_file(path: Path, key: str, content: bytes) -> None:
    """Write a file atomically: other processes never read a partial file."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(path.parent.stat())
        with whole_file(path, private=True) as part:
            part.write_bytes(_checksum(key, content) + b"\n" + content)
    except OSError as error:
        _warn_not_kept(path.parent, error.strerror)


def _private_bytes(path: Path) -> bytes:
    """Return the bytes of a file; raise PermissionError unless file and folder are private to the
    user."""
    if os.name != "posix":
        return path.read_bytes()
    # Read from the checked folder, even if links change in the meantime.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_private(os.fstat(folder))
        file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _check_private(os.fstat(file))
        with open(file, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(file)


def _check_private(about: os.stat_result) -> None:
    """Raise PermissionError unless a file or folder belongs to the user and is not writable by
    others."""
    if os.name != "posix":
        return
    if about.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "others can write to it: empty it and chmod go-w")


def _checksum(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).hexdigest().encode()


@functools.cache
def _warn_not_kept(folder: Path, reason: str | None) -> None:
    """Warn, only once, that compiled code cannot be cached."""
    warnings.warn(
        f"compiled kernels cannot be stored in {folder} ({reason}) and will be compiled and "
        "checked again by every process; set OSCAR_MM_CACHE to a folder of your own",
        RuntimeWarning,
        stacklevel=2,
    )


@contextmanager
def announced(kind: str) -> Iterator[None]:
    """Log once why an answer takes so long if the block takes more than a second.

    Args:
        kind: kind of the kernels that the block compiles, or loads if they are cached.
    """
    timer = threading.Timer(_SILENT_S, _announce, [kind])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def _announce(kind: str) -> None:
    _log.warning(
        "compiling %s kernels, which are then cached: this answer takes seconds longer", kind
    )


STANDARD = "c++17"
PTXAS_OPTIONS = ("-v",)
_FILE_FORMAT = 1
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_FUNCTION = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<spill_stores>\d+) bytes spill stores, (?P<spill_loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_SHARED = re.compile(r"(\d+) bytes smem")


class KernelError(RuntimeError):
    """A kernel cannot be compiled, loaded or launched; the message names the kernel and the
    reason."""


@dataclass(frozen=True)
class Report:
    """Resource usage of a kernel as reported by ptxas: registers per thread, and everything else in
    bytes."""

    registers: int
    shared: int
    """Static shared memory per thread block; launches add dynamic shared memory."""
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, and the report of each kernel by name."""

    code: bytes
    reports: dict[str, Report]
    key: str = ""
    """Hash of source, options, architecture and compiler; empty for code compiled from a string."""


def csrc_folder() -> Path:
    """Return the folder of the CUDA sources."""
    return Path(__file__).parents[1] / "csrc"


def compile_kernel(source: str, arch: str, macros: Mapping[str, str | int]) -> Cubin:
    """Return the machine code of a csrc source, from the cache folder if possible.

    Args:
        source: file name in csrc, like "decode/decode.cu".
        arch: architecture like "sm_90a"; see ``oscar_mm.kernels.launch.architecture``.
        macros: preprocessor macros that the source requires according to its first comment.

    Raises:
        KernelError: if a dependency of the compiler is missing, or the source does not compile (the
            message then contains the compiler's output).
    """
    texts = _read_sources(source)
    key = _key(texts, arch, macros)
    folder = cache_folder()
    path = None if folder is None else folder / f"{Path(source).stem}-{arch}-{key}.bin"
    cubin = None if path is None else _load(path, key)
    if cubin is None:
        with announced("CUDA"):
            cubin = replace(compile_text(source, texts[source], arch, macros), key=key)
        if path is not None:
            _store(path, key, cubin)
    return cubin


def compile_text(name: str, text: str, arch: str, macros: Mapping[str, str | int]) -> Cubin:
    """Compile a string, which may include the headers in csrc, without using the cache folder.

    Args:
        name: name of the source in the compiler's messages.
        text: CUDA C++.
        arch: see ``compile_kernel``.
        macros: see ``compile_kernel``.

    Raises:
        KernelError: see ``compile_kernel``.
    """
    try:
        # This is a compiled module without stubs.
        from cuda.core import (
            Program,  # pyright: ignore[reportAttributeAccessIssue]
            ProgramOptions,  # pyright: ignore[reportAttributeAccessIssue]
        )
    except ImportError as error:
        raise not_installed(error) from error
    options = ProgramOptions(
        name=name,
        arch=arch,
        std=STANDARD,
        include_path=[str(csrc_folder()), str(_cuda_headers())],
        define_macro=[(macro, str(value)) for macro, value in macros.items()] or None,
        ptxas_options=list(PTXAS_OPTIONS),
    )
    program, log = Program(text, "c++", options), io.StringIO()
    try:
        code = program.compile("cubin", logs=log).code
    except Exception as error:  # NVRTC's errors have no public class in cuda-core
        given = " ".join(f"{macro}={value}" for macro, value in macros.items()) or "no macros"
        raise KernelError(f"{name} does not compile for {arch} with {given}:\n{error}") from error
    finally:
        program.close()
    return Cubin(bytes(code), _reports(log.getvalue()))


def _read_sources(source: str) -> dict[str, str]:
    """Return the texts of a source and of all headers in csrc that it includes, by name."""
    texts: dict[str, str] = {}
    waiting = [(source, "")]
    while waiting:
        name, wanted = waiting.pop()
        if name in texts:
            continue
        path = csrc_folder() / name
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except OSError as error:
            raise KernelError(f"cannot read {path}{wanted}: {error.strerror}") from error
        reason = f", which {name} includes"
        waiting += [(header, reason) for header in _INCLUDE.findall(texts[name])]
    return texts


def _key(texts: Mapping[str, str], arch: str, macros: Mapping[str, str | int]) -> str:
    """Return the hash of everything that a cubin depends on."""
    content = {
        "format": _FILE_FORMAT,
        "texts": dict(texts),
        "arch": arch,
        "macros": {macro: str(value) for macro, value in macros.items()},
        "options": [STANDARD, *PTXAS_OPTIONS],
        "nvrtc": _nvrtc_version(),
    }
    return key_of(content)


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    try:
        from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise not_installed(error) from error
    try:
        result, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings are installed, but the library is not
        raise KernelError(
            f"NVRTC, which compiles the kernels, cannot be loaded: {error}"
        ) from error
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC, which compiles the kernels, cannot be used: {result.name}")
    return major, minor


@functools.cache
def _cuda_headers() -> Path:
    """Return the folder that contains cuda_fp16.h, from torch's dependencies or an installed CUDA
    toolkit."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if found is None or not (Path(found) / "cuda_fp16.h").is_file():
        raise KernelError(
            "cuda_fp16.h, which the kernels include, is not on this machine: it comes with a CUDA "
            "build of torch in nvidia-cuda-runtime (pip install nvidia-cuda-runtime), or with a "
            "CUDA toolkit that CUDA_HOME names"
        )
    return Path(found)


def not_installed(error: ImportError) -> KernelError:
    """Return the error for a missing CUDA package."""
    return KernelError(
        f"compiling the CUDA kernels needs cuda-core >= 1.0 and cuda-bindings ({error}): "
        "pip install cuda-core"
    )


def _reports(log: str) -> dict[str, Report]:
    """Parse the resource usage in the output of ptxas -v."""
    reports = {}
    for found in _FUNCTION.finditer(log):
        shared = _SHARED.search(found["rest"])
        reports[found["name"]] = Report(
            registers=int(found["registers"]),
            shared=int(shared[1]) if shared else 0,
            stack=int(found["stack"]),
            spill_stores=int(found["spill_stores"]),
            spill_loads=int(found["spill_loads"]),
        )
    return reports


def _load(path: Path, key: str) -> Cubin | None:
    """Return the cubin in a file; None if there is no file, or ``_store`` did not write it."""
    content = load_file(path, key)
    if content is None:
        return None
    reports, _, code = content.partition(b"\n")
    named = {name: Report(**report) for name, report in json.loads(reports).items()}
    return Cubin(code, named, key)


def _store(path: Path, key: str, cubin: Cubin) -> None:
    reports = {name: asdict(report) for name, report in cubin.reports.items()}
    store_file(path, key, json.dumps(reports).encode() + b"\n" + cubin.code)
