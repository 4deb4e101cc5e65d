"""Check that each rank's part of the experts suits the products that run them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from oscar_mm.errors import InputError
from oscar_mm.moe_switch import GROUPED, IMPLEMENTATION
from oscar_mm.tensor_parallel import TPGroup, is_dtensor

_ALIGNMENT = 16
"""Bytes whose multiple a row of the matrices of torch's grouped products must have."""


def check(model: PreTrainedModel, ranks: TPGroup) -> None:
    """Check the experts of a loaded model; all ranks find the same.

    Args:
        model: loaded model.
        ranks: ranks that divide it.

    Raises:
        InputError: if a prompt could not run, since a part of an expert has an odd width.
    """
    if not {GROUPED, IMPLEMENTATION} & {*model.get_experts_implementation().values()}:
        return
    for name, weight in model.named_parameters():
        if name.endswith(".experts.down_proj") and is_dtensor(weight):
            width, count = weight.shape[-1], ranks.count
            if not _suits(width, count, weight.dtype):
                fewer = [n for n in range(1, count) if count % n == 0]
                suited = [str(n) for n in fewer if _suits(width, n, weight.dtype)]
                start = f"start {' or '.join(suited)}, or " if suited else ""
                raise InputError(
                    f"tp_plan: the model's experts have an inner width of {width}, which cannot be "
                    f"divided among {count} processes into parts of whole {_ALIGNMENT} bytes, as "
                    f"grouped products need them: {start}pass "
                    "model_kwargs={'experts_implementation': 'eager'}, which is slower"
                )


def _suits(width: int, count: int, dtype: torch.dtype) -> bool:
    """Return whether each rank's part of a width is a multiple of ``_ALIGNMENT`` bytes."""
    part = -(-width // count)
    last = width - (count - 1) * part
    return not any(size * dtype.itemsize % _ALIGNMENT for size in (part, last))
