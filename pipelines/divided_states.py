"""Divide the heads of linear-attention layers (Gated DeltaNet), and so their states, among ranks.

transformers' own plans divide these layers' matrices too, but gather all outputs, so each rank
would compute, and keep the states of, all heads. Here a rank has some key heads and the value heads
that use them. The ranks exchange only the sums of the output projection, as in attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oscar_mm.errors import InputError
from oscar_mm.tensor_parallel import TPGroup

PLAN = {
    f"layers.*.linear_attn.{name}": style
    for style, names in {
        "colwise": ("in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"),
        "rowwise": ("out_proj",),
    }.items()
    for name in names
}
"""Tensor-parallel styles of the matrices whose rows are in the order of the heads."""


def heads_of_states(config: Any) -> int:
    """Return how many key heads, whose number ranks must divide, each layer with states has.

    Args:
        config: transformers configuration of a model with states.
    """
    return getattr(config.get_text_config(decoder=True), "linear_num_key_heads", 1)


def check(config: Any, plan: object) -> None:
    """Check that a plan can divide the states of a model.

    Args:
        config: transformers configuration of a model with states.
        plan: argument ``tp_plan``.

    Raises:
        InputError: if it cannot.
    """
    if plan != "auto":
        raise InputError(
            f"tp_plan: a plan of your own cannot divide the states of {config.model_type}: pass "
            "'auto'"
        )


@torch.no_grad()
def keep_own_heads(decoder: Any, ranks: TPGroup) -> None:
    """Cut what ``PLAN`` leaves whole to the heads of this rank: the joint projection to queries,
    keys and values, the convolution, and the numbers of each head.

    Args:
        decoder: decoder of a loaded model whose other matrices are divided.
        ranks: ranks that divide the model.
    """
    layers = getattr(decoder, "layers", ())
    mixers = [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]
    for mixer in mixers:
        parts = (mixer.key_dim, mixer.key_dim, mixer.value_dim)
        for name in ("A_log", "dt_bias"):
            _cut(mixer, name, (mixer.num_v_heads,), ranks)
        _cut(mixer.conv1d, "weight", parts, ranks)
        if hasattr(mixer, "in_proj_qkv"):
            _cut(mixer.in_proj_qkv, "weight", parts, ranks)
            mixer.in_proj_qkv.out_features //= ranks.count
        for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"):
            setattr(mixer, name, getattr(mixer, name) // ranks.count)
        for name in ("in_channels", "out_channels", "groups"):
            setattr(mixer.conv1d, name, mixer.conv_dim)
    if mixers and torch.cuda.is_available():
        torch.cuda.empty_cache()  # Page pools, outside of PyTorch, can use what became free.


def _cut(module: nn.Module, name: str, parts: tuple[int, ...], ranks: TPGroup) -> None:
    """Replace a parameter with this rank's rows of each of its parts."""
    weight = getattr(module, name)
    own = [part.chunk(ranks.count)[ranks.rank] for part in weight.split(parts)]
    setattr(module, name, nn.Parameter(torch.cat(own), requires_grad=weight.requires_grad))
