"""Ahead: a step that is launched before it is known whether it will be taken as it is.

The host learns which tokens were chosen only after a while, and with them which rows have ended;
the device goes on meanwhile as if none had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oscar_mm.cache.step import Step


@dataclass(frozen=True, eq=False)
class Ahead:
    """What was launched.

    It has written keys and values only where nothing is stored, so nothing needs to be taken back.

    Attributes:
        tokens: (batch,) ids that it was launched with.
        state: of the ledger: its past.
        promises: of the store.
        step: as it was foretold: where it has put the tokens of rows that had not ended, and what
            it has packed.
        logits: (batch, vocabulary) that come of it.
    """

    tokens: torch.Tensor
    state: tuple[Any, ...]
    promises: int
    step: Step
    logits: torch.Tensor

    def is_step(
        self, tokens: torch.Tensor, state: tuple[Any, ...], promises: int, step: Step
    ) -> bool:
        """Whether it was this step: with the same tokens and past it writes the same, or less.

        Where a row has ended, what was written of it lies in slots and places that are free.

        Args:
            tokens, state, promises: as they are when the step comes.
        """
        if tokens is not self.tokens or state != self.state or step.copies:
            return False
        if self.step.promised and promises != self.promises:
            return False
        told, writes = self.step.writes, step.writes
        if writes is not None:
            if told is None:
                return False
            stored = np.isin(told[0], writes[0])
            if not np.array_equal(told[:, stored], writes):
                return False
        packed = {filling.row: filling for filling in self.step.fillings}
        return all(filling.is_same(packed.get(filling.row)) for filling in step.fillings)
