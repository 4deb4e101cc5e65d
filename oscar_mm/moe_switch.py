"""Experts "oscar" for transformers: mixtures of experts that are quick for one token and for many.

Of the implementations that transformers has, "batched_mm" copies the weights of each token's
experts next to each other, which is quick for a few tokens and out of memory for a prompt;
"grouped_mm" sorts the tokens by expert, which suits a prompt. ``generate`` switches between the
two; a decode loop of one's own has to choose, and ours does by the number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

IMPLEMENTATION = "oscar"
_GROUPED, _BATCHED = "grouped_mm", "batched_mm"
MOST_BATCHED = 16
"""Tokens of a step: so far "batched_mm" was the quicker one wherever both were measured, with 128
experts of which a token takes 8 (benchmarks/results/full_size-nvidia-h200.json)."""


def forward(
    experts: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Experts function of transformers' ExpertsInterface.

    Args:
        experts: the module with the stacked weights.
        hidden_states: (tokens, hidden size).
        top_k_index: (tokens, experts per token) integers; top_k_weights likewise.

    Returns:
        (tokens, hidden size).
    """
    few = hidden_states.device.type != "cpu" and len(hidden_states) <= MOST_BATCHED
    implementation = ALL_EXPERTS_FUNCTIONS[_BATCHED if few else _GROUPED]
    return implementation(experts, hidden_states, top_k_index, top_k_weights)


def choose_experts(model: Any) -> None:
    """Use it in a model of transformers wherever it has what transformers takes by itself,
    "grouped_mm"; a choice of the user's stays, and so do experts that are quantized."""
    chosen = model.get_experts_implementation()
    if _GROUPED in chosen.values() and not _has_quantized_experts(model):
        ours = {
            name: IMPLEMENTATION if value == _GROUPED else value for name, value in chosen.items()
        }
        model.set_experts_implementation(ours)


def _has_quantized_experts(model: torch.nn.Module) -> bool:
    """Their modules choose among functions of their own (transformers' FP8Experts), of which
    "oscar" is none."""
    return any(
        weight.itemsize == 1
        for name, experts in model.named_modules()
        if name.endswith(".experts")
        for weight in experts.parameters()
    )


ExpertsInterface.register(IMPLEMENTATION, forward)
