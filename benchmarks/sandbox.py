"""Run programs that a model wrote in a sandbox, where they can change no file and reach no service.

In its Linux namespaces (``unshare`` of util-linux), a program finds no network, no other processes
and only the folders of the system's programs and Python's, read-only and without Unix sockets of
services. Resource limits bound its time, memory and output. ``check`` tests the sandbox first.
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
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from oscar_mm import InputError

SECONDS, BYTES = 5, 1 << 30
"""Limits of a program: seconds of processor time and of wall-clock time, and bytes of memory."""
_PRINTED_BYTES = 1 << 20
"""Maximum number of bytes that a program may print."""
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--ipc", "--mount", "--pid")
_UNSHARE += ("--fork", "--kill-child")
_FOLDERS = ("/bin", "/etc", "/lib", "/lib64", "/nix/store", "/sbin", "/usr")
"""Folders with the programs and libraries of Linux systems, as far as they exist."""
_SET_UP = """
root=$1; shift
mount --make-rprivate / && mount -t tmpfs none "$root" || exit
while [ "$1" != -- ]; do
  mkdir -p "$root$1" && mount --rbind "$1" "$root$1" || exit
  shift
done
shift
awk '{print $5}' /proc/self/mountinfo | sort -u | while read -r point; do
  mount -o remount,bind,ro "$(printf %b "$point")" 2>/dev/null || true
done
unshare --user --mount --root="$root" --wd=/ "$@"
exit $?
"""
"""Shell script that mounts folders in a new root, read-only, and runs a command there.

Its arguments are an empty folder for the root, the folders, "--" and the command. This runs in
further namespaces, where it cannot make the mounts writable again. The shell remains the first
process, so that all processes of a program end with it. Spaces in paths of mountinfo are octal.
"""
_ATTEMPTS = """
import ctypes, os, socket, sys
folder, port, file, abstract = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
def remount():
    libc, locked = ctypes.CDLL(None, use_errno=True), 14  # MS_NOSUID | MS_NODEV | MS_NOEXEC
    flags = os.statvfs("/").f_flag & locked | 4128  # MS_BIND | MS_REMOUNT
    if libc.mount(None, b"/", None, flags, None):
        raise OSError(ctypes.get_errno())
def connect(address):
    socket.socket(socket.AF_UNIX).connect(address)
attempts = {
    "make files writable": remount,
    "write files": lambda: open(folder + "/new", "w"),
    "remove files": lambda: os.remove(folder + "/kept"),
    "use the network": lambda: socket.create_connection(("127.0.0.1", port), 1),
    "use Unix sockets in files": lambda: connect(file),
    "use abstract Unix sockets": lambda: connect("\\0" + abstract),
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
    """Check that programs run, but can neither change files nor use the network or Unix sockets.

    Raises:
        InputError: if this machine does not allow such a sandbox.
    """
    if sys.platform != "linux" or shutil.which("unshare") is None:
        raise InputError("programs of a model run in a sandbox that needs Linux and util-linux")
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as hidden,
        closing(socket.create_server(("", 0))) as server,
        closing(socket.socket(socket.AF_UNIX)) as in_file,
        closing(socket.socket(socket.AF_UNIX)) as abstract,
    ):
        (Path(folder) / "kept").touch()
        file, name = f"{hidden}/socket", secrets.token_hex(8)
        for service, address in ((in_file, file), (abstract, f"\0{name}")):
            service.bind(address)
            service.listen()
        port = str(server.getsockname()[1])
        code, said = _run(_ATTEMPTS, folder, port, file, name, folders=(folder,))
    if code != 0:
        raise InputError(
            f"programs of a model run in a sandbox, which this system refuses ({said.strip()}); "
            "allow user namespaces"
        )
    if said:
        raise InputError(f"in the sandbox a program can {', '.join(said.splitlines())}")


def _run(
    program: str, *arguments: str, seconds: float = SECONDS, folders: Sequence[str] = ()
) -> tuple[int, str]:
    """Return the exit code of a program and what it printed; the code is not 0 after a timeout.

    Args:
        program: source text.
        arguments: its ``sys.argv[1:]``.
        seconds: maximum seconds of processor time and of wall-clock time.
        folders: further folders that it can read.
    """
    python = (sys.executable, "-I", "-c", program, *arguments)
    python_folders = sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)
    needed = [folder for folder in (*_FOLDERS, *python_folders) if os.path.isdir(folder)]
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryDirectory() as root:
        process = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _SET_UP, "sh", root, *needed, *folders, "--", *python],
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
