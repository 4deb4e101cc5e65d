"""transformers' QuantizedCache stores the same tokens; skipped where its packages are missing."""

from importlib import import_module

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.compare.methods import BACKENDS, quantized_cache_methods
from oscar_mm.compare.paged import Paged
from tests.compare.states import IDS, states

LIKE = Paged("channel", KVPolicy.preset("channel"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {**BACKENDS, "quanto": ("no_such_package.at_all", *BACKENDS["quanto"][1:])}
    monkeypatch.setattr("oscar_mm.compare.methods.BACKENDS", gone)
    method = quantized_cache_methods(LIKE)[0]
    assert method.name == "quanto, 2 bit"
    assert method.missing(states(1), IDS) == "no_such_package.at_all is not installed"


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_scales_and_zeros_are_counted(backend: str) -> None:
    methods = [one for one in quantized_cache_methods(LIKE) if one.backend == backend]
    [layer] = states(2)
    if methods[0].missing([layer], IDS):
        pytest.skip(methods[0].missing([layer], IDS))
    import_module(BACKENDS[backend][0])
    errors = []
    for method in methods:
        back = method.restored(layer, IDS)
        packed = torch.cat(list(LIKE.packed(IDS).values()))
        kept = torch.ones(len(IDS), dtype=torch.bool)
        kept[packed] = False
        assert torch.equal(back.keys[:, :, kept], layer.keys[:, :, kept])
        assert back.stored_values == 2 * layer.keys[:, :, packed].numel()
        # Groups of 64 with scale and zero in 16-bit precision.
        assert 8 * back.stored_bytes == (method.bits + 0.5) * back.stored_values
        errors.append(float((back.keys - layer.keys).norm() / layer.keys.norm()))
    assert 0 < errors[1] < errors[0] / 3
