"""Forged files, whose checksum is right but whose content is impossible."""

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
from oscar_mm.cache.page_store import LayerShape, PageStore
from oscar_mm.cache.saved_cache import SavedCache, load_cache, save_cache
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import Bits
from tests.cache.invariants import POLICIES
from tests.cache.test_saved_cache import history


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "chat.safetensors"
    save_cache(history("channel"), path, fingerprint="model-1")
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


def no_number(field: str, value: float) -> Callable:
    """Return a forgery that puts a value that is not finite into a field of the first page."""

    def change(tensors: dict[str, torch.Tensor], text: dict[str, Any]) -> None:
        _, _, heads, width = tensors["layer.1.recent"].shape
        page = PageFormat.of(KVPolicy.preset("channel"), Bits(2, 2), heads, width)
        first = tensors["layer.1.pages.2"][:1]
        content = page.read(first, field)
        content[..., -1] = value
        page.write(first, field, content)

    return change


def a_page_twice(tensors: dict[str, torch.Tensor], text: dict[str, Any]) -> None:
    """List the first page of a stream of at least two pages twice."""
    rows = tensors["streams"][:, 2].cumsum(0).tolist()
    at = next(end for end, own in zip(rows, tensors["streams"][:, 2], strict=True) if own > 1)
    tensors["entries"][at - 1, 0] = tensors["entries"][at - 2, 0]


POLICY = {
    **dataclasses.asdict(KVPolicy.preset("channel")),
    "bits": KVPolicy.preset("channel").bits._asdict(),
}
FORGED = {
    "version": (altered_text(version=3), "has format version 3; .* reads 2"),
    "version 0": (altered_text(version=0), "has format version 0; .* reads 2"),
    "version 1": (altered_text(version=1), "has format version 1; .* reads 2"),
    "no version": (altered_text(version="1"), "not a saved cache"),
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
    "other code": (altered("codes", (0, 300), 255), "row 0: codes and streams count"),
    "code without stream": (altered("codes", (0, 300), 6), "row 0: codes and streams count"),
    "no rows": (replaced("codes", lambda x: x[:0]), "12 streams, too many for 0 rows"),
    "many rows": (
        replaced("codes", lambda x: torch.empty(10**9, 0, dtype=torch.uint8)),
        "1000000000 rows",
    ),
    "codes' type": (replaced("codes", lambda x: x.int()), "codes has .*I32"),
    "stream's row": (altered("streams", (0, 0), 3), "out of range"),
    "stream's code": (altered("streams", (0, 1), -1), "out of range"),
    "stream's entries": (altered("streams", (0, 2), 2**62), "out of range"),
    "stream's tail": (altered("streams", (0, 3), -(2**62)), "out of range"),
    "stream twice": (altered("streams", 1, torch.zeros(4, dtype=torch.int64)), "damaged"),
    "fewer entries": (replaced("entries", lambda x: x[:-1].clone()), "differ in number"),
    "start": (altered("entries", (0, 1), -1), "out of range"),
    "stop": (altered("entries", (0, 2), 129), "out of range"),
    "empty entry": (altered("entries", (0, 2), 0), "out of range"),
    "fewer tokens": (altered("entries", (0, 1), 1), "different numbers of tokens"),
    "stream's slots": (altered("streams", (0, 3), 3), "differ in number"),
    "page": (altered("entries", (0, 0), 10**9), "not numbered from 0"),
    "negative page": (altered("entries", (0, 0), -1), "not numbered from 0"),
    "slot": (altered("recent", 0, 10**9), "not numbered from 0"),
    "negative slot": (altered("recent", 0, -1), "not numbered from 0"),
    "slot twice": (lambda t, text: t["recent"].fill_(0), "a stream uses a slot twice"),
    "fewer slots": (replaced("recent", lambda x: x[:-1].clone()), "differ in number"),
    "slots' type": (replaced("recent", lambda x: x.long()), "recent has .*I64"),
    "slots' shape": (
        replaced("recent", lambda x: x[:, None].clone()),
        "recent has unexpected shape",
    ),
    "many slots": (
        replaced("recent", lambda x: torch.zeros(10**6, dtype=torch.int32)),
        "1000000 recent, too many for 3 rows of 620 tokens",
    ),
    "blocks": (lambda t, text: t.update(blocks=t["recent"].clone()), "unknown tensors .'blocks'"),
    "other bits": (
        lambda t, text: t.update({"layer.0.pages.3.2": t.pop("layer.0.pages.2")}),
        "damaged: 'layer.0.pages.2'",
    ),
    "fewer pages": (
        replaced("layer.0.pages.2", lambda x: x[1:].clone()),
        "pages.2 has invalid shape",
    ),
    "page twice": (a_page_twice, "tokens of a page twice"),
    "many entries": (
        replaced("entries", lambda x: torch.ones(10**6, 3, dtype=torch.int32)),
        "1000000 entries, too many for 3 rows of 620 tokens",
    ),
    "many tokens": (
        replaced("codes", lambda x: torch.zeros(1, 2**26, dtype=torch.uint8)),
        "1 rows of 67108864 tokens",
    ),
    "many given": (
        lambda t, text: t.update({f"given.{n}": torch.ones(1) for n in range(65)}),
        "65 tensors",
    ),
    "NaN scale": (no_number("key_scales", float("nan")), "layer 1: pages.2 contains NaN or inf"),
    "infinite zero": (no_number("value_zeros", float("inf")), "pages.2 contains NaN or infinity"),
    "NaN norm": (no_number("norms", float("nan")), "pages.2 contains NaN or infinity"),
    "NaN token": (altered("layer.1.recent", (-1, 1, 0, 0), float("nan")), "recent contains NaN"),
    "infinite token": (altered("layer.0.recent", (0, 0, 1, 3), -float("inf")), "recent contains"),
    "fewer tokens in 16 bit": (
        replaced("layer.1.recent", lambda x: x[1:].clone()),
        "recent has invalid shape",
    ),
    "long text": (altered_text(fingerprint="x" * 10**6), "another model .{,400}$"),
    "long policy": (altered_text(policy=POLICY | {"fit": "x" * 10**6}), "fit='x{,400}$"),
    "page bytes": (
        replaced("layer.0.pages.2", lambda x: x[:, 1:].clone()),
        "pages.2 has invalid shape",
    ),
    "type of 16 bit": (
        replaced("layer.1.recent", lambda x: x.long()),
        "16-bit tokens have dtype I64",
    ),
    "heads": (replaced("layer.1.recent", lambda x: x[:, :, :1].clone()), "damaged"),
    "dimensions": (replaced("layer.1.recent", lambda x: x.flatten()), "damaged"),
    "sigma": (
        altered("layer.0.sigma", (0, 0), float("nan")),
        "sigma has values outside of the valid range",
    ),
    "sigma's shape": (replaced("layer.0.sigma", lambda x: x[:, 1:].clone()), "sigma has"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_files(saved: Path, tmp_path: Path, name: str) -> None:
    """Files with a right checksum but impossible content are refused before slots are taken."""
    change, message = FORGED[name]
    tensors = load_file(saved)
    with safe_open(saved, "pt") as file:
        text = json.loads(file.metadata()["oscar_mm.cache"])
    change(tensors, text)
    path = tmp_path / "forged"
    write_checked(path, tensors, {"oscar_mm.cache": json.dumps(text)})
    store = PageStore("channel")
    with pytest.raises(InputError, match=r"forged[: ].*(" + message + ")"):
        load_cache(path, fingerprint="model-1", store=store)
    assert store.memory().pool_bytes == 0 and not store.layers
    with pytest.raises(InputError, match="forged"):
        load_cache(path, fingerprint="model-1")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["center", "key_scales", "key_zeros", "value_scales"])
def test_forged_stream_pages(tmp_path: Path, field: str, value: float) -> None:
    cache, path = history(POLICIES["stream"]), tmp_path / "forged"
    save_cache(cache, path, fingerprint="model-1")
    with safe_open(path, "pt") as file:
        texts = {"oscar_mm.cache": file.metadata()["oscar_mm.cache"]}
    tensors = load_file(path)
    pages, page_format = tensors["layer.1.pages.3.2"], cache.layers[1].formats[Bits(3, 2)]
    content = page_format.read(pages, field)
    content[-1].flatten()[0] = value
    page_format.write(pages, field, content)
    write_checked(path, tensors, texts)
    with pytest.raises(
        InputError, match=r"forged .* layer 1: pages\.3\.2 contains NaN or infinity"
    ):
        load_cache(path, fingerprint="model-1")


@pytest.mark.parametrize(
    "change", [{"kv_heads": 4}, {"head_dim": 128}, {"dtype": torch.float16}, None]
)
def test_a_cache_of_another_shape_than_the_model(saved: Path, change: dict | None) -> None:
    """The header shows the mismatch, so no pool is allocated that the model could not use."""
    shape = LayerShape(*load_file(saved)["layer.0.recent"].shape[2:], torch.float32)
    model = [shape, shape]
    assert SavedCache.read(saved, fingerprint="model-1", layers=model).shapes == model
    model = [shape] if change is None else [shape, shape._replace(**change)]
    message = (
        "it has 2 layers" if change is None else "layer 1: .* but the model has .* KV heads of"
    )
    with pytest.raises(InputError, match=f"damaged: {message}"):
        SavedCache.read(saved, fingerprint="model-1", layers=model)
