"""Row adapters: LoRA adapters of which each row of a batch has its own, or none.

A module stacks the matrices of all adapters along their ranks, and a row uses its own ranks only:

y = x W^T + (x A^T, with 0 in the ranks of other adapters) B^T

So rows with different adapters share a pass, which takes two products more. The choice of the rows
is a tensor: a captured graph reads it at a fixed address.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from oscar_mm.ops.decode_tables import upload

_idle: ContextVar[torch.Tensor | None] = ContextVar("idle", default=None)
_ATTRIBUTE = "oscar_adapters"


@contextmanager
def choosing(idle: torch.Tensor | None) -> Iterator[None]:
    """Within the block, rows of this thread's passes use adapters; elsewhere, they use none.

    Args:
        idle: (rows, ranks) bool: the ranks that a row does not use, see ``RowAdapters.idle``; one
            row stands for all. None if no row uses any.
    """
    token = _idle.set(idle)
    try:
        yield
    finally:
        _idle.reset(token)


def chosen() -> torch.Tensor | None:
    """Return the argument of the innermost ``choosing`` of this thread; None outside of it."""
    return _idle.get()


def silence_(between: torch.Tensor, idle: torch.Tensor, modules: int = 1) -> torch.Tensor:
    """Set the products of unused ranks to 0, in place, whatever they are.

    Args:
        between: (rows, modules * ranks) products x A^T.
        idle: see ``choosing``.
        modules: number of modules whose ranks follow one another.
    """
    between.view(len(between), modules, -1).masked_fill_(idle[:, None], 0)
    return between


class AdaptedLinear(nn.Module):
    """A linear module with the adapters of all rows.

    It has no attribute ``weight``: code that multiplies by the weights itself would leave the
    adapters out. The stacks are buffers, since a model's fingerprint covers parameters only.

    Args:
        base_layer: the module without adapters.
        down: (ranks, in_features): matrices A of all adapters, each in its ranks.
        up: (out_features, ranks): matrices B times their scaling.
    """

    down: torch.Tensor
    up: torch.Tensor

    def __init__(self, base_layer: nn.Module, down: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.launch: Any = None
        """What a launch of several modules, of which this is the first, adds; see ``LowRank``."""
        self.register_buffer("down", down, persistent=False)
        self.register_buffer("up", up, persistent=False)

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return len(self.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute (..., out_features) of (..., in_features); the rows are all leading axes."""
        found, idle = self.base_layer(x), chosen()
        if idle is None:
            return found
        between = silence_(x.reshape(-1, x.shape[-1]) @ self.down.T, idle)
        return torch.addmm(found.reshape(len(between), -1), between, self.up.T).view_as(found)


@dataclass(frozen=True, eq=False)
class RowAdapters:
    """The adapters of a model that requests choose by name.

    Attributes:
        digests: SHA-256 of each adapter's matrices, by name.
        table: (adapters + 1, ranks) bool on the model's device: the ranks that a row without
            adapters does not use (all of them), then those of a row with the first adapter, ...
    """

    digests: dict[str, str]
    table: torch.Tensor

    @classmethod
    def of(cls, model: Any) -> RowAdapters | None:
        """Return the adapters of a model; None if it has none."""
        return getattr(model, _ATTRIBUTE, None)

    def attach(self, model: nn.Module) -> None:
        """Make ``of`` return these adapters for a model."""
        setattr(model, _ATTRIBUTE, self)

    def idle(self, names: Sequence[str | None]) -> torch.Tensor | None:
        """Return the (rows, ranks) mask of unused ranks, without waiting for the device.

        Args:
            names: the adapter of each row, or None.

        Returns:
            The mask, of one row if all rows use the same adapter; None if no row uses any.
        """
        places = self.places(names)
        if not any(places):
            return None
        if len(set(places)) == 1:
            return self.table[places[0] : places[0] + 1]
        return self.table[upload(np.array(places, dtype=np.int64), self.table.device)]

    def digest(self, name: str | None) -> str | None:
        """Return the digest of an adapter; None for None."""
        return None if name is None else self.digests[name]

    def places(self, names: Sequence[str | None]) -> list[int]:
        """Return the row of ``table`` for each name."""
        known = {name: place for place, name in enumerate(self.digests, 1)}
        return [0 if name is None else known[name] for name in names]
