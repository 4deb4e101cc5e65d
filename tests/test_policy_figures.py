"""The figures of docs/policies.md show the records as they are."""

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from docs import policy_figures


def drawn(folder: Path) -> dict[str, set[str]]:
    """Words and numbers in the figures of a folder, by file."""
    return {
        path.name: set(re.findall(r"<text [^>]*>([^<]+)</text>", path.read_text()))
        for path in folder.glob("policy_*.svg")
    }


@pytest.mark.parametrize("name", policy_figures.FIGURES)
def test_a_figure_is_of_the_newest_record(name: str) -> None:
    _, record = policy_figures.FIGURES[name]
    image = (policy_figures.IMAGES / f"{name}.svg").read_text()
    again = "run python docs/policy_figures.py"
    assert f"{record} {policy_figures.digest(record)}" in image, again


def test_the_script_draws_these_figures(tmp_path: Path) -> None:
    policy_figures.main(tmp_path)
    assert drawn(tmp_path) == drawn(policy_figures.IMAGES)
    assert {"standard", "compact", "3.75", "2.85"} <= drawn(tmp_path)["policy_bits.svg"]


def test_the_page_shows_all_figures() -> None:
    page = (policy_figures.ROOT / "docs" / "policies.md").read_text()
    shown = re.findall(r"\]\(images/(\w+)\.svg\)", page)
    assert sorted(shown) == sorted(policy_figures.FIGURES)
