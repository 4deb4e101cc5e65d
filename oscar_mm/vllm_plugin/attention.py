"""Paged attention for layers whose tokens are all in stream pages, and some also in rings.

This module does not depend on vLLM, which calls it with the requests of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from oscar_mm.errors import InputError
from oscar_mm.ops.append import UNITS, AppendKernel, append
from oscar_mm.ops.append import Specialization as AppendSpecialization
from oscar_mm.ops.block_tables import BlockTablesKernel
from oscar_mm.ops.decode import DecodeKernel, decode, decode_kernel
from oscar_mm.ops.decode_tables import DecodeArguments
from oscar_mm.ops.library import numbers_of, recipe_numbers
from oscar_mm.ops.rings import RingsKernel
from oscar_mm.ops.store import Specialization as StoreSpecialization
from oscar_mm.ops.store import StoreKernel, store, store_layers
from oscar_mm.ops.unpack import Specialization as UnpackSpecialization
from oscar_mm.ops.unpack import UnpackKernel, unpack_slots
from oscar_mm.pages.quantize import Recipe
from oscar_mm.vllm_plugin.step import Reading, Step

Flash = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, Reading],
    None,
]
"""Function that computes causal attention for the requests of a reading. The arguments are queries
(tokens, query heads, head_dim), keys, values, the output, the factor by which scores are
multiplied, and the reading. Keys and values are only the new ones, (tokens, KV heads, head_dim),
or, if requests have a past, all of them, (pages, 128, KV heads, head_dim)."""


class StoredLayer(NamedTuple):
    """A layer's rings, and the pages in which to store their tokens; see ``store_layers``."""

    recent: torch.Tensor
    pages: torch.Tensor
    not_finite: torch.Tensor
    sigma: torch.Tensor | None


class PagedAttention:
    """Stores a layer's new tokens in pages, and attends to both new and stored tokens.

    Requests attend to the exact new tokens and tokens in their rings, and to all other tokens as
    stored in pages. Decode reads packed pages; for prompts, pages are unpacked first.

    Args:
        recipe: recipe of the pages.
        heads: number of query heads.
        scale: factor by which scores are multiplied.
        flash: attention function for prompts.

    Attributes:
        group: number of query heads per KV head.
        sigma: (KV heads or 1, head_dim) float32 balancing factors; None for no balancing.
        rings: (slots, 2, KV heads, head_dim): tokens in the model's dtype; empty until
            ``make_rings`` is called.
    """

    def __init__(self, recipe: Recipe, heads: int, scale: float, flash: Flash) -> None:
        self._recipe, self._scale, self._flash = recipe, scale, flash
        self._page_format = recipe.page_format
        self._formats = numbers_of(self._page_format)
        self._recipe_numbers = recipe_numbers(recipe)
        self.group = heads // self._page_format.kv_heads
        self.sigma: torch.Tensor | None = None
        self.rings = torch.empty(0, 2, self._page_format.kv_heads, self._page_format.head_dim)
        self._not_finite = torch.zeros(1, dtype=torch.int32)

    def make_rings(self, places: int, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate memory for this number of tokens in rings, unless it is already allocated."""
        own = self.rings
        if len(own) < places or (own.device, own.dtype) != (device, dtype):
            # Zeros, because layers of a draft model may read entries that they have not written.
            self.rings = own.new_zeros(places, *own.shape[1:], device=device, dtype=dtype)

    def balance(self, sigma: torch.Tensor | None, device: torch.device | None = None) -> None:
        """Set the balancing factors of queries and keys; call this again if weights are reloaded.

        Args:
            sigma: (KV heads or 1, head_dim) float32; None for no balancing.
            device: device of the layer, if known.
        """
        if self.sigma is not None and sigma is not None:
            self.sigma.copy_(sigma)  # Captured graphs use its address.
        else:
            self.sigma = None if sigma is None else sigma.to(device).contiguous()

    def prepare(self, device: torch.device, dtype: torch.dtype, query_tokens: int) -> None:
        """Prepare for capturing a step: load kernels, and allocate tensors at fixed addresses.

        Args:
            device: device of the layer.
            dtype: dtype of queries, keys and values.
            query_tokens: maximum number of new tokens per decoding request.

        Raises:
            InputError: if the kernels do not run on this GPU.
        """
        self._not_finite = self._not_finite.to(device)
        if self.sigma is not None:
            self.sigma = self.sigma.to(device).contiguous()
        if device.type != "cuda":
            return
        kernels: list[object] = [
            self._decode_kernel(dtype, tokens, device) for tokens in range(1, query_tokens + 1)
        ]
        unpacked = UnpackSpecialization(self._page_format, self._recipe.rotate, dtype)
        kernels += [
            StoreKernel.of(StoreSpecialization(self._recipe, dtype), device),
            AppendKernel.of(AppendSpecialization(dtype, UNITS[0]), device),
            UnpackKernel.of(unpacked, device),
            *(RingsKernel.of(None, device), BlockTablesKernel.of(None, device)),
        ]
        if None in kernels:
            raise InputError(
                "--attention-backend CUSTOM (oscar_mm): the kernels do not run on this GPU; "
                "`oscar-mm doctor` says why"
            )

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: torch.Tensor,
        step: Step,
        output: torch.Tensor,
    ) -> None:
        """Attend to past and new tokens, and store the new ones.

        Args:
            query: (tokens, query heads, head_dim), after RoPE.
            key, value: (tokens, KV heads, head_dim).
            pages: (pages, page_bytes) uint8, written to.
            step: describes the requests; any tokens past the end of the last request are padding.
            output: (tokens, query heads, head_dim), written to.
        """
        is_staged = step.tables.staged
        if not is_staged:
            self._store(key, value, pages, step)
        if step.decodes:
            part = slice(step.decode_tokens)
            self._decode(query[part], key[part], value[part], pages, step, output[part])
        for reading in step.readings:
            part = reading.tokens
            self._read(query[part], key[part], value[part], pages, reading, output[part])
        if step.has_rings:
            # This comes after decode, which reads the new tokens directly, not from their places.
            is_beside = bool(step.decodes) and not step.readings
            keys, values = (states.transpose(0, 1)[None] for states in (key, value))
            append(keys, values, self.rings, step.tables.writes, self._not_finite, is_beside)
        layer = StoredLayer(self.rings, pages, self._not_finite, self.sigma)
        layers = step.passed.through(layer)
        if is_staged and layers:
            self._store_layers(layers, step)

    def _store(
        self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, step: Step
    ) -> None:
        own = self.rings.shape[1:]
        store(
            *(key.transpose(0, 1)[None], value.transpose(0, 1)[None], key.new_empty(0, *own)),
            *(step.tables.jobs, self._begins(step), pages, self._not_finite, self.sigma),
            self._recipe_numbers,
        )

    def _store_layers(self, layers: list[StoredLayer], step: Step) -> None:
        recent, pages, not_finite, sigma = (list(x) for x in zip(*layers, strict=True))
        tables = step.tables.jobs, self._begins(step)
        store_layers(recent, *tables, pages, not_finite, sigma, self._recipe_numbers)

    def _begins(self, step: Step) -> torch.Tensor:
        return step.tables.begins if self._page_format.center else step.tables.begins[:0]

    def _decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: torch.Tensor,
        step: Step,
        output: torch.Tensor,
    ) -> None:
        shape = (step.decodes, step.query_tokens)
        queries, keys, values, outputs = (
            x.unflatten(0, shape).transpose(1, 2) for x in (query, key, value, output)
        )
        tables = step.tables
        arguments = DecodeArguments(
            *(queries, keys, values, [pages], self.rings, self.sigma),
            *(tables.items, tables.recents, tables.counts, tables.assignments),
            *(self._scale, self._formats, self._recipe.rotate),
        )
        kernel = self._decode_kernel(query.dtype, step.query_tokens, query.device)
        if kernel is not None:
            kernel(arguments, outputs)
        else:
            outputs.copy_(decode(*arguments))

    def _read(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: torch.Tensor,
        reading: Reading,
        output: torch.Tensor,
    ) -> None:
        past = reading.past
        if past is None:
            self._flash(query, key, value, output, self._scale, reading)
            return
        how = (self._formats, self._recipe.rotate, key.dtype)
        unpacked = unpack_slots(pages, past.slots, self.sigma, *how)
        target, places = past.exact
        exact = self.rings[places].unbind(1)
        keys, values = (
            _with_exact(side, [(target, kept), (past.places, new)])
            for side, kept, new in zip(unpacked, exact, (key, value), strict=True)
        )
        self._flash(query, keys, values, output, self._scale, reading)

    def _decode_kernel(
        self, dtype: torch.dtype, tokens: int, device: torch.device
    ) -> DecodeKernel | None:
        formats, head_dim = (self._page_format,), self._page_format.head_dim
        columns = self.group * tokens
        return decode_kernel(formats, head_dim, self._recipe.rotate, dtype, columns, device)


def _with_exact(
    side: torch.Tensor, exact: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Replace some unpacked keys or values with their exact originals.

    If indices repeat, the last entry of ``exact`` wins.

    ``side`` is (pages, KV heads, 128, d), and the result is (pages, 128, KV heads, d).
    """
    by_head = side.transpose(0, 1)
    for places, tokens in exact:
        by_head.flatten(1, 2).index_copy_(1, places, tokens.transpose(0, 1))
    return by_head.permute(1, 2, 0, 3)
