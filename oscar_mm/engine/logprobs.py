"""Log-probabilities of an answer's tokens and of the most likely alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from oscar_mm.ops.decode_tables import upload


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, from the model's logits before sampling changes them.

    Attributes:
        token_id: id of the token.
        logprob: natural logarithm of its probability.
        top: ids and log-probabilities of the requested number of most likely tokens, most likely
            first.
        rank: rank of the token in the vocabulary, from 1; None for tokens of the answer.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


class AskedLogprobs:
    """Rows of a batch that request log-probabilities.

    Args:
        tops: row -> number of most likely tokens to report.
        device: device of the logits.
    """

    def __init__(self, tops: dict[int, int], device: torch.device) -> None:
        self.tops = tops
        self.rows = upload(np.array([*tops], np.int64), device)


class StepLogprobs:
    """Log-probabilities of a step, being copied to the host.

    Args:
        rows: rows of the batch that request log-probabilities.
        logits: (batch, vocabulary) logits, which may be overwritten afterwards.
        tokens: (batch,) sampled ids.
    """

    def __init__(self, rows: AskedLogprobs, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        self._tops = rows.tops
        asked = logits[rows.rows].float()
        total = asked.logsumexp(-1, keepdim=True)
        chosen = asked.gather(1, tokens[rows.rows, None])
        likeliest, ids = asked.topk(min(max(rows.tops.values()), asked.shape[1]))
        found = torch.cat([chosen, likeliest], dim=1) - total
        self._ids = ids.to("cpu", non_blocking=True)
        self._logprobs = found.to("cpu", non_blocking=True)

    def by_row(self, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """Return the log-probabilities by row, given the sampled tokens of all rows.

        Once the tokens have arrived on the host, the log-probabilities have arrived too.
        """
        found = zip(self._tops.items(), self._ids.tolist(), self._logprobs.tolist(), strict=True)
        return {
            row: TokenLogprob(tokens[row], own, tuple(zip(ids, likeliest, strict=True))[:top])
            for (row, top), ids, (own, *likeliest) in found
        }
