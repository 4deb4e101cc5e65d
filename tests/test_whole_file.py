"""Files that are replaced in one go."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from oscar_mm.errors import InputError
from oscar_mm.files import whole_file, writing


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize(("private", "mode"), [(False, 0o640), (True, 0o600)])
def test_who_may_read_it(tmp_path: Path, umask, private: bool, mode: int) -> None:
    path = tmp_path / "file"
    with whole_file(path, private=private) as part:
        assert stat.S_IMODE(part.stat().st_mode) == mode
        part.write_bytes(b"new")
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_the_old_file_is_there_until_the_new_one_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with whole_file(path) as part:
        part.write_bytes(b"new")
        assert path.read_bytes() == b"old" and part.parent == tmp_path
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]


def test_it_is_on_the_disk_before_it_is_in_place(tmp_path: Path, monkeypatch) -> None:
    path, synced = tmp_path / "file", []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((path.exists(), os.fstat(file))))
    with whole_file(path) as part:
        part.write_bytes(b"new")
    assert [(there, stat.S_ISDIR(found.st_mode)) for there, found in synced] == [
        (False, False),
        (True, True),
    ]
    assert synced[0][1].st_ino == path.stat().st_ino and synced[0][1].st_size == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_leaves_the_old_file_alone(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(error), whole_file(path) as part:
        part.write_bytes(b"ne")
        raise error
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_no_folder_and_a_folder_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "gone" / "file"):
        pass
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError), whole_file(tmp_path / "folder") as part:
        part.write_bytes(b"new")
    assert os.listdir(tmp_path) == ["folder"]


def test_what_a_link_leads_to(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    for text in (b"old", b"new"):
        with whole_file(link) as part:
            part.write_bytes(text)
        assert link.is_symlink() and path.read_bytes() == text


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (
        pytest.raises(InputError, match="pipe: cannot be written: Invalid argument"),
        writing(tmp_path / "pipe"),
        whole_file(tmp_path / "pipe"),
    ):
        pass
    assert (tmp_path / "pipe").is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_names_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    path = tmp_path / ("写" * 85)
    with whole_file(path) as part:
        part.write_bytes(b"new")
    assert path.read_bytes() == b"new"
