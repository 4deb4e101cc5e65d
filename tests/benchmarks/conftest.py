"""Decoders in small, as benchmarks of decode steps see them."""

import gc
from collections.abc import Iterator

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
def quick_collection() -> Iterator[None]:
    """Benchmarks collect garbage for each cell; it takes a second to look through all that pytest
    and the libraries hold."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
