"""The memory report counts every byte, and the documented ratios hold."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from oscar_mm import KVPolicy, OscarCache
from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.layer import OscarLayer
from oscar_mm.cache.memory import KINDS, token_bytes
from oscar_mm.modality import Modality
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import Bits
from tests.cache.invariants import POLICIES, attend_oscar, chunk, filled, left_padded, random_ids
from tests.checkpoints import build_decoder

IDS = left_padded(random_ids(9, 60, 290, 40, 300, 200), 890, 700)


def tensors(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield all tensors reachable from an object, except through its ``cache``."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors(value, seen)
    elif isinstance(thing, list | tuple | set):
        for value in thing:
            yield from tensors(value, seen)
    elif hasattr(thing, "__dict__"):
        for name, value in vars(thing).items():
            if name != "cache":
                yield from tensors(value, seen)


def held(cache: OscarCache) -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors(cache.layers, set())
    }
    return sum(storages.values())


def check_sums(cache: OscarCache) -> None:
    report = cache.memory()
    assert report.kv_bytes == held(cache) + cache.kv_manager.table_bytes
    assert sum(report.by_kind.values()) == report.kv_bytes
    assert sum(report.by_modality.values()) == report.kv_bytes
    assert min(report.by_kind.values()) >= 0 and min(report.by_modality.values()) >= 0
    assert set(report.by_kind) == set(KINDS)
    assert set(report.by_modality) == {m.label for m in Modality} | {"shared"}


@pytest.mark.parametrize("policy", ["bf16", "oscar", "mixed", "no_window", "stream_mixed"])
def test_every_byte_is_counted(policy: str) -> None:
    cache, _ = filled(POLICIES[policy], IDS)
    check_sums(cache)
    for tokens in (1, 140, 1):
        attend_oscar(cache, chunk(tokens, tokens, batch=2))
        check_sums(cache)
    cache.crop(-400)
    check_sums(cache)
    cache.forget(250, 480, row=1)
    check_sums(cache)
    cache.batch_repeat_interleave(3)
    check_sums(cache)
    attend_oscar(cache, chunk(3, 1, batch=6))
    check_sums(cache)
    cache.batch_select_indices(torch.tensor([4]))
    check_sums(cache)
    cache.reset()
    check_sums(cache)
    assert cache.memory().kv_bytes == 0


def test_within_a_forward_pass() -> None:
    """Some layers have executed the step, others have not yet."""
    cache = OscarCache("channel")
    for step, tokens in enumerate((300, 150)):
        for layer in range(3):
            attend_oscar(cache, chunk(step, tokens), layer=layer)
            check_sums(cache)


def test_layers_of_different_sizes() -> None:
    cache = OscarCache(KVPolicy.preset("standard", balance=None))
    for step, tokens in enumerate((300, 150)):
        for layer, head_dim in enumerate((64, 128, 64, 128, 64)):
            new = chunk(step, tokens, head_dim=head_dim)
            attend_oscar(cache, new, layer=layer)
            check_sums(cache)
    store = cache.store
    pools = [pool for layer in store.layers.values() for pool in layer.by_bits.values()]
    report = store.memory()
    assert report.pool_bytes == sum(pool.storage.nbytes for pool in pools)
    used = sum(
        store.allocators[bits].used * pool.bytes_each
        for layer in store.layers.values()
        for bits, pool in layer.by_bits.items()
    )
    assert report.used_bytes == used
    cache.shrink()  # Reserved slots belong to no modality.
    assert sum(store.bytes_by_modality().values()) == store.memory().used_bytes == cache.slot_bytes


def test_numbers_of_a_report() -> None:
    cache, _ = filled("channel", IDS)
    report = cache.memory()
    real = (IDS != -1).sum(1)
    assert sum(report.tokens.values()) == int(real.sum())
    assert report.tokens == {m.label: int((m == IDS).sum()) for m in Modality}
    assert report.values == 2 * 2 * 64 * int(real.sum())
    assert report.bf16_bytes == 2 * report.values
    assert report.ratio == report.bf16_bytes / report.kv_bytes
    assert report.bits_per_value == pytest.approx(8 * report.kv_bytes / report.values)
    present = {m.label for m in Modality if (m == IDS).any()}
    assert {name for name, size in report.by_modality.items() if size} == present | {"shared"}
    assert json.loads(json.dumps(report.to_dict()))["kv_bytes"] == report.kv_bytes


@pytest.mark.parametrize("policy", ["channel", "mixed", "bf16", "stream", "stream_mixed"])
def test_bytes_of_tokens(policy: str) -> None:
    cache, _ = filled(POLICIES[policy], IDS)
    report = cache.memory()
    ends = [0, 100, 101, 350, 512, 700, 890]
    parts = [
        token_bytes(cache.kv_manager, *ends[at : at + 2], row=row)
        for row in (0, 1)
        for at in range(6)
    ]
    # All but the places of pages that are not in use.
    held = sum(report.by_kind[kind] for kind in ("codes", "scales", "norms", "tails"))
    idle = sum(
        (128 * len(stream.pages) - stream.packed) * cache.layers[0].pages[stream.bits].slot_bytes
        for stream in cache.kv_manager.streams()
        if stream.pages
    )
    assert (idle > 0) == (policy in ("stream", "stream_mixed"))
    assert abs(held - idle / 128 - sum(parts)) <= len(parts)
    assert token_bytes(cache.kv_manager, 0, 190, row=1) == 0  # padding
    cache.forget(200, 700)
    assert token_bytes(cache.kv_manager, 190, 710) == token_bytes(
        cache.kv_manager, 190, 200
    ) + token_bytes(cache.kv_manager, 700, 710)


def test_empty() -> None:
    report = OscarCache().memory()
    assert (report.kv_bytes, report.ratio, report.bits_per_value) == (0, 1.0, 0.0)
    assert str(report) == "KV cache: empty"


def test_table() -> None:
    cache, _ = filled("oscar", random_ids(0, 100, 2000))
    report = cache.memory()
    lines = [line for line in str(report).splitlines() if not line.startswith("tails:")]
    assert max(map(len, lines[:-1])) <= 80
    assert any(line.startswith("text") and "100" in line for line in lines)
    assert any("2,000" in line for line in lines)
    assert f"{report.ratio:.2f}x" in lines[-2] and lines[-2].startswith("all")
    assert f"{report.bits_per_value:.2f} bits per value" in lines[-1]


def test_table_of_a_short_prompt_says_what_tails_are() -> None:
    """The table explains tails, because the ratio may be below 1."""
    report = filled("channel", random_ids(0, 100, 50))[0].memory()
    lines = str(report).splitlines()
    assert report.ratio < 1 and lines[-1].startswith("tails:")
    assert "bits per value" in lines[-2]


@pytest.mark.daily("channel")
@pytest.mark.parametrize(
    ("policy", "heads", "tokens", "least"),
    [
        ("oscar", 2, 32768, 0.94),
        ("channel", 8, 8192, 0.81),
    ],
)
def test_ratio(policy: str, heads: int, tokens: int, least: float) -> None:
    """KV heads of 128 channels in bfloat16, text and images; ``least`` is a lower bound on the
    ratio of full pages. Fewer heads are quicker, and what all heads share weighs more."""
    cache = OscarCache(policy)
    of_pages = 16 / PageFormat.of(cache.policy, Bits(2, 2), heads, 128).bits_per_value
    generator = torch.Generator().manual_seed(0)
    images = [1] * (tokens // 4 - 20)
    ids = ([0] * 30 + images + [0] * 25 + images + [0] * (tokens - 55 - 2 * len(images)))[:tokens]
    cache.expect(torch.tensor([ids]))
    for count in (tokens - 1, 1):
        new = torch.randn(2, 1, heads, count, 128, generator=generator).bfloat16()
        cache.update(new[0], new[1], 0)
    report = cache.memory()
    assert report.bf16_bytes == 2 * 2 * heads * 128 * tokens
    assert least * of_pages <= report.ratio < of_pages
    check_sums(cache)


@pytest.mark.slow
def test_peak_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys and values of a layer are packed as soon as its attention is done."""
    tokens, layers, width = 8000, 12, 64
    model = build_decoder(
        "llama",
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=width,
        hidden_size=32,
        intermediate_size=32,
    )
    model.set_attn_implementation("oscar")
    cache, peaks = OscarCache("channel", model=model), []
    append = OscarLayer.append

    def measured(
        self: OscarLayer, keys: torch.Tensor, values: torch.Tensor, *a: Any, **how: Any
    ) -> None:
        append(self, keys, values, *a, **how)
        # The model is float32: raw keys and values would take half in 16-bit precision.
        report = self.cache.memory()
        raw = (keys.nbytes + values.nbytes) / 2
        peaks.append(report.kv_bytes + raw)

    monkeypatch.setattr(OscarLayer, "append", measured)
    ids = torch.randint(3, 300, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, **as_argument(cache), logits_to_keep=1)
    whole = 2 * layers * tokens * width * 2
    assert len(peaks) == layers
    assert max(peaks) <= 0.3 * whole, max(peaks) / whole
    assert cache.memory().kv_bytes <= 0.2 * whole
