"""Programs of a model change nothing, reach nobody and end."""

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


def test_holes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_READ_ONLY", 'exec "$@"')
        with pytest.raises(InputError, match=r"can write files, remove files$"):
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
