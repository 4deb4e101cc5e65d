"""Programs of a model change nothing, reach nobody and end."""

import subprocess
import sys
import time
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
        ("import os; os.kill(int(os.listdir('/proc')[0]), 9)", False),
    ],
)
def test_programs(program: str, passes: bool) -> None:
    assert sandbox.passes(program) == passes


def test_a_program_that_does_not_end() -> None:
    assert not sandbox.passes("while True: pass", seconds=0.5)


def test_files_stay(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    program = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"
    assert sandbox.passes(program, str(tmp_path))
    assert (tmp_path / "kept").read_text() == "kept"


def test_files_stay_though_a_program_mounts_them_again(tmp_path: Path) -> None:
    program = """
import subprocess, sys
change = f"mount -o remount,bind,rw /; touch {sys.argv[1]}/new"
assert subprocess.run(["sh", "-c", change], capture_output=True).returncode
assert subprocess.run(["unshare", "-Urm", "sh", "-c", change], capture_output=True).returncode
"""
    assert sandbox.passes(program, str(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_mounts_with_spaces_are_read_only(tmp_path: Path) -> None:
    (mount := tmp_path / "a b").mkdir()
    attempt = f"open({str(mount / 'new')!r}, 'w')"
    program = f"from benchmarks import sandbox; print(sandbox.passes({attempt!r}))"
    line = f'mount -t tmpfs none \'{mount}\' && exec "$0" -c "$1"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", line]
    python = [sys.executable, program]
    found = subprocess.run([*inside, *python], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n", found.stderr


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
        patch.setattr(sandbox, "_READ_ONLY", 'exec "$@"')
        with pytest.raises(InputError, match=r"can make files writable, write files, rem.+$"):
            sandbox.check()
    without = tuple(one for one in sandbox._UNSHARE if one != "--net")
    monkeypatch.setattr(sandbox, "_UNSHARE", without)
    with pytest.raises(InputError, match=r"can use the network$"):
        sandbox.check()


def test_a_system_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_UNSHARE", ("sh", "-c", "echo no permission; exit 1"))
    with pytest.raises(InputError, match=r"refuses \(no permission\); allow user namespaces"):
        sandbox.check()
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="needs Linux and util-linux"):
        sandbox.check()
