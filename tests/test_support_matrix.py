"""docs/models.md has the support matrix that ``python -m tests.support_matrix`` writes."""

import pytest

from tests.support_matrix import PAGE, page


def test_the_support_matrix_is_that_of_the_code() -> None:
    pytest.importorskip("num2words", reason="SmolVLM's processor needs num2words")
    text = PAGE.read_text()
    assert page(text) == text, "run python -m tests.support_matrix"
