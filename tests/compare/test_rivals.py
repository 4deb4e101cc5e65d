"""Formats of other projects: errors and bytes worked out by hand, and decoding step by step."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from oscar_mm.cache.cache import as_argument
from oscar_mm.compare.decoding import DecodedCache
from oscar_mm.compare.methods import block_methods, rival_methods
from oscar_mm.compare.rivals import (
    FP8,
    INT4,
    Exact,
    ExLlamaV3,
    Format,
    KVarN,
    Rival,
    TurboQuant,
    normal_levels,
)
from oscar_mm.compare.teacher_forcing import LayerStates, Recorder
from oscar_mm.quant.basis import hadamard
from tests.checkpoints import build_decoder

RIVALS = {one.name: one for one in rival_methods()}
LAYERS = 6


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def loss(found: Tensor, given: Tensor) -> float:
    """Squared error by the squares of what was given."""
    return float((found - given).square().sum() / given.square().sum())


def states(tokens: int, head_dim: int = 64, index: int = 2) -> LayerStates:
    module = torch.nn.Module()
    module.config = SimpleNamespace(num_hidden_layers=LAYERS)
    keys, values = normal(2, 1, 2, tokens, head_dim).bfloat16()
    return LayerStates(index, module, 1.0, keys, values, keys, {})


def rounding_loss(draws: np.ndarray, bits: int) -> float:
    """Squared error of rounding each row to equal steps from its least to its largest number."""
    low, high = draws.min(1, keepdims=True), draws.max(1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    return float(np.square(np.rint((draws - low) / step) * step + low - draws).mean())


@pytest.mark.parametrize(
    ("bits", "levels", "error"),
    # J. Max, Quantizing for minimum distortion, 1960, table I.
    [
        (2, [0.4528, 1.510], 0.1175),
        (3, [0.2451, 0.7560, 1.344, 2.152], 0.03454),
        (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
    ],
)
def test_levels_are_those_of_the_literature(bits: int, levels: list[float], error: float) -> None:
    positive = torch.tensor(levels, dtype=torch.float64)
    expected = torch.cat([-positive.flip(0), positive])
    torch.testing.assert_close(normal_levels(bits), expected, atol=6e-4, rtol=0)
    x = normal(1000, 512)
    back = TurboQuant(bits, 3).keys(x)
    # Directions of 512 channels are nearly normal; the levels' vector has the length of the key,
    # which turns an error e of least squares into 2 - 2 sqrt(1 - e).
    assert loss(back, x) == pytest.approx(2 - 2 * (1 - error) ** 0.5, rel=0.03)
    torch.testing.assert_close(back.norm(dim=-1), x.norm(dim=-1), rtol=1e-3, atol=0)


@pytest.mark.daily("3")
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_errors_of_known_numbers(bits: int) -> None:
    """Rounding between extremes by numpy; the cache of ExLlamaV3 by the mean of its extremes."""
    draws = np.random.default_rng(0).standard_normal((5_000, 128))
    of_64 = rounding_loss(draws[:, :64], bits)
    x = normal(100, 128, 64)
    assert loss(TurboQuant(3, bits).values(x), x) == pytest.approx(of_64, rel=0.02)
    assert loss(KVarN(2, bits).values(x), x) == pytest.approx(of_64, rel=0.06)
    assert loss(KVarN(bits, 2).keys(x), x) == pytest.approx(rounding_loss(draws, bits), rel=0.06)
    groups = draws[:, :32]
    largest = np.abs(groups).max(1, keepdims=True)
    middles = (np.arange(2**bits) + 0.5) / 2 ** (bits - 1) - 1
    nearest = np.abs(groups[..., None] / largest[..., None] - middles).min(-1) * largest
    expected = float(np.square(nearest).mean())
    assert loss(ExLlamaV3(bits, 2).keys(x), x) == pytest.approx(expected, rel=0.02)
    assert loss(ExLlamaV3(2, bits).values(x), x) == pytest.approx(expected, rel=0.02)


def test_what_vllm_itself_stores_in_four_and_eight_bits() -> None:
    """Rotated numbers go to the nearest of 16 equal steps, which contain zero; E4M3 has 3 bits
    after the point."""
    x = normal(5_000, 128)
    rounding = rounding_loss(x.numpy(), 4)
    assert loss(INT4().keys(x), x) == pytest.approx(rounding, rel=0.1)
    assert torch.equal(INT4().keys(x), INT4().values(x))
    # An outlier in one channel is spread over all by the rotation.
    x[:, 7] = 40
    assert loss(INT4().keys(x), x) < 0.5 * rounding_loss(x.numpy(), 4) / float(x.square().mean())
    numbers = torch.tensor([[1.0, 1.0625, 1.07, -17.0, 448.0, 1e4, 2**-9, 0.0]])
    expected = torch.tensor([[1.0, 1.0, 1.125, -16.0, 448.0, 448.0, 2**-9, 0.0]])
    assert torch.equal(FP8().keys(numbers), expected)


@pytest.mark.daily("tokens")
@pytest.mark.parametrize("axis", [1, 2], ids=["channels", "tokens"])
def test_kvarn_does_not_mind_how_large_tokens_and_channels_are(axis: int) -> None:
    """Its point: by the deviations of both axes a tile becomes one of equal numbers."""
    shape = [50, 1, 1]
    shape[axis] = (64, 128)[axis - 1]
    even, sizes = normal(50, 64, 128), normal(*shape).exp() + 1
    kvarn, rotation = KVarN(3, 3), hadamard(64)
    for restore in (kvarn.keys, kvarn.values):
        plain, uneven = ((x.mT @ rotation).contiguous() for x in (even, even * sizes))
        error = (restore(uneven) - uneven) @ rotation / sizes.mT
        same = (restore(plain) - plain) @ rotation
        assert error.square().mean() == pytest.approx(same.square().mean().item(), rel=0.05)
    # Tokens of unequal size are what rounding by channel does not stand.
    if axis == 2:
        assert loss(kvarn.keys(uneven), uneven) < 0.5 * rounding_loss(
            (even * sizes).flatten(0, 1).numpy(), 3
        ) / float((even * sizes).square().mean())


def test_what_does_not_fill_a_tile_is_rounded_as_in_a_tile() -> None:
    x = normal(4, 128 + 37, 64)
    back = KVarN(3, 3).keys(x)
    assert torch.equal(back[:, :128], KVarN(3, 3).keys(x[:, :128]))
    assert torch.equal(back[:, 128:], KVarN(3, 3).keys(x[:, 37:])[:, 91:])
    few = KVarN(3, 3).values(x[:, :1])
    assert few.isfinite().all() and loss(few, x[:, :1]) < 0.05


@pytest.mark.daily("64-3.5625", "TurboQuant 3bit_nc-64-11.791666666666666", "ExLlamaV3 k3v2-64-3.0")
@pytest.mark.parametrize(
    ("name", "head_dim", "bits"),
    # Codes, and 16-bit scales and the like: KVarN d + 2 d + 3 * 128 a tile, TurboQuant 3 a token
    # (two of six layers packed, or all), ExLlamaV3 one in 32.
    [
        ("KVarN k4v2", 64, 3 + 16 * (3 / 256 + 3 / 128)),
        ("KVarN k3v2", 128, 2.5 + 16 * (3 / 256 + 3 / 256)),
        ("KVarN k2v2, own tokens", 256, 2 + 16 * (3 / 256 + 3 / 512)),
        ("TurboQuant 3bit_nc, all layers packed", 64, 3 + 16 * 3 / 128),
        ("TurboQuant 3bit_nc", 64, (2 * (3 + 16 * 3 / 128) + 4 * 16) / 6),
        ("TurboQuant k3v4_nc, own tokens", 128, (2 * (3.5 + 16 * 3 / 256) + 4 * 16) / 6),
        ("ExLlamaV3 k3v2", 64, 2.5 + 0.5),
        ("ExLlamaV3 k2v2, own tokens", 128, 2 + 0.5),
        ("INT4 per token and head, own tokens", 128, 4 + 32 / 128),
        ("FP8, own tokens", 64, 8),
    ],
)
def test_bits_are_those_counted_by_hand(name: str, head_dim: int, bits: float) -> None:
    rival, ids = RIVALS[name], torch.zeros(600, dtype=torch.int8)
    layers = [states(600, head_dim, index) for index in range(LAYERS)]
    found = [rival.restored(one, ids) for one in layers]
    stored, values = (sum(getattr(x, f"stored_{y}") for x in found) for y in ("bytes", "values"))
    assert 8 * stored / values == pytest.approx(bits, abs=1e-3)
    # All that is held: 16 bits for what is not packed.
    every = 2 * layers[0].keys.numel() * LAYERS
    memory = rival.memory(layers, ids)
    assert memory.values == every
    assert memory.kv_bytes == pytest.approx(stored + 2 * (every - values), rel=1e-4)
    assert memory.bits_per_value == pytest.approx(8 * memory.kv_bytes / every)
    changed = [not torch.equal(x.keys, layer.keys) for x, layer in zip(found, layers, strict=True)]
    some = name.startswith("TurboQuant") and "all layers" not in name
    assert changed == ([False, False, True, True, False, False] if some else [True] * LAYERS)


def test_the_same_tokens_are_exact_as_with_our_pages() -> None:
    ours = next(one for one in block_methods() if one.name == "blocks, window 32")
    ids = torch.zeros(300, dtype=torch.int8)
    for name in ("KVarN k4v2", "TurboQuant 3bit_nc", "ExLlamaV3 k2v2"):
        assert torch.equal(RIVALS[name].restored_from(ids, 9), ours.restored_from(ids, 9))
        back, real = RIVALS[name].restored(states(300), ids), states(300)
        exact = (back.keys == real.keys).all(-1).all(1)[0]
        assert exact.nonzero()[:, 0].tolist() == [*range(4), *range(268, 300)]


@pytest.mark.parametrize(
    ("exact", "packed"),
    [
        (Exact(), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Exact(recent=0), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Exact(sinks=2, recent=3), [2, 3, 4, 5]),
        (Exact(sinks=2, tile=4), [2, 3, 4, 5]),
        (Exact(sinks=9, tile=4), []),
    ],
)
def test_what_is_packed_of_eight_tokens(exact: Exact, packed: list[int]) -> None:
    rival, ids, layer = Rival("x", ExLlamaV3(2, 2), exact), torch.zeros(8), states(8)
    back = rival.restored(layer, ids)
    changed = (back.keys != layer.keys).any(-1).any(1)[0] & (back.values != layer.values).any(
        -1
    ).any(1)[0]
    assert changed.nonzero()[:, 0].tolist() == packed
    assert back.stored_values == 2 * 2 * 64 * len(packed)


def test_heads_that_groups_do_not_divide() -> None:
    ids = torch.zeros(9, dtype=torch.int8)
    for rival in RIVALS.values():
        assert rival.missing([states(9)], ids) is None
        uneven = states(9, head_dim=80)
        if reason := rival.missing([uneven], ids):
            assert reason == "head_dim is not a multiple of 32"
        else:
            assert rival.restored(uneven, ids).keys.isfinite().all()
    assert RIVALS["ExLlamaV3 k2v2"].missing([states(9, head_dim=80)], ids)


class Steps(DynamicCache):
    """A cache of transformers that packs as a peer's engine does, after each step."""

    def __init__(self, form: Format, exact: Exact, layers: int) -> None:
        super().__init__()
        self.form, self.exact, self.count, self.packed = form, exact, layers, {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        pair = (x.bfloat16().to(x.dtype) for x in (keys, values))
        given = super().update(*pair, layer_idx, *args, **kwargs)
        if self.exact.layers <= layer_idx < self.count - self.exact.layers:
            stored = self._stored(layer_idx, given)
            given = given if self.exact.recent else stored  # vLLM reads what it has just stored
            self.layers[layer_idx].keys, self.layers[layer_idx].values = stored
        return given if keys.shape[2] == 1 else (keys, values)

    def _stored(self, index: int, pair: tuple[Tensor, Tensor]) -> list[Tensor]:
        start, tile = self.packed.get(index, self.exact.sinks), self.exact.tile
        stop = max(start, start + (pair[0].shape[2] - start) // tile * tile)
        self.packed[index], stored = stop, []
        for x, restore in zip(pair, (self.form.keys, self.form.values), strict=True):
            new = restore(x[:, :, start:stop].float()) if stop > start else x[:, :, :0]
            stored.append(
                torch.cat([x[:, :, :start], new.bfloat16().to(x.dtype), x[:, :, stop:]], 2)
            )
        return stored


@pytest.mark.daily("KVarN k3v2, own tokens", "ExLlamaV3 k3v2, own tokens")
@pytest.mark.parametrize(
    "name", [name for name in RIVALS if name.endswith("own tokens") and "2v2" not in name]
)
@torch.no_grad()
def test_decoding_is_what_step_by_step_gives(name: str) -> None:
    rival, prompt, tokens = RIVALS[name], 250, 300
    # In float64, so that both round to the same codes.
    plain, model = (build_decoder("llama", num_hidden_layers=LAYERS).double() for _ in range(2))
    model.set_attn_implementation("oscar")
    ids = torch.randint(3, 300, (1, tokens), generator=torch.Generator().manual_seed(3))
    cache = Steps(rival.format, rival.exact, LAYERS)
    plain(ids[:, :prompt], **as_argument(cache))
    steps = [plain(x, **as_argument(cache)).logits[0] for x in ids[:, prompt:].split(1, dim=1)]
    real, exact = torch.cat(steps), plain(ids).logits[0, prompt:]
    recorder = Recorder(model)
    model(ids[:, :prompt], **as_argument(recorder.cache))
    decoded = DecodedCache(rival, recorder.layers, torch.zeros(tokens, dtype=torch.int8))
    places = torch.arange(prompt, tokens)[None]
    found = model(ids[:, prompt:], position_ids=places, **as_argument(decoded)).logits[0]
    lost = (real - exact).square().mean()
    # INT4 rounds rotated numbers to bfloat16 first, so the last bit of a sum can change a code.
    assert (found - real).square().mean() < (1e-3 if name.startswith("INT4") else 1e-4) * lost
