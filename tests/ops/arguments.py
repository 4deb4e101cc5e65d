"""Arguments of the operations, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from oscar_mm import KVPolicy
from oscar_mm.kernels.launch import multiprocessors
from oscar_mm.ops.append import append
from oscar_mm.ops.decode import decode
from oscar_mm.ops.library import numbers_of, recipe_numbers
from oscar_mm.ops.pack import pack_jobs
from oscar_mm.ops.samples import (
    JOB_SLOTS,
    random_basis,
    random_jobs,
    random_layer_stores,
    random_pages,
    random_past,
    random_stores,
)
from oscar_mm.ops.store import store, store_layers
from oscar_mm.ops.unpack import unpack_slots
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pages.quantize import Recipe
from oscar_mm.policy import Bits

OPERATIONS = {
    "append": append,
    "decode": decode,
    "pack": pack_jobs,
    "store": store,
    "store_layers": store_layers,
    "unpack": unpack_slots,
}


def channel_policy(**changes: Any) -> KVPolicy:
    """Return a policy of pages whose keys are scaled by channel."""
    fields = {"bits": 2, "key_axis": "channel", "token_scaling": "per_head"}
    fields |= {"key_group": 128, "center": False}
    return KVPolicy(**(fields | changes))


POLICY = channel_policy()


def stream_policy(bits: tuple[int, int] = (3, 2), **changes: Any) -> KVPolicy:
    """Return a policy of stream pages with a center."""
    fields = {"bits": bits, "key_axis": "token", "token_scaling": None, "center": True}
    return KVPolicy(**(fields | changes))


def page_format(
    bits: int | tuple[int, int] = 2, head_dim: int = 64, policy: KVPolicy = POLICY
) -> PageFormat:
    both = (bits, bits) if isinstance(bits, int) else bits
    return PageFormat.of(policy, Bits(*both), 2, head_dim)


def zeros(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def append_arguments(device: str, dtype: torch.dtype) -> tuple:
    """Return arguments for five new tokens of two rows; one write does nothing."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(2, 5, 2, 64, generator=generator).to(device, dtype).transpose(1, 2)
        for _ in range(2)
    )
    writes = [[0, 4, 2], [1, 0, 0], [9, 9, -1], [1, 3, 1]]
    return (
        *(keys, values, zeros(3, 2, 2, 64, dtype=dtype, device=device)),
        torch.tensor(writes, dtype=torch.int32, device=device),
        zeros(1, dtype=torch.int32, device=device),
    )


def pack_arguments(device: str, dtype: torch.dtype) -> tuple:
    made = page_format()
    return (
        *random_jobs(made, dtype, torch.device(device)),
        zeros(JOB_SLOTS, made.page_bytes, dtype=torch.uint8, device=device),
        zeros(1, dtype=torch.int32, device=device),
        random_basis(made, True, torch.device(device)).sigma,
        recipe_numbers(Recipe.of(made, POLICY)),
    )


def store_arguments(device: str, dtype: torch.dtype) -> tuple:
    policy = stream_policy()
    made = page_format(policy.bits.text, policy=policy)
    return (
        *random_stores(made, dtype, torch.device(device)),
        zeros(5, made.page_bytes, dtype=torch.uint8, device=device),
        zeros(1, dtype=torch.int32, device=device),
        random_basis(made, True, torch.device(device)).sigma,
        recipe_numbers(Recipe.of(made, policy)),
    )


def store_layers_arguments(device: str, dtype: torch.dtype) -> tuple:
    policy, place = stream_policy(), torch.device(device)
    made = page_format(policy.bits.text, policy=policy)
    states = random_layer_stores(made, dtype, place)
    return (
        *states,
        [zeros(5, made.page_bytes, dtype=torch.uint8, device=device) for _ in states[0]],
        [zeros(1, dtype=torch.int32, device=device) for _ in states[0]],
        [random_basis(made, True, place).sigma, None],
        recipe_numbers(Recipe.of(made, policy)),
    )


def unpack_arguments(device: str, dtype: torch.dtype) -> tuple:
    made = page_format()
    return (
        random_pages(4, made, torch.device(device)),
        torch.tensor([3, 0, 3], dtype=torch.int32, device=device),
        *(random_basis(made, True, torch.device(device)).sigma, numbers_of(made), True, dtype),
    )


def decode_arguments(device: str, dtype: torch.dtype) -> tuple:
    formats = (page_format(2), page_format(4))
    place = torch.device(device)
    states, *tables = random_past(formats, True, dtype, place, multiprocessors(place))
    # The kernel of a GPU takes none.
    heads = states[0].shape[1]
    sinks = torch.linspace(-2, 2, heads) if place.type == "cpu" else None
    return (*states, *tables, 0.125, numbers_of(*formats), True, sinks)


ARGUMENTS: dict[str, Callable[[str, torch.dtype], tuple]] = {
    "append": append_arguments,
    "decode": decode_arguments,
    "pack": pack_arguments,
    "store": store_arguments,
    "store_layers": store_layers_arguments,
    "unpack": unpack_arguments,
}


def results(name: str, arguments: tuple) -> list[torch.Tensor]:
    """What an operation returns, or copies of what it wrote to."""
    returned = OPERATIONS[name](*arguments)
    if returned is None:
        return [tensor.clone() for tensor in written(name, arguments)]
    return [returned] if isinstance(returned, torch.Tensor) else list(returned)


def written(name: str, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes to, lists of tensors one by one."""
    found = [arguments[at] for at in WRITTEN.get(name, ())]
    return [x for one in found for x in ([one] if isinstance(one, torch.Tensor) else one)]


def named(name: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """An operation's arguments by their names."""
    return dict(zip((x.name for x in OPERATIONS[name]._schema.arguments), arguments, strict=True))


BALANCED_BY_ROW = ("decode", "pack", "store", "store_layers")
"""Operations that take balancing of each row."""


def balanced_by_row(name: str, device: str, dtype: torch.dtype, heads: int = 2) -> dict[str, Any]:
    """Arguments by name, with balancing of each of two rows; no page has tokens of both."""
    given = named(name, ARGUMENTS[name](device, dtype))
    if "jobs" in given:
        for table, row in ((given["jobs"], 2), (given["begins"], 1)):
            table[:, row] = table[:, 0] % 2
    generator = torch.Generator().manual_seed(2)
    share = torch.rand(2, heads, 64, generator=generator)
    sigma = (1 / (share + 0.5).bfloat16().float()).to(device)
    return given | {"sigma": [sigma, sigma.flip(0)] if name == "store_layers" else sigma}


WRITTEN = {"append": (2, 4), "pack": (6, 7), "store": (5, 6), "store_layers": (3, 4)}
"""Positions of the arguments that are written to."""
