"""Compare kernels with PyTorch operations, and the speed of GPU kernels with a plain copy.

``python -m oscar_mm.apps.operation_checks`` checks the CPU kernels; the first run on a machine
compiles them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from oscar_mm.fast_decode import delta as delta_module
from oscar_mm.fast_decode import experts as mixture_module
from oscar_mm.fast_decode import linear as linear_module
from oscar_mm.fast_decode import rope as rope_module
from oscar_mm.fast_decode.centered_norm import CenteredNormKernel
from oscar_mm.fast_decode.delta import DeltaKernel, DeltaShape, delta, sample
from oscar_mm.fast_decode.experts import (
    ExpertKernels,
    GroupedKernels,
    PromptKernels,
    mixture_of_experts,
)
from oscar_mm.fast_decode.experts_torch import Choice, Experts, MixtureArguments
from oscar_mm.fast_decode.gate import GateKernel
from oscar_mm.fast_decode.linear import LinearKernel, LinearRowsKernel, linear
from oscar_mm.fast_decode.linear_cluster import ClusterSpecialization, LinearClusterKernel
from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.fast_decode.rope import RopeKernel, rope_
from oscar_mm.fast_decode.shared_gate import SharedGateKernel
from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import multiprocessors, uses_tma, uses_wgmma
from oscar_mm.kernels.self_check import Verdict
from oscar_mm.ops import append as append_module
from oscar_mm.ops import pack as pack_module
from oscar_mm.ops import store as store_module
from oscar_mm.ops import unpack as unpack_module
from oscar_mm.ops.append import AppendKernel, append
from oscar_mm.ops.decode import DecodeKernel, Specialization, decode
from oscar_mm.ops.decode_numba import decode_on_cpu
from oscar_mm.ops.decode_tables import assign
from oscar_mm.ops.library import numbers_of, recipe_numbers
from oscar_mm.ops.pack import PackKernel, pack_jobs
from oscar_mm.ops.pages_numba import unpack_on_cpu
from oscar_mm.ops.samples import random_pages
from oscar_mm.ops.store import StoreKernel, store, whole_page_tables
from oscar_mm.ops.store_numba import store_on_cpu
from oscar_mm.ops.store_torch import StoreArguments, store_layers_one_by_one
from oscar_mm.ops.unpack import UnpackKernel, unpack_slots
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.pages.quantize import Recipe
from oscar_mm.policy import DEFAULT, KVPolicy

KERNELS = ("append", "decode", "delta", "linear", "mixture", "pack", "rope", "store", "unpack")
_POLICY = KVPolicy.preset(DEFAULT)
_WHOLE_PAGE_POLICY = KVPolicy.preset("channel")
"""Policy for checking ``pack``, an operation that the default policy does not use."""
_DTYPE, _HEADS, _GROUP, _HEAD_DIM = torch.bfloat16, 8, 4, 128
_PAGES = 1024
"""Number of pages in the prompt: 131,072 tokens, 537 MB in 16-bit precision and 94 MB packed, more
than fits into a GPU's L2 cache."""
_ROWS = 8
_BATCH = 64
"""Number of rows of a full batch."""
_WIDTH, _HIDDEN = 4096, 12288
"""Input and output widths of the feed-forward layer to check."""
_DELTA = DeltaShape(16, 32, 128, 128)
"""Heads of Gated DeltaNet in Qwen3.5 with 9 billion parameters."""
_CHOICE = Choice(32, 8, True, _DTYPE)
_MIXTURE = mixture_module.Specialization(_CHOICE, 1, 2048, 768)
_LINEAR_KERNELS = (
    (LinearKernel, linear_module.Specialization(1, True, _DTYPE)),
    (LinearRowsKernel, linear_module.RowsSpecialization.of(_ROWS, True, _DTYPE)),
    (GateKernel, _DTYPE),
    (CenteredNormKernel, _DTYPE),
)
_HOPPER_LINEAR_KERNEL = LinearClusterKernel, ClusterSpecialization.of(_BATCH, True, _DTYPE)
_MIXTURE_KERNELS = (
    (ExpertKernels, _MIXTURE),
    (GroupedKernels, mixture_module.GroupedSpecialization(_CHOICE, 8)),
    (PromptKernels, _CHOICE),
    (SharedGateKernel, _DTYPE),
)
"""Kernels of an operation, with their specializations; only the first kernel works without TMA."""
_COPY_BYTES = 1 << 29
_CALLS, _REPLAYS = 4, 5
LOOPS = ("decode", "store", "unpack")
DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of keys and values; each CPU kernel is compiled for each of these dtypes."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workload:
    """Call of an operation, with the minimum number of bytes that it must read and write."""

    call: Callable[[], object]
    moved_bytes: int


def check_kernel(operation: str, device: torch.device) -> Verdict:
    """Compare the default policy's kernel for an operation with PyTorch operations.

    Raises:
        KernelError: if this device has no kernel; the message says why.
    """
    if operation == "append":
        return AppendKernel.checked.check(append_module.Specialization(_DTYPE, 16), device)
    page = _page(_WHOLE_PAGE_POLICY if operation == "pack" else _POLICY)
    if operation == "decode":
        specialization = Specialization.of((page,), _HEAD_DIM, _POLICY.rotate, _DTYPE, _GROUP)
        if isinstance(specialization, str):
            raise KernelError(specialization)
        return DecodeKernel.checked.check(specialization, device)
    if operation == "delta":
        made = delta_module.Specialization.of(_DELTA, _DTYPE, _BATCH, device)
        return DeltaKernel.checked.check(made, device)
    if operation == "linear":
        more = (_HOPPER_LINEAR_KERNEL,) if uses_wgmma(device) else ()
        return _first_that_disagrees(device, *_LINEAR_KERNELS, *more)
    if operation == "mixture":
        return _first_that_disagrees(device, *_MIXTURE_KERNELS)
    if operation == "pack":
        made = pack_module.Specialization(Recipe.of(page, _WHOLE_PAGE_POLICY), _DTYPE)
        return PackKernel.checked.check(made, device)
    if operation == "store":
        made = store_module.Specialization(Recipe.of(page, _POLICY), _DTYPE)
        return StoreKernel.checked.check(made, device)
    if operation == "rope":
        made = rope_module.Specialization(_HEAD_DIM, _DTYPE, _HEAD_DIM)
        return RopeKernel.checked.check(made, device)
    made = unpack_module.Specialization(page, _POLICY.rotate, _DTYPE)
    return UnpackKernel.checked.check(made, device)


def _first_that_disagrees(
    device: torch.device, first: tuple[Any, Any], *others: tuple[Any, Any]
) -> Verdict:
    """Return the verdict on the first kernel that disagrees with PyTorch, or else on the last one.

    Args:
        device: device to check.
        first: a kernel and its specialization.
        others: further pairs of kernel and specialization, checked only on devices with TMA.
    """
    kernel, made = first
    verdict = kernel.checked.check(made, device)
    for kernel, made in others:
        if verdict.agrees and uses_tma(device):
            verdict = kernel.checked.check(made, device)
    return verdict


def workload(operation: str, device: torch.device, pages: int = _PAGES) -> Workload:
    """Prepare a call of an operation on a layer with 8 KV heads and a prompt of ``pages`` pages."""
    if operation in _TOKEN_WORKLOADS:
        return _TOKEN_WORKLOADS[operation](device)
    page_format = _page(_WHOLE_PAGE_POLICY if operation == "pack" else _POLICY)
    pool = random_pages(1, page_format, device).repeat(pages, 1)
    slots = torch.arange(pages, dtype=torch.int32, device=device)
    if operation == "unpack":
        options = (numbers_of(page_format), _POLICY.rotate, _DTYPE)
        call = partial(unpack_slots, pool, slots, None, *options)
        return Workload(call, pool.nbytes + 2 * pages * PAGE_TOKENS * _HEADS * _HEAD_DIM * 2)
    if operation == "pack":
        return _pack(pool, slots, page_format)
    if operation == "store":
        return _store(pool, page_format)
    return _decode(pool, slots, page_format)


def _page(policy: KVPolicy) -> PageFormat:
    return PageFormat.of(policy, policy.bits.text, _HEADS, _HEAD_DIM)


def _states(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, _HEAD_DIM, dtype=_DTYPE, device=device)


def _recent(device: torch.device) -> torch.Tensor:
    return _states(device, _ROWS, 2, _HEADS)


def _pack(pool: torch.Tensor, slots: torch.Tensor, page_format: PageFormat) -> Workload:
    tokens, device = len(slots) * PAGE_TOKENS, pool.device
    keys, values = (_states(device, 1, _HEADS, tokens) for _ in range(2))
    source = torch.arange(tokens, dtype=torch.int32, device=device).view(-1, PAGE_TOKENS)
    places = (source, torch.zeros_like(slots), slots, pool, torch.zeros_like(slots[:1]))
    numbers = recipe_numbers(Recipe.of(page_format, _WHOLE_PAGE_POLICY))
    sides = (keys, values, _recent(device))
    call = partial(pack_jobs, *sides, *places, None, numbers)
    return Workload(call, keys.nbytes + values.nbytes + pool.nbytes)


def _store(pool: torch.Tensor, page_format: PageFormat) -> Workload:
    device = pool.device
    keys, values = (_states(device, len(pool), _HEADS, PAGE_TOKENS) for _ in range(2))
    jobs, begins = whole_page_tables(len(pool), device)
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    numbers = recipe_numbers(Recipe.of(page_format, _POLICY))
    tables = (jobs, begins[: len(pool) * page_format.center])
    sides = (keys, values, _recent(device))
    call = partial(store, *sides, *tables, pool, bad, None, numbers)
    return Workload(call, keys.nbytes + values.nbytes + pool.nbytes)


def _decode(pool: torch.Tensor, slots: torch.Tensor, page_format: PageFormat) -> Workload:
    """Prepare attention of one new token per row; all rows have the same number of pages."""
    device, per_row = pool.device, len(slots) // _ROWS
    keys, values = (_states(device, _ROWS, _HEADS, 1) for _ in range(2))
    new = (_states(device, _ROWS, _HEADS * _GROUP, 1), keys, values)
    items = torch.stack([slots, torch.full_like(slots, PAGE_TOKENS)], dim=1)
    counts = ((0, per_row),) * _ROWS
    parts = assign(counts, _HEADS, _GROUP, multiprocessors(device))
    tables = (
        items[: _ROWS * per_row].view(_ROWS, per_row, 2),
        torch.zeros(_ROWS, 1, dtype=torch.int32, device=device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.from_numpy(parts.copy()).to(device),
    )
    options = (_HEAD_DIM**-0.5, numbers_of(page_format), _POLICY.rotate)
    return Workload(
        partial(decode, *new, [pool], _recent(device), None, *tables, *options), pool.nbytes
    )


def _append(device: torch.device) -> Workload:
    """Prepare a call that appends one new token per row."""
    keys, values = (_states(device, _ROWS, _HEADS, 1) for _ in range(2))
    writes = [[row, 0, row] for row in range(_ROWS)]
    writes = torch.tensor(writes, dtype=torch.int32, device=device)
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    call = partial(append, keys, values, _recent(device), writes, bad)
    return Workload(call, 2 * (keys.nbytes + values.nbytes))


def _delta(device: torch.device) -> Workload:
    """Prepare a call that runs a step of a full batch, whose states do not fit in the L2 cache."""
    given = sample(_DELTA, _DELTA.one_after_the_other, _BATCH, _DTYPE, device)
    return Workload(partial(delta, given), 2 * sum(x.nbytes for x in given.states.tensors))


def _linear(device: torch.device) -> Workload:
    """Prepare a call that computes the gate of a feed-forward layer."""
    x = torch.ones(1, _WIDTH, dtype=_DTYPE, device=device)
    weights = [x.new_full((_HIDDEN, _WIDTH), 0.01) for _ in range(2)]
    call = partial(linear, x, weights, norm=Norm(x[0], 1e-6), gated=True)
    return Workload(call, sum(weight.nbytes for weight in weights))


def _mixture(device: torch.device) -> Workload:
    (count, chosen, normalized, _), _, width, between, *_ = _MIXTURE
    x = torch.ones(1, width, dtype=_DTYPE, device=device)
    experts = Experts(
        x.new_full((count, width), 0.01),
        x.new_full((count, 2 * between, width), 0.01),
        x.new_full((count, width, between), 0.01),
        *(chosen, normalized),
    )
    read = experts.gate_and_up[:chosen].nbytes + experts.down[:chosen].nbytes
    return Workload(partial(mixture_of_experts, MixtureArguments(x, x[0], 1e-6, *experts)), read)


def _rope(device: torch.device) -> Workload:
    """Prepare a call that applies RoPE to the query and key heads of one token per row."""
    heads = _states(device, _ROWS, _HEADS * (_GROUP + 1))
    angles = _states(device, _ROWS)
    call = partial(rope_, heads, _HEADS * _GROUP, angles, angles)
    return Workload(call, 2 * (heads.nbytes + angles.nbytes))


_TOKEN_WORKLOADS = {
    "append": _append,
    "delta": _delta,
    "linear": _linear,
    "mixture": _mixture,
    "rope": _rope,
}


def call_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call in seconds; on a GPU, a CUDA graph excludes host time."""
    with torch.cuda.device(device):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_CALLS):
                call()
        return _median_seconds(graph.replay) / _CALLS


def copy_speed(device: torch.device) -> float:
    """Return the speed of a plain copy: bytes read and written per second."""
    with torch.cuda.device(device):
        source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        target.copy_(source)
        # A CUDA graph would use the copy engine, which is slower than a kernel.
        return 2 * _COPY_BYTES / _median_seconds(lambda: target.copy_(source))


def _median_seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call in seconds, measured by GPU events before and after it."""
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


class _StoreLoops:
    """CPU versions of ``store`` and ``store_layers``, with the interface of a kernel."""

    def __call__(self, arguments: StoreArguments) -> None:
        store_on_cpu(arguments)

    of_layers = staticmethod(partial(store_layers_one_by_one, store=store_on_cpu))


def check_loops(operation: str, dtype: torch.dtype) -> Verdict:
    """Compare the CPU kernel of an operation with PyTorch, in the same way as its GPU kernel."""
    page_format = PageFormat.of(_POLICY, _POLICY.bits.text, 1, 128)
    if operation == "decode":
        made = Specialization.of((page_format,), 128, _POLICY.rotate, torch.bfloat16, 4)
        if isinstance(made, str):
            raise RuntimeError(made)
        error = DecodeKernel.disagreement(made._replace(dtype=dtype), decode_on_cpu, _CPU)
        return Verdict(error, DecodeKernel.checked.bound)
    if operation == "unpack":
        made = unpack_module.Specialization(page_format, _POLICY.rotate, dtype)
        error = UnpackKernel.disagreement(made, unpack_on_cpu, _CPU)
        return Verdict(error, UnpackKernel.checked.bound)
    loops: Any = _StoreLoops()
    made = store_module.Specialization(Recipe.of(page_format, _POLICY), dtype)
    return Verdict(StoreKernel.disagreement(made, loops, _CPU), StoreKernel.checked.bound)


def check_all_loops() -> dict[str, Verdict]:
    """Check the CPU kernels for all operations and dtypes, and return the verdicts by name."""
    return {
        f"{operation}, {str(dtype).removeprefix('torch.')}": check_loops(operation, dtype)
        for operation in LOOPS
        for dtype in DTYPES
    }


if __name__ == "__main__":
    for name, verdict in check_all_loops().items():
        print(f"{name}: {'ok' if verdict.agrees else 'FAILED'}")
