"""OscarLayer: the bytes of one layer, and attention over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import CacheLayerMixin

from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS, PageFormat
from oscar_mm.cache.ledger import PackJob, Sequence, Step
from oscar_mm.cache.pool import Pool
from oscar_mm.cache.stream import Stream
from oscar_mm.errors import InputError
from oscar_mm.ops.pack import pack
from oscar_mm.ops.packed_attention import packed_attention
from oscar_mm.ops.unpack import unpack
from oscar_mm.quant.balance import sigma_from_norms, sigma_from_prompt
from oscar_mm.quant.basis import Basis

if TYPE_CHECKING:
    from oscar_mm.cache.cache import OscarCache

UNPACK_PAGES = 16
"""Pages of one stream that are unpacked at a time: 2,048 tokens."""


class OscarLayer(CacheLayerMixin):
    """One layer of an ``OscarCache``: its pools, its basis, and what a ``Step`` does to them."""

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: OscarCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        # Steps carried out, and whether the next one has come in but is not carried out yet.
        self.steps, self.waits = 0, False
        self.sigma: torch.Tensor | None = None
        self.sigma_is_final = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shapes, dtype and device from the first keys: (batch, KV heads, tokens, d)."""
        if key_states.shape != value_states.shape:
            raise InputError(
                f"layer {self.index}: keys {tuple(key_states.shape)} and values "
                f"{tuple(value_states.shape)} differ in shape: this model is not supported"
            )
        _, self.kv_heads, _, self.head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        policy = self.cache.policy
        block = (2, self.kv_heads, BLOCK_TOKENS, self.head_dim)
        self.blocks = Pool(block, self.dtype, self.device)
        self.formats = {
            bits: PageFormat.of(policy, bits, self.kv_heads, self.head_dim)
            for bits in set(policy.bits) - {16}
        }
        self.pages = {
            bits: Pool((page_format.page_bytes,), torch.uint8, self.device)
            for bits, page_format in self.formats.items()
        }
        self.kernel = packed_attention(
            self.formats, self.head_dim, policy.rotate, self.dtype, self.device
        )
        self.is_initialized = True

    @property
    def basis(self) -> Basis:
        """Coordinates of the pages."""
        return Basis(self.head_dim, self.cache.policy.rotate, self.sigma)

    @torch.inference_mode(False)
    @torch.no_grad()
    def settle_basis(
        self,
        keys: torch.Tensor,
        queries: torch.Tensor | None = None,
        module: torch.nn.Module | None = None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """Choose the balancing once, before the first page is packed; see ``KVPolicy.balance``.

        Args:
            keys: (batch, KV heads, tokens, head_dim) of the first chunk.
            queries: (batch, query heads, tokens, head_dim); None where only keys are known.
            module: the attention module, for its ``q_norm`` and ``k_norm``.
            tokens: (batch, tokens) bool, which are not padding.
        """
        wanted = self.cache.policy.balance
        if self.sigma_is_final or not self.cache.policy.packs:
            return
        sigma = self.sigma if wanted in ("weights", "auto") else None
        if sigma is None and wanted in ("weights", "auto") and hasattr(module, "k_norm"):
            sigma = sigma_from_norms(module.q_norm, module.k_norm, self.head_dim)
        if sigma is None and wanted in ("prompt", "auto") and queries is not None:
            centered = self.cache.policy.key_axis == "channel"
            sigma = sigma_from_prompt(queries, keys, tokens, centered=centered)
        if sigma is None and wanted in ("weights", "prompt"):
            needs = {
                "weights": "a model with QK-norm over a head (Qwen3 and others), and attention "
                "'oscar' or OscarCache(policy, model=model)",
                "prompt": "attention 'oscar': other implementations do not show the queries",
            }[wanted]
            raise InputError(f"layer {self.index}: balance={wanted!r} needs {needs}")
        self.sigma = None if sigma is None else sigma.to(keys.device)
        self.sigma_is_final = True

    @torch.no_grad()
    def append(self, keys: torch.Tensor, values: torch.Tensor, step: Step) -> None:
        """Store a chunk, (batch, KV heads, tokens, head_dim) each, as the step says."""
        for bits, pool in self.pages.items():
            pool.reserve(self.cache.ledger.allocators[bits].capacity)
        for job in step.packs:
            self._pack(job, keys[job.row], values[job.row])
        self.blocks.reserve(self.cache.ledger.allocators[16].capacity)
        for source, target in step.copies:
            self.blocks.storage[target] = self.blocks.storage[source]
        if step.writes is not None:
            rows, tokens, blocks, places = step.writes_on(self.device)
            for side, states in enumerate((keys, values)):
                new = states[rows, :, tokens]
                # One token is checked by its logits: a check per layer would stall a GPU.
                if keys.shape[2] > 1 and not bool(new.isfinite().all()):
                    raise FloatingPointError(
                        f"layer {self.index}: keys or values hold NaN or infinity"
                    )
                self.blocks.storage[:, side][blocks, :, places] = new
        self.steps += 1
        self.waits = False

    def _pack(self, job: PackJob, keys: torch.Tensor, values: torch.Tensor) -> None:
        source = torch.from_numpy(job.source).to(self.device)
        parts = [torch.stack((keys[:, source], values[:, source]))]
        if job.tail:
            parts.insert(0, self.tail(job.blocks, job.tail))
        both = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        both = both.unflatten(2, (-1, PAGE_TOKENS)).transpose(1, 2)
        page_format = self.formats[job.bits]
        try:
            packed = pack(both[0], both[1], page_format, self.cache.policy, self.basis)
        except FloatingPointError as error:
            raise FloatingPointError(f"layer {self.index}: {error}") from None
        self.pages[job.bits].storage[job.pages] = packed

    def tail(self, blocks: list[int], tokens: int) -> torch.Tensor:
        """(2, KV heads, tokens, head_dim) from the first ``tokens`` places of blocks."""
        stored = self.blocks.storage[blocks]
        return stored.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]

    def page_runs(self, stream: Stream) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Page bytes of a stream, a bounded number of pages at a time, and their tokens."""
        for start in range(0, len(stream.pages), UNPACK_PAGES):
            run = slice(start, start + UNPACK_PAGES)
            yield self.pages[stream.bits].storage[stream.pages[run]], stream.page_tokens[run]

    def unpacked(
        self, sequences: list[Sequence], length: int, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored keys and values in sequence order: (batch, KV heads, length, head_dim) each.

        In the model's coordinates and, if no other is asked for, dtype; 0 where a token is padding.
        """
        dtype = dtype or self.dtype
        shape = (2, len(sequences), self.kv_heads, length, self.head_dim)
        both = torch.zeros(shape, dtype=dtype, device=self.device)
        for row, sequence in enumerate(sequences):
            target = both[:, row]
            for code, stream in sequence.streams.items():
                places = torch.from_numpy(sequence.positions(code)).to(self.device)
                start = 0
                for pages, tokens in self.page_runs(stream):
                    sides = unpack(pages, self.formats[stream.bits], self.basis, dtype)
                    where = places[start : start + sum(tokens)]
                    start += len(where)
                    target[:, :, where] = torch.stack([joined(side, tokens) for side in sides])
                where = places[start : start + stream.tail]
                target[:, :, where] = self.tail(stream.blocks, stream.tail).to(dtype)
        return both[0], both[1]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Not for direct use: an ``OscarCache`` needs all its layers to take the same chunk."""
        return self.cache.update(key_states, value_states, self.index)

    def get_seq_length(self) -> int:
        """Tokens of a row, padding included."""
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length of keys after ``query_length`` more tokens, 0)."""
        return self.cache.get_mask_sizes(query_length, self.index)

    def get_max_length(self) -> int:
        """-1: unbounded."""
        return -1


def joined(pages: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """(n, KV heads, 128, head_dim) -> (KV heads, tokens in use, head_dim)."""
    if all(count == PAGE_TOKENS for count in tokens):
        return pages.transpose(0, 1).flatten(1, 2)
    return torch.cat([page[:, :count] for page, count in zip(pages, tokens, strict=True)], dim=1)
