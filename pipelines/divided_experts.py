"""Check that torch's grouped products support each rank's part of the experts."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from oscar_mm.errors import InputError
from oscar_mm.moe_switch import GROUPED, IMPLEMENTATION
from oscar_mm.tensor_parallel import TPGroup, is_dtensor

_ALIGNMENT = 16
"""Bytes of which each row of a matrix must be a multiple in torch's grouped products."""


def check(model: PreTrainedModel, ranks: TPGroup) -> None:
    """Check the experts of a loaded model, with the same result on all ranks.

    Args:
        model: loaded model.
        ranks: ranks that divide it.

    Raises:
        InputError: if the width of a rank's part is not aligned, so that no prompt could run.
    """
    if not {GROUPED, IMPLEMENTATION} & {*model.get_experts_implementation().values()}:
        return
    for name, weight in model.named_parameters():
        if name.endswith(".experts.down_proj") and is_dtensor(weight):
            width, count = weight.shape[-1], ranks.count
            if not _is_aligned(width, count, weight.dtype):
                fewer = [divisor for divisor in range(1, count) if count % divisor == 0]
                possible = [str(n) for n in fewer if _is_aligned(width, n, weight.dtype)]
                start = f"start {' or '.join(possible)}, or " if possible else ""
                raise InputError(
                    f"tp_plan: the model's experts have an inner width of {width}, which cannot be "
                    f"divided among {count} processes into parts whose rows are multiples of "
                    f"{_ALIGNMENT} bytes, as torch's grouped products require: {start}pass "
                    "model_kwargs={'experts_implementation': 'eager'}, which is slower"
                )


def _is_aligned(width: int, count: int, dtype: torch.dtype) -> bool:
    """Return whether each rank's part of a width is a multiple of ``_ALIGNMENT`` bytes."""
    part = -(-width // count)
    last = width - (count - 1) * part
    return not any(size * dtype.itemsize % _ALIGNMENT for size in (part, last))
