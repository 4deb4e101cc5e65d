"""Small decoders for benchmarks of decode steps, and random numbers."""

import pytest
import torch

from benchmarks.cache_variants import Decoder


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    return Decoder("qwen3-vl-8b", torch.device("cpu"), tiny=True)


@pytest.fixture(scope="session")
def mixture() -> Decoder:
    """A mixture of experts."""
    return Decoder("qwen3-vl-30b-a3b", torch.device("cpu"), tiny=True)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)
