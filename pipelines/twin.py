"""A second pipeline of the same loaded model, with another cache format."""

from __future__ import annotations

import copy
from typing import TypeVar

from oscar_mm.cache.store import PageStore
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.policy import KVPolicy

P = TypeVar("P", bound=Pipeline)


def with_policy(pipe: P, policy: str | KVPolicy) -> P:
    """A pipeline of the same model that stores keys and values as ``policy`` says.

    Both share lock and budget: their chats may be in use at once, from several threads, and count
    together. Prefixes are kept by the first only.

    Args:
        pipe: of the model.
        policy: a KVPolicy or a preset's name.

    Raises:
        InputError: an unknown preset, or a policy that the model's ranks rule out.
    """
    twin = copy.copy(pipe)
    twin.policy = KVPolicy.of(policy)
    pipe.store.ranks.check(twin.policy)
    twin.store = PageStore(twin.policy, pipe.lock, pipe.store.ranks)
    twin.prefixes = None
    if pipe.budget is not None:
        with pipe.lock:
            pipe.budget.stores.add(twin.store)
    return twin
