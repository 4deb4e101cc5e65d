"""Long prompts beside short questions: what is sent, and what is measured of a server."""

import pytest

pytest.importorskip("fastapi", reason="needs fastapi")

from benchmarks.long_prompts import PROMPTS, measure, said
from tests.apps.serve.conftest import omni, served  # noqa: F401


def test_prompts() -> None:
    sizes = {}
    for kind, make in PROMPTS.items():
        made = make()
        sizes[kind] = (len(made), sum(len(one["content"]) for one in made))
    assert sizes["a prompt"] == (1, 18_060)
    assert sizes["a told answer"] == (3, 60_007)
    assert sizes["told turns"][0] == 4_001


def test_a_long_prompt(omni) -> None:  # noqa: F811
    question = "What is in this picture? " * 60
    with served(omni) as address:
        row = measure(int(address.rpartition(":")[2]), [said("user", question)])
    assert row["tokens"] > 60 and row["short asked"] >= 1
    assert row["long beside"] > 0 and row["short longest"] >= row["short median"] > 0
