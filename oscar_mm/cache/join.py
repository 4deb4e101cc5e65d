"""Join: rows of several caches as one batch, over the same pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.rows import NOWHERE, Row
from oscar_mm.cache.step import Step
from oscar_mm.errors import InputError


def can_join(caches: Sequence[OscarCache]) -> bool:
    """Whether caches can be rows of one batch: one store, and layer by layer one balancing.

    The balancing differs where it is taken from the prompt, that is on models without QK-norm.
    """
    if any(cache.store is not caches[0].store or cache.linear_layers for cache in caches):
        return False
    sigmas = [[layer.sigma for layer in cache.layers] for cache in caches if cache.layers]
    return all(
        len(row) == len(sigmas[0]) and all(map(_equal, row, sigmas[0])) for row in sigmas[1:]
    )


def join(caches: Sequence[OscarCache]) -> OscarCache:
    """A cache whose rows are those of several caches, one after the other; an empty one is a row.

    Shorter rows get padding on the left, so whoever goes on with it gives every row positions of
    its own. The rows share their slots with the caches that they come from, which stay as they
    are.

    Args:
        caches: of one store; at least one.

    Raises:
        InputError: ``can_join`` is False.
        RuntimeError: one of them is in the middle of a forward pass.
    """
    if not can_join(caches):
        raise InputError(
            "caches of different stores, balanced by different prompts, or with linear attention "
            "cannot be joined"
        )
    for cache in caches:
        cache.check_complete()
    joined = OscarCache(caches[0].policy, store=caches[0].store)
    source = next((cache for cache in caches if cache.layers), None)
    if source is None:
        return joined
    rows = [row for cache in caches for row in cache.ledger.sequences or [Row()]]
    longest = max(len(row.codes) for row in rows)
    joined.ledger.hold([_padded(row, longest) for row in rows])
    joined.layers += [layer.fork(joined) for layer in source.layers]
    joined.replayed(Step())
    return joined


def _padded(row: Row, length: int) -> Row:
    twin = row.copy()
    twin.codes[:0] = bytes([NOWHERE]) * (length - len(twin.codes))
    return twin


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or torch.equal(one, other)
