"""Muon for matrices and AdamW for the rest, on a float32 copy of the weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

RATE = 2e-3
WARMUP = 200  # steps


class Master:
    """Optimizes float32 copies of a model's weights; the model may be bfloat16.

    Stacked matrices (experts, convolutions) are optimized matrix by matrix: Muon takes nothing
    else. Embeddings and the output layer are no maps between features: AdamW.

    Args:
        model: its weights are read now and written at each step.
        rate: learning rate of both.
        muon: False optimizes everything with AdamW, as a CPU has to: there Muon takes five times
            as long as the rest of a step.
    """

    def __init__(self, model: nn.Module, rate: float = RATE, muon: bool = True) -> None:
        self.rate = rate
        named = [(name, weight) for name, weight in model.named_parameters()]
        self.weights = [weight for _, weight in named]
        self.copies = [weight.detach().float().clone() for weight in self.weights]
        self.grads = [torch.zeros_like(copy) for copy in self.copies]
        self.leaves: list[list[tuple[nn.Parameter, torch.Tensor]]] = []
        matrices, others = [], []
        for (name, _), copy, grad in zip(named, self.copies, self.grads, strict=True):
            leaves = [nn.Parameter(part) for part in _parts(name, copy)]
            (matrices if muon and _is_map(name, copy) else others).extend(leaves)
            self.leaves.append(list(zip(leaves, _parts(name, grad), strict=True)))
        adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.optimizers: list[torch.optim.Optimizer] = [adam]
        if matrices:
            match = {"weight_decay": 0.02, "adjust_lr_fn": "match_rms_adamw"}
            self.optimizers.append(torch.optim.Muon(matrices, lr=rate, **match))

    @torch.no_grad()
    def step(self, share: float) -> None:
        """One step from the gradients on the model, which are cleared.

        Args:
            share: of the full learning rate.
        """
        learnt = []
        for weight, grad, leaves in zip(self.weights, self.grads, self.leaves, strict=True):
            # A tower that saw nothing must rest: Muon would move it on by its momentum alone, as
            # far as ever, since its steps do not depend on the size of the gradient.
            for leaf, part in leaves:
                leaf.grad = None if weight.grad is None else part
            if weight.grad is not None:
                learnt.append((grad, weight.grad))
        torch._foreach_copy_([grad for grad, _ in learnt], [found for _, found in learnt])
        torch.nn.utils.clip_grad_norm_([leaf for one in self.leaves for leaf, _ in one], 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * share
            optimizer.step()
        torch._foreach_copy_(self.weights, self.copies)
        for weight in self.weights:
            weight.grad = None

    def state(self) -> dict[str, Any]:
        """To be saved."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return {"copies": self.copies, "optimizers": optimizers}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        torch._foreach_copy_(self.copies, list(state["copies"]))
        torch._foreach_copy_(self.weights, self.copies)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def _is_map(name: str, weight: torch.Tensor) -> bool:
    table = ("embed_tokens", "lm_head", "pos_embed", "position_embedding", "class_embedding")
    return weight.ndim >= 2 and not any(part in name for part in table)


def _parts(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The matrices of a tensor, as views."""
    if tensor.ndim <= 2:
        return [tensor]
    if ".experts." in name:
        return list(tensor.unbind(0))
    return [tensor.flatten(1)]


def schedule(step: int, share_done: float) -> float:
    """Share of the learning rate: warm up, hold until half time, then a cosine down to 3%."""
    warm = min(1.0, (step + 1) / WARMUP)
    late = max(0.0, 2 * share_done - 1)
    return warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, late))))
