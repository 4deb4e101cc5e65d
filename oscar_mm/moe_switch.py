"""Experts "oscar" for transformers: a mixture of experts that is fast for both few and many tokens.

Transformers' "batched_mm" gathers the weights of each token's experts, which is fast for a few
tokens but runs out of memory for a prompt; its "grouped_mm" sorts the tokens by expert, which suits
a prompt. Transformers switches between the two only in ``generate``; "oscar" chooses by the number
of tokens, in any decode loop.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

IMPLEMENTATION = "oscar"
GROUPED, _BATCHED = "grouped_mm", "batched_mm"
MAX_BATCHED = 16
"""Maximum number of tokens for "batched_mm", which was faster up to this number in all measurements
with 8 of 128 experts per token (benchmarks/results/full_size-nvidia-h200.json)."""


def forward(
    experts: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute the output of a layer's experts, for transformers' ExpertsInterface.

    Args:
        experts: the module with the stacked weights.
        hidden_states: (tokens, hidden size).
        top_k_index: (tokens, experts per token) integers.
        top_k_weights: (tokens, experts per token) factors for the experts' outputs.

    Returns:
        (tokens, hidden size).
    """
    few = hidden_states.device.type != "cpu" and len(hidden_states) <= MAX_BATCHED
    implementation = ALL_EXPERTS_FUNCTIONS[_BATCHED if few else GROUPED]
    return implementation(experts, hidden_states, top_k_index, top_k_weights)


def choose_experts(model: Any) -> None:
    """Replace the default, "grouped_mm", with "oscar" in a transformers model.

    Any other choice by the user is kept, and quantized experts are left unchanged.
    """
    chosen = model.get_experts_implementation()
    if GROUPED in chosen.values() and not _has_quantized_experts(model):
        ours = {
            name: IMPLEMENTATION if value == GROUPED else value for name, value in chosen.items()
        }
        model.set_experts_implementation(ours)


def _has_quantized_experts(model: torch.nn.Module) -> bool:
    """Whether experts have 8-bit weights; such modules (transformers' FP8Experts) accept only their
    own functions, not "oscar"."""
    return any(
        weight.itemsize == 1
        for name, experts in model.named_modules()
        if name.endswith(".experts")
        for weight in experts.parameters()
    )


ExpertsInterface.register(IMPLEMENTATION, forward)
