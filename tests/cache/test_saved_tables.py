"""Forged files: their checksum is right, but their content is no cache's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from oscar_mm import InputError, KVPolicy
from oscar_mm.cache.checked_file import write_checked
from oscar_mm.cache.persist import load_cache, save_cache
from oscar_mm.cache.store import PageStore
from tests.cache.test_persist import history


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "chat.safetensors"
    save_cache(history("compact"), path, fingerprint="model-1")
    return path


def altered_text(**changes: Any) -> Callable:
    return lambda tensors, text: text.update(changes)


def altered(name: str, place: Any, value: Any) -> Callable:
    def change(tensors: dict[str, torch.Tensor], text: dict[str, Any]) -> None:
        tensors[name][place] = value

    return change


def replaced(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def change(tensors: dict[str, torch.Tensor], text: dict[str, Any]) -> None:
        tensors[name] = make(tensors[name])

    return change


POLICY = {**dataclasses.asdict(KVPolicy()), "bits": KVPolicy().bits._asdict()}
FORGED = {
    "version": (altered_text(version=2), "has format version 2; .* reads 1"),
    "no version": (altered_text(version="1"), "no saved cache"),
    "policy": (altered_text(policy=POLICY | {"key_group": 7}), "damaged: KVPolicy key_group=7"),
    "no policy": (altered_text(policy=[1]), "damaged"),
    "other policy": (altered_text(policy=POLICY | {"bits": {"text": 16}}), "another policy"),
    "fewer layers": (lambda tensors, text: text["layers"].pop(), "unknown tensors"),
    "more layers": (lambda tensors, text: text["layers"].extend([text["layers"][0]]), "damaged"),
    "layers": (altered_text(layers=7), "damaged"),
    "many layers": (altered_text(layers=[{}] * 2000), "2000 layers"),
    "page order": (lambda tensors, text: text["layers"][1].update(page_order="x"), "order"),
    "balanced": (lambda tensors, text: text["layers"][1].update(balanced="x"), "balanced"),
    "missing": (lambda tensors, text: tensors.pop("entries"), "damaged: 'entries'"),
    "missing pages": (lambda tensors, text: tensors.pop("layer.1.pages.2"), "damaged"),
    "code": (altered("codes", (0, 5), 9), "unknown stream codes"),
    "other code": (altered("codes", (0, 300), 255), "row 0 has other tokens"),
    "code without stream": (altered("codes", (0, 300), 6), "row 0 has other tokens"),
    "no rows": (replaced("codes", lambda x: x[:0]), "out of range"),
    "many rows": (
        replaced("codes", lambda x: torch.empty(10**9, 0, dtype=torch.uint8)),
        "1000000000 rows",
    ),
    "codes' type": (replaced("codes", lambda x: x.int()), "codes is .*int32"),
    "stream's row": (altered("streams", (0, 0), 3), "out of range"),
    "stream's code": (altered("streams", (0, 1), -1), "out of range"),
    "stream's entries": (altered("streams", (0, 2), 2**62), "out of range"),
    "stream's tail": (altered("streams", (0, 3), -(2**62)), "out of range"),
    "stream twice": (altered("streams", 1, torch.zeros(4, dtype=torch.int64)), "damaged"),
    "fewer entries": (replaced("entries", lambda x: x[:-1].clone()), "differ in number"),
    "start": (altered("entries", (0, 1), -1), "out of range"),
    "stop": (altered("entries", (0, 2), 129), "out of range"),
    "empty entry": (altered("entries", (0, 2), 0), "out of range"),
    "fewer tokens": (altered("entries", (0, 1), 1), "other tokens"),
    "page": (altered("entries", (0, 0), 10**9), "not numbered from 0"),
    "negative page": (altered("entries", (0, 0), -1), "not numbered from 0"),
    "block": (altered("blocks", 0, 10**9), "not numbered from 0"),
    "block twice": (lambda t, text: t["blocks"].fill_(0), "twice|not numbered"),
    "fewer pages": (replaced("layer.0.pages.2", lambda x: x[1:].clone()), "pages.2 is"),
    "page bytes": (replaced("layer.0.pages.2", lambda x: x[:, 1:].clone()), "pages.2 is"),
    "blocks' type": (replaced("layer.1.blocks", lambda x: x.long()), "int64"),
    "heads": (replaced("layer.1.blocks", lambda x: x[:, :, :1].clone()), "damaged"),
    "dimensions": (replaced("layer.1.blocks", lambda x: x.flatten()), "damaged"),
    "sigma": (altered("layer.0.sigma", (0, 0), float("nan")), "sigma is not positive"),
    "sigma's shape": (replaced("layer.0.sigma", lambda x: x[:, 1:].clone()), "sigma is"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_files(saved: Path, tmp_path: Path, name: str) -> None:
    """With a right checksum, but content that is no cache's: refused before anything is taken."""
    change, message = FORGED[name]
    tensors = load_file(saved)
    with safe_open(saved, "pt") as file:
        text = json.loads(file.metadata()["oscar_mm.cache"])
    change(tensors, text)
    path = tmp_path / "forged"
    write_checked(path, tensors, {"oscar_mm.cache": json.dumps(text)})
    store = PageStore("compact")
    with pytest.raises(InputError, match=r"forged: .*(" + message + ")"):
        load_cache(path, fingerprint="model-1", store=store)
    assert store.memory().pool_bytes == 0 and not store.layers
    with pytest.raises(InputError, match="forged"):
        load_cache(path, fingerprint="model-1")
