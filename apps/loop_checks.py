"""Compares loops for CPUs with PyTorch operations. A machine's first call compiles them.

python -m oscar_mm.apps.loop_checks
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from oscar_mm.kernels.self_check import Verdict
from oscar_mm.ops import store as store_module
from oscar_mm.ops import unpack
from oscar_mm.ops.decode import DecodeKernel, Specialization
from oscar_mm.ops.decode_cpu import decode_on_cpu
from oscar_mm.ops.store import StoreKernel
from oscar_mm.ops.store_cpu import store_on_cpu
from oscar_mm.ops.store_torch import StoreArguments, store_layers_one_by_one
from oscar_mm.ops.unpack import UnpackKernel
from oscar_mm.ops.unpack_cpu import unpack_on_cpu
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import DEFAULT, KVPolicy
from oscar_mm.quant.quantize import Recipe

OPERATIONS = ("decode", "store", "unpack")
DTYPES = (torch.float32, torch.bfloat16)
"""Of keys and values; loops are compiled for each."""
_POLICY = KVPolicy.preset(DEFAULT)
_CPU = torch.device("cpu")


class _StoreLoops:
    """``store`` and ``store_layers`` as a kernel has them."""

    def __call__(self, arguments: StoreArguments) -> None:
        store_on_cpu(arguments)

    of_layers = staticmethod(partial(store_layers_one_by_one, store=store_on_cpu))


def check(operation: str, dtype: torch.dtype) -> Verdict:
    """Compare the loops of an operation as its kernel is compared."""
    page_format = PageFormat.of(_POLICY, _POLICY.bits.text, 1, 128)
    if operation == "decode":
        made = Specialization.of((page_format,), 128, _POLICY.rotate, torch.bfloat16, 4)
        if isinstance(made, str):
            raise RuntimeError(made)
        error = DecodeKernel.disagreement(replace(made, dtype=dtype), decode_on_cpu, _CPU)
        return Verdict(error, DecodeKernel.checked.bound)
    if operation == "unpack":
        made = unpack.Specialization(page_format, _POLICY.rotate, dtype)
        error = UnpackKernel.disagreement(made, unpack_on_cpu, _CPU)
        return Verdict(error, UnpackKernel.checked.bound)
    loops: Any = _StoreLoops()
    made = store_module.Specialization(Recipe.of(page_format, _POLICY), dtype)
    return Verdict(StoreKernel.disagreement(made, loops, _CPU), StoreKernel.checked.bound)


def check_all() -> dict[str, Verdict]:
    """A verdict for each operation and dtype, by name."""
    return {
        f"{operation}, {str(dtype).removeprefix('torch.')}": check(operation, dtype)
        for operation in OPERATIONS
        for dtype in DTYPES
    }


if __name__ == "__main__":
    for name, verdict in check_all().items():
        print(f"{name}: {'ok' if verdict.agrees else 'FAILED'}")
