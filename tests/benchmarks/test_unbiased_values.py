"""Values that do not shrink: the same codes, a scale that makes up for what the fit takes away."""

import torch

from benchmarks.unbiased_values import experiments
from oscar_mm.compare.paged import Paged
from oscar_mm.quant.basis import Basis
from tests.compare.states import HEAD_DIM, IDS, states


def test_values_keep_their_length_in_the_stored_coordinates() -> None:
    method = experiments()[-1]
    assert method.name == "compact, groups 32, unbiased values"
    [layer] = states(2)
    found, usual = method.restored(layer, IDS), Paged("x", method.policy).restored(layer, IDS)
    assert torch.equal(found.keys, usual.keys) and found.stored_bytes == usual.stored_bytes
    packed = torch.cat(list(method.packed(IDS).values()))
    kept = torch.ones(len(IDS), dtype=torch.bool)
    kept[packed] = False
    assert torch.equal(found.values[:, :, kept], layer.values[:, :, kept])

    def groups(values: torch.Tensor) -> torch.Tensor:
        stored = Basis(HEAD_DIM, True).values_in(values[:, :, packed]).unflatten(-1, (-1, 32))
        return stored - stored.mean(-1, keepdim=True)

    exact = groups(layer.values)
    length = exact.square().sum(-1)
    overlap = {"found": found, "usual": usual}
    share = {name: ((groups(one.values) * exact).sum(-1) / length) for name, one in overlap.items()}
    # Up to bfloat16, in which values are given back.
    assert (share["found"] - 1).abs().max() < 0.02
    assert 0.8 < share["usual"].mean() < 0.95
