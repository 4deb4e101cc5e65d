"""Muon for matrices and AdamW for the rest, on a float32 copy of the weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

RATE = 2e-3
WARMUP = 200  # steps
MOMENTUM = 0.95
WEIGHT_DECAY = 0.02
# The quintic iteration that drives all singular values towards one, as in torch.optim.Muon.
QUINTIC, ROUNDS = (3.4445, -4.7750, 2.0315), 5
TOWERS = ("visual.", "vision_tower.", "audio_tower.")


class Matrices:
    """Stacked weights of one shape in one tower; Muon steps on all of them at once.

    torch.optim.Muon steps on matrices one by one: two thousand launches for models as small as
    these, which is most of a step. Tests compare the two.

    Args:
        weights: (rows, columns) float32, all of one shape.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        self.stack = torch.stack(weights)
        self.grads = torch.zeros_like(self.stack)
        self.momentum = torch.zeros_like(self.stack)
        rows, columns = self.stack.shape[1:]
        self.wide = rows <= columns
        # A step is as long as AdamW's, so that both share a learning rate.
        self.length = 0.2 * math.sqrt(max(rows, columns))

    def step(self, rate: float) -> None:
        """Take a step with learning rate ``rate`` from ``grads``."""
        self.momentum.lerp_(self.grads, 1 - MOMENTUM)
        update = self.grads.lerp(self.momentum, MOMENTUM)
        self.stack.mul_(1 - rate * WEIGHT_DECAY)
        self.stack.sub_(self._orthogonal(update), alpha=rate * self.length)

    def _orthogonal(self, update: Tensor) -> Tensor:
        matrices = update.bfloat16() if self.wide else update.bfloat16().mT
        matrices = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
        first, third, fifth = QUINTIC
        for _ in range(ROUNDS):
            gram = matrices @ matrices.mT
            factor = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
            matrices = torch.baddbmm(matrices, factor, matrices, beta=first)
        return (matrices if self.wide else matrices.mT).float()


class Master:
    """Optimizes float32 copies of a model's weights; the model may be bfloat16.

    Muon takes stacked experts and convolutions matrix by matrix. AdamW takes embeddings and the
    output layer, which are no maps between features.

    Args:
        model: model whose weights are read now and written at each step.
        rate: learning rate of both optimizers.
        muon: False optimizes everything with AdamW, for a CPU, where Muon takes five times as
            long as the rest of a step.
    """

    def __init__(self, model: nn.Module, rate: float = RATE, muon: bool = True) -> None:
        self.rate = rate
        named = list(model.named_parameters())
        self.weights = [weight for _, weight in named]
        chosen: dict[tuple, list[tuple[int, Tensor]]] = {}
        self.copies: list[Tensor] = [weight.detach().float().clone() for weight in self.weights]
        self.grads = [torch.zeros_like(copy) for copy in self.copies]
        self.others: dict[int, nn.Parameter] = {}
        for place, (name, weight) in enumerate(named):
            if muon and _is_map(name, weight):
                tower = next((tower for tower in TOWERS if tower in name), "text")
                for part in _matrices(name, self.copies[place]):
                    chosen.setdefault((tower, part.shape), []).append((place, part))
            else:
                self.others[place] = nn.Parameter(self.copies[place])
        self.groups: list[tuple[list[int], Matrices]] = []
        for members in chosen.values():
            places = list(dict.fromkeys(place for place, _ in members))
            group = Matrices([part for _, part in members])
            self.groups.append((places, group))
            self._view(places, group)
        self.adam = torch.optim.AdamW(
            self.others.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def _view(self, places: list[int], group: Matrices) -> None:
        """Make the copies and gradients of these weights views of the stacks."""
        start = 0
        for place in places:
            shape = self.copies[place].shape
            count = self.copies[place].numel() // group.stack[0].numel()
            self.copies[place] = group.stack[start : start + count].view(shape)
            self.grads[place] = group.grads[start : start + count].view(shape)
            start += count

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Take a step from the gradients on the model, and clear them.

        Args:
            share: share of the full learning rate.

        Raises:
            RuntimeError: a part of a tower has no gradient while the rest of it has one.
        """
        learnt = [place for place, weight in enumerate(self.weights) if weight.grad is not None]
        grads = [self.grads[place] for place in learnt]
        torch._foreach_copy_(grads, [self.weights[place].grad for place in learnt])
        norm = torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        for place, leaf in self.others.items():
            leaf.grad = None if self.weights[place].grad is None else self.grads[place]
        self.adam.param_groups[0]["lr"] = self.rate * share
        self.adam.step()
        seen = set(learnt)
        for places, group in self.groups:
            # A tower without gradients must rest: Muon would move it by its momentum alone, as far
            # as ever, because its steps do not depend on the size of the gradient.
            if len(seen.intersection(places)) == len(places):
                group.step(self.rate * share)
            elif seen.intersection(places):
                raise RuntimeError("some weights of a tower have a gradient and others have none")
        torch._foreach_copy_(self.weights, self.copies)
        for weight in self.weights:
            weight.grad = None

    def state(self) -> dict[str, Any]:
        """State to save."""
        momenta = [group.momentum for _, group in self.groups]
        copies = [copy.clone() for copy in self.copies]  # a view would save its whole stack
        return {"copies": copies, "momenta": momenta, "adam": self.adam.state_dict()}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        torch._foreach_copy_(self.copies, list(state["copies"]))
        torch._foreach_copy_(self.weights, self.copies)
        for (_, group), momentum in zip(self.groups, state["momenta"], strict=True):
            group.momentum.copy_(momentum)
        self.adam.load_state_dict(state["adam"])


def _is_map(name: str, weight: Tensor) -> bool:
    table = ("embed_tokens", "lm_head", "pos_embed", "position_embedding", "class_embedding")
    return weight.ndim >= 2 and not any(part in name for part in table)


def _matrices(name: str, tensor: Tensor) -> list[Tensor]:
    """Matrices of a tensor, as views."""
    if tensor.ndim > 2 and ".experts." in name:
        return list(tensor.unbind(0))
    return [tensor.flatten(1)]


def schedule(step: int, share_done: float) -> float:
    """Share of the learning rate: warm up, hold until half time, then a cosine down to 3%."""
    warm = min(1.0, (step + 1) / WARMUP)
    late = max(0.0, 2 * share_done - 1)
    return warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, late))))
