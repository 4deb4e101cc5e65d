"""The folder of compiled kernels: what others could have written there is not used."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from oscar_mm.kernels.compile import load_file, store_file

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs owners and modes of files")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that was kept."""
    path = tmp_path / "kernels" / "a.bin"
    store_file(path, "key", b"code")
    assert load_file(path, "key") == b"code"
    return path


@pytest.fixture
def open_to_all() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def refused(path: Path, why: str) -> None:
    """Neither used nor written to, and that is said once."""
    before = path.read_bytes()
    with pytest.warns(RuntimeWarning, match=f"cannot be stored in {path.parent} .*{why}") as said:
        for _ in range(2):
            assert load_file(path, "key") is None
            store_file(path, "key", b"other code")
    assert len(said) == 1 and path.read_bytes() == before


def test_only_the_user_can_read_and_write(open_to_all: None, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702, 0o1777])
def test_a_folder_that_others_can_write_to(path: Path, mode: int) -> None:
    path.parent.chmod(mode)
    refused(path, r"others can write to it: .*OSCAR_MM_CACHE to a folder of your own")
    path.parent.chmod(0o755)
    assert load_file(path, "key") == b"code"


def test_a_folder_of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    refused(path, "it belongs to another user")


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_to_is_made_again(path: Path, mode: int) -> None:
    path.chmod(mode)
    assert load_file(path, "key") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store_file(path, "key", b"code")
    assert load_file(path, "key") == b"code" and path.stat().st_mode & 0o777 == 0o600


def test_links(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.symlink_to(path.parent)
    assert load_file(folder / path.name, "key") == b"code"
    store_file(folder / "b.bin", "key", b"b")
    assert load_file(path.parent / "b.bin", "key") == b"b"
    file = path.with_name("link.bin")
    file.symlink_to(path)
    assert load_file(file, "key") is None
    path.parent.chmod(0o777)
    assert load_file(folder / path.name, "key") is None


def test_what_is_no_file(path: Path) -> None:
    os.mkfifo(path.with_name("pipe.bin"))
    path.with_name("folder.bin").mkdir()
    for name in ("pipe.bin", "folder.bin", "gone.bin"):
        assert load_file(path.with_name(name), "key") is None
