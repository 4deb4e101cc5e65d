"""Run programs that a model wrote in a sandbox, where they can change no file and use no network.

Linux namespaces (``unshare`` of util-linux) give a program a read-only file system, no network and
no other processes; resource limits bound its time, memory and output. ``check`` tests the sandbox
first.
"""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path

from oscar_mm import InputError

SECONDS, BYTES = 5, 1 << 30
"""Limits of a program: seconds of processor time and of wall-clock time, and bytes of memory."""
_PRINTED_BYTES = 1 << 20
"""Maximum number of bytes that a program may print."""
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--ipc", "--mount", "--pid")
_UNSHARE += ("--fork", "--kill-child", "--mount-proc")
_READ_ONLY = """
mount --make-rprivate /
awk '{print $5}' /proc/self/mountinfo | sort -u | while read -r point; do
  mount -o remount,bind,ro "$(printf %b "$point")" 2>/dev/null || true
done
unshare --user --mount "$@"
exit $?
"""
"""Shell script that makes all mounts read-only, then runs its arguments.

They run in further namespaces, where nobody can make the mounts writable again. The shell remains
the first process, so that all processes of a program end with it. Spaces in paths of mountinfo are
octal.
"""
_ATTEMPTS = """
import ctypes, os, socket, sys
folder, port = sys.argv[1], int(sys.argv[2])
def remount():
    libc, locked = ctypes.CDLL(None, use_errno=True), 14  # MS_NOSUID | MS_NODEV | MS_NOEXEC
    flags = os.statvfs("/").f_flag & locked | 4128  # MS_BIND | MS_REMOUNT
    if libc.mount(None, b"/", None, flags, None):
        raise OSError(ctypes.get_errno())
attempts = {
    "make files writable": remount,
    "write files": lambda: open(folder + "/new", "w"),
    "remove files": lambda: os.remove(folder + "/kept"),
    "use the network": lambda: socket.create_connection(("127.0.0.1", port), 1),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except OSError:
        continue
    print(name)
"""


def passes(program: str, *arguments: str, seconds: float = SECONDS) -> bool:
    """Return whether a Python program runs to its end without an error within its limits."""
    end = secrets.token_hex(8)  # A program that exits early does not print it.
    code, printed = _run(f"{program}\nprint({end!r})", *arguments, seconds=seconds)
    return code == 0 and printed.endswith(f"{end}\n")


def check() -> None:
    """Check that programs run, but can neither write or remove files nor use the network.

    Raises:
        InputError: if this machine does not allow such a sandbox.
    """
    if sys.platform != "linux" or shutil.which("unshare") is None:
        raise InputError("programs of a model run in a sandbox that needs Linux and util-linux")
    with tempfile.TemporaryDirectory() as folder, closing(socket.create_server(("", 0))) as server:
        (Path(folder) / "kept").touch()
        code, said = _run(_ATTEMPTS, folder, str(server.getsockname()[1]))
    if code != 0:
        raise InputError(
            f"programs of a model run in a sandbox, which this system refuses ({said.strip()}); "
            "allow user namespaces"
        )
    if said:
        raise InputError(f"in the sandbox a program can {', '.join(said.splitlines())}")


def _run(program: str, *arguments: str, seconds: float = SECONDS) -> tuple[int, str]:
    """Return the exit code of a program and what it printed; the code is not 0 after a timeout."""
    python = (sys.executable, "-I", "-c", program, *arguments)
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _READ_ONLY, "sh", *python],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={"PATH": os.defpath, "PYTHONHASHSEED": "0"},
            preexec_fn=_limit,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return -1, f"more than {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return code, printed.read().decode(errors="replace")


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_PRINTED_BYTES, _PRINTED_BYTES))
