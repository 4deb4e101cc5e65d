"""Processes of their own, begun in a moment.

Importing torch and transformers takes a process ten seconds. One that has done so (Python's fork
server, with tests/imported.py) is forked instead for each process that a test wants. Nothing of
the test's own process is in there, and nothing that an earlier one did.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir
from io import FileIO
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FORKS = "forkserver" in multiprocessing.get_all_start_methods()
"""Whether the system can fork processes; Windows cannot."""
if FORKS:
    _CONTEXT = multiprocessing.get_context("forkserver")
    _CONTEXT.set_forkserver_preload(["tests.imported"])


def without_notes(errors: bytes) -> bytes:
    """What a process said on stderr, besides that it compiles kernels: that depends on what has run
    on this machine before."""
    lines = errors.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"compiling "))


class Forked:
    """A process that calls a function; killed where its ``with`` block ends, if it still runs.

    Where the system cannot fork, the test is skipped.

    Args:
        function: of a module, as it is sent by its name.
        arguments: of the function, to be pickled.
        environment: variables to set.

    Attributes:
        pid: of the process.
        stdin, stdout, stderr: our ends of its pipes, in bytes and without buffers.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        environment: dict[str, str] | None = None,
    ) -> None:
        if not FORKS:
            pytest.skip("needs processes that are forked")
        (stdin, self.stdin), (stdout, self.stdout), (stderr, self.stderr) = map(_pipe, "wrr")
        theirs = (stdin, stdout, stderr)
        self._process = _CONTEXT.Process(
            target=_call, args=(theirs, environment or {}, function, arguments)
        )
        with chdir(ROOT):
            self._process.start()
        self.pid = self._process.pid
        for end in theirs:
            end.close()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        for file in (self.stdin, self.stdout, self.stderr):
            file.close()

    def runs(self) -> bool:
        return self._process.is_alive()

    def wait(self, seconds: float = 120) -> int:
        """Its exit code, negative for a signal; a process that does not end is an error."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"still runs after {seconds} s"
        return self._process.exitcode

    def end(self, said: bytes = b"", seconds: float = 120) -> tuple[int, bytes, bytes]:
        """Say this, and no more; its exit code, and what is left of stdout and stderr."""
        self.stdin.write(said)
        self.stdin.close()
        told = {self.stdout: b"", self.stderr: b""}
        deadline, open_still = monotonic() + seconds, list(told)
        while open_still:
            ready = wait(open_still, deadline - monotonic())
            assert ready, f"still runs after {seconds} s"
            for file in ready:
                part = file.read(1 << 16)
                told[file] += part
                if not part:
                    open_still.remove(file)
        return self.wait(), *told.values()


def command(*arguments: str) -> None:
    """``oscar-mm`` with these arguments."""
    from oscar_mm.cli import main

    sys.argv = ["oscar-mm", *arguments]
    main()


def _pipe(mode: str) -> tuple[Connection, FileIO]:
    """The end of a process and ours, to be read or written."""
    reader, writer = os.pipe()
    theirs, ours = (reader, writer) if mode == "w" else (writer, reader)
    return Connection(theirs), FileIO(ours, mode)


def _call(
    ends: tuple[Connection, ...],
    environment: dict[str, str],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    # A shell lets what it runs in the background ignore this signal, and so its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    tempfile.tempdir = None  # An import may have asked for it before TMPDIR was set.
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww")
    function(*arguments)
