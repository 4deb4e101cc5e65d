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


def test_files_of_another_number_of_ranks(tmp_path) -> None:
    path = tmp_path / "my [1].chat"
    assert TPGroup(2, 1).saved_path(path) == TPGroup(2, 1).path(path)
    for rank in range(3):
        TPGroup(3, rank).path(path).touch()
    with pytest.raises(InputError, match=r"saved by 3 processes.* read by 1: start 3$"):
        TPGroup().saved_path(path)
    assert TPGroup(3, 2).saved_path(path) == TPGroup(3, 2).path(path)
    path.touch()
    assert TPGroup().saved_path(path) == path
    with pytest.raises(InputError, match=r"saved by 1 or 3 processes.* by 2: start 1 or 3$"):
        TPGroup(2, 0).saved_path(path)
    for rank in range(3):
        TPGroup(3, rank).path(path).unlink()
    with pytest.raises(InputError, match=r"saved by 1 process .* by 2: start 1$"):
        TPGroup(2, 1).saved_path(path)


def test_norms_of_all_heads_need_all_heads() -> None:
    with pytest.raises(InputError, match=r"token_scaling='shared'.*2 ranks.*'channel'"):
        TPGroup(2, 0).check(KVPolicy.preset("oscar"))
    TPGroup(2, 0).check(KVPolicy.preset("oscar", token_scaling="per_head"))
    TPGroup(2, 0).check(KVPolicy.preset("channel"))
