"""Saving and loading gives the same cache, bit for bit, or an error with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from oscar_mm import InputError, KVPolicy, OscarCache
from oscar_mm.cache.checked_file import write_checked
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.saved_cache import SavedCache, load_cache, save_cache
from oscar_mm.modality import PADDING
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import PLAIN, Bits
from tests.cache.invariants import (
    POLICIES,
    attend_oscar,
    chunk,
    filled,
    left_padded,
    random_ids,
)
from tests.cache.numbers import check_slots
from tests.processes import Forked

IDS = left_padded(random_ids(8, 60, 290, 40, 200), 590, 400)
LAYERS = 2


def history(policy: str | KVPolicy) -> OscarCache:
    """Return a cache with two layers, two rows of unequal length that share slots, forgotten tokens
    and a crop."""
    cache = OscarCache(policy)
    for layer in range(LAYERS):
        attend_oscar(cache, chunk(layer, 590, batch=2), ids=IDS, layer=layer)
    cache.batch_select_indices(torch.tensor([0, 0, 1]))
    for layer in range(LAYERS):
        attend_oscar(cache, chunk(5 + layer, 40, batch=3), layer=layer)
    cache.crop(-10)
    cache.forget(100, 330, row=1)
    cache.forget(560, 575, row=2)
    return cache


def same(one: OscarCache, other: OscarCache) -> None:
    """Check that content and later attention output are equal, bit for bit."""
    assert one.get_seq_length() == other.get_seq_length()
    length = one.get_seq_length()
    assert torch.equal(one.real_tokens(length), other.real_tokens(length))
    for layer in range(LAYERS):
        for found, expected in zip(one.unpacked(layer), other.unpacked(layer), strict=True):
            assert torch.equal(found, expected)
    for seed, tokens in enumerate((1, 150, 1)):
        for layer in range(LAYERS):
            new = chunk(20 + seed, tokens, batch=3)
            found, expected = (attend_oscar(cache, new, layer=layer) for cache in (one, other))
            assert torch.equal(found, expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "chat.safetensors"
    save_cache(history("channel"), path, fingerprint="model-1", metadata={"turn": 3})
    return path


@pytest.mark.parametrize("policy", ["bf16", "oscar", "kivi", "mixed", "stream_mixed"])
def test_round_trip(policy: str, tmp_path: Path) -> None:
    cache, path = history(POLICIES[policy]), tmp_path / "cache"
    metadata = {
        "token_ids": torch.arange(630),
        "positions": np.arange(12, dtype=np.float32).reshape(3, 4),
        "media": [{"sha256": "ab" * 32, "label": "ä.png"}],
        "none": None,
    }
    save_cache(cache, path, fingerprint="f", metadata=metadata)
    loaded, given = load_cache(path, fingerprint="f", policy=POLICIES[policy])
    assert given["media"] == metadata["media"] and given["none"] is None
    assert torch.equal(given["token_ids"], metadata["token_ids"])
    assert given["positions"].tolist() == metadata["positions"].tolist()
    assert set(given) == set(metadata)
    before, after = cache.memory(), loaded.memory()
    assert after.tokens == before.tokens and after.kv_bytes <= before.kv_bytes
    check_slots(loaded.store, [loaded.kv_manager])
    same(loaded, cache)


def test_pages_of_several_orders(tmp_path: Path) -> None:
    """Some pages of a layer have the order of the kernels; others, with bits that kernels do not
    support, have the order of tokens."""
    policy = KVPolicy.preset("channel", bits={"text": (3, 2)})
    cache, _ = filled(policy, random_ids(8, 200, 290, 240))
    assert {page.in_fragments for page in cache.layers[0].formats.values()} == {False, True}
    save_cache(cache, tmp_path / "a", fingerprint="f")
    loaded, _ = load_cache(tmp_path / "a", fingerprint="f")
    for found, expected in zip(loaded.unpacked(0), cache.unpacked(0), strict=True):
        assert torch.equal(found, expected)


def test_only_slots_in_use_and_shared_ones_once(tmp_path: Path) -> None:
    one, _ = filled("channel", random_ids(1, 60, 2000))
    many = one.fork()
    many.batch_repeat_interleave(8)
    sizes = []
    for cache in (one, many):
        save_cache(cache, tmp_path / "a", fingerprint="f")
        sizes.append((tmp_path / "a").stat().st_size)
    assert sizes[1] < 1.15 * sizes[0]
    loaded, _ = load_cache(tmp_path / "a", fingerprint="f")
    assert loaded.memory().by_kind == many.memory().by_kind
    one.forget(60, 1900)
    many.close()
    save_cache(one, tmp_path / "a", fingerprint="f")
    kept = one.store.allocators[Bits(2, 2)].used
    assert load_file(tmp_path / "a")["layer.0.pages.2"].shape[0] == kept <= 2


def test_tokens_that_are_gone_are_not_in_the_file(tmp_path: Path) -> None:
    """Cropped and forgotten tokens, still in memory, must not leak into the file."""
    cache, _ = filled("bf16", torch.zeros(1, 50, dtype=torch.int64))
    content = cache.unpacked(0)[0]
    cache.crop(-5)
    cache.forget(3, 10)
    free = torch.ones(len(cache.layers[0].recent.storage), dtype=torch.bool)
    free[[slot for stream in cache.kv_manager.streams() for slot in stream.slots]] = False
    cache.layers[0].recent.storage[free] = torch.nan
    save_cache(cache, tmp_path / "a", fingerprint="f")
    recent = load_file(tmp_path / "a")["layer.0.recent"]
    assert recent.shape == (38, 2, 2, 64)
    kept = torch.cat([content[0, :, :3], content[0, :, 10:45]], dim=1)
    assert torch.equal(recent[:, 0].transpose(0, 1), kept)
    loaded, _ = load_cache(tmp_path / "a", fingerprint="f")
    assert torch.equal(loaded.unpacked(0)[0][0, :, 10:], content[0, :, 10:45])
    assert loaded.store.allocators[PLAIN].used == 38


PAIR = Bits(3, 2)
STREAM = KVPolicy(bits=(3, 2), key_axis="token", token_scaling=None, center=True)


def stream_pages(head_dim: int = 64) -> tuple[OscarCache, OscarCache]:
    """Return caches with two layers that share a page neither has filled; one has forgotten tokens
    of the page, both have been cropped."""
    cache = OscarCache(STREAM)
    for layer in range(LAYERS):
        attend_oscar(
            cache,
            chunk(layer, 330, head_dim=head_dim),
            ids=torch.tensor([[0] * 40 + [1] * 200 + [0] * 90]),
            layer=layer,
        )
    twin = cache.fork()
    for one in (cache, twin):
        for layer in range(LAYERS):
            attend_oscar(one, chunk(10 + layer, 20, head_dim=head_dim), layer=layer)
    cache.forget(60, 180)
    cache.forget(270, 290)
    cache.crop(-60)
    return cache, twin


@pytest.mark.parametrize("head_dim", [64, 128, 80])
def test_stream_pages_come_back_byte_by_byte(tmp_path: Path, head_dim: int) -> None:
    """Bytes in use are equal; unused bytes are zero in the file, except the center of a page."""
    cache, twin = stream_pages(head_dim)
    path = tmp_path / "a"
    for one in (cache, twin):
        page_format = one.layers[0].formats[PAIR]
        slots = {page: [] for stream in one.kv_manager.streams() for page in stream.pages}
        for stream in one.kv_manager.streams():
            for page, *used in zip(stream.pages, stream.starts, stream.stops, strict=True):
                slots[page] += range(*used)
        owner = page_format.token_bytes(torch.device("cpu"))
        in_use = {page: torch.isin(owner, torch.tensor([-1, *own])) for page, own in slots.items()}
        assert any(not own.all() for own in in_use.values())
        # Poison in every byte of a place that is not in use.
        for layer in one.layers:
            for page, own in in_use.items():
                if one.store.allocators[PAIR].owners(page) == 1:
                    layer.pages[PAIR].storage[page, ~own] = 0xFF
        save_cache(one, path, fingerprint="f")
        saved = load_file(path)
        loaded, _ = load_cache(path, fingerprint="f", policy=STREAM)
        for layer in range(LAYERS):
            written = saved[f"layer.{layer}.pages.3.2"]
            assert len(written) == len(slots)
            for number, (page, own) in enumerate(in_use.items()):
                held = one.layers[layer].pages[PAIR].storage[page]
                assert torch.equal(written[number, own], held[own])
                assert not written[number, ~own].any()
            center = page_format.read(written, "center")
            assert center.any(-1).all()
            for found, expected in zip(loaded.unpacked(layer), one.unpacked(layer), strict=True):
                assert found.isfinite().all() and torch.equal(found, expected)
        check_slots(loaded.store, [loaded.kv_manager])
        for seed, tokens in enumerate((1, 1, 150, 1)):
            for layer in range(LAYERS):
                new = chunk(20 + seed, tokens, head_dim=head_dim)
                mine, other = (attend_oscar(x, new, layer=layer) for x in (one, loaded))
                assert torch.equal(mine, other)
        for layer in range(LAYERS):
            assert torch.equal(loaded.unpacked(layer)[0], one.unpacked(layer)[0])


def test_a_page_that_forks_have_in_common_is_written_once(tmp_path: Path) -> None:
    """Two rows of a cache use different places of the same page."""
    cache, _ = filled(STREAM, torch.zeros(1, 260, dtype=torch.int64))
    cache.batch_repeat_interleave(2)
    cache.forget(140, 150, row=0)
    cache.forget(200, 210, row=1)
    pages = {page for stream in cache.kv_manager.streams() for page in stream.pages}
    save_cache(cache, tmp_path / "a", fingerprint="f")
    written = load_file(tmp_path / "a")["layer.0.pages.3.2"]
    assert len(written) == len(pages) == 2
    # Places that either row has: all up to the last one.
    owner = cache.layers[0].formats[PAIR].token_bytes(torch.device("cpu"))
    numbers = {page: number for number, page in enumerate(pages)}
    stored = cache.layers[0].pages[PAIR].storage
    for page, number in numbers.items():
        places = 128 if page == min(pages) else 260 - 4 - 32 - 128
        own = owner < places
        assert torch.equal(written[number, own], stored[page, own])
        assert not written[number, ~own].any()
    loaded, _ = load_cache(tmp_path / "a", fingerprint="f")
    for found, expected in zip(loaded.unpacked(0), cache.unpacked(0), strict=True):
        assert torch.equal(found, expected)
    # Each row continues in its own page, as before.
    for seed in range(3):
        new = chunk(seed, 1, batch=2)
        assert torch.equal(attend_oscar(loaded, new), attend_oscar(cache, new))
    check_slots(loaded.store, [loaded.kv_manager])


def test_the_spare_slot_is_not_saved(tmp_path: Path) -> None:
    cache, _ = filled(STREAM, torch.zeros(1, 200, dtype=torch.int64))
    attend_oscar(cache, chunk(1, 1))
    [sequence] = cache.kv_manager.sequences
    assert sequence.spare
    cache.layers[0].recent.storage[sequence.spare] = torch.nan
    save_cache(cache, tmp_path / "a", fingerprint="f")
    assert load_file(tmp_path / "a")["layer.0.recent"].shape[0] == 4 + 32
    loaded, _ = load_cache(tmp_path / "a", fingerprint="f")
    assert loaded.store.allocators[PLAIN].used == 36
    for seed in range(3):
        new = chunk(seed, 1)
        assert torch.equal(attend_oscar(loaded, new), attend_oscar(cache, new))


def test_into_a_store_that_others_use(tmp_path: Path) -> None:
    store = PageStore("channel")
    first = OscarCache("channel", store=store)
    for layer in range(LAYERS):
        attend_oscar(first, chunk(layer, 300, batch=3), layer=layer)
    before = [x.clone() for x in first.unpacked(1)]
    cache = history("channel")
    save_cache(cache, tmp_path / "a", fingerprint="f")
    loaded, _ = load_cache(tmp_path / "a", fingerprint="f", store=store)
    assert loaded.store is store
    check_slots(store, [first.kv_manager, loaded.kv_manager])
    same(loaded, cache)
    assert all(torch.equal(a, b) for a, b in zip(before, first.unpacked(1), strict=True))


def test_empty_caches(tmp_path: Path) -> None:
    cache = OscarCache("channel")
    save_cache(cache, tmp_path / "a", fingerprint="f")
    loaded, given = load_cache(tmp_path / "a", fingerprint="f")
    assert loaded.get_seq_length() == 0 and given == {}
    attend_oscar(cache, chunk(0, 200))
    sigma = cache.layers[0].sigma
    cache.crop(-200)
    save_cache(cache, tmp_path / "a", fingerprint="f")
    loaded, _ = load_cache(tmp_path / "a", fingerprint="f")
    assert torch.equal(loaded.layers[0].sigma, sigma)
    assert torch.equal(attend_oscar(loaded, chunk(1, 300)), attend_oscar(cache, chunk(1, 300)))
    assert torch.equal(loaded.unpacked(0)[0], cache.unpacked(0)[0])


def next_output(cache: OscarCache) -> list[str]:
    out = [attend_oscar(cache, chunk(n, 3, batch=3), layer=n) for n in range(LAYERS)]
    return [x.double().sum().item().hex() for x in out]


def go_on(path: Path) -> None:
    cache, given = load_cache(path, fingerprint="model-1")
    print(given["turn"], next_output(cache))


def test_in_a_fresh_process(saved: Path) -> None:
    """The next output is equal, bit for bit."""
    with Forked(go_on, saved) as process:
        code, out, errors = process.end()
    assert code == 0, errors.decode()
    assert out.decode() == f"3 {next_output(history('channel'))}\n"


def test_a_hundred_images_take_a_sixth(tmp_path: Path) -> None:
    """4 KV heads of 128 channels in bfloat16, policy compact; the file against 16-bit precision."""
    cache, generator = OscarCache("channel"), torch.Generator().manual_seed(0)
    image = [0] * 6 + [1] * 160
    for _ in range(10):
        cache.expect(torch.tensor([image * 10]))
        new = torch.randn(2, 1, 4, 1660, 128, generator=generator).bfloat16()
        cache.update(new[0], new[1], 0)
    path = tmp_path / "hundred"
    save_cache(
        cache, path, fingerprint="f", metadata={"ids": torch.zeros(16600, dtype=torch.int32)}
    )
    assert cache.memory().bf16_bytes == 16600 * 2 * 4 * 128 * 2
    of_pages = 16 / PageFormat.of(cache.policy, Bits(2, 2), 4, 128).bits_per_value
    assert path.stat().st_size <= cache.memory().bf16_bytes / (0.9 * of_pages)
    assert load_cache(path, fingerprint="f")[0].memory().ratio >= 0.89 * of_pages > 5.8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fingerprint": "model-2"}, r"another model \(fingerprint model-1, here model-2\)"),
        (
            {"policy": "oscar"},
            r"with policy 'channel', but here it is 'oscar': choose policy='channel'",
        ),
        ({"policy": KVPolicy.preset("channel", window=64)}, r"another policy: window=32, here 64$"),
        ({"store": PageStore("kivi")}, "here it is 'kivi'"),
        (
            {"policy": KVPolicy.preset("channel", value_scale="plain")},
            r"another policy: value_scale='unbiased', here 'plain'$",
        ),
    ],
)
def test_refuses_what_does_not_fit(saved: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=r"chat\.safetensors[: ].*" + message):
        load_cache(saved, **{"fingerprint": "model-1"} | arguments)


@pytest.mark.parametrize("shape", [{"head_dim": 32}, {"kv_heads": 4}])
def test_refuses_a_store_of_another_shape(saved: Path, shape: dict[str, int]) -> None:
    store = PageStore("channel")
    first = OscarCache("channel", store=store)
    attend_oscar(first, chunk(0, 10, **shape))
    used = store.memory()
    with pytest.raises(InputError, match=r"chat\.safetensors: layer 0: the store has"):
        load_cache(saved, fingerprint="model-1", store=store)
    assert store.memory() == used
    attend_oscar(first, chunk(1, 10, **shape))


def test_a_file_from_before_values_could_be_unbiased(tmp_path: Path) -> None:
    """Such a file lacks the field, and its pages are fitted without the option."""
    cache, path = history(KVPolicy.preset("channel", value_scale="plain")), tmp_path / "old"
    save_cache(cache, path, fingerprint="f")
    with safe_open(path, "pt") as file:
        text = json.loads(file.metadata()["oscar_mm.cache"])
    del text["policy"]["value_scale"]
    write_checked(path, load_file(path), {"oscar_mm.cache": json.dumps(text)})
    for policy in (None, KVPolicy.preset("channel", value_scale="plain")):
        loaded, _ = load_cache(path, fingerprint="f", policy=policy)
        assert loaded.policy == cache.policy
    same(loaded, cache)
    with pytest.raises(InputError, match=r"old .*: value_scale='plain', here 'unb"):
        load_cache(path, fingerprint="f", policy="channel")
    del text["policy"]["norm"]
    write_checked(path, load_file(path), {"oscar_mm.cache": json.dumps(text)})
    with pytest.raises(InputError, match="has no valid policy"):
        load_cache(path, fingerprint="f")


def grouped(head_dim: int, path: Path) -> OscarCache:
    """Save a cache whose policy has 128 channels per key group, as files did before "head"."""
    cache = OscarCache(KVPolicy.preset("standard", key_group=128))
    for layer in range(LAYERS):
        attend_oscar(cache, chunk(layer, 300, batch=3, head_dim=head_dim), layer=layer)
    save_cache(cache, path, fingerprint="f")
    return cache


@pytest.mark.parametrize("policy", [None, "standard", KVPolicy.preset("standard", key_group=128)])
def test_a_group_of_128_is_a_whole_head_of_64(policy: KVPolicy | None, tmp_path: Path) -> None:
    cache = grouped(64, tmp_path / "old")
    loaded, _ = load_cache(tmp_path / "old", fingerprint="f", policy=policy)
    assert loaded.policy == KVPolicy.of(policy or "standard")
    same(loaded, cache)


def test_a_group_of_128_is_half_of_a_head_of_256(tmp_path: Path) -> None:
    cache = grouped(256, tmp_path / "old")
    loaded, _ = load_cache(tmp_path / "old", fingerprint="f")
    assert loaded.policy == cache.policy
    for layer in range(LAYERS):
        for found, expected in zip(loaded.unpacked(layer), cache.unpacked(layer), strict=True):
            assert torch.equal(found, expected)
    with pytest.raises(InputError, match=r"another policy: key_group=128, here 'head'$"):
        load_cache(tmp_path / "old", fingerprint="f", policy="standard")


def test_heads_without_channels_are_refused(tmp_path: Path) -> None:
    grouped(64, tmp_path / "old")
    with safe_open(tmp_path / "old", "pt") as file:
        text = file.metadata()["oscar_mm.cache"]
    tensors = load_file(tmp_path / "old")
    tensors["layer.0.recent"] = tensors["layer.0.recent"][..., :0].contiguous()
    write_checked(tmp_path / "old", tensors, {"oscar_mm.cache": text})
    with pytest.raises(InputError, match="is damaged: a layer has no channels"):
        load_cache(tmp_path / "old", fingerprint="f")


def with_float32_tokens(path: Path) -> dict[str, torch.Tensor]:
    """Rewrite a file as in versions where unpacked tokens had the model's dtype."""
    with safe_open(path, "pt") as file:
        text = json.loads(file.metadata()["oscar_mm.cache"])
    for about in text["layers"]:
        del about["dtype"]
    tensors = {
        name: x.float() if name.startswith("layer.") and name.endswith("recent") else x
        for name, x in load_file(path).items()
    }
    write_checked(path, tensors, {"oscar_mm.cache": json.dumps(text)})
    return tensors


def test_a_file_of_tokens_in_float32_takes_what_its_cache_will(tmp_path: Path) -> None:
    cache, path = history("channel"), tmp_path / "old"
    save_cache(cache, path, fingerprint="f")
    expected = SavedCache.read(path, fingerprint="f").bytes
    with_float32_tokens(path)
    saved = SavedCache.read(path, fingerprint="f")
    loaded = saved.placed()
    assert saved.bytes == expected == loaded.store.memory().used_bytes
    same(loaded, cache)


def test_refuses_float32_tokens_beyond_bfloat16(tmp_path: Path) -> None:
    path = tmp_path / "old"
    save_cache(history("channel"), path, fingerprint="f")
    tensors = with_float32_tokens(path)
    tensors["layer.0.recent"][0] = torch.finfo(torch.float32).max
    with safe_open(path, "pt") as file:
        texts = {"oscar_mm.cache": file.metadata()["oscar_mm.cache"]}
    write_checked(path, tensors, texts)
    with pytest.raises(InputError, match="recent contains NaN"):
        load_cache(path, fingerprint="f")


def test_altered_and_truncated(saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    path = tmp_path / "bad"
    for at in (len(whole) - 1, len(whole) // 2):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(InputError, match="bad was altered"):
            load_cache(path, fingerprint="model-1")
        path.write_bytes(whole[:at])
        with pytest.raises(InputError, match="bad is truncated"):
            load_cache(path, fingerprint="model-1")


def test_metadata_that_cannot_be_saved(tmp_path: Path) -> None:
    for wrong in ({"a": object()}, {"a": float("nan")}, {"a": {1, 2}}):
        with pytest.raises(InputError, match="x: metadata cannot be saved"):
            save_cache(OscarCache(), tmp_path / "x", fingerprint="f", metadata=wrong)
    assert not list(tmp_path.iterdir())


def test_not_after_an_interrupted_pass(tmp_path: Path) -> None:
    cache = history("channel")
    attend_oscar(cache, chunk(0, 5, batch=3))
    with pytest.raises(RuntimeError, match="did not reach layer 1"):
        save_cache(cache, tmp_path / "x", fingerprint="f")
    assert not list(tmp_path.iterdir())


def test_other_safetensors_files(tmp_path: Path) -> None:
    write_checked(tmp_path / "a", {"w": torch.ones(3)}, {"x": "y"})
    with pytest.raises(InputError, match="a is a safetensors file, but not a saved cache"):
        load_cache(tmp_path / "a", fingerprint="f")


def test_padding_only_rows(tmp_path: Path) -> None:
    ids = torch.full((2, 40), PADDING)
    ids[0] = 0
    cache = OscarCache("channel")
    attend_oscar(cache, chunk(0, 40, batch=2), ids=ids)
    save_cache(cache, tmp_path / "a", fingerprint="f")
    loaded, _ = load_cache(tmp_path / "a", fingerprint="f")
    new = chunk(1, 3, batch=2)
    assert torch.equal(attend_oscar(loaded, new), attend_oscar(cache, new))
