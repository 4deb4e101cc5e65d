"""roundtrip: what the cache would return."""

import pytest
import torch

from oscar_mm import InputError, KVPolicy, roundtrip
from oscar_mm.modality import Modality
from tests.pairs import pairs
from tests.quant.synthetic import attention, multimodal, relative_error, sigma_of

PRESETS = ("channel", "oscar", "kivi", "quarot")


def sample(
    seed: int = 0, shape: tuple[int, ...] = (1, 2, 300, 64), dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))


@pytest.mark.parametrize(
    ("name", "most"), [("oscar", 3.03), ("channel", 2.45), ("kivi", 3.0), ("quarot", 2.25)]
)
def test_bits_per_value(name: str, most: float) -> None:
    result = roundtrip(*sample(shape=(1, 8, 256, 128)), name)
    assert result.pages == 2
    assert 2 < result.bits_per_value <= most


def test_nothing_to_pack() -> None:
    for tokens in (0, 1, 127):
        k, v = sample(shape=(2, 2, tokens, 64), dtype=torch.bfloat16)
        result = roundtrip(k, v)
        assert (result.pages, result.bits_per_value) == (0, 16)
        assert torch.equal(result.k, k) and torch.equal(result.v, v)
    k, v = sample(shape=(1, 2, 256, 64))
    result = roundtrip(k, v, "bf16")
    assert (result.pages, result.bits_per_value) == (0, 32)
    assert torch.equal(result.k, k)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_full_pages_change_and_the_rest_does_not(name: str, dtype: torch.dtype) -> None:
    k, v = sample(dtype=dtype)
    before = k.clone(), v.clone()
    result = roundtrip(k, v, name)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
    for found, given in ((result.k, k), (result.v, v)):
        assert found.dtype == dtype and found.shape == given.shape
        assert torch.equal(found[:, :, 256:], given[:, :, 256:])
        assert 0.05 < relative_error(found[:, :, :256], given[:, :, :256]) < 0.6


def test_modality_in_every_form() -> None:
    k, v = sample(shape=(2, 2, 128, 64))
    policy = KVPolicy.preset("channel", bits={"image": 4, "audio": 16})
    expected = roundtrip(k, v, policy, "image")
    assert expected.bits_per_value > 4
    ids = torch.ones(128, dtype=torch.int8)
    for form in (Modality.IMAGE, 1, "IMAGE", ids, ids.expand(2, 128), ids.long()):
        assert torch.equal(roundtrip(k, v, policy, form).k, expected.k)
    assert roundtrip(k, v, policy, "audio").pages == 0
    assert torch.equal(roundtrip(k, v, policy).k, roundtrip(k, v, policy, "text").k)
    assert not torch.equal(roundtrip(k, v, policy).k, expected.k)


@pytest.mark.parametrize("name", PRESETS)
def test_modalities_do_not_mix(name: str) -> None:
    k, v = sample(1, (2, 2, 900, 64))
    ids = torch.randint(0, 4, (2, 900), generator=torch.Generator().manual_seed(0))
    policy = KVPolicy.preset(name, bits={"image": 4, "video": 16})
    result = roundtrip(k, v, policy, ids)
    for row in range(2):
        for modality in Modality:
            where = ids[row] == modality
            alone = roundtrip(
                k[row, None][:, :, where], v[row, None][:, :, where], policy, modality
            )
            assert torch.equal(result.k[row][:, where], alone.k[0])
            assert torch.equal(result.v[row][:, where], alone.v[0])


@pytest.mark.parametrize("name", PRESETS)
def test_four_bits_are_better_than_two(name: str) -> None:
    k, v = sample()
    two, four = (roundtrip(k, v, KVPolicy.preset(name, bits=bits)) for bits in (2, 4))
    assert relative_error(four.k, k) < 0.4 * relative_error(two.k, k)
    assert relative_error(four.v, v) < 0.4 * relative_error(two.v, v)
    assert four.bits_per_value == pytest.approx(two.bits_per_value + 2)


@pytest.mark.parametrize(
    ("head_dim", "name"),
    [
        *((head_dim, "channel") for head_dim in (4, 16, 72, 80, 96, 112, 256)),
        *((80, name) for name in PRESETS if name != "channel"),
    ],
)
def test_head_dims(head_dim: int, name: str) -> None:
    k, v = sample(shape=(1, 3, 128, head_dim))
    result = roundtrip(k, v, name)
    assert relative_error(result.k, k) < 0.6 and relative_error(result.v, v) < 0.6


@pytest.mark.parametrize(
    ("name", "dtype", "where"),
    pairs(
        PRESETS,
        (torch.float32, torch.bfloat16, torch.float16),
        ("element", "token", "channel"),
    ),
)
def test_outliers(name: str, dtype: torch.dtype, where: str) -> None:
    k, v = sample(2, (1, 2, 256, 128), dtype)
    clean = roundtrip(k, v, name)
    k, v = k.clone(), v.clone()
    place = {"element": (0, 1, 40, 7), "token": (0, 1, 40), "channel": (0, 1, slice(None), 7)}
    for side in (k, v):
        noise = side[place[where]].clone()
        side[place[where]] = 1e4 + 100 * noise
    result = roundtrip(k, v, name)
    for found, given, before in ((result.k, k, clean.k), (result.v, v, clean.v)):
        assert found.isfinite().all()
        assert relative_error(found, given) < 0.65
        if name != "oscar":  # one norm for all heads
            assert torch.equal(found[:, 0], before[:, 0])
        if where != "channel":
            assert torch.equal(found[:, :, 128:], before[:, :, 128:])


@pytest.mark.parametrize("name", ["channel", "oscar"])
def test_token_scaling_protects_the_other_tokens(name: str) -> None:
    k, v = sample(3, (1, 2, 128, 128))
    k[0, :, 17] *= 1e3
    others = torch.tensor([token for token in range(32) if token != 17])  # of its key group
    scaled = roundtrip(k, v, name).k[:, :, others]
    plain = roundtrip(k, v, KVPolicy.preset(name, token_scaling=None)).k[:, :, others]
    assert relative_error(scaled, k[:, :, others]) < 0.5
    assert relative_error(plain, k[:, :, others]) > 0.9


@pytest.mark.parametrize("name", PRESETS)
def test_zeros_and_constants(name: str) -> None:
    zeros = torch.zeros(1, 2, 128, 64)
    result = roundtrip(zeros, zeros, name)
    assert not result.k.any() and not result.v.any()
    ones = torch.full((1, 2, 128, 64), 3.0)
    result = roundtrip(ones, ones, name)
    assert torch.allclose(result.k, ones, rtol=2e-3, atol=2e-3)
    assert torch.allclose(result.v, ones, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("seed", range(2))
def test_attention_over_many_tokens_gains_by_unbiased_values(seed: int) -> None:
    """Values with something in common: what their groups lack does not average out."""
    queries, k, v, ids = multimodal(seed, kv_heads=2, tokens=1024)
    generator = torch.Generator().manual_seed(seed)
    v = v + torch.randn(1, 2, 1, 128, generator=generator) * v.std()
    stored = {
        name: roundtrip(k, v, KVPolicy.preset("channel", value_scale=name), ids).v
        for name in ("plain", "unbiased")
    }

    def errors(sharpness: float) -> list[float]:
        asked = queries[:, :, ::16] * sharpness
        exact = attention(asked, k, v)
        return [relative_error(attention(asked, k, x), exact) for x in stored.values()]

    flat, sharp = errors(0.25), errors(1)
    assert flat[1] < 0.75 * flat[0] and sharp[1] < 1.02 * sharp[0]
    plain, unbiased = (relative_error(x, v) for x in stored.values())
    assert plain < unbiased, "each value alone is better fitted by least squares"


def test_balancing_is_given() -> None:
    queries, k, v, ids = multimodal(0, kv_heads=2, tokens=256)
    sigma = sigma_of(queries, k)
    balanced, without = roundtrip(k, v, "channel", ids, sigma=sigma), roundtrip(k, v, "channel")
    assert not torch.equal(balanced.k, without.k)
    assert torch.equal(roundtrip(k, v, "oscar", sigma=sigma).k, roundtrip(k, v, "oscar").k)


GOOD = (1, 2, 128, 64)


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (torch.zeros(2, 128, 64), torch.zeros(2, 128, 64), "batch, KV heads, tokens, head_dim"),
        (torch.zeros(GOOD), torch.zeros(1, 2, 127, 64), "127"),
        (torch.zeros(GOOD), torch.zeros(GOOD).half(), "float16"),
        (torch.zeros(GOOD).double(), torch.zeros(GOOD).double(), "float64"),
        (torch.zeros(GOOD).int(), torch.zeros(GOOD).int(), "int32"),
        (torch.full(GOOD, torch.nan), torch.zeros(GOOD), "k contains NaN"),
        (torch.zeros(GOOD), torch.full(GOOD, -torch.inf), "v contains NaN"),
        (torch.full(GOOD, 1e6), torch.zeros(GOOD), r"row 0, text tokens: .*65504"),
        (torch.zeros(GOOD), torch.full(GOOD, 1e6).bfloat16().float(), "65504"),
        (torch.zeros(1, 2, 128, 66), torch.zeros(1, 2, 128, 66), "head_dim=66"),
    ],
)
def test_bad_tensors(k: torch.Tensor, v: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        roundtrip(k, v)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modality": "smell"}, "text, image, video, audio"),
        ({"modality": 7}, "7"),
        ({"modality": torch.zeros(127)}, r"\(127,\)"),
        ({"modality": torch.full((128,), 4)}, "ids must be"),
        ({"modality": torch.full((128,), -1)}, "ids must be"),
        ({"sigma": torch.ones(3, 64)}, r"sigma \(3, 64\) must be \(1 or 2, 64\)"),
        ({"sigma": torch.ones(64)}, "sigma "),
        ({"policy": "int2"}, "unknown policy"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        roundtrip(*sample(shape=GOOD), **options)
