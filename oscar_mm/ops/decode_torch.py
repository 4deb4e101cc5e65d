"""``decode`` with PyTorch operations: attention to parts of the past, merged exactly.

The results for parts of the keys and values are merged using their log-sum-exps. Each part is
processed by torch's flash attention and then discarded, so the extra memory does not grow with the
past. This is used for many queries (a later turn), and for few queries if ``decode`` has no kernel.
"""

from __future__ import annotations

import torch

from oscar_mm.kernels.launch import refuse_capture
from oscar_mm.ops.decode_tables import SECOND, START, DecodeArguments
from oscar_mm.ops.library import sigma_of
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.pages.quantize import unpack_stored
from oscar_mm.quant.basis import Basis

_SCORE_ELEMENTS = 1 << 24
"""Number of scores to compute at a time without flash attention (64 MB in float32)."""
_TOKENS_AT_ONCE = 2048
"""Number of past tokens to have in memory at a time, in float32, if there is no kernel."""
_FEW = 16_384
"""Maximum number of tokens to unpack for all rows in one pass; more are unpacked row by row."""


class MergedAttention:
    """Attention of queries to keys and values that are added in parts, in any order."""

    def __init__(self, queries: torch.Tensor, scaling: float) -> None:
        """
        Args:
            queries: (batch, query heads, tokens, head_dim); a query head attends to KV head
                ``head // (query heads / KV heads)``.
            scaling: factor by which scores are multiplied.
        """
        self._queries, self._scaling = queries, scaling
        self._output: torch.Tensor | None = None
        self._total: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor:
        """Log of the sum of exp(scores), (batch, query heads, tokens) float32."""
        return self._added()[1]

    def _added(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the merged output and total, in float32."""
        if self._output is None or self._total is None:
            raise RuntimeError("no keys and values were added")
        return self._output, self._total

    def add(self, keys: torch.Tensor, values: torch.Tensor, *, causal: bool = False) -> None:
        """Attend to one part.

        Args:
            keys, values: (batch, KV heads, n, head_dim) in the queries' dtype, with n at least 1.
            causal: whether query i attends only to keys up to i; requires the same number of keys
                and queries.
        """
        self.merge(*_attention(self._queries, keys, values, self._scaling, causal))

    def add_later(
        self, keys: torch.Tensor, values: torch.Tensor, tokens: slice | torch.Tensor
    ) -> None:
        """Attend from each token of a group to the later tokens of the group.

        Args:
            keys, values: (batch, KV heads, queries, head_dim), one for each query.
            tokens: the group: a slice or ascending int64 indices of at least two queries.
        """
        # In reverse order, attention to later tokens is attention to earlier ones.
        queries = self._queries[:, :, tokens][:, :, :-1].flip(2)
        keys, values = (x[:, :, tokens][:, :, 1:].flip(2) for x in (keys, values))
        reverse = _attention(queries, keys, values, self._scaling, causal=True)
        output, total = (x.flip(2) for x in reverse)
        whole, sums = self._added()
        before = sums[:, :, tokens][:, :, :-1]
        share = torch.sigmoid(total - before)[..., None]
        earlier = slice(tokens.start, tokens.stop - 1) if isinstance(tokens, slice) else tokens[:-1]
        whole[:, :, earlier] = whole[:, :, earlier].lerp(output.float(), share)
        sums[:, :, earlier] = torch.logaddexp(before, total)

    def merge(self, output: torch.Tensor, total: torch.Tensor) -> None:
        """Merge the result of the same queries for another part.

        Args:
            output: (batch, query heads, tokens, head_dim), any float dtype.
            total: log of the sum of exp(scores), (batch, query heads, tokens) float32.
        """
        if self._output is None or self._total is None:
            self._output, self._total = output.float(), total
            return
        # exp(total) / (exp(before) + exp(total)): the new part's share of the weights
        share = torch.sigmoid(total - self._total)[..., None]
        self._output = self._output.lerp_(output.float(), share)
        self._total = torch.logaddexp(self._total, total)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Enlarge the denominator of each head's softmax by exp(sink), see ``oscar_mm.ops.sinks``.

        Args:
            sinks: (query heads,).
        """
        output, total = self._added()
        added = sinks.float()[None, :, None]
        output.mul_(torch.sigmoid(total - added)[..., None])
        self._total = torch.logaddexp(total, added)

    def output(self) -> torch.Tensor:
        """Return the merged output, (batch, query heads, tokens, head_dim) in the dtype of the
        queries."""
        return self._added()[0].to(self._queries.dtype)


def _attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the log of the sum of exp(scores), (batch, query heads, tokens)
    float32."""
    states = (queries, keys, values, 0.0, causal)
    if queries.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, total = flash(*states, scale=scaling)
    elif has_flash(queries):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        output, total, *_ = flash(*states, scale=scaling)
    else:
        output, total = _without_flash(queries, keys, values, scaling, causal)
    return output, total


def has_flash(queries: torch.Tensor) -> bool:
    """Return whether torch's flash attention for GPUs supports this device, dtype and head_dim."""
    return (
        queries.is_cuda
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(queries.device) >= (8, 0)
        and queries.dtype in (torch.bfloat16, torch.float16)
        and queries.shape[3] % 8 == 0
        and queries.shape[3] <= 256
    )


def _without_flash(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with matrix products in float32, a few queries at a time."""
    kv_heads, count = keys.shape[1:3]
    grouped = queries.unflatten(1, (kv_heads, -1))
    keys, values = (x.float()[:, :, None] for x in (keys, values))
    outputs, totals = [], []
    step = max(1, _SCORE_ELEMENTS // (queries.shape[:2].numel() * count))
    for start in range(0, queries.shape[2], step):
        part = grouped[:, :, :, start : start + step].float() * scaling
        scores = part @ keys.mT
        if causal:
            place = torch.arange(start, start + part.shape[3], device=queries.device)
            hidden = place[:, None] < torch.arange(count, device=queries.device)
            scores = scores.masked_fill(hidden, -torch.inf)
        totals.append(scores.logsumexp(-1).flatten(1, 2))
        outputs.append((scores.softmax(-1) @ values).flatten(1, 2))
    return torch.cat(outputs, dim=2), torch.cat(totals, dim=2)


def decode_by_torch(arguments: DecodeArguments) -> torch.Tensor:
    """Run ``decode`` with PyTorch operations, one row at a time; waits for the device."""
    refuse_capture("decode", arguments.queries.device)
    queries, keys, values, pages, recent, sigma, items, recents, counts, *_ = arguments
    output = arguments.result()
    all_pages = items[torch.arange(items.shape[1], device=items.device) < counts[:, 1:2]]
    few = [
        _FewPages(pages[number], all_pages[(all_pages[:, 1] >= SECOND) == bool(number)][:, 0], one)
        for number, one in enumerate(arguments.page_formats)
    ]
    for row, (in_16_bit, in_pages) in enumerate(counts.tolist()):
        of_row = slice(row, row + 1)
        plain = MergedAttention(queries[of_row].float(), arguments.scaling)
        plain.add(keys[of_row].float(), values[of_row].float(), causal=True)
        for slots in recents[row, :in_16_bit].split(_TOKENS_AT_ONCE) if in_16_bit else ():
            stored = recent[slots].permute(1, 2, 0, 3).float()
            plain.add(stored[:1], stored[1:])
        # Attend in the coordinates of the pages, in which scores are the same.
        basis = Basis(queries.shape[3], arguments.rotate, sigma_of(sigma, row))
        turned = basis.queries_in(queries[row].reshape(keys.shape[1], -1, queries.shape[3]))
        packed = MergedAttention(turned.view_as(queries[of_row]), arguments.scaling)
        entries = items[row, :in_pages]
        for number, stored_pages in enumerate(few):
            mine = entries[(entries[:, 1] >= SECOND) == bool(number)]
            for part in mine.split(_TOKENS_AT_ONCE // PAGE_TOKENS) if len(mine) else ():
                stored = stored_pages[part[:, 0]]
                used = part[:, 1] % SECOND
                packed.add(*(_in_use(side, used // START, used % START) for side in stored))
        if in_pages:
            plain.merge(basis.values_out(packed.output()), packed.total)
        if arguments.sinks is not None:
            plain.add_sinks(arguments.sinks)
        output[row] = plain.output()[0]
    return output


class _FewPages:
    """Keys and values of pages, unpacked in one pass for all rows unless there are too many.

    Args:
        pages: (slots, page_bytes) uint8.
        slots: (n,): slots that will be requested.
        page_format: format of the pages.
    """

    def __init__(self, pages: torch.Tensor, slots: torch.Tensor, page_format: PageFormat) -> None:
        self._pages, self._format = pages, page_format
        self._slots = slots.unique()
        few = 0 < len(self._slots) <= _FEW // PAGE_TOKENS
        self._unpacked = unpack_stored(pages[self._slots], page_format) if few else None

    def __getitem__(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of (n,) slots, each (n, KV heads, 128, d) float32."""
        if self._unpacked is None:
            return unpack_stored(self._pages[slots], self._format)
        places = torch.searchsorted(self._slots, slots.contiguous())
        keys, values = self._unpacked
        return keys[places], values[places]


def _in_use(states: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Select the used tokens, starts to stops - 1 of each page, from (n, KV heads, tokens, d);
    return (1, KV heads, used tokens, d)."""
    places = torch.arange(states.shape[2], device=states.device)
    used = (places >= starts[:, None]) & (places < stops[:, None])
    joined = states.transpose(0, 1).flatten(1, 2)[None]
    return joined if bool(used.all()) else joined[:, :, used.flatten()]
