"""Recorded layers made of random numbers, with outlier channels and unequal modalities."""

from types import SimpleNamespace

import torch
from torch import nn

from oscar_mm.compare.teacher_forcing import LayerStates, Recorder

KV_HEADS, QUERY_HEADS, HEAD_DIM = 2, 4, 64
# Text, images and text: full pages of both, and a rest.
IDS = torch.cat([torch.zeros(150), torch.ones(300), torch.zeros(40)]).to(torch.int8)


class Attention(nn.Module):
    """An attention module with projections, or with norms of queries and keys."""

    def __init__(self, index: int, *, normed: bool) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = index, HEAD_DIM
        self.config = SimpleNamespace(hidden_size=32)
        if normed:
            self.q_norm, self.k_norm = (nn.RMSNorm(HEAD_DIM) for _ in range(2))
            for norm in (self.q_norm, self.k_norm):
                nn.init.uniform_(norm.weight, 0.3, 3)
            return
        self.q_proj, self.k_proj = (nn.Linear(32, n * HEAD_DIM) for n in (QUERY_HEADS, KV_HEADS))


def states(
    rows: int,
    ids: torch.Tensor = IDS,
    *,
    normed: bool = False,
    layers: int = 1,
    device: str = "cpu",
) -> list[LayerStates]:
    torch.manual_seed(rows)
    attentions = [Attention(index, normed=normed).to(device) for index in range(layers)]
    recorder = Recorder(nn.Sequential(*attentions))
    for index, module in enumerate(attentions):
        queries, keys, values = (
            torch.randn(rows, heads, len(ids), HEAD_DIM).to(device)
            for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
        )
        keys[..., 5] *= 6
        keys += torch.randn(rows, KV_HEADS, 1, HEAD_DIM).to(device)
        recorder.cache.look(index, module, queries, keys, values, HEAD_DIM**-0.5)
    return recorder.layers
