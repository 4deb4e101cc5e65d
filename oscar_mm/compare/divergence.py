"""Scores: how far a method's answers agree with those of the 16-bit cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from oscar_mm.compare.forced import IGNORE, Forced

_RUNNERS_UP = 4


@dataclass
class Scores:
    """Sums of one method, an element for each prompt.

    Attributes:
        exact: for each answer instead, whether all its tokens are the likeliest ones.
        agreed: number of judged tokens with the same likeliest token as with the 16-bit cache.
        divergence: sum over judged tokens of the KL divergence of the next-token distribution,
            16-bit cache against method, in nats.
        margin: sum over judged tokens of the mean squared error of the logit of the likeliest
            token less the logits of the next four. The divergence depends on the few tokens that
            are nearly wrong; the margin does not, and tells methods apart with fewer prompts.
        tokens: number of judged tokens.
    """

    exact: list[Tensor] = field(default_factory=list)
    agreed: list[Tensor] = field(default_factory=list)
    divergence: list[Tensor] = field(default_factory=list)
    margin: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)

    def add(self, forced: Forced, exact_logits: Tensor, logits: Tensor) -> None:
        """Judge a batch: logits (judged tokens, vocabulary) of the 16-bit cache and the method."""
        judged = forced.targets != IGNORE
        rows = judged.nonzero()[:, 0]
        expected, actual = log_softmax(exact_logits, -1), log_softmax(logits, -1)
        divergence = (expected.exp() * (expected - actual)).sum(-1)
        choice = logits.argmax(-1)
        agreed = (choice == exact_logits.argmax(-1)).float()
        count = len(judged)
        answer = rows * forced.count + forced.answers[judged]
        wrong = _sums((choice != forced.targets[judged]).float(), answer, count * forced.count)
        there = _sums(torch.ones_like(agreed), answer, count * forced.count)
        self.exact.append((wrong == 0)[there > 0].float())
        self.agreed.append(_sums(agreed, rows, count))
        self.divergence.append(_sums(divergence, rows, count))
        self.margin.append(_sums(_margin_error(exact_logits, logits), rows, count))
        self.tokens.append(_sums(torch.ones_like(agreed), rows, count))

    def summary(self) -> dict[str, float | int]:
        """Shares and means over tokens, and their standard errors over prompts ("..._error").

        "exact" is a share of answers, with its standard error over answers.
        """
        parts = (self.exact, self.agreed, self.divergence, self.margin, self.tokens)
        exact, agreed, divergence, margin, tokens = (torch.cat(x).double().cpu() for x in parts)
        kl, kl_error = ratio(divergence, tokens)
        margin_mean, margin_error = ratio(margin, tokens)
        agreement, agreement_error = ratio(agreed, tokens)
        share, share_error = ratio(exact, torch.ones_like(exact))
        return {
            "prompts": len(tokens),
            "answers": len(exact),
            "tokens": int(tokens.sum()),
            "exact": share,
            "exact_error": share_error,
            "agreement": agreement,
            "agreement_error": agreement_error,
            "kl": kl,
            "kl_error": kl_error,
            "margin": margin_mean,
            "margin_error": margin_error,
        }


def ratio(sums: Tensor, counts: Tensor) -> tuple[float, float]:
    """Ratio of two sums and its standard error over their parts, by the delta method.

    Args:
        sums: (parts,) float64, such as divergences by prompt.
        counts: (parts,) float64, divisors such as tokens by prompt.
    """
    quotient = sums.sum() / counts.sum()
    error = (sums - quotient * counts).square().sum().sqrt() / counts.sum()
    return quotient.item(), error.item()


def _margin_error(expected: Tensor, actual: Tensor) -> Tensor:
    top = expected.topk(min(_RUNNERS_UP + 1, expected.shape[-1]), dim=-1).indices
    shift = (actual - expected).gather(-1, top)
    return (shift[:, :1] - shift[:, 1:]).square().mean(-1)


def _sums(values: Tensor, places: Tensor, count: int) -> Tensor:
    return torch.zeros(count, device=values.device).index_add(0, places, values)
