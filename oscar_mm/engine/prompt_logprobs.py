"""PromptLogprobs: log-probabilities of a prompt's tokens, computed during chunked prefill."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oscar_mm.engine.logprobs import TokenLogprob

_MAX_LOGITS = 1 << 24
"""Maximum number of logits in memory at a time: 64 MiB in float32."""


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, computed from the model's own logits.

    Args:
        ids: (tokens,) token ids of the prompt.
        top: number of most likely tokens to return at each position.
    """

    def __init__(self, ids: torch.Tensor, top: int) -> None:
        self._ids, self._top = ids.cpu(), top
        self._found: list[TokenLogprob] = []

    def read(
        self, states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], vocabulary: int
    ) -> None:
        """Compute the log-probabilities predicted by the next chunk of the prompt.

        Args:
            states: (1, tokens, channels) outputs of the decoder.
            head: function that maps (tokens, channels) outputs to (tokens, vocabulary) logits.
            vocabulary: number of logits per token.
        """
        for part in states[0].split(max(1, _MAX_LOGITS // vocabulary)):
            first = len(self._found) + 1
            following = self._ids[first : first + len(part)]
            if len(following):  # The last token of the prompt predicts no prompt token.
                self._add(head(part[: len(following)]).float(), following)

    def _add(self, logits: torch.Tensor, following: torch.Tensor) -> None:
        """Add the log-probabilities of ``following``, one token per row of logits."""
        total = logits.logsumexp(-1, keepdim=True)
        own = logits.gather(1, following[:, None].to(logits.device))
        ranks = (logits > own).sum(-1) + 1
        likeliest, ids = logits.topk(min(self._top, logits.shape[1]))
        rows = zip(
            following.tolist(),
            (own - total)[:, 0].tolist(),
            ranks.tolist(),
            ids.tolist(),
            (likeliest - total).tolist(),
            strict=True,
        )
        for token, logprob, rank, top, found in rows:
            pairs = tuple(zip(top, found, strict=True))
            self._found.append(TokenLogprob(token, logprob, pairs, rank))

    @property
    def complete(self) -> list[TokenLogprob]:
        """Log-probabilities of all tokens except the first, once the prompt is prefilled."""
        return self._found
