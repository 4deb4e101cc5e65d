"""The file container: written completely or not at all, and every change is detected."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oscar_mm import InputError
from oscar_mm.cache import checked_file
from oscar_mm.cache.checked_file import Kind, read_checked, write_checked

TENSORS = {"a": torch.arange(7, dtype=torch.int32), "b": torch.randn(3, 5).bfloat16()}
TEXTS = {"one": '{"oscar_mm.sha256":"no"}', "two": "ünï"}


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    return read_checked(path, lambda texts, kinds: None)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    write_checked(path, TENSORS, TEXTS)
    return path


def test_round_trip(saved: Path) -> None:
    tensors, texts = read(saved)
    assert set(tensors) == {"a", "b"} and texts.items() >= TEXTS.items()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)
    # It is a plain safetensors file, alone in its folder, and private.
    assert set(load_file(saved)) == {"a", "b"}
    assert os.listdir(saved.parent) == [saved.name]
    assert os.name != "posix" or saved.stat().st_mode & 0o077 == 0


def test_no_tensors(tmp_path: Path) -> None:
    write_checked(tmp_path / "empty", {}, {})
    assert read(tmp_path / "empty")[0] == {}


def test_any_altered_byte_is_found(saved: Path, tmp_path: Path) -> None:
    """Every byte is tried: of length, header, texts, checksum and data."""
    whole = saved.read_bytes()
    other = tmp_path / "altered"
    for at in range(len(whole)):
        for flip in (0x01, 0x20):
            other.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            with pytest.raises(InputError, match=r"altered[: ]"):
                read(other)


def test_any_truncation_is_found(saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    other = tmp_path / "short"
    for size in range(len(whole)):
        other.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"short is (truncated|not a safetensors)"):
            read(other)
    other.write_bytes(whole[:-1])
    with pytest.raises(InputError, match=f"truncated: {len(whole) - 1} bytes, .* {len(whole)}"):
        read(other)
    other.write_bytes(whole + b"x")
    with pytest.raises(InputError, match="has extra bytes at its end"):
        read(other)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 a zip file, for instance of torch.save" + bytes(200),
        (100_000_000).to_bytes(8, "little") + b"{}",
        (1 << 63).to_bytes(8, "little") + b"{}" + bytes(100),
        (4).to_bytes(8, "little") + b"{1:}",
        (2).to_bytes(8, "little") + b"[]",
        (26).to_bytes(8, "little") + b'{"a":{"data_offsets":[0]}}',
        (9).to_bytes(8, "little") + b'{"a":"b"}',
        (60_000).to_bytes(8, "little") + b'{"a":' + b"[" * 59_995,
        (20_000_000).to_bytes(8, "little") + b'{"a":[' + b"{}," * 6_666_664,
        (15).to_bytes(8, "little") + b'{"a":{},"a":{}}',
    ],
)
def test_not_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"other is (not a safetensors file|truncated)"):
        read(path)


@pytest.mark.parametrize("texts", [None, {"a": "b"}, {"oscar_mm.sha256": "12"}])
def test_safetensors_of_others(tmp_path: Path, texts: dict[str, str] | None) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, texts)
    with pytest.raises(
        InputError, match=r"model\.safetensors is a safetensors file, but oscar_mm did not"
    ):
        read(path)


def test_texts_that_are_too_long_are_not_written(tmp_path: Path) -> None:
    write_checked(tmp_path / "long", {}, {"a": "x" * 16_000_000})
    assert len(read(tmp_path / "long")[1]["a"]) == 16_000_000
    with pytest.raises(InputError, match=r"longer: cannot be written: .* 16,777,216 bytes"):
        write_checked(tmp_path / "longer", {}, {"a": "x" * 17_000_000})
    assert os.listdir(tmp_path) == ["long"]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone: cannot be read: No such file"):
        read(tmp_path / "gone")
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(InputError, match=r"no.a: cannot be written: No such file"):
        write_checked(tmp_path / "no" / "a", TENSORS, {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="folder: cannot be written"):
        write_checked(tmp_path / "folder", TENSORS, {})
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize(
    "step", ["oscar_mm.cache.checked_file.save_file", "os.fsync", "os.replace"]
)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_old_file_survives_a_failed_write(
    saved: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    before = saved.read_bytes()

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(step, fail)
    expected = InputError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_checked(saved, {"c": torch.ones(3)}, {})
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [saved.name]


def test_refusal_comes_before_the_whole_file_is_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(texts: dict[str, str], kinds: dict[str, Kind]) -> None:
        assert kinds == {"a": ("I32", (7,)), "b": ("BF16", (3, 5))}
        assert json.loads(texts["one"]) and texts["two"] == TEXTS["two"]
        raise InputError("no")

    monkeypatch.setattr(checked_file, "_digest", None)
    with pytest.raises(InputError, match="no"):
        read_checked(saved, refuse)


def written_before(path: Path) -> None:
    """Write a file as earlier versions did: with a SHA-256 of the file with zeros in its place."""
    save_file(TENSORS, path, {**TEXTS, "oscar_mm.sha256": "0" * 64})
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest().encode()
    place = content.index(b'"oscar_mm.sha256":"0') + len(b'"oscar_mm.sha256":"')
    path.write_bytes(content[:place] + digest + content[place + 64 :])


def test_files_of_earlier_versions(tmp_path: Path) -> None:
    path = tmp_path / "old"
    written_before(path)
    tensors, texts = read(path)
    assert texts == TEXTS and all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x01]) + whole[at + 1 :])
        with pytest.raises(InputError, match=r"old[: ]"):
            read(path)


def test_tensors_of_any_shape(tmp_path: Path) -> None:
    """Names and texts of any content are kept apart."""
    tensors = {"none": torch.zeros(0, 3), "one": torch.tensor(2.0), "true": torch.ones(2) > 0}
    write_checked(tmp_path / "a", tensors, {"x": "", "": "y"})
    found, texts = read(tmp_path / "a")
    assert texts == {"x": "", "": "y"}
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
