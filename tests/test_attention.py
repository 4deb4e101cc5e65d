"""Attention "oscar" equals plain attention over the unpacked copy, whatever is stored."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oscar_mm import OscarCache
from oscar_mm.attention import attend
from oscar_mm.cache import layer as layer_module
from oscar_mm.cache import paged_attention
from oscar_mm.cache.block_table import SequenceTable
from oscar_mm.cache.paged_attention import LayerCall, attend_stored
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.modality import PADDING
from tests.cache.invariants import (
    POLICIES,
    attend_oscar,
    check_chunk,
    chunk,
    filled,
    left_padded,
    plain_attention,
    random_ids,
)
from tests.pairs import pairs


def after(
    cache: OscarCache, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The unpacked past of the first layer and new tokens."""
    stored = cache.unpacked(0)
    return torch.cat([stored[0], keys], dim=2), torch.cat([stored[1], values], dim=2)


PROMPTS = {
    "one": (1,),
    "short": (1, 2, 1),
    "page": (128,),
    "several": (5, 140, 1, 300, 33, 128),
    "long": (700, 1, 1300, 40, 513),
}


@pytest.mark.parametrize(
    ("policy", "prompt"),
    [
        *((policy, "several") for policy in POLICIES),
        *product(("bf16", "channel", "stream_mixed"), ("one", "short", "page", "long")),
    ],
)
def test_central_invariant(policy: str, prompt: str) -> None:
    ids = random_ids(1, *PROMPTS[prompt])
    cache, _ = filled(POLICIES[policy], ids)
    for seed, tokens in enumerate((1, 5, 300, 1, 1)):
        check_chunk(cache, chunk(seed + 10, tokens))


@pytest.mark.parametrize(("policy", "head_dim", "group"), pairs(POLICIES, (64, 80, 128), (1, 4, 8)))
def test_heads(policy: str, head_dim: int, group: int) -> None:
    shape = {"head_dim": head_dim, "group": group}
    cache, _ = filled(POLICIES[policy], random_ids(2, 60, 200, 140), **shape)
    for tokens in (1, 5):
        check_chunk(cache, chunk(tokens, tokens, **shape))


@pytest.mark.parametrize(
    ("policy", "group", "most"),
    [
        *(("standard", 1, 128), ("channel", 2, 64), ("standard", 4, 32)),
        *(("compact", 8, 16), ("channel", 16, 16)),
    ],
)
def test_short_turns_on_a_cpu_read_packed_pages(
    policy: str, group: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer ones read a copy, which is sooner done for many queries."""
    unpacked, parts = [], layer_module.OscarLayer.parts

    def noted(layer: layer_module.OscarLayer, *rest: Any) -> Any:
        unpacked.append(layer)
        return parts(layer, *rest)

    cache, _ = filled(policy, random_ids(1, 300, 700, 400), group=group)
    for tokens in (most, most + 1):
        queries, keys, values = chunk(tokens, tokens, group=group)
        expected = plain_attention(queries, *after(cache, keys, values))
        cache.attend_packed(None)
        new, _ = cache.update(keys, values, 0)
        monkeypatch.setattr(layer_module.OscarLayer, "parts", noted)
        states, step = (queries, keys, values), new.oscar_chunk._step
        found = attend_stored(cache.layers[0], *states, queries.shape[-1] ** -0.5, step)
        monkeypatch.undo()
        torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=2e-5)
        assert bool(unpacked) is (tokens > most)
        cache.layers[0].append(keys, values, step)


@pytest.mark.parametrize("changes", ["standard:window=600", "bf16"])
def test_tokens_in_16_bit_are_not_read_one_by_one(changes: str, monkeypatch) -> None:
    """Where they are many, torch's attention takes them in less time."""
    cache, _ = filled(changes, random_ids(1, 300, 300))
    step, loops = StepPlan(past=cache.kv_manager.sequences), paged_attention.decode_directly
    read = []
    monkeypatch.setattr(paged_attention, "decode_directly", lambda x: (read.append(x), loops(x))[1])
    for tokens in (16, 17):
        attend_stored(cache.layers[0], *chunk(1, tokens), 0.125, step)
    assert [arguments.queries.shape[2] for arguments in read] == [16]


@pytest.mark.parametrize("policy", ["bf16", "channel", "stream"])
def test_a_span_of_thousands(policy: str) -> None:
    cache, _ = filled(POLICIES[policy], random_ids(3, 1, 3000, 2))
    check_chunk(cache, chunk(5, 2))


@pytest.mark.parametrize("policy", POLICIES)
def test_prompt_is_exact(policy: str) -> None:
    cache = OscarCache(POLICIES[policy])
    check_chunk(cache, chunk(0, 400), ids=random_ids(0, 200, 200))


@pytest.mark.parametrize("policy", ["bf16", "kivi", "mixed", "stream_mixed", "stream_no_window"])
def test_left_padded_rows(policy: str) -> None:
    ids = left_padded(random_ids(3, 100, 250, 50), 400, 133, 1)
    cache = OscarCache(POLICIES[policy])
    output = check_chunk(cache, chunk(0, 400, batch=3), ids=ids)
    assert not output[2, :, :399].any()
    real = ids != PADDING
    # Then a step of all rows, one in which a row has ended, and a longer one with new padding.
    for seed, tokens in enumerate((1, 1, 150)):
        new = torch.zeros(3, tokens, dtype=torch.int64)
        if seed == 1:
            new[1] = PADDING
        elif seed == 2:
            new[0, :149] = PADDING
            new[2, 40:90] = PADDING
        check_chunk(cache, chunk(seed, tokens, batch=3), ids=new, past_real=real)
        real = torch.cat([real, new != PADDING], dim=1)
    keys, _ = cache.unpacked(0)
    assert not keys.transpose(1, 2)[~real].any() and keys.transpose(1, 2)[real].any(-1).all()


@pytest.mark.parametrize("policy", ["channel", "bf16"])
def test_row_of_padding_only(policy: str) -> None:
    ids = torch.zeros(2, 200, dtype=torch.int64)
    ids[1] = PADDING
    cache = OscarCache(policy)
    output = attend_oscar(cache, chunk(0, 200, batch=2), ids=ids)
    assert not output[1].any()
    check_chunk(cache, chunk(1, 5, batch=2), ids=torch.zeros(2, 5), past_real=ids != PADDING)


@pytest.mark.parametrize("pieces", [(1,) * 40, (1, 199, 3, 300, 97), (128, 128, 128)])
def test_prefill_in_pieces_is_prefill_in_one(pieces: tuple[int, ...]) -> None:
    total = sum(pieces)
    whole = chunk(5, total)
    ids = random_ids(5, total // 2, total - total // 2)
    expected = attend_oscar(OscarCache("bf16"), whole, ids=ids)
    cache, start, found = OscarCache("bf16"), 0, []
    for count in pieces:
        part = tuple(x[:, :, start : start + count] for x in whole)
        found.append(attend_oscar(cache, part, ids=ids[:, start : start + count]))
        start += count
    torch.testing.assert_close(torch.cat(found, dim=2), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(cache.unpacked(0)[0], whole[1])


@pytest.mark.parametrize("policy", ["channel", "bf16"])
@pytest.mark.parametrize("window", [1, 50, 300, 420, 1000])
def test_sliding_window(policy: str, window: int) -> None:
    ids = left_padded(random_ids(3, 100, 300), 400, 250)
    cache = OscarCache(policy)
    check_chunk(cache, chunk(0, 400, batch=2), ids=ids, window=window)
    new = torch.zeros(2, 20, dtype=torch.int64)
    check_chunk(cache, chunk(1, 20, batch=2), ids=new, past_real=ids != PADDING, window=window)


@pytest.mark.daily("standard")
@pytest.mark.parametrize(("policy", "window"), [("standard", 100), ("bf16", 600)])
def test_windows_of_many_tokens_are_read_in_blocks(
    policy: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk unpacks only the past tokens that are in its windows."""
    ids = left_padded(random_ids(3, 400, 300, 600), 1300, 700)
    cache, read, masks = OscarCache(policy), list[int](), list[torch.Size]()
    unpacked, masked = layer_module.OscarLayer.unpacked, paged_attention._masked

    def recorded(layer: Any, rows: Any, length: int, *dtype: Any) -> Any:
        read.append(length)
        return unpacked(layer, rows, length, *dtype)

    def noted(*states: Any) -> torch.Tensor:
        masks.append(states[3].shape[2:])
        return masked(*states)

    monkeypatch.setattr(paged_attention, "_masked", noted)
    check_chunk(cache, chunk(0, 1300, batch=2), ids=ids, window=window)
    monkeypatch.setattr(layer_module.OscarLayer, "unpacked", recorded)
    new, real = torch.zeros(2, 1250, dtype=torch.int64), ids != PADDING
    check_chunk(cache, chunk(1, 1250, batch=2), ids=new, past_real=real, window=window)
    assert read == [1300, window - 1]  # The first for the comparison.
    assert len(masks) == 6 and all(keys < queries + window for queries, keys in masks)


@pytest.mark.parametrize(
    ("policy", "window"),
    [*product(["standard"], (1, 2, 50, 200, 420)), ("channel", 50), ("bf16", 200)],
)
def test_a_token_reads_only_what_its_window_has(
    policy: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without unpacking the past, whatever the modalities and the padding of the rows."""
    ids = left_padded(random_ids(3, 100, 300), 400, 250)
    cache, read = OscarCache(policy), list[int]()
    check_chunk(cache, chunk(0, 400, batch=2), ids=ids, window=window)
    monkeypatch.setattr(layer_module.OscarLayer, "with_past", None)
    monkeypatch.setattr(LayerCall, "_inside", None)
    latest = SequenceTable.latest

    def recorded(self: SequenceTable, count: int) -> SequenceTable:
        table = latest(self, count)
        tokens = [stream.tokens for stream in table.streams.values()]
        assert table.stored == sum(tokens)
        read.append(table.stored)
        return table

    monkeypatch.setattr(SequenceTable, "latest", recorded)
    past_real = ids != PADDING
    for seed in range(1, 4):
        new = torch.zeros(2, 1, dtype=torch.int64)
        check_chunk(cache, chunk(seed, 1, batch=2), ids=new, past_real=past_real, window=window)
        first = max(0, past_real.shape[1] - window + 1)
        assert read == past_real[:, first:].sum(1).tolist()
        read.clear()
        past_real = torch.cat([past_real, torch.ones(2, 1, dtype=torch.bool)], dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", ["channel", "oscar", "bf16"])
def test_half_precision(policy: str, dtype: torch.dtype) -> None:
    cache = OscarCache(policy)
    attend_oscar(cache, tuple(x.to(dtype) for x in chunk(0, 400)))
    new = tuple(x.to(dtype) for x in chunk(1, 3))
    stored = cache.unpacked(0)
    assert stored[0].dtype == dtype
    expected = plain_attention(
        new[0], *(torch.cat(both, dim=2) for both in zip(stored, new[1:], strict=True))
    )
    found = attend_oscar(cache, new)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0.03, atol=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_short_prompt_on_a_gpu_waits_for_no_plan(head_dim: int, dtype: torch.dtype) -> None:
    """cuDNN would make one for each new length."""
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    for tokens in (1, 77, 2000, 2001):
        queries, keys, values = (
            x.to("cuda", dtype) for x in chunk(tokens, tokens, head_dim=head_dim)
        )
        with Names():
            found = attend_oscar(OscarCache("bf16"), (queries, keys, values))
        expected = plain_attention(queries.cpu(), keys.cpu(), values.cpu())
        torch.testing.assert_close(found.cpu().double(), expected, rtol=0.03, atol=0.03)
    assert names and not any("cudnn" in name for name in names)


@pytest.mark.parametrize("policy", ["bf16", "oscar", "mixed", "stream_mixed", "no_window"])
def test_fresh_memory_is_never_read(policy: str) -> None:
    """Uninitialized memory is NaN here: what nobody wrote must not be read."""

    def outputs() -> list[torch.Tensor]:
        ids = left_padded(random_ids(3, 100, 250, 50), 400, 133)
        cache = OscarCache(POLICIES[policy])
        found = [attend_oscar(cache, chunk(0, 400, batch=2), ids=ids)]
        found += [attend_oscar(cache, chunk(n, n, batch=2)) for n in (1, 5, 140, 1)]
        return [*found, *cache.unpacked(0)]

    expected = outputs()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
        poisoned = outputs()
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(poisoned, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes, views of ``known`` ones left out."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.bytes = max(self.bytes, storage.nbytes())
        return result


@pytest.mark.parametrize("policy", ["channel", "oscar", "bf16"])
def test_memory_of_a_later_turn_does_not_grow_with_the_past(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(Of a step it is in tests/ops/test_decode.py.)"""
    monkeypatch.setattr(layer_module, "_CPU_PAGES", 8)
    largest = []
    for tokens in (2048, 4096):
        cache, _ = filled(policy, torch.zeros(1, tokens, dtype=torch.int64), kv_heads=1, group=1)
        layer = cache.layers[0]
        pools = [layer.recent.storage, *(pool.storage for pool in layer.pages.values())]
        step = StepPlan(past=cache.kv_manager.sequences)
        with Largest(*pools) as counted:
            attend_stored(layer, *chunk(1, 150, kv_heads=1, group=1), 0.125, step)
        largest.append(counted.bytes)
    assert largest[0] == largest[1] <= 2 * 8 * 128 * 64 * 4


def test_other_caches_and_none_get_sdpa() -> None:
    queries, keys, values = chunk(0, 7)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    found, weights = attend(module, queries, keys, values, None, scaling=0.125)
    assert weights is None
    expected = plain_attention(queries, keys, values)
    torch.testing.assert_close(found.transpose(1, 2).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "window"),
    [*product(("bf16", "channel", "stream_mixed"), (None, 40)), ("quarot", None), ("mixed", 40)],
)
def test_sinks(policy: str, window: int | None) -> None:
    """Sinks count in a prompt, in decode steps and in turns of any length, also within a window."""
    sinks = torch.tensor([-1.0, 0.5, 2.0, 9.0])
    cache = OscarCache(POLICIES[policy])
    check_chunk(cache, chunk(0, 400), ids=random_ids(0, 200, 200), window=window, sinks=sinks)
    for seed, tokens in enumerate((1, 5, 300, 1)):
        check_chunk(cache, chunk(seed + 10, tokens), window=window, sinks=sinks)


@pytest.mark.parametrize("window", [None, 40])
def test_sinks_that_kernels_do_not_take(window: int | None, monkeypatch) -> None:
    """The past, or its part inside the window, is unpacked, as on a GPU."""
    decoded = []
    monkeypatch.setattr(paged_attention, "takes_sinks", lambda _: False)
    monkeypatch.setattr(paged_attention, "decode_directly", decoded.append)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 9.0])
    cache = OscarCache("standard")
    check_chunk(cache, chunk(0, 400), ids=random_ids(0, 200, 200), window=window, sinks=sinks)
    for seed in range(3):
        check_chunk(cache, chunk(seed + 10, 1), window=window, sinks=sinks)
    assert not decoded


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_without_a_cache(window: int | None) -> None:
    queries, keys, values = chunk(0, 7)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 9.0])
    seen = None if window is None else torch.ones(1, 1, 7, 7).tril().triu(1 - window).bool()
    found, _ = attend(nn.Identity(), queries, keys, values, seen, s_aux=sinks)
    expected = plain_attention(queries, keys, values, window=window, sinks=sinks)
    torch.testing.assert_close(found.transpose(1, 2).double(), expected, rtol=1e-5, atol=1e-5)


def test_sinks_in_a_static_cache() -> None:
    """The keys that come after those of a prompt are free places."""
    queries, keys, values = chunk(0, 7)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 9.0])
    longer = (pad(x, (0, 0, 0, 5), value=3.0) for x in (keys, values))
    found, _ = attend(nn.Identity(), queries, *longer, None, s_aux=sinks)
    expected = plain_attention(queries, keys, values, sinks=sinks)
    torch.testing.assert_close(found.transpose(1, 2).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "kind", "padding", "window"),
    pairs(("bf16", "standard", "channel"), ("run", "prompt"), (0, 9), (None, 30)),
)
def test_two_way_media(kind: str, policy: str, padding: int, window: int | None) -> None:
    """An image token also sees later tokens of its run, or a media token those of all media, in a
    prompt and in a later turn."""
    module = nn.Identity()
    setattr(module, paged_attention.TWO_WAY, kind)
    cache, real = OscarCache(POLICIES.get(policy, policy)), torch.ones(2, 0, dtype=torch.bool)
    for seed, runs in enumerate((((150, 0), (1, 1), (5, 0), (60, 1)), ((3, 2), (40, 1), (1, 0)))):
        kinds = torch.cat([torch.full((length,), kind) for length, kind in runs])
        run = torch.cat([torch.full((length,), at) for at, (length, _) in enumerate(runs)])
        ids = left_padded(kinds[None], len(kinds), len(kinds) - padding)
        queries, keys, values = chunk(seed, len(kinds), batch=2)
        both = after(cache, keys, values) if seed else (keys, values)
        before, real = real.shape[1], torch.cat([real, ids != PADDING], dim=1)
        query, key = torch.arange(before, real.shape[1])[:, None], torch.arange(real.shape[1])
        seen = key <= query
        if kind == "run":
            seen[:, before:] |= (run[:, None] == run) & (kinds == 1)
        else:
            seen[:, before:] |= (kinds > 0)[:, None] & (kinds > 0)
        if window is not None:
            seen &= key > query - window
        states = (queries, *(x.repeat_interleave(2, dim=1) for x in both))
        expected = scaled_dot_product_attention(
            *(x.double() for x in states), seen & real[:, None, None]
        ).nan_to_num()
        found = attend_oscar(cache, (queries, keys, values), ids=ids, window=window, module=module)
        found, expected = (x.double() * real[:, None, before:, None] for x in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["softcap", "position_bias"])
def test_models_that_pages_do_not_know(name: str) -> None:
    cache = OscarCache("channel")
    cache.get_mask_sizes(4)
    cache.attend_packed(None)
    queries, keys, values = chunk(0, 4)
    new_keys, new_values = cache.update(keys, values, 0)
    with pytest.raises(NotImplementedError, match=f"{name}.*eager"):
        attend(nn.Identity(), queries, new_keys, new_values, None, **{name: 1.0})
