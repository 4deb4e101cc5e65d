"""The words follow the figures."""

from dataclasses import replace

from oscar_mm.inspect.findings import findings
from tests.inspect.synthetic import inspection


def test_keys_of_unequal_length_need_token_scaling() -> None:
    found = inspection(long=4.0)
    verdict, *others = findings(found)
    assert "needs token scaling: without it, attention weights are off by " in verdict
    assert any("over 3 times its median are most frequent in layer" in one for one in others)


def test_even_keys_do_not() -> None:
    verdict, *others = findings(inspection())
    assert "hardly matters" in verdict
    assert any("no key is over 3 times its median" in one for one in others)
    assert not any("QK-norm" in one for one in others)
    assert any("QK-norm" in one for one in findings(replace(inspection(), qk_norm=True)))


def test_modalities_of_unequal_length_alone_do_not() -> None:
    verdict, *others = findings(inspection(imbalance=6.0))
    assert "hardly matters" in verdict
    [between] = [one for one in others if one.startswith("Between modalities")]
    assert "text" in between and "(6." in between and "costs nothing" in between


def test_harm_is_told_too() -> None:
    found = inspection()
    worse = []
    for layer in found.layers:
        errors = {
            label: {
                part: replace(one, divergence=one.divergence * (0.5 if "no token" in label else 1))
                for part, one in parts.items()
            }
            for label, parts in layer.errors.items()
        }
        worse.append(replace(layer, errors=errors))
    verdict = findings(replace(found, layers=worse))[0]
    assert (
        "does not need token scaling: without it, attention weights are off by 48% less" in verdict
    )


def test_outlier_channels_and_samples_are_told() -> None:
    found = inspection(outliers=8.0)
    said = findings(replace(found, quantized=512))
    assert any("The largest key channel is " in one for one in said)
    assert any("a sample of 512 of 1,024 tokens" in one for one in said)


def test_without_pages_nothing_is_claimed() -> None:
    found = inspection()
    empty = [replace(layer, errors={label: {} for label in layer.errors}) for layer in found.layers]
    said = findings(replace(found, layers=empty))
    assert "cannot be told from this prompt" in said[0]
    assert not any("error" in one or "KL" in one for one in said)
