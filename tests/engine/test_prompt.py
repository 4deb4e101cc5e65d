"""Prompts: the devices of their tensors, and their continuation."""

import torch

from oscar_mm.engine.prompt import Prompt


def test_arguments_are_where_the_positions_are() -> None:
    ids, pixels = torch.ones(1, 3, dtype=torch.long), torch.zeros(8, 4)
    there = torch.arange(3, device="meta")[None]
    kinds = torch.zeros(1, 3, dtype=torch.int8)
    prompt = Prompt({"input_ids": ids, "pixel_values": pixels}, there, there[:, 0], kinds)
    found = prompt.arguments()
    assert {name: x.device.type for name, x in found.items()} == dict.fromkeys(found, "meta")
    assert found.keys() == prompt.inputs.keys()
    assert prompt.inputs["pixel_values"] is pixels, "it goes on waiting"


def test_ids_are_read_without_waiting_for_the_device() -> None:
    """A tensor on "meta" has no values to copy back."""
    ids, kinds = torch.tensor([[5, 6, 7]]), torch.zeros(1, 3, dtype=torch.int8)
    prompt = Prompt({"input_ids": ids}, torch.arange(3)[None], torch.tensor([3]), kinds)
    moved = prompt.to(torch.device("meta"))
    assert moved.positions.is_meta and moved.ids.is_meta and moved.arguments()["input_ids"].is_meta
    assert torch.equal(moved.inputs["input_ids"], ids) and int(moved.next_position) == 3
    assert moved.positions_after(2).is_meta
