"""Adapters as peft puts them into a model, without peft."""

from __future__ import annotations

import torch
from torch import nn

PLACES = ("q_proj", "v_proj", "up_proj", "qkv")
"""Layers of the decoder and of the tower."""
RANKS = {"a": 4, "b": 8}


class LowRank(nn.Module):
    """A layer with adapters, which says so as peft's layers do."""

    adapter_layer_names = ("lora_A", "lora_B")
    other_param_names = ("r", "scaling")

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.r, self.scaling = linear, dict(RANKS), dict.fromkeys(RANKS, 2.0)
        sizes = linear.in_features, linear.out_features
        self.lora_A, self.lora_B = (
            nn.ModuleDict(
                {name: nn.Linear(*pair(rank), bias=False) for name, rank in RANKS.items()}
            )
            for pair in (lambda rank: (sizes[0], rank), lambda rank: (rank, sizes[1]))
        )
        self.active_adapters = ["a"]
        self.disable_adapters = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        for name in [] if self.disable_adapters else self.active_adapters:
            if name in self.lora_A:
                y = y + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return y


class OwnAdapters:
    def __init__(self, model: nn.Module) -> None:
        torch.manual_seed(0)
        self.model, self.layers, self.paths = model, list[LowRank](), list[str]()
        for path, module in list(model.named_modules()):
            if path.endswith(PLACES):
                self.layers.append(LowRank(module))
                self.paths.append(path)
                model.set_submodule(path, self.layers[-1])

    def use(self, *names: str) -> None:
        for layer in self.layers:
            layer.disable_adapters = not names
            if names:
                layer.active_adapters = list(names)

    def scale(self, name: str, factor: float) -> None:
        for layer in self.layers:
            layer.scaling[name] = 2.0 * factor

    def remove(self, name: str) -> None:
        for layer in self.layers:
            del layer.lora_A[name], layer.lora_B[name]

    def take_out(self) -> None:
        """Leave the model as it was."""
        for path, layer in zip(self.paths, self.layers, strict=True):
            self.model.set_submodule(path, layer.base_layer)
