"""Errors of quantization: those of the cache itself, and where token scaling matters."""

from dataclasses import replace

import pytest
import torch

from oscar_mm import InputError
from oscar_mm.inspect.quantization_errors import (
    PAIRS,
    VARIANTS,
    Errors,
    measure_errors,
    roundtrip,
    sampled,
)
from tests.inspect.synthetic import states
from tests.quant.synthetic import relative_error


def measured(**troubles: float) -> dict[str, dict[str, Errors]]:
    shown, ids = states(**troubles)
    return measure_errors(shown, None, ids, sampled(ids))


def test_errors_are_those_of_pages() -> None:
    shown, ids = states(imbalance=3.0)
    ids[768:868] = 0
    found = measure_errors(shown, None, ids, sampled(ids))
    keys, values = shown.keys[None], shown.values[None]
    for pair in PAIRS.values():
        for variant in pair:
            errors = found[variant.label]
            assert list(errors) == ["text", "image", "all"], "28 tokens of audio fill no page"
            back = roundtrip(keys, values, variant.policy, ids)
            for label, code, tokens in (("text", 0, 256), ("image", 1, 640)):
                where = (ids == code).nonzero()[:tokens, 0]
                expected = relative_error(back.k[:, :, where], keys[:, :, where])
                assert errors[label].keys == pytest.approx(expected, rel=1e-3)
                expected = relative_error(back.v[:, :, where], values[:, :, where])
                assert errors[label].values == pytest.approx(expected, rel=1e-3)
            assert errors["all"].bits == back.bits_per_value
            assert min(one.output for one in errors.values()) > 0


def test_output_error_is_that_of_attention() -> None:
    shown, ids = states()
    found = measure_errors(shown, None, ids, sampled(ids))
    [variant, _] = PAIRS["kivi"]
    back = roundtrip(shown.keys[None], shown.values[None], variant.policy, ids)
    hidden = torch.ones(1024, 1024).triu(1).bool()

    def weights(keys: torch.Tensor) -> torch.Tensor:
        scores = shown.queries.double() @ keys.double().repeat_interleave(2, dim=0).mT
        return (scores * shown.scaling).masked_fill(hidden, -torch.inf).softmax(-1)

    def attention(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (weights(keys) @ values.double().repeat_interleave(2, dim=0))[:, -64:]

    errors = found[variant.label]["all"]
    expected = relative_error(attention(back.k[0], back.v[0]), attention(shown.keys, shown.values))
    assert errors.output == pytest.approx(expected, rel=1e-4)
    exact, other = weights(shown.keys)[:, -64:], weights(back.k[0])[:, -64:]
    terms = exact * (exact.log() - other.log())
    expected = float(terms.masked_fill(hidden[-64:], 0).sum(-1).mean())
    assert errors.divergence == pytest.approx(expected, rel=1e-3)


def test_balancing_is_of_those_presets_that_have_it() -> None:
    shown, ids = states()
    sigma = torch.rand(2, 64, generator=torch.Generator().manual_seed(1)) + 0.5
    stretched = replace(
        shown,
        keys=shown.keys * sigma[:, None],
        queries=shown.queries / sigma.repeat_interleave(2, 0)[:, None],
    )
    plain = measure_errors(shown, None, ids, sampled(ids))
    balanced = measure_errors(stretched, sigma, ids, sampled(ids))
    compact, oscar = PAIRS["channel"][0].label, PAIRS["oscar"][0].label
    assert balanced[compact]["all"].output == pytest.approx(plain[compact]["all"].output, rel=1e-2)
    assert balanced[oscar]["all"].output > 1.02 * plain[oscar]["all"].output


def test_token_scaling_helps_where_keys_are_of_unequal_length() -> None:
    with_it, without = (variant.label for variant in PAIRS["channel"])
    even, uneven = measured(), measured(long=4.0)
    assert even[without]["all"].keys == pytest.approx(even[with_it]["all"].keys, rel=0.1)
    assert uneven[without]["image"].keys > 1.2 * uneven[with_it]["image"].keys
    assert even[without]["all"].divergence == pytest.approx(
        even[with_it]["all"].divergence, rel=0.1
    )
    assert uneven[without]["all"].divergence > 1.1 * uneven[with_it]["all"].divergence
    # Modalities of unequal length are no trouble: each has pages of its own.
    apart = measured(imbalance=5.0)
    for part in ("text", "image"):
        ratio = apart[without][part].keys / apart[with_it][part].keys
        assert ratio == pytest.approx(even[without][part].keys / even[with_it][part].keys, rel=0.01)


def test_short_prompts_have_no_pages() -> None:
    shown, ids = states()
    few = replace(
        shown,
        queries=shown.queries[:, :100],
        keys=shown.keys[:, :100],
        values=shown.values[:, :100],
    )
    found = measure_errors(few, None, ids[:100], sampled(ids[:100]))
    assert set(found) == {variant.label for variant in VARIANTS}
    assert not any(found.values())


def test_sample_of_a_long_prompt() -> None:
    ids = torch.zeros(40_000, dtype=torch.int8)
    ids[100:30_100] = 1
    ids[39_800:] = 3
    assert len(sampled(ids[:5000])) == 5000
    chosen = sampled(ids, limit=2048)
    assert len(chosen) == pytest.approx(2048, abs=256) and bool((chosen.diff() > 0).all())
    counts = ids[chosen].bincount(minlength=4).tolist()
    assert counts[1] == pytest.approx(3 * counts[0], abs=256) and counts[3] == 128
    for code in (0, 1, 3):
        # Whole pages of tokens that follow each other in their stream.
        stream = (ids == code).nonzero()[:, 0]
        place = torch.searchsorted(stream, chosen[ids[chosen] == code]).view(-1, 128)
        assert bool((place[:, 0] % 128 == 0).all()) and bool((place.diff(dim=1) == 1).all())
    assert int(chosen.min()) < 200 and int(chosen.max()) > 39_800


def test_a_sample_is_like_the_whole() -> None:
    shown, ids = states(imbalance=3.0)
    whole = measure_errors(shown, None, ids, sampled(ids))
    part = measure_errors(shown, None, ids, sampled(ids, limit=640))
    for label, errors in part.items():
        assert errors["all"].keys == pytest.approx(whole[label]["all"].keys, rel=0.15)
        assert errors["all"].output > 0


def test_what_no_page_can_hold() -> None:
    shown, ids = states()
    shown.keys[0, 5, 3] = float("nan")
    with pytest.raises(InputError, match="k contains NaN or infinity"):
        measure_errors(shown, None, ids, sampled(ids))
