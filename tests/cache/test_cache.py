"""OscarCache: its inputs, its output without attention "oscar", and its errors."""

import copy
import dataclasses
import warnings

import pytest
import torch

from oscar_mm import InputError, KVPolicy, OscarCache
from oscar_mm.modality import PADDING, Modality
from tests.cache.invariants import POLICIES, attend_oscar, chunk, filled, left_padded, random_ids
from tests.pairs import pairs

FULL = torch.zeros(1, 200, dtype=torch.int64)


def tokens_of(cache: OscarCache) -> dict[str, int]:
    return {name: count for name, count in cache.memory().tokens.items() if count}


@pytest.mark.parametrize("policy", POLICIES)
def test_update_returns_past_and_new_in_sequence_order(policy: str) -> None:
    ids = left_padded(random_ids(4, 40, 150, 60, 130), 380, 200)
    cache = OscarCache(KVPolicy.of(POLICIES[policy]))
    wants_queries = cache.policy.balance == "prompt"
    if wants_queries:
        cache = OscarCache(KVPolicy.preset("channel", window=0, sinks=0, balance=None))
    _, keys, values = chunk(0, 380, batch=2)
    cache.expect(ids)
    found = cache.update(keys, values, 0)
    # The prompt itself comes back as it is.
    assert torch.equal(found[0], keys) and torch.equal(found[1], values)
    stored = cache.unpacked(0)
    _, new_keys, new_values = chunk(1, 3, batch=2)
    cache.expect(torch.zeros(2, 3))
    found = cache.update(new_keys, new_values, 0)
    for both, past, new, given in zip(
        found, stored, (new_keys, new_values), (keys, values), strict=True
    ):
        assert both.shape == (2, 2, 383, 64)
        assert torch.equal(both[:, :, :380], past) and torch.equal(both[:, :, 380:], new)
        pads = (ids == PADDING)[:, None, :, None].expand_as(given)
        assert not both[:, :, :380][pads].any()
        error = (past - given)[~pads].norm() / given[~pads].norm()
        assert error < 0.6 if cache.policy.packs else error == 0


@pytest.mark.parametrize("name", ["channel", "oscar", "kivi", "quarot", "stream"])
def test_sinks_and_window_stay_exact(name: str) -> None:
    policy = dataclasses.replace(KVPolicy.of(POLICIES[name]), sinks=7, window=50)
    ids = random_ids(0, 100, 500, 300)
    cache, (_, keys, values) = filled(policy, ids)
    for given, stored in zip((keys, values), cache.unpacked(0), strict=True):
        given = given.bfloat16().float()
        assert torch.equal(stored[:, :, :7], given[:, :, :7])
        assert torch.equal(stored[:, :, -50:], given[:, :, -50:])
        assert not torch.equal(stored[:, :, 7:100], given[:, :, 7:100]) or name == "channel"
        assert not torch.equal(stored[:, :, 300:400], given[:, :, 300:400])


def test_what_is_not_packed_of_a_float32_model_is_in_16_bit() -> None:
    tokens = {name: filled(name, random_ids(0, 30))[0] for name in ("channel", "standard", "bf16")}
    bytes_of = {name: cache.memory().by_kind["tails"] for name, cache in tokens.items()}
    assert bytes_of["channel"] == bytes_of["standard"] == bytes_of["bf16"] / 2
    keys = chunk(0, 30)[1]
    assert torch.equal(tokens["bf16"].unpacked(0)[0], keys)
    assert torch.equal(tokens["standard"].unpacked(0)[0], keys.bfloat16().float())


def test_layers_are_independent() -> None:
    """Three layers of one cache store the same as three caches of one layer."""
    ids = random_ids(6, 90, 200, 100)
    alone = [OscarCache("channel") for _ in range(3)]
    together = OscarCache("channel")
    for step, tokens in enumerate((390, 1, 140)):
        new_ids = ids if not step else torch.zeros(1, tokens, dtype=torch.int64)
        for layer, cache in enumerate(alone):
            new = chunk(10 * step + layer, tokens)
            expected = attend_oscar(cache, new, ids=new_ids)
            found = attend_oscar(together, new, ids=new_ids, layer=layer)
            assert torch.equal(found, expected)
    for layer, cache in enumerate(alone):
        assert torch.equal(together.unpacked(layer)[0], cache.unpacked(0)[0])
    assert len(together) == 3 and together.get_seq_length() == 531


def test_expected_tokens_are_used_up() -> None:
    cache = OscarCache("channel")
    cache.expect(torch.tensor([[1] * 30 + [2] * 10 + [3] * 5]))
    for tokens in (20, 15, 10, 7):
        _, keys, values = chunk(0, tokens)
        cache.update(keys, values, 0)
    assert tokens_of(cache) == {"text": 7, "image": 30, "video": 10, "audio": 5}


def test_expected_rows_are_repeated_for_beams() -> None:
    cache = OscarCache("channel")
    cache.expect(torch.tensor([[1, 1, PADDING], [3, 0, 0]]))
    _, keys, values = chunk(0, 3, batch=6)
    cache.update(keys, values, 0)
    assert tokens_of(cache) == {"text": 6, "image": 6, "audio": 3}


def test_expected_mask() -> None:
    cache = OscarCache("channel")
    ids = torch.tensor([[1, 1, 0], [3, 0, 0]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    cache.expect(ids, attention_mask=mask)
    assert ids.tolist() == [[1, 1, 0], [3, 0, 0]]
    _, keys, values = chunk(0, 3, batch=2)
    cache.update(keys, values, 0)
    assert tokens_of(cache) == {"text": 2, "image": 1, "audio": 1}
    alone = OscarCache("channel")
    alone.expect(attention_mask=mask)
    alone.update(keys, values, 0)
    assert tokens_of(alone) == {"text": 4}


@pytest.mark.parametrize(
    ("modalities", "mask", "message"),
    [
        (None, None, "neither modalities nor attention_mask was passed"),
        (torch.zeros(3), None, r"got shape \(3,\)"),
        (
            torch.tensor([[0, 4]]),
            None,
            r"0 \(text\), 1 \(image\), 2 \(video\), 3 \(audio\).*\[0, 4\]",
        ),
        (torch.tensor([[0, -2]]), None, "-2"),
        (torch.tensor([[255, 256]]), None, "255"),
        (torch.tensor([[0.5, 1.0]]), None, "0.5"),
        (torch.zeros(1, 3), torch.ones(1, 4), r"\(1, 4\).*\(1, 3\)"),
        (torch.zeros(2, 3), torch.ones(1, 3), r"\(1, 3\).*\(2, 3\)"),
    ],
)
def test_expect_refuses(
    modalities: torch.Tensor | None, mask: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        OscarCache().expect(modalities, attention_mask=mask)


@pytest.mark.parametrize("shape", [(1, 3), (2, 4), (4, 5)])
def test_tokens_that_were_not_announced(shape: tuple[int, int]) -> None:
    cache = OscarCache()
    cache.expect(torch.zeros(shape))
    _, keys, values = chunk(0, 5, batch=3)
    with pytest.raises(InputError, match=rf"announced \({shape[0]}, {shape[1]}\).*\(3, 5\) arriv"):
        cache.update(keys, values, 0)
    cache.expect(torch.zeros(3, 5))
    cache.update(keys, values, 0)
    assert cache.get_seq_length() == 5


def test_warning_for_an_unannounced_batch() -> None:
    _, keys, values = chunk(0, 5, batch=2)
    policy = KVPolicy.preset("channel", balance=None)
    with pytest.warns(UserWarning, match=r"expect\(attention_mask=...\) was not called"):
        OscarCache(policy).update(keys, values, 0)
    announced = OscarCache(policy)
    announced.expect(torch.zeros(2, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        announced.update(keys, values, 0)
        announced.update(keys[:, :, :1], values[:, :, :1], 0)
        OscarCache(policy).update(keys[:1], values[:1], 0)
        attend_oscar(OscarCache(), chunk(0, 5, batch=2))


def test_another_batch_size() -> None:
    cache, _ = filled("channel", FULL)
    with pytest.raises(InputError, match="has 1 sequences, but the new keys have 2"):
        attend_oscar(cache, chunk(0, 1, batch=2))
    attend_oscar(cache, chunk(0, 1))
    assert cache.get_seq_length() == 201


def test_values_of_another_shape() -> None:
    _, keys, values = chunk(0, 5)
    with pytest.raises(InputError, match=r"layer 1.*differ in shape"):
        OscarCache().update(keys, values[..., :32], 1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_interrupted_forward_pass(broken: int, packed: bool) -> None:
    """The next pass may have the same or another size, with or without a crop before it."""

    def forward(cache: OscarCache, tokens: int, layers: int = 3) -> None:
        for layer in range(layers):
            queries, keys, values = chunk(layer, tokens)
            if packed:
                attend_oscar(cache, (queries, keys, values), layer=layer)
            else:
                cache.update(keys, values, layer)

    for fresh in (True, False):
        for tokens in (1, 5, 200):
            cache = OscarCache("channel")
            if not fresh:
                forward(cache, 150)
            forward(cache, 5, layers=broken)
            queries, keys, values = chunk(0, 5)
            keys[0, 0, 2] = torch.nan
            with pytest.raises(FloatingPointError, match=f"layer {broken}"):
                if packed:
                    attend_oscar(cache, (queries, keys, values), layer=broken)
                else:
                    cache.update(keys, values, broken)
            cache.crop(-2)
            with pytest.raises(RuntimeError, match=r"did not reach layer \d.*reset\(\)"):
                forward(cache, tokens)
            cache.reset()
            assert cache.get_seq_length() == 0 and cache.memory().kv_bytes == 0
            forward(cache, 130)
            forward(cache, tokens)
            assert cache.get_seq_length() == 130 + tokens


@pytest.mark.parametrize(
    ("policy", "bad", "side", "tokens"),
    pairs(POLICIES, (torch.nan, torch.inf, -torch.inf), (1, 2), (5, 300)),
)
def test_nan_in_a_prompt(policy: str, tokens: int, side: int, bad: float) -> None:
    cache = OscarCache(POLICIES[policy])
    new = chunk(0, tokens)
    attend_oscar(cache, new, layer=0)
    new[side][0, 1, tokens // 2, 3] = bad
    with pytest.raises(FloatingPointError, match="layer 1"):
        attend_oscar(cache, new, layer=1)


@pytest.mark.parametrize("policy", ["channel", "bf16"])
def test_infinity_in_one_token_is_found(policy: str) -> None:
    cache = OscarCache(policy)
    attend_oscar(cache, chunk(0, 100), ids=torch.zeros(1, 100))
    new = chunk(1, 1)
    new[2][0, 0, 0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match="layer 0"):
        attend_oscar(cache, new)
    with pytest.raises(RuntimeError, match="reset"):
        attend_oscar(cache, chunk(1, 1))


@pytest.mark.parametrize("policy", ["channel", "oscar", "kivi"])
def test_what_no_page_can_hold_is_found_when_it_is_packed(policy: str) -> None:
    cache = OscarCache(KVPolicy.preset(policy, window=0, sinks=0))
    attend_oscar(cache, chunk(0, 100), ids=torch.zeros(1, 100))
    new = chunk(1, 1)
    new[2][0, 0, 0, 0] = 1e6
    attend_oscar(cache, new)
    with pytest.raises(FloatingPointError, match="layer 0"):
        for _ in range(27):
            attend_oscar(cache, chunk(1, 1))


@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("policy", ["quarot", "stream", "stream_mixed"])
def test_what_no_place_can_hold_is_found_when_it_leaves_the_window(policy: str, side: int) -> None:
    cache = OscarCache(dataclasses.replace(KVPolicy.of(POLICIES[policy]), window=9, sinks=0))
    attend_oscar(cache, chunk(0, 100), ids=torch.zeros(1, 100))
    new = chunk(1, 1)
    new[side][0, 0, 0, 0] = 1e6
    for seed in range(9):
        attend_oscar(cache, new if seed == 0 else chunk(seed, 1))
    with pytest.raises(FloatingPointError, match="layer 0"):
        attend_oscar(cache, chunk(1, 1))


def test_padding_may_be_nan() -> None:
    ids = left_padded(torch.ones(1, 300, dtype=torch.int64), 300, 150)
    new = chunk(0, 300, batch=2)
    expected = OscarCache("channel")
    attend_oscar(expected, new, ids=ids)
    poisoned = tuple(x.clone() for x in new)
    for x in poisoned:
        x[1, :, :150] = torch.nan
    cache = OscarCache("channel")
    assert attend_oscar(cache, poisoned, ids=ids).isfinite().all()
    assert torch.equal(cache.unpacked(0)[0], expected.unpacked(0)[0])


@pytest.mark.parametrize("packed", [True, False])
def test_no_graph_of_gradients_is_kept(packed: bool) -> None:
    cache = OscarCache("channel")
    for tokens in (300, 1, 150):
        new = tuple(x.requires_grad_() for x in chunk(0, tokens))
        attend_oscar(cache, new) if packed else cache.update(*new[1:], 0)
    layer = cache.layers[0]
    held = [layer.recent.storage, *(pool.storage for pool in layer.pages.values())]
    assert not any(x.requires_grad for x in [*held, *cache.unpacked(0)])
    assert layer.sigma is None or not layer.sigma.requires_grad


def test_inference_mode_and_then_not() -> None:
    with torch.inference_mode():
        cache, _ = filled("channel", FULL)
    for tokens in (1, 150):
        new = tuple(x.requires_grad_() for x in chunk(0, tokens))
        assert attend_oscar(cache, new).isfinite().all()
    assert cache.get_seq_length() == 351


def test_what_transformers_asks() -> None:
    cache, _ = filled("channel", FULL)
    assert (cache.get_seq_length(), type(cache.get_seq_length())) == (200, int)
    assert cache.get_mask_sizes(5) == (205, 0) and cache.get_max_length() == -1
    assert not cache.is_compileable and not any(cache.is_sliding)
    assert (cache.batch_size, cache.is_initialized) == (1, True)
    for name in ("offload", "prefetch", "early_initialization", "update_indexer"):
        with pytest.raises(NotImplementedError, match=f"OscarCache.{name}"):
            getattr(cache, name)(0)
    with pytest.raises(ValueError, match=r"crop\(150\).*crop\(-50\) to keep 150"):
        cache.crop(150)
    for wrong in (-201, -1000):
        with pytest.raises(ValueError, match="cache of 200"):
            cache.crop(wrong)
    assert cache.get_seq_length() == 200
    assert repr(copy.copy(cache)) == repr(cache)


def test_bf16_pool_of_every_modality() -> None:
    cache, (_, keys, _) = filled("bf16", random_ids(1, 10, 140, 20, 300))
    assert torch.equal(cache.unpacked(0)[0], keys)
    held = {name: size for name, size in cache.memory().by_modality.items() if size}
    assert set(held) <= {m.label for m in Modality} | {"shared"}
