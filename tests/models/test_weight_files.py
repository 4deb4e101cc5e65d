"""Weight files that are missing or damaged are named, with what to do."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.models import check_weights, stored_bytes
from oscar_mm.pipelines.plan import Session, plan
from oscar_mm.pipelines.text import load_text_model
from tests.checkpoints import build_decoder
from tests.quantized_checkpoints import AWQ, awq, quantize_folder

SECOND = "model-00002-of-00003.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123456789\n"


@pytest.fixture
def folder(qwen3_vl_folder: Path, tmp_path: Path) -> Path:
    """A quantized checkpoint of three files."""
    quantize_folder(qwen3_vl_folder, tmp_path / "awq", AWQ, awq, shards=3)
    return tmp_path / "awq"


@pytest.mark.parametrize(
    ("kept", "fault"),
    [
        (lambda whole: whole[:-5], "is damaged, perhaps truncated; delete it and download it"),
        (lambda whole: whole[:1000], "is damaged, perhaps truncated"),
        (lambda whole: whole[:5], "is damaged, perhaps truncated"),
        (lambda whole: whole[:8] + b"{" * (len(whole) - 8), "is damaged"),
        (lambda _: b"", "is empty; delete it and download it again"),
        (lambda _: b"<html>404</html>", "not a safetensors file; delete it and download it again"),
        (lambda _: POINTER.encode(), "is a Git LFS pointer .* `git lfs pull`, or delete it"),
    ],
)
def test_a_damaged_file(folder: Path, kept, fault: str) -> None:
    check_weights(str(folder))
    file = folder / SECOND
    file.write_bytes(kept(file.read_bytes()))
    with pytest.raises(InputError, match=f"^model {re.escape(str(folder))}: {SECOND} .*{fault}"):
        check_weights(str(folder))


def test_pipelines_and_plans_name_the_file(folder: Path) -> None:
    file = folder / SECOND
    file.write_bytes(file.read_bytes()[:-5])
    for read in (lambda: OscarVLPipeline(folder, device="cpu"), lambda: plan(folder, Session())):
        with pytest.raises(InputError, match=f"{SECOND} is damaged"):
            read()
    file.unlink()
    for read in (lambda: OscarVLPipeline(folder, device="cpu"), lambda: plan(folder, Session())):
        with pytest.raises(InputError, match=f"{SECOND} is missing, but .* names it"):
            read()


def test_a_single_file_takes_precedence_over_an_index(folder: Path, qwen3_vl_folder: Path) -> None:
    (folder / SECOND).write_bytes(b"")
    shutil.copy(qwen3_vl_folder / "model.safetensors", folder)
    check_weights(str(folder))
    assert stored_bytes(str(folder)) == (folder / "model.safetensors").stat().st_size


def test_an_empty_file_of_a_language_model(tmp_path: Path) -> None:
    build_decoder("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(
        (Path(__file__).parents[2] / "oscar_mm/models/pocket-vl/tokenizer.json").read_bytes()
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"model\.safetensors is empty"):
        load_text_model(tmp_path, device="cpu")


MAPS: list[Any] = [{"a": 3}, {}, [], None, {"a": "../model.safetensors"}, {"a": ""}]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", "[" * 100_000, *(json.dumps({"weight_map": one}) for one in MAPS)]
)
def test_a_damaged_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"index\.json is damaged; delete it and"):
        check_weights(str(folder))
    with pytest.raises(InputError, match=r"index\.json is damaged; delete it and"):
        OscarVLPipeline(folder, device="cpu")


def test_plans_need_the_weights_of_quantized_checkpoints(folder: Path, qwen3_vl_folder) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    with pytest.raises(InputError, match=r"awq: there are no weights .*; download the whole"):
        plan(folder, Session())
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert plan(folder, Session()) == plan(qwen3_vl_folder, Session())
