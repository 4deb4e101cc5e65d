"""Pack: quantize 16-bit keys and values, writing all 128 tokens of a page at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import (
    ELEMENTS,
    OUT_OF_ORDER,
    Strides,
    addresses,
    aligned_rows,
    check_pages,
    current_stream,
    ints,
    multiprocessors,
    page_macros,
    pointers,
    recipe_macros,
    sigma_strides,
    strides,
)
from oscar_mm.kernels.self_check import OperationKernel
from oscar_mm.ops.library import (
    STATES,
    ArgumentChecker,
    Written,
    define,
    recipe_numbers,
    recipe_of,
    sigma_of,
)
from oscar_mm.ops.samples import CHECKED_HEADS, JOB_SLOTS, random_basis, random_jobs
from oscar_mm.ops.store import whole_pages
from oscar_mm.ops.store_torch import tokens_of
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.pages.quantize import Recipe, parts_of, quantize
from oscar_mm.policy import NORMS, VALUE_SCALES, KVPolicy
from oscar_mm.quant.basis import Basis

NOT_STORABLE = "keys or values contain NaN, infinity or numbers beyond float16 (65504)"
_PER_PROCESSOR = 2
"""Number of thread blocks that a multiprocessor runs at a time."""
_NORMS_THREADS = 256
_checker = ArgumentChecker("pack")


class PackArguments(NamedTuple):
    """Arguments of ``pack``.

    Slots of ``recent`` may be reused as soon as the operation returns, since later work on the same
    stream runs after it.

    Attributes:
        keys: (batch, KV heads, tokens, head_dim): keys of new tokens after RoPE, in bfloat16,
            float16 or float32; any strides with contiguous channels.
        values: same shape and dtype as keys.
        recent: (slots, 2, KV heads, head_dim): earlier tokens, in the same dtype.
        source: (n, 128) int32: source of each token of a page: an index into keys and values, or
            ~slot of recent.
        rows: (n,) int32: row of the batch for each page.
        slots: (n,) int32: pages to write in ``pages``; nothing is written for a negative slot, so
            that a captured graph can have a fixed n.
        pages: (pool slots, page_bytes) uint8.
        not_finite: (1,) int32; set to 1 if a scale, zero or norm is NaN, infinite or beyond float16
            (65504), otherwise unchanged. This happens if the input is NaN, infinite or beyond
            float16, and may happen if it is beyond a quarter of that range, since a least-squares
            fit can extend beyond the values.
        sigma: (KV heads or 1, head_dim) float32 balancing factors, or (batch, KV heads or 1,
            head_dim) for per-row balancing; None for no balancing. Their reciprocals should be
            bfloat16 numbers, since the kernel rounds them.
        recipe_numbers: recipe of the pages (``oscar_mm.ops.library.recipe_numbers``).
    """

    keys: torch.Tensor
    values: torch.Tensor
    recent: torch.Tensor
    source: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    pages: Written
    not_finite: Written
    sigma: torch.Tensor | None
    recipe_numbers: list[int]

    @property
    def recipe(self) -> Recipe:
        """Recipe of the pages."""
        return recipe_of(self.recipe_numbers)


class PackParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/pack/pack.cu, field for field."""

    _fields_ = (
        *pointers("keys", "values", "recent", "source", "rows", "slots", "pages", "sigma"),
        *pointers("norms", "not_finite"),
        *(("key_stride", Strides), ("value_stride", Strides)),
        *ints("jobs", "kv_heads", "sigma_row_stride", "sigma_head_stride"),
    )


class NormsParams(ctypes.Structure):
    """Mirror of ``Params`` in csrc/pack/norms.cu, field for field."""

    _fields_ = (
        *pointers("keys", "recent", "source", "rows", "slots", "sigma", "norms"),
        ("key_stride", Strides),
        *ints("kv_heads", "sigma_row_stride", "sigma_head_stride"),
    )


def shared_bytes(head_dim: int) -> int:
    """Return ``sizeof(Shared)`` of csrc/pack/pack.cu."""
    rows, sources, sizes = 3 * PAGE_TOKENS * head_dim * 2, 2 * PAGE_TOKENS * 4, head_dim * 2
    return rows + sources + sizes + 2 * PAGE_TOKENS * 4


class Specialization(NamedTuple):
    """Compile-time parameters of the kernels."""

    recipe: Recipe
    dtype: torch.dtype

    @property
    def macros(self) -> dict[str, str | int]:
        """Preprocessor macros for compiling csrc/pack/pack.cu."""
        return recipe_macros(*self) | {
            "CODE_BITS": self.recipe.page_format.bits.keys,
            "NORM_FIT": NORMS.index(self.recipe.norm),
            "VALUE_SCALE": VALUE_SCALES.index(self.recipe.value_scale),
        }

    @property
    def norms_macros(self) -> dict[str, str | int]:
        """Preprocessor macros for compiling csrc/pack/norms.cu."""
        return page_macros(self.recipe.page_format) | {"ELEMENT": ELEMENTS[self.dtype]}


class PackKernel(OperationKernel[Specialization], operation="pack", bound=0.01):
    """CUDA kernels of ``pack``; the kernel ``norms`` runs first if all heads share their norms."""

    def __init__(self, specialization: Specialization, device: torch.device) -> None:
        super().__init__(specialization, device)
        recipe, dtype = specialization
        check_pages(recipe.page_format, dtype)
        if recipe.page_format.codec.appends_tokens:
            raise KernelError(OUT_OF_ORDER)
        self._norms = None
        if recipe.page_format.token_scaling == "shared":
            if recipe.norm != "plain":
                # Fitting a norm over all heads to the codes needs all heads at once, but a thread
                # block has only one.
                raise KernelError("the kernel supports norms per head, not one for all heads")
            self._norms = self._load("pack/norms.cu", specialization.norms_macros)
        self._pack = self._load("pack/pack.cu", specialization.macros)

    def __call__(self, arguments: PackArguments) -> None:
        """Launch the kernels; requires at least one page to write."""
        keys, values, recent, source, rows, slots, pages, not_finite, sigma, *_ = arguments
        keys, values = aligned_rows(keys), aligned_rows(values)
        stream, (_, heads, _, head_dim) = current_stream(keys.device), keys.shape
        sigma_steps, norms = sigma_strides(sigma), None
        if self._norms is not None:
            norms = torch.empty(source.shape, dtype=torch.float32, device=keys.device)
            tensors = addresses(keys, recent, source, rows, slots, sigma, norms)
            params = NormsParams(*tensors, strides(keys), heads, *sigma_steps)
            self._norms.launch((len(source), 1, 1), (_NORMS_THREADS, 1, 1), 0, params, stream)
        params = PackParams(
            *addresses(keys, values, recent, source, rows, slots, pages, sigma, norms, not_finite),
            *(strides(keys), strides(values), len(source), heads, *sigma_steps),
        )
        blocks = min(len(source) * heads, _PER_PROCESSOR * multiprocessors(keys.device))
        block, shared = (2 * head_dim, 1, 1), shared_bytes(head_dim)
        self._pack.launch((blocks, 1, 1), block, shared, params, stream)

    @staticmethod
    def disagreement(
        specialization: Specialization, kernel: Callable[[Any], None], device: torch.device
    ) -> float:
        """Return the fraction of bytes that differ; a few may, where a value lies between
        two codes."""
        recipe, dtype = specialization
        page_format = replace(recipe.page_format, kv_heads=CHECKED_HEADS)
        jobs = random_jobs(page_format, dtype, device)
        numbers = recipe_numbers(replace(recipe, page_format=page_format))
        shape = (2, JOB_SLOTS, page_format.page_bytes)
        results = torch.zeros((2, *shape), dtype=torch.uint8, device=device)
        not_finite = torch.zeros(1, dtype=torch.int32, device=device)
        for of_run, run in zip(results, (kernel, pack_by_torch), strict=True):
            for pages, rows in zip(of_run, ((), (len(jobs[0]),)), strict=True):
                sigma = random_basis(page_format, recipe.rotate, device, rows).sigma
                run(PackArguments(*jobs, pages, not_finite, sigma, numbers))
        if bool(not_finite):
            return float("nan")
        return float((results[0] != results[1]).float().mean())


def pack_by_torch(arguments: PackArguments) -> None:
    """Run ``pack`` with PyTorch operations; waits for the device."""
    keys, values, recent, source, rows, slots, pages, not_finite, sigma, *_ = arguments
    todo = (slots >= 0).nonzero()[:, 0]
    for part in parts_of(len(todo), arguments.recipe.page_format):
        jobs = todo[part]
        stored = source[jobs], rows[jobs, None]
        key_pages = tokens_of(keys, recent, 0, *stored).transpose(1, 2)
        value_pages = tokens_of(values, recent, 1, *stored).transpose(1, 2)
        of_jobs = sigma_of(sigma, rows[jobs])
        packed, finite = quantize(key_pages, value_pages, arguments.recipe, of_jobs)
        pages[slots[jobs]] = packed
        not_finite |= (~finite).int()


def _check(arguments: PackArguments) -> None:
    recipe, keys = arguments.recipe, arguments.keys
    page_format = recipe.page_format
    heads, head_dim, count = page_format.kv_heads, page_format.head_dim, arguments.source.shape[0]
    check, device = _checker.check, keys.device
    check("keys", keys, ("batch", heads, "tokens", head_dim), STATES, device, rows=True)
    check("values", arguments.values, keys.shape, keys.dtype, device, rows=True)
    check("recent", arguments.recent, ("slots", 2, heads, head_dim), keys.dtype, device)
    check("source", arguments.source, ("pages", PAGE_TOKENS), torch.int32, device)
    check("rows", arguments.rows, (count,), torch.int32, device)
    check("slots", arguments.slots, (count,), torch.int32, device)
    check("pages", arguments.pages, ("slots", page_format.page_bytes), torch.uint8, device)
    check("not_finite", arguments.not_finite, (1,), torch.int32, device)
    _checker.check_sigma(arguments.sigma, heads, head_dim, device, len(keys))
    if page_format.codec.appends_tokens:
        _checker.refuse("format", f"of key_axis {page_format.key_axis!r}", "of key_axis 'channel'")


def _pack(arguments: PackArguments) -> None:
    if len(arguments.source):
        specialization = Specialization(arguments.recipe, arguments.keys.dtype)
        kernel = PackKernel.of(specialization, arguments.keys.device)
        (kernel or pack_by_torch)(arguments)


pack_jobs = define("pack", PackArguments, _check, _pack)


def pack(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_format: PageFormat,
    policy: KVPolicy,
    basis: Basis,
) -> torch.Tensor:
    """Quantize full pages with this operation, or with ``store`` for pages to which tokens are
    appended.

    Args:
        keys: (pages, KV heads, 128, head_dim), float32, bfloat16 or float16, after RoPE; any
            strides.
        values: same shape and dtype as keys.
        page_format: layout of the pages.
        policy: policy that defines fit, norm, token scaling and value scale.
        basis: the layer's balancing and rotation.

    Returns:
        (pages, page_bytes) uint8.

    Raises:
        FloatingPointError: if ``not_finite`` is set. Reading ``not_finite`` waits for the device.
    """
    expected = (page_format.kv_heads, PAGE_TOKENS, page_format.head_dim)
    if tuple(keys.shape[1:]) != expected or values.shape != keys.shape:
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)}: "
            f"must both be (pages, {', '.join(map(str, expected))})"
        )
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
    recipe = replace(Recipe.of(page_format, policy), rotate=basis.rotate)
    of_pages = whole_pages if page_format.codec.appends_tokens else _whole_pages
    pages, not_finite = of_pages(keys, values, recipe, basis.sigma)
    if bool(not_finite):
        raise FloatingPointError(NOT_STORABLE)
    return pages


def _whole_pages(
    keys: torch.Tensor, values: torch.Tensor, recipe: Recipe, sigma: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages, each written at once, and ``not_finite``."""
    count, (_, heads, _, head_dim), page_format = len(keys), keys.shape, recipe.page_format
    order = torch.arange(max(count, PAGE_TOKENS), dtype=torch.int32, device=keys.device)
    rows = order[:count]
    pages = torch.zeros(count, page_format.page_bytes, dtype=torch.uint8, device=keys.device)
    not_finite = torch.zeros(1, dtype=torch.int32, device=keys.device)
    pack_jobs(
        *(keys, values, keys.new_empty(0, 2, heads, head_dim)),
        *(order[:PAGE_TOKENS].repeat(count, 1), rows, rows, pages, not_finite, sigma),
        recipe_numbers(recipe),
    )
    return pages, not_finite
