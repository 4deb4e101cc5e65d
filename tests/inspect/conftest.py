"""Pipelines with exact caches, as those of tests/pipelines."""

from tests.pipelines.conftest import llava, omni, qwen

__all__ = ["llava", "omni", "qwen"]
