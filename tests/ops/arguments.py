"""Arguments of the four operations, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oscar_mm import KVPolicy
from oscar_mm.cache.layout import PageFormat
from oscar_mm.ops.append import append
from oscar_mm.ops.decode import decode
from oscar_mm.ops.formats import text_of
from oscar_mm.ops.gpu import multiprocessors
from oscar_mm.ops.pack import pack_jobs
from oscar_mm.ops.samples import (
    JOB_SLOTS,
    random_basis,
    random_jobs,
    random_pages,
    random_past,
)
from oscar_mm.ops.unpack import unpack_slots

OPERATIONS = {"append": append, "decode": decode, "pack": pack_jobs, "unpack": unpack_slots}
POLICY = KVPolicy.preset("compact")


def page_format(bits: int = 2, head_dim: int = 64, policy: KVPolicy = POLICY) -> PageFormat:
    return PageFormat.of(policy, bits, 2, head_dim)


def zeros(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def append_arguments(device: str, dtype: torch.dtype) -> tuple:
    """Of five new tokens of two rows; one write does nothing."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(2, 5, 2, 64, generator=generator).to(device, dtype).transpose(1, 2)
        for _ in range(2)
    )
    writes = [[0, 4, 2, 31], [1, 0, 0, 0], [9, 9, -1, 9], [1, 3, 1, 17]]
    return (
        *(keys, values, zeros(3, 2, 2, 32, 64, dtype=dtype, device=device)),
        torch.tensor(writes, dtype=torch.int32, device=device),
        zeros(1, dtype=torch.int32, device=device),
    )


def pack_arguments(device: str, dtype: torch.dtype) -> tuple:
    made = page_format()
    return (
        *random_jobs(made, dtype, torch.device(device)),
        zeros(JOB_SLOTS, made.page_bytes, dtype=torch.uint8, device=device),
        zeros(1, dtype=torch.int32, device=device),
        *(random_basis(made, True, torch.device(device)).sigma, text_of(made)),
        *(True, POLICY.fit, POLICY.norm, POLICY.value_scale),
    )


def unpack_arguments(device: str, dtype: torch.dtype) -> tuple:
    made = page_format()
    return (
        random_pages(4, made, torch.device(device)),
        torch.tensor([3, 0, 3], dtype=torch.int32, device=device),
        *(random_basis(made, True, torch.device(device)).sigma, text_of(made), True, dtype),
    )


def decode_arguments(device: str, dtype: torch.dtype) -> tuple:
    formats = (page_format(2), page_format(4))
    place = torch.device(device)
    states, *tables = random_past(formats, True, dtype, place, multiprocessors(place))
    return (*states, *tables, 0.125, [text_of(one) for one in formats], True)


ARGUMENTS: dict[str, Callable[[str, torch.dtype], tuple]] = {
    "append": append_arguments,
    "decode": decode_arguments,
    "pack": pack_arguments,
    "unpack": unpack_arguments,
}


def results(name: str, arguments: tuple) -> list[torch.Tensor]:
    """What an operation returns, or copies of what it wrote to."""
    returned = OPERATIONS[name](*arguments)
    if returned is None:
        written = [arguments[at] for at in WRITTEN[name]]
        return [tensor.clone() for tensor in written]
    return [returned] if isinstance(returned, torch.Tensor) else list(returned)


WRITTEN = {"append": (2, 4), "pack": (6, 7)}
"""Positions of the arguments that are written to."""
