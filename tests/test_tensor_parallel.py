"""Ranks of models that are not divided, and names of files."""

from pathlib import Path

import pytest
import torch

from oscar_mm import InputError, KVPolicy
from oscar_mm.tensor_parallel import TPGroup


def test_a_model_that_is_whole() -> None:
    ranks = TPGroup.of(torch.nn.Linear(2, 2))
    assert ranks == TPGroup(1, 0)
    assert ranks.path("a/chat.safetensors") == Path("a/chat.safetensors")
    ranks.check(KVPolicy.preset("oscar"))
    kept = torch.arange(3)
    ranks.broadcast(kept)
    assert kept.tolist() == [0, 1, 2]


def test_files_of_ranks() -> None:
    paths = [TPGroup(2, rank).path("a/my.chat.safetensors") for rank in range(2)]
    assert paths == [Path(f"a/my.chat.{rank}-of-2.safetensors") for rank in range(2)]
    assert TPGroup(4, 3).path(Path("chat")) == Path("chat.3-of-4")


def test_norms_of_all_heads_need_all_heads() -> None:
    with pytest.raises(InputError, match=r"token_scaling='shared'.*2 ranks.*'channel'"):
        TPGroup(2, 0).check(KVPolicy.preset("oscar"))
    TPGroup(2, 0).check(KVPolicy.preset("oscar", token_scaling="per_head"))
    TPGroup(2, 0).check(KVPolicy.preset("channel"))
