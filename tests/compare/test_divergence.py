"""Scores against numbers worked out by hand."""

from math import log

import pytest
import torch

from oscar_mm.compare.divergence import Scores
from oscar_mm.compare.forced import IGNORE, Forced


def test_scores_of_two_prompts() -> None:
    # The first prompt has two answers, of two tokens and of one; the second one of one token.
    targets = torch.tensor([[IGNORE, 0, 1, 1], [2, IGNORE, IGNORE, IGNORE]])
    answers = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]])
    forced = Forced(torch.zeros(2, 4), torch.zeros(2, 4), targets, answers, count=2)
    exact = torch.tensor([[4.0, 1, 1], [1, 4, 1], [1, 4, 1], [1, 1, 4]]).log()
    found = exact.clone()
    found[1] = torch.tensor([2.0, 1, 1]).log()  # a wrong token in the first answer
    found[3] = torch.tensor([1.0, 1, 2]).log()  # the right one, less surely
    scores = Scores()
    scores.add(forced, exact, found)
    wrong = 1 / 6 * log(1 / 3) + 4 / 6 * log(8 / 3) + 1 / 6 * log(2 / 3)
    unsure = 2 * 1 / 6 * log(2 / 3) + 4 / 6 * log(4 / 3)
    summary = scores.summary()
    assert (summary["prompts"], summary["answers"], summary["tokens"]) == (2, 3, 4)
    assert summary["exact"] == pytest.approx(2 / 3)
    assert summary["agreement"] == pytest.approx(3 / 4)
    kl = (wrong + unsure) / 4
    assert summary["kl"] == pytest.approx(kl, rel=1e-6)
    # Of the second token the likeliest loses log 8 and log 4 on the others, of the fourth log 2.
    shifts = (log(2 / 1) - log(1 / 4)) ** 2, (log(1 / 1) - log(1 / 4)) ** 2, log(2) ** 2
    assert summary["margin"] == pytest.approx((sum(shifts[:2]) / 2 + shifts[2]) / 4, rel=1e-6)
    apart = ((wrong - 3 * kl) ** 2 + (unsure - kl) ** 2) ** 0.5 / 4
    assert summary["kl_error"] == pytest.approx(apart, rel=1e-6)


def test_the_same_logits_have_no_divergence() -> None:
    logits = torch.randn(5, 7)
    targets = logits.argmax(-1)[None]
    forced = Forced(targets, targets, targets, torch.zeros_like(targets))
    scores = Scores()
    scores.add(forced, logits, logits)
    summary = scores.summary()
    assert summary["kl"] == summary["kl_error"] == summary["margin"] == 0
    assert summary["exact"] == summary["agreement"] == 1
