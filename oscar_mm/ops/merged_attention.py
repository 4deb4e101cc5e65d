"""Attention over parts of the keys and values, merged exactly by their log-sum-exps.

Each part is done by torch's flash attention and forgotten, so the extra memory does not grow with
the past. Many queries (a later turn) attend so, and few of them where ``decode`` has no kernel.
"""

from __future__ import annotations

import torch

_SCORE_ELEMENTS = 1 << 24
"""Scores computed at a time where there is no flash attention (float32: 64 MB)."""


class MergedAttention:
    """Attention of queries over keys and values that arrive in parts, in any order."""

    def __init__(self, queries: torch.Tensor, scaling: float) -> None:
        """
        Args:
            queries: (batch, query heads, tokens, head_dim); a query head attends to KV head
                ``head // (query heads / KV heads)``.
            scaling: factor of the scores.
        """
        self._queries, self._scaling = queries, scaling
        self._output: torch.Tensor | None = None
        self._total: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor:
        """Log of the sum of exp(scores), (batch, query heads, tokens) float32."""
        if self._total is None:
            raise RuntimeError("attention to no part")
        return self._total

    def add(self, keys: torch.Tensor, values: torch.Tensor, *, causal: bool = False) -> None:
        """Attend to one part.

        Args:
            keys: (batch, KV heads, n, head_dim) in the queries' dtype, n at least 1; values
                likewise.
            causal: query i sees the keys up to the i-th, of as many as there are queries.
        """
        self.merge(*_attention(self._queries, keys, values, self._scaling, causal))

    def merge(self, output: torch.Tensor, total: torch.Tensor) -> None:
        """Add what the same queries found in another part.

        Args:
            output: (batch, query heads, tokens, head_dim), any float dtype.
            total: log of the sum of exp(scores), (batch, query heads, tokens) float32.
        """
        if self._output is None or self._total is None:
            self._output, self._total = output.float(), total
            return
        # exp(total) / (exp(before) + exp(total)): the new part's share of the whole.
        share = torch.sigmoid(total - self._total)[..., None]
        self._output = self._output.lerp_(output.float(), share)
        self._total = torch.logaddexp(self._total, total)

    def output(self) -> torch.Tensor:
        """(batch, query heads, tokens, head_dim) in the queries' dtype."""
        if self._output is None:
            raise RuntimeError("attention to no part")
        return self._output.to(self._queries.dtype)


def _attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and the log of the sum of exp(scores), (batch, query heads, tokens) float32."""
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
    """Whether torch's flash attention for GPUs takes queries of this device, dtype and head_dim."""
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
    """By matrix products in float32, some queries at a time."""
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
