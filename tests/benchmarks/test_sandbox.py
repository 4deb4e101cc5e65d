"""Programs of a model change nothing, reach nobody and end."""

import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import sandbox
from oscar_mm import InputError


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    try:
        sandbox.check()
    except InputError as error:
        if "refuses" in str(error) or "needs Linux" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize(
    ("program", "passes"),
    [
        ("assert sum([1, 2]) == 3", True),
        ("assert sum([1, 2]) == 4", False),
        ("raise SystemExit(3)", False),
        ("import sys; sys.exit(0)", False),
        ("this is no program", False),
        ("bytearray(1 << 31)", False),
        ("open('/tmp/new', 'w')", False),
        ("while True: print('endless' * 1000)", False),
    ],
)
def test_programs(program: str, passes: bool) -> None:
    assert sandbox.passes(program) == passes


def test_a_program_that_does_not_end() -> None:
    assert not sandbox.passes("while True: pass", seconds=0.5)


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that programs see."""
    monkeypatch.setattr(sandbox, "_FOLDERS", (*sandbox._FOLDERS, str(tmp_path)))
    return tmp_path


def test_files_stay(shown: Path) -> None:
    (shown / "kept").write_text("kept")
    program = """
import pathlib, shutil, sys
assert pathlib.Path(sys.argv[1], "kept").read_text() == "kept"
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
    assert sandbox.passes(program, str(shown))
    assert (shown / "kept").read_text() == "kept"


def test_files_stay_though_a_program_mounts_them_again(shown: Path) -> None:
    program = """
import subprocess, sys
change = f"mount -o remount,bind,rw {sys.argv[1]}; touch {sys.argv[1]}/new"
assert subprocess.run(["sh", "-c", change], capture_output=True).returncode
assert subprocess.run(["unshare", "-Urm", "sh", "-c", change], capture_output=True).returncode
"""
    assert sandbox.passes(program, str(shown))
    assert not [*shown.iterdir()]


def test_sockets_are_out_of_reach(tmp_path: Path) -> None:
    """Sockets in folders and, without one, of a name; a read-only file system does not keep
    programs from the former."""
    connect = "import socket, sys; socket.socket(socket.AF_UNIX).connect(eval(sys.argv[1]))"
    for address in (str(tmp_path / "socket"), f"\0{tmp_path}"):
        with closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(address)
            server.listen()
            subprocess.run([sys.executable, "-c", connect, repr(address)], check=True)
            assert not sandbox.passes(connect, repr(address))


def test_mounts_with_spaces_are_read_only(tmp_path: Path) -> None:
    (mount := tmp_path / "a b").mkdir()
    attempts = [f"open({str(mount / 'new')!r}, 'w')", f"import os; os.listdir({str(mount)!r})"]
    program = f"""
from benchmarks import sandbox
sandbox._FOLDERS += ({str(tmp_path)!r},)
print([sandbox.passes(one) for one in {attempts!r}])
"""
    line = f'mount -t tmpfs none \'{mount}\' && exec "$0" -c "$1"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", line]
    python = [sys.executable, program]
    found = subprocess.run([*inside, *python], capture_output=True, text=True, check=True)
    assert found.stdout == "[False, True]\n", found.stderr


def test_other_processes_are_out_of_reach() -> None:
    attempt = f"import os; os.kill({os.getpid()}, 0)"
    exec(attempt)
    assert not sandbox.passes(attempt)


def test_all_processes_of_a_program_end(tmp_path: Path) -> None:
    """So do those that have left its process group and asked not to be killed with their parent."""
    program = f"""
import ctypes, os, time
for _ in range(2):
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.fork():
        break
    os.setsid()
time.sleep(60)  # {tmp_path}
"""
    begun = time.monotonic()
    assert not sandbox.passes(program, seconds=0.5)
    assert time.monotonic() - begun < 30
    lines = [x.read_bytes() for x in Path("/proc").glob("[0-9]*/cmdline") if x.exists()]
    assert not any(f"# {tmp_path}".encode() in line for line in lines)


def test_holes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        open_all = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'
        patch.setattr(sandbox, "_SET_UP", open_all)
        with pytest.raises(InputError, match=r"can make files writable, write files, rem.+$"):
            sandbox.check()
    without = tuple(one for one in sandbox._UNSHARE if one != "--net")
    monkeypatch.setattr(sandbox, "_UNSHARE", without)
    with pytest.raises(InputError, match=r"can use the network, use abstract Unix sockets$"):
        sandbox.check()


def test_a_system_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_UNSHARE", ("sh", "-c", "echo no permission; exit 1"))
    with pytest.raises(InputError, match=r"refuses \(no permission\); allow user namespaces"):
        sandbox.check()
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="needs Linux and util-linux"):
        sandbox.check()
