"""Recorded layers made of random numbers, with outlier channels and unequal modalities."""

import torch
from torch import nn

from oscar_mm.compare.teacher_forcing import LayerStates, Recorder

KV_HEADS, QUERY_HEADS, HEAD_DIM = 2, 4, 64
# Text, images and text: full pages of both, and a rest.
IDS = torch.cat([torch.zeros(150), torch.ones(300), torch.zeros(40)]).to(torch.int8)


class Normed(nn.Module):
    """An attention module of a model with QK-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = (nn.RMSNorm(HEAD_DIM) for _ in range(2))
        for norm in (self.q_norm, self.k_norm):
            nn.init.uniform_(norm.weight, 0.3, 3)


def states(
    rows: int,
    ids: torch.Tensor = IDS,
    *,
    normed: bool = False,
    layers: int = 1,
    device: str = "cpu",
) -> list[LayerStates]:
    torch.manual_seed(rows)
    recorder = Recorder()
    for index in range(layers):
        queries, keys, values = (
            torch.randn(rows, heads, len(ids), HEAD_DIM).to(device)
            for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
        )
        keys[..., 5] *= 6
        keys += torch.randn(rows, KV_HEADS, 1, HEAD_DIM).to(device)
        module = (Normed() if normed else nn.Module()).to(device)
        recorder.cache.look(index, module, queries, keys, values, HEAD_DIM**-0.5)
    return recorder.layers
