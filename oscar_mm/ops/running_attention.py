"""Attention of queries over blocks of keys and values, merged by running softmax.

Nothing is unpacked beyond one block: each is scored, weighted and forgotten (the online softmax of
FlashAttention, arXiv:2205.14135), so the extra memory does not grow with the past.
"""

from __future__ import annotations

import torch

from oscar_mm.quant.basis import Basis

_SCORE_ELEMENTS = 1 << 24
"""Scores computed at a time (float32: 64 MB)."""


class RunningAttention:
    """Attention of one sequence's queries over keys and values that arrive in blocks.

    Stored (balanced, rotated) and plain blocks may be mixed: queries exist in both coordinates,
    scores are the same in either, and the two outputs are added at the end.
    """

    def __init__(
        self, queries: torch.Tensor, kv_heads: int, scaling: float, basis: Basis | None
    ) -> None:
        """
        Args:
            queries: (query heads, tokens, head_dim), any float dtype; a query head attends to KV
                head ``head // (query heads / kv_heads)``.
            scaling: factor of the scores, usually head_dim ** -0.5.
            basis: coordinates of stored blocks; None if there will be none.
        """
        self._shape, self._dtype, self._basis = queries.shape, queries.dtype, basis
        self._tokens = queries.shape[1]
        self._groups = queries.shape[0] // kv_heads
        # (KV heads, group * tokens, head_dim)
        grouped = queries.reshape(kv_heads, -1, queries.shape[2])
        self._plain = grouped.float() * scaling
        # Without stored blocks never read.
        self._stored = self._plain if basis is None else basis.queries_in(grouped) * scaling
        rows = self._plain.shape[:2]
        self._maximum = self._plain.new_full(rows, -torch.inf)
        self._total = self._plain.new_zeros(rows)
        self._out_plain = torch.zeros_like(self._plain)
        self._out_stored = None if basis is None else torch.zeros_like(self._plain)

    def add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        stored: bool,
        first_query: int | None = None,
    ) -> None:
        """Attend to one block.

        Args:
            keys: (KV heads, n, head_dim), any float dtype.
            values: the same shape.
            stored: whether they are in stored coordinates (else the model's).
            first_query: the query token that sees exactly the first key; each later query sees one
                key more. None: all queries see all keys.
        """
        keys, values = keys.float(), values.float()
        heads, count = keys.shape[:2]
        step = max(1, _SCORE_ELEMENTS // (heads * self._groups * max(1, count)))
        queries = (self._stored if stored else self._plain).unflatten(1, (self._groups, -1))
        for start in range(first_query or 0, self._tokens, step):
            part = slice(start, min(start + step, self._tokens))
            query = queries[:, :, part].flatten(1, 2)
            scores = query @ keys.transpose(1, 2)
            if first_query is not None and part.start - first_query < count - 1:
                visible = torch.arange(part.start, part.stop, device=keys.device) - first_query
                hidden = visible[:, None] < torch.arange(count, device=keys.device)
                scores = scores.unflatten(1, (self._groups, -1))
                scores = scores.masked_fill(hidden, -torch.inf).flatten(1, 2)
            self._merge(scores, values, part, stored)

    def _merge(self, scores: torch.Tensor, values: torch.Tensor, part: slice, stored: bool) -> None:
        def of_part(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(1, (self._groups, -1))[:, :, part]

        before = of_part(self._maximum).flatten(1, 2)
        maximum = torch.maximum(before, scores.amax(-1))
        weights = (scores - maximum[..., None]).exp()
        shrink = (before - maximum).exp()
        shape = (len(scores), self._groups, -1)
        of_part(self._maximum).copy_(maximum.view(shape))
        total = of_part(self._total)
        total.mul_(shrink.view(shape)).add_(weights.sum(-1).view(shape))
        gathered = (weights @ values).view(*shape, values.shape[-1])
        for output, is_target in ((self._out_plain, not stored), (self._out_stored, stored)):
            if output is not None:
                output = of_part(output).mul_(shrink.view(shape)[..., None])
                if is_target:
                    output.add_(gathered)

    def output(self) -> torch.Tensor:
        """(query heads, tokens, head_dim) in the queries' dtype."""
        total = self._out_plain
        if self._basis is not None and self._out_stored is not None:
            total = total + self._basis.values_out(self._out_stored)
        return (total / self._total[..., None]).view(self._shape).to(self._dtype)
