"""Forgetting tokens of a cache: no query attends to them, and other tokens do not change."""

import pytest
import torch
from transformers import DynamicCache

from oscar_mm import InputError, OscarCache
from oscar_mm.cache.cache import as_argument
from tests.cache.invariants import attend_oscar, check_chunk, chunk, filled, random_ids
from tests.checkpoints import build_decoder

IDS = random_ids(3, 60, 400, 50, 300)


def test_forget_is_seen_by_no_attention() -> None:
    """Covers layers with and without a sliding window, all streams, and tails."""
    cache, _ = filled("channel", IDS)
    real = torch.ones(1, 810, dtype=torch.bool)
    for start, stop in ((0, 3), (50, 300), (600, 640), (780, 809)):
        cache.forget(start, stop)
        real[:, start:stop] = False
    assert cache.get_seq_length() == 810
    assert torch.equal(cache.real_tokens(810), real)
    for seed, window in enumerate((None, 400, 20)):
        new = torch.zeros(1, 9, dtype=torch.int64)
        check_chunk(cache, chunk(seed, 9), ids=new, past_real=real, window=window)
        real = torch.cat([real, new == 0], dim=1)


@pytest.mark.parametrize("shared", [True, False])
def test_many_tokens_move_up(shared: bool) -> None:
    """More tokens move than are moved at a time."""
    cache, (_, keys, _) = filled("bf16", torch.zeros(1, 6000, dtype=torch.int64), kv_heads=1)
    twin = cache.fork()
    if not shared:
        twin.close()
    cache.forget(40, 777)
    kept = torch.cat([torch.arange(40), torch.arange(777, 6000)])
    found = cache.unpacked(0)[0]
    assert torch.equal(found[:, :, kept], keys[:, :, kept]) and not found[:, :, 40:777].any()
    if shared:
        assert torch.equal(twin.unpacked(0)[0], keys)


@pytest.mark.parametrize("implementation", ["oscar", "sdpa"])
@pytest.mark.parametrize("window", [None, 250])
def test_a_model_goes_on_as_if_forgotten_tokens_were_masked(
    window: int | None, implementation: str
) -> None:
    """Other tokens keep their positions: logits equal those of a plain cache with a mask."""
    model = build_decoder("mistral", sliding_window=window)
    model.set_attn_implementation(implementation)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 300, (1, 420), generator=generator)
    cache, plain = OscarCache("bf16", model=model), DynamicCache()
    mask = torch.ones_like(ids)
    with torch.no_grad():
        for one in (cache, plain):
            model(ids[:, :400], **as_argument(one))
        cache.forget(10, 170)
        cache.forget(200, 390)
        mask[:, 10:170] = mask[:, 200:390] = 0
        for start, stop in ((400, 415), (415, 416), (416, 420)):
            new = {"position_ids": torch.arange(start, stop)[None], "use_cache": True}
            found = model(
                ids[:, start:stop], **as_argument(cache), attention_mask=mask[:, :stop], **new
            )
            model.set_attn_implementation("sdpa")
            expected = model(
                ids[:, start:stop], **as_argument(plain), attention_mask=mask[:, :stop], **new
            )
            model.set_attn_implementation(implementation)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_everything_forgotten_is_an_empty_past() -> None:
    cache, _ = filled("channel", IDS)
    cache.forget(0, 810)
    assert cache.store.memory().used_bytes == 0
    past = torch.zeros(1, 810, dtype=torch.bool)
    check_chunk(cache, chunk(1, 5), ids=torch.zeros(1, 5), past_real=past)


def test_forget_refuses() -> None:
    cache, _ = filled("channel", IDS)
    with pytest.raises(InputError, match=r"tokens 5 to 811 .* the cache has 810"):
        cache.forget(5, 811)
    with pytest.raises(InputError, match=r"row 1 .* the cache has 1 sequences"):
        cache.forget(0, 1, row=1)
    with pytest.raises(InputError, match=r"row 0 .* the cache has 0"):
        OscarCache().forget(0, 0)


def test_layers_forget_the_same() -> None:
    cache = OscarCache("channel")
    for layer in range(3):
        attend_oscar(cache, chunk(0, 810), ids=IDS, layer=layer)
    twin = cache.fork()
    cache.forget(30, 790)
    keys = [cache.unpacked(layer)[0] for layer in range(3)]
    assert torch.equal(keys[0], keys[1]) and torch.equal(keys[0], keys[2])
    kept = torch.cat([torch.arange(30), torch.arange(790, 810)])
    assert torch.equal(keys[0][:, :, kept], twin.unpacked(0)[0][:, :, kept])
