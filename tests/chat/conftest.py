"""Assertions of helpers tell what they compared."""

import pytest

pytest.register_assert_rewrite("tests.chat.walk", "tests.chat.reports")
