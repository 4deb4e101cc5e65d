"""Verdicts on passes with drafts."""

import pytest

from benchmarks.drafts import report


@pytest.mark.parametrize(("fastest", "verdict"), [(316, "1.58x"), (290, "1.45x")])
def test_verdict(fastest: float, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The best number of drafts counts, against none at the same context."""
    cells = {300: (100, 120, 110), 2048: (200, 240, fastest)}
    report(
        [
            {
                "model": "m",
                "context": context,
                "drafts": drafts,
                "ms": 1e3 * (1 + drafts) / speed,
                "tokens": 1.0 + drafts,
                "tokens_per_s": speed,
            }
            for context, speeds in cells.items()
            for drafts, speed in enumerate(speeds)
        ]
    )
    found = capsys.readouterr().out
    assert "m, 300: 1.20x, at least 1.5: NOT met" in found
    assert f"m, 2,048: {verdict}, at least 1.5: {'met' if fastest > 300 else 'NOT met'}" in found
