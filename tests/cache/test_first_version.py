"""Files of version 1: blocks of 32 tokens in 16-bit precision, pages of tokens in another order."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from oscar_mm import InputError, KVPolicy
from oscar_mm.cache.checked_file import write_checked
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.saved_cache import load_cache, save_cache
from tests.cache.invariants import POLICIES, attend_oscar, chunk
from tests.cache.numbers import check_slots
from tests.cache.test_saved_cache import history, same

HEADS, LENGTH, PAGES, BLOCKS = 2, 320, 3, 7
PADDING, TEXT, IMAGE = 255, 0, 1
STREAMS = [[0, TEXT, 2, 45], [0, IMAGE, 0, 67], [1, TEXT, 2, 50], [1, IMAGE, 0, 65]]
"""Row, code, entries, tokens in blocks. Rows have the first page and some blocks in common."""
ENTRIES = [[0, 0, 100], [1, 20, 128], [0, 0, 128], [2, 0, 72]]
OF_BLOCKS = [0, 1, 2, 3, 4, 0, 5, 2, 3, 6]
CODES = [
    [TEXT] * 200 + [IMAGE] * 67 + [TEXT] * 53,
    [PADDING] * 5 + [TEXT] * 210 + [IMAGE] * 65 + [TEXT] * 40,
]
FORMATS = [("quarot", 64), ("quarot", 128), ("groups of 32", 64), ("quarot", 48)]
POLICY = {
    "quarot": KVPolicy.preset("quarot"),
    "groups of 32": KVPolicy.preset("quarot", key_group=32, value_group=32),
}


def sylvester(size: int) -> np.ndarray:
    """Normalized Hadamard matrix, block-diagonal where the size is no power of two."""
    matrix, first = np.zeros((size, size)), 0
    for width in (128, 64, 32, 16):
        if not size & width:
            continue
        block = np.ones((1, 1))
        while len(block) < width:
            block = np.kron([[1, 1], [1, -1]], block)
        matrix[first : first + width, first : first + width] = block / width**0.5
        first += width
    return matrix


def a_page(generator: np.random.Generator, policy: KVPolicy, width: int) -> tuple:
    """Bytes of a page of 2-bit codes as version 1 has them, and the keys and values in it,
    (KV heads, 128, width) in float64."""
    content, sides = b"", ([], [])
    for _ in range(HEADS):
        for side, group in enumerate((policy.key_group, policy.value_group)):
            group = min(group, width)
            codes = generator.integers(0, 4, (128, width), dtype=np.uint8)
            scales, zeros = (
                generator.normal(size=(128, width // group)).astype(np.float16) for _ in range(2)
            )
            scales = abs(scales)
            # Four codes to a byte, token by token, the first one in the lowest bits.
            content += (
                (codes.reshape(-1, 4) << np.array([0, 2, 4, 6])).sum(1).astype("u1").tobytes()
            )
            for array in (scales, zeros):
                # Of keys token by token, of values group by group.
                content += (array if side == 0 else array.T).astype("<f2").tobytes()
                assert len(content) % 16 == 0
            scales, zeros = (x.astype(np.float64).repeat(group, 1) for x in (scales, zeros))
            sides[side].append((scales * codes + zeros) @ sylvester(width))
    return np.frombuffer(content, np.uint8), *map(np.stack, sides)


def first_file(path: Path, name: str, width: int) -> tuple[dict, dict, np.ndarray]:
    """Write a file of two layers.

    Returns:
        its tensors, its text, and keys and values (layers, 2, rows, KV heads, LENGTH, width) of
        all tokens, zero for padding.
    """
    policy, generator = POLICY[name], np.random.default_rng(0)
    tensors = {
        "codes": np.array(CODES, np.uint8),
        "streams": np.array(STREAMS, np.int64),
        "entries": np.array(ENTRIES, np.int32),
        "blocks": np.array(OF_BLOCKS, np.int32),
        "given.turn": np.array([7]),
    }
    expected = np.zeros((2, 2, 2, HEADS, LENGTH, width))
    for layer in range(2):
        pages, *packed = zip(*(a_page(generator, policy, width) for _ in range(PAGES)), strict=True)
        blocks = generator.normal(size=(BLOCKS, 2, HEADS, 32, width)).astype(np.float32)
        tensors[f"layer.{layer}.pages.2"] = np.stack(pages)
        tensors[f"layer.{layer}.blocks"] = blocks
        entry = block = 0
        for row, code, entries, tail in STREAMS:
            count = -(-tail // 32)
            for side in range(2):
                held = [packed[side][page][:, a:b] for page, a, b in ENTRIES[entry:][:entries]]
                whole = [blocks[number, side] for number in OF_BLOCKS[block:][:count]]
                held.append(np.concatenate(whole, axis=1)[:, :tail])
                places = np.flatnonzero(np.array(CODES[row]) == code)
                expected[layer, side, row][:, places] = np.concatenate(held, axis=1)
            entry, block = entry + entries, block + count
    fields = dataclasses.asdict(policy)
    del fields["center"]
    text = {
        "version": 1,
        "fingerprint": "f",
        "policy": {**fields, "bits": dict.fromkeys(("text", "image", "video", "audio"), 2)},
        "layers": [{"balanced": True, "page_order": "plain"}] * 2,
        "given": {"label": "x"},
    }
    tensors = {key: torch.from_numpy(value.copy()) for key, value in tensors.items()}
    write_checked(path, tensors, {"oscar_mm.cache": json.dumps(text)})
    return tensors, text, expected


@pytest.mark.parametrize(("name", "width"), FORMATS)
def test_the_same_tokens_come_back(tmp_path: Path, name: str, width: int) -> None:
    """All bytes of the file are written by hand here, and its tokens computed in float64."""
    path = tmp_path / "old"
    _, _, expected = first_file(path, name, width)
    store = PageStore(POLICY[name])
    cache, given = load_cache(path, fingerprint="f", store=store)
    assert given["label"] == "x" and given["turn"].tolist() == [7]
    assert cache.memory().tokens == {"text": 503, "image": 132, "video": 0, "audio": 0}
    assert cache.real_tokens(LENGTH).tolist() == (np.array(CODES) != PADDING).tolist()
    for layer in range(2):
        for found, wanted in zip(cache.unpacked(layer), expected[layer], strict=True):
            # Sums over a head in float32, of numbers up to 40; what is not packed is in bfloat16.
            close = np.isclose(found.numpy(), wanted, rtol=0, atol=1e-4)
            rounded = torch.from_numpy(wanted).bfloat16().float().numpy()
            assert (close | (found.numpy() == rounded)).all()
            assert close.mean() > 0.5
    check_slots(store, [cache.kv_manager])
    # 45 + 67 tokens of the first row, and 18 + 1 of the second that it does not share.
    used = [slots.used for slots in store.allocators.values()]
    assert used == [PAGES, 45 + 67 + (50 - 32) + (65 - 64)]
    save_cache(cache, tmp_path / "new", fingerprint="f")
    with safe_open(tmp_path / "new", "pt") as file:
        assert json.loads(file.metadata()["oscar_mm.cache"])["version"] == 2
    again, _ = load_cache(tmp_path / "new", fingerprint="f")
    for tokens in (1, 40, 1):
        for layer in range(2):
            new = chunk(tokens + layer, tokens, batch=2, head_dim=width)
            mine, other = (attend_oscar(one, new, layer=layer) for one in (cache, again))
            assert torch.equal(mine, other)
    for layer in range(2):
        assert torch.equal(again.unpacked(layer)[0], cache.unpacked(layer)[0])


@pytest.mark.parametrize("policy", ["channel", "kivi", "four", "mixed", "bf16"])
def test_whole_pages_are_as_they_were(tmp_path: Path, policy: str) -> None:
    """A cache of a long history, its tokens in 16-bit precision put into blocks: it goes on as
    before."""
    cache, path = history(POLICIES[policy]), tmp_path / "old"
    save_cache(cache, path, fingerprint="f")
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        text = json.loads(file.metadata()["oscar_mm.cache"])
    recent, parts, first = tensors.pop("recent").tolist(), [], 0
    for count in tensors["streams"][:, 3].tolist():
        own = recent[first : first + count]
        parts += [own[at : at + 32] for at in range(0, count, 32)]
        first += count
    tensors["blocks"] = torch.arange(len(parts), dtype=torch.int32)
    for layer in range(2):
        tokens = tensors.pop(f"layer.{layer}.recent")
        blocks = tokens.new_full((len(parts), *tokens.shape[1:3], 32, tokens.shape[3]), 7.5)
        for block, slots in zip(blocks, parts, strict=True):
            block[:, :, : len(slots)] = tokens[slots].permute(1, 2, 0, 3)
        tensors[f"layer.{layer}.blocks"] = blocks
    text["version"] = 1
    text["policy"]["bits"] = {key: both[0] for key, both in text["policy"]["bits"].items()}
    del text["policy"]["center"]
    write_checked(path, tensors, {"oscar_mm.cache": json.dumps(text)})
    loaded, _ = load_cache(path, fingerprint="f", policy=POLICIES[policy])
    check_slots(loaded.store, [loaded.kv_manager])
    same(loaded, cache)


def of(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def changed(tensors: dict[str, torch.Tensor], text: dict[str, Any]) -> None:
        tensors[name] = change(tensors[name].clone())

    return changed


def at(name: str, place: Any, value: Any) -> Callable:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return of(name, change)


def policy_with(**fields: Any) -> Callable:
    return lambda tensors, text: text["policy"].update(fields)


def tail_twice(tensors: dict[str, torch.Tensor], text: dict[str, Any]) -> None:
    """A stream has more tokens than its row, all of them in one block many times."""
    tensors["streams"][0, 3] = 32 * 32
    tensors["blocks"] = torch.cat([torch.zeros(32, dtype=torch.int32), tensors["blocks"][2:]])


HOSTILE = {
    "block": (at("blocks", 3, BLOCKS), "a block is out of range"),
    "huge block": (at("blocks", 3, 2**31 - 1), "a block is out of range"),
    "negative block": (at("blocks", 0, -1), "a block is out of range"),
    "block twice": (at("blocks", 1, 0), "a stream has a slot twice"),
    "tail": (at("streams", (0, 3), 44), "other tokens than its streams"),
    "long tail": (at("streams", (0, 3), 65), "differ in number"),
    "no tail": (at("streams", (1, 3), 0), "differ in number"),
    "negative tail": (at("streams", (0, 3), -1), "a stream is out of range"),
    "huge tail": (at("streams", (0, 3), 2**62), "a stream is out of range"),
    "tokens without number": (tail_twice, "1206 tokens in 16 bit"),
    "fewer blocks": (of("blocks", lambda x: x[:-1].clone()), "differ in number"),
    "blocks' type": (of("blocks", lambda x: x.long()), "recent is .*I64"),
    "blocks' shape": (of("blocks", lambda x: x[:, None].clone()), "recent is "),
    "many blocks": (
        of("blocks", lambda x: torch.zeros(10**6, dtype=torch.int32)),
        "1000000 recent of 2 rows of 320 tokens",
    ),
    "no blocks": (lambda t, text: t.pop("blocks"), "damaged: 'blocks'"),
    "no blocks of a layer": (lambda t, text: t.pop("layer.1.blocks"), "damaged: 'layer.1.recent'"),
    "tokens of a block": (
        of("layer.0.blocks", lambda x: x[:, :, :, :16].clone()),
        "layer.0.blocks is of 16 tokens",
    ),
    "heads": (of("layer.1.blocks", lambda x: x[:, :, :1].clone()), "damaged"),
    "sides": (of("layer.1.blocks", lambda x: x[:, :1].clone()), "layer 1: recent is"),
    "dimensions": (of("layer.1.blocks", lambda x: x.flatten()), "damaged"),
    "type": (of("layer.1.blocks", lambda x: x.long()), "in 16 bit are I64"),
    "blocks of a layer": (of("layer.1.blocks", lambda x: x[1:].clone()), "layer 1: recent is"),
    "NaN token": (at("layer.1.blocks", (0, 1, 0, 3, 5), float("nan")), "recent holds what is no"),
    "page": (at("entries", (1, 0), 3), "not numbered from 0"),
    "page bytes": (of("layer.0.pages.2", lambda x: x[:, 1:].clone()), "pages.2 is"),
    "NaN scale": (at("layer.1.pages.2", (0, slice(2048, 2050)), 0xFF), "pages.2 holds what is no"),
    "page order": (lambda t, text: text["layers"][1].update(page_order="fragments"), "order"),
    "slots of now": (lambda t, text: t.update(recent=t["blocks"].clone()), "unknown .*'recent'"),
    "tokens of now": (
        lambda t, text: t.update({"layer.0.recent": torch.zeros(3)}),
        "unknown tensors .'layer.0.recent'",
    ),
    "version": (lambda t, text: text.update(version=2), "damaged: 'recent'"),
    "three bits": (policy_with(bits={"text": 3}), "not one of version 1"),
    "pair": (policy_with(bits={"text": [4, 2]}), "not one of version 1"),
    "center": (policy_with(center=True), "not one of version 1"),
    "policy": (policy_with(token_scaling="per_head"), "damaged: KVPolicy token_scaling="),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path: Path, name: str) -> None:
    """With a right checksum, but content that no cache had: refused before anything is taken."""
    change, message = HOSTILE[name]
    path = tmp_path / "hostile"
    tensors, text, _ = first_file(path, "quarot", 64)
    text["layers"] = [dict(about) for about in text["layers"]]
    change(tensors, text)
    write_checked(path, tensors, {"oscar_mm.cache": json.dumps(text)})
    with pytest.raises(InputError, match=rf"hostile: .*{message}"):
        load_cache(path, fingerprint="f")
    store = PageStore("quarot")
    with pytest.raises(InputError, match="hostile: "):
        load_cache(path, fingerprint="f", store=store)
    assert store.memory().pool_bytes == 0 and not store.layers
