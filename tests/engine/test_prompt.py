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
