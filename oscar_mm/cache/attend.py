"""Attention of a layer over what it holds and over new tokens, before these are stored."""

from __future__ import annotations

import logging

import torch
from torch.nn.functional import scaled_dot_product_attention

from oscar_mm.cache.layer import UNPACK_PAGES, OscarLayer, joined
from oscar_mm.cache.layout import BLOCK_TOKENS, PAGE_TOKENS
from oscar_mm.cache.ledger import Sequence, Step
from oscar_mm.cache.tables import Tables, tables_of
from oscar_mm.ops.decode import RunningAttention
from oscar_mm.ops.packed_attention import MAX_QUERY_TOKENS, PackedAttention
from oscar_mm.ops.unpack import unpack_stored

_CHUNK_KEYS = UNPACK_PAGES * PAGE_TOKENS
_WORST_ERROR = 0.02
"""Relative error at which a kernel's first result is a mismatch: far above the rounding of 16 bit
(0.002), far below that of a wrong token or head."""
_log = logging.getLogger(__name__)


def attend_stored(
    layer: OscarLayer,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    step: Step,
) -> torch.Tensor:
    """Attention over the past of a step and, causally, over its chunk; before ``append``.

    On a GPU a chunk of up to 16 tokens goes to the decode kernel, whose first result is compared
    with that of PyTorch operations: a kernel that disagrees is not used again.

    Args:
        layer: of the cache.
        queries: (batch, query heads, tokens, head_dim).
        keys: (batch, KV heads, tokens, head_dim) of the chunk; values likewise.
        scaling: factor of the scores.
        step: what ``append`` will do with the chunk.

    Returns:
        (batch, query heads, tokens, head_dim); 0 for queries that are padding.
    """
    if step.real is None and not any(sequence.stored for sequence in step.past):
        return _causal(queries, keys, values, scaling)
    kernel, tokens = layer.kernel, keys.shape[2]
    # Of a single token a row is padding as a whole, so its output can be taken out afterwards.
    most = MAX_QUERY_TOKENS if step.real is None else 1
    if kernel is None or kernel.trusted is False or tokens > most:
        return _attend_rows(layer, queries, keys, values, scaling, step)
    output = _by_kernel(layer, kernel, queries, keys, values, scaling, step)
    if kernel.trusted is None:
        expected = _attend_rows(layer, queries, keys, values, scaling, step)
        error = (output.float() - expected.float()).norm() / expected.float().norm()
        kernel.trusted = bool(error < _WORST_ERROR)
        if not kernel.trusted:
            _log.error(
                "the decode kernel disagrees with PyTorch operations on %s (relative error %.3g): "
                "it is not used. Please report this with the output of `oscar-mm doctor`",
                layer.device,
                float(error),
            )
            return expected
    return output


def _by_kernel(
    layer: OscarLayer,
    kernel: PackedAttention,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    step: Step,
) -> torch.Tensor:
    columns = keys.shape[2] * (queries.shape[1] // keys.shape[1])
    bits = kernel.specialization.bits

    def make() -> Tables:
        return tables_of(step.past, bits, layer.kv_heads, columns, kernel.workers, layer.device)

    tables = step.once((layer.device, layer.kv_heads, columns, bits, kernel.workers), make)
    pages = {bits: pool.storage for bits, pool in layer.pages.items()}
    output = kernel(
        queries, keys, values, scaling, pages, layer.blocks.storage, layer.sigma, tables
    )
    if step.real is None:
        return output

    def rows_that_go_on() -> torch.Tensor:
        present = [len(real) > 0 for real in step.real]
        return torch.tensor(present, device=layer.device).view(-1, 1, 1, 1)

    return output * step.once(("rows that go on", layer.device), rows_that_go_on)


def _attend_rows(
    layer: OscarLayer,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    step: Step,
) -> torch.Tensor:
    """By PyTorch operations, a row of the batch at a time."""
    output = torch.zeros_like(queries)
    for row, sequence in enumerate(step.past):
        chunk = (queries[row], keys[row], values[row])
        if step.real is None:
            output[row] = _attend_row(layer, *chunk, scaling, sequence)
        elif len(step.real[row]):
            real = torch.from_numpy(step.real[row]).to(layer.device)
            query, key, value = (states[:, real] for states in chunk)
            output[row][:, real] = _attend_row(layer, query, key, value, scaling, sequence)
    return output


def _attend_row(
    layer: OscarLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    sequence: Sequence,
) -> torch.Tensor:
    if not sequence.stored:
        return _causal(query[None], key[None], value[None], scaling)[0]
    packed = any(stream.pages for stream in sequence.streams.values())
    running = RunningAttention(query, layer.kv_heads, scaling, layer.basis if packed else None)
    for stream in sequence.streams.values():
        for pages, tokens in layer.page_runs(stream):
            stored = unpack_stored(pages, layer.formats[stream.bits])
            running.add(*(joined(side, tokens) for side in stored), stored=True)
        for start in range(0, stream.tail, _CHUNK_KEYS):
            count = min(_CHUNK_KEYS, stream.tail - start)
            blocks = stream.blocks[start // BLOCK_TOKENS : -(-(start + count) // BLOCK_TOKENS)]
            running.add(*layer.tail(blocks, count), stored=False)
    for start in range(0, key.shape[1], _CHUNK_KEYS):
        block = slice(start, start + _CHUNK_KEYS)
        running.add(key[:, block], value[:, block], stored=False, first_query=start)
    return running.output()


def _causal(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    return scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True
    )
