"""Decoders in small, as benchmarks of decode steps see them."""

import gc

import pytest
import torch

from benchmarks.decoder import Decoder


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    return Decoder("qwen3-vl-8b", torch.device("cpu"), tiny=True)


@pytest.fixture(scope="session")
def mixture() -> Decoder:
    """Of experts."""
    return Decoder("qwen3-vl-30b-a3b", torch.device("cpu"), tiny=True)


@pytest.fixture(scope="module")
def quick_collection() -> None:
    """Benchmarks collect garbage for each cell: what earlier files left is not looked through."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)
