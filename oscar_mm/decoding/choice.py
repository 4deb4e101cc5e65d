"""Choice: the next token of every row, on the device at once and on the host when it is asked for.

Nothing here makes the host wait for the device but ``Choice.listed``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oscar_mm.decoding.prompt import Prompt
from oscar_mm.decoding.sampling import Chooser, Sampling
from oscar_mm.modality import PADDING
from oscar_mm.ranks import Ranks

_BROKEN = -1
"""Told to the host in the place of a token that was chosen from NaN."""


@dataclass(frozen=True)
class Choice:
    """The tokens that were chosen of one step's logits.

    Attributes:
        tokens: (batch,) int64 ids on the device, which are ids whatever the logits were.
        sent: the same on the host, or on their way there.
        arrived: when they have come; None if they need not come.
    """

    tokens: torch.Tensor
    sent: torch.Tensor
    arrived: torch.cuda.Event | None

    def listed(self) -> list[int]:
        """The tokens, on the host: waits for them.

        Raises:
            FloatingPointError: the model's logits are NaN.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        listed = self.sent.tolist()
        if _BROKEN in listed:
            raise FloatingPointError("the model's logits are NaN: its weights or inputs are broken")
        return listed


class Choices:
    """Chooses the tokens of all rows, step by step.

    Args:
        choosers: with the (n,) indices of the rows that each chooses for, on the device; of rows
            without one the likeliest token is taken.
        ranks: what rank 0 chooses all ranks take: by themselves they sample, and may round,
            differently.
    """

    def __init__(self, choosers: Sequence[tuple[torch.Tensor, Chooser]], ranks: Ranks) -> None:
        self._choosers, self._ranks = choosers, ranks

    @classmethod
    def after(
        cls,
        prompt: Prompt,
        samplings: Sequence[Sampling],
        history: Sequence[torch.Tensor] | torch.Tensor | None,
        device: torch.device,
        ranks: Ranks,
    ) -> Choices:
        """Those of an answer to a prompt.

        Args:
            samplings: of each row.
            history: for each row the (tokens,) ids of what comes before the prompt.
            device: of the logits.
        """
        ids = prompt.inputs["input_ids"].to(device)
        real = (prompt.modalities != PADDING).to(device)

        def seen(row: int) -> torch.Tensor:
            its_ids = ids[row][real[row]]
            return its_ids if history is None else torch.cat([history[row].to(device), its_ids])

        alike: dict[tuple[float, ...], list[int]] = {}
        for row, sampling in enumerate(samplings):
            if sampling.changes_logits:
                alike.setdefault(sampling.rules, []).append(row)
        choosers = [
            (
                torch.tensor(rows, device=device),
                Chooser([samplings[row] for row in rows], [seen(row) for row in rows]),
            )
            for rows in alike.values()
        ]
        return cls(choosers, ranks)

    def __call__(self, logits: torch.Tensor) -> Choice:
        """The choice from (batch, vocabulary) logits, which may be overwritten afterwards."""
        # NaN is the highest of all.
        highest, tokens = logits.max(-1)
        for rows, chooser in self._choosers:
            # Where there is NaN something is chosen all the same, and not told.
            scores = logits[rows].float().nan_to_num(0.0, math.inf, -math.inf)
            tokens[rows] = chooser.choose(scores)
        told = tokens.masked_fill(highest.isnan(), _BROKEN)
        self._ranks.agree(told)
        if self._ranks.count > 1:
            tokens = told.clamp(min=0)
        sent = told.to("cpu", non_blocking=True)
        arrived = None
        if told.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(told.device))
        return Choice(tokens, sent, arrived)
