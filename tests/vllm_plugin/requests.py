"""Requests that are scheduled as an engine like vLLM's does, and attention by its definition."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from oscar_mm.ops.rings import RingShape
from oscar_mm.pages.quantize import unpack_by_torch
from oscar_mm.quant.basis import Basis
from oscar_mm.vllm_plugin import Settings
from oscar_mm.vllm_plugin.attention import PagedAttention
from oscar_mm.vllm_plugin.step import Reading, Rings, Step, StepTables

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


@dataclass
class Request:
    """Queries (tokens, heads, d), keys and values of all its tokens, and what has been read.

    Attributes:
        exact_from: the first token that its ring may have, where it has one.
    """

    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    blocks: list[int]
    read: int = 0
    exact_from: int = 0
    outputs: list[torch.Tensor] = field(default_factory=list)

    def output(self) -> torch.Tensor:
        """Output of all tokens that were read."""
        return torch.cat(self.outputs)


class Layer:
    """One layer with a pool of pages, in which what was never written is NaN."""

    def __init__(
        self,
        policy: str = "standard",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        pages: int = 64,
        query_tokens: int = 1,
        max_unpacked: int = 64,
        layers_of_tables: int = 1,
        rings: int = 16,
        head_dim: int = HEAD_DIM,
    ) -> None:
        self.device, self.dtype, self.head_dim = torch.device(device), dtype, head_dim
        settings = Settings.of({"oscar_mm": {"policy": policy}})
        recipe, self.policy = settings.recipe(KV_HEADS, head_dim), settings.policy
        self.format, self.recipe = recipe.page_format, recipe
        self.attention = PagedAttention(recipe, HEADS, head_dim**-0.5, exact_attention)
        generator = torch.Generator().manual_seed(1)
        share = torch.rand(KV_HEADS, head_dim, generator=generator)
        self.attention.balance(1 / (share + 0.5).bfloat16().float())
        ring_shape = RingShape(self.policy.sinks, self.policy.window, query_tokens)
        self.attention.make_rings(rings * ring_shape.entries, self.device, dtype)
        self.attention.rings.fill_(torch.nan)
        self.attention.prepare(self.device, dtype, query_tokens)
        shape = (pages, self.format.page_bytes)
        self.pages = torch.full(shape, 255, dtype=torch.uint8, device=device)
        self.other_pages: list[torch.Tensor] = []
        """Pages of further layers, which get the same states."""
        self._other_rings: list[torch.Tensor] = []
        group = HEADS // KV_HEADS
        sizes = (16, 4096, pages, KV_HEADS, group, max_unpacked)
        self.rings = Rings(rings, ring_shape, pages, self.device)
        self.tables = StepTables(*sizes, self.device, self.rings, layers_of_tables)
        self._free = list(range(pages - 1, 0, -1))
        self._generator = torch.Generator().manual_seed(2)

    def request(self, tokens: int, like: Request | None = None, shared: int = 0) -> Request:
        """A request of so many tokens, of which the first are another's, whose blocks it shares."""
        drift = torch.randn(KV_HEADS, self.head_dim, generator=self._generator) * 2
        states = []
        for heads in (HEADS, KV_HEADS, KV_HEADS):
            x = torch.randn(tokens, heads, self.head_dim, generator=self._generator)
            states.append(x.to(self.device, self.dtype))
        states[1] += drift.to(self.device, self.dtype)
        blocks = [self._free.pop() for _ in range(-(-tokens // 128) - shared // 128)]
        if like is not None:
            for mine, other in zip(states, like.states, strict=True):
                mine[:shared] = other[:shared]
            blocks = like.blocks[: shared // 128] + blocks
        return Request(tuple(states), blocks, shared, shared)

    def step(
        self, scheduled: list[tuple[Request, int]], decodes: int | None = None, padding: int = 0
    ) -> Step:
        """Read so many tokens of each request; those that decode come first.

        Args:
            scheduled: requests and numbers of tokens.
            decodes: how many of them decode; by default those of one token.
            padding: rows and tokens behind the last ones.
        """
        count = sum(n for _, n in scheduled)
        if decodes is None:
            decodes = sum(n == 1 for _, n in scheduled)
        if decodes == len(scheduled):
            decodes += padding
        width = max(len(request.blocks) for request, _ in scheduled) + 2
        rows = len(scheduled) + padding
        blocks = torch.zeros(rows, width, dtype=torch.int32)
        lengths, starts = np.zeros(rows, np.int32), np.zeros(rows + 1, np.int32)
        starts[1:] = count
        slots = torch.full((count + padding,), -1)
        at = 0
        for row, (request, n) in enumerate(scheduled):
            blocks[row, : len(request.blocks)] = torch.tensor(request.blocks)
            lengths[row], starts[row] = request.read + n, at
            for place in range(request.read, request.read + n):
                slots[at] = request.blocks[place // 128] * 128 + place % 128
                at += 1
        step = self.tables.step(
            *(blocks.to(self.device), torch.from_numpy(lengths).to(self.device)),
            *(torch.from_numpy(starts).to(self.device), slots.to(self.device), decodes),
            *(scheduled[0][1] if decodes else 1, starts, lengths),
        )
        states = []
        for side in range(3):
            of_all = [r.states[side][r.read : r.read + n] for r, n in scheduled]
            nan = of_all[0].new_full((padding, *of_all[0].shape[1:]), torch.nan)
            states.append(torch.cat([*of_all, nan]))
        output = torch.full_like(states[0], torch.nan)
        self.attention(*states, self.pages, step, output)
        while len(self._other_rings) < len(self.other_pages):
            self._other_rings.append(torch.full_like(self.attention.rings, torch.nan))
        for pages, rings in zip(self.other_pages, self._other_rings, strict=False):
            own, self.attention.rings = self.attention.rings, rings
            self.attention(*states, pages, step, torch.empty_like(output))
            self.attention.rings = own
        at = 0
        for request, n in scheduled:
            request.outputs.append(output[at : at + n])
            request.read += n
            at += n
        return step

    def stored(self, request: Request, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a request's first tokens as pages have them, (tokens, KV heads, d)."""
        pages = self.pages[request.blocks[: -(-tokens // 128)]].cpu()
        sigma = self.attention.sigma
        basis = Basis(self.head_dim, self.recipe.rotate, None if sigma is None else sigma.cpu())
        keys, values = unpack_by_torch(pages, self.format, basis, torch.float32)
        return tuple(x.transpose(1, 2).flatten(0, 1)[:tokens] for x in (keys, values))

    def expected(self, request: Request, start: int, stop: int) -> torch.Tensor:
        """Attention of tokens that were read in one step, in float64: to their own and to those
        that the ring has as they came, to others before as pages have them."""
        queries, *new = (x[start:stop].cpu().double() for x in request.states)
        past = self.stored(request, start) if start else [x[:0] for x in new]
        recent = slice(max(start - self.policy.window, request.exact_from), start)
        sinks = slice(0 if request.exact_from else min(self.policy.sinks, start))
        for side, came in zip(past, request.states[1:], strict=True):
            for exact in (sinks, recent):
                side[exact] = came[exact].cpu().float()
        keys, values = (torch.cat([a.double(), b]) for a, b in zip(past, new, strict=True))
        return causal(queries, keys, values)


def causal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The last tokens' causal attention, (tokens, heads, d) each."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * queries.shape[2] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
    scores = scores.masked_fill(hidden.triu(scores.shape[2] - scores.shape[1] + 1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def exact_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    reading: Reading,
    version: int | None = None,
) -> None:
    """In the place of flash attention, request by request."""
    assert scale == query.shape[2] ** -0.5
    starts = reading.starts.tolist()
    for row, (start, stop) in enumerate(pairwise(starts)):
        if reading.past is None:
            own = keys[start:stop], values[start:stop]
        else:
            length = int(reading.past.lengths[row])
            table = reading.past.table[row, : -(-length // 128)].long()
            own = tuple(x[table].flatten(0, 1)[:length] for x in (keys, values))
        output[start:stop] = causal(query[start:stop].float(), *(x.float() for x in own))
