"""Policies that vLLM can serve with, and how it is told; without torch, for the command line."""

from __future__ import annotations

from typing import Any

from oscar_mm.errors import InputError
from oscar_mm.policy import KVPolicy

KEY = "oscar_mm"
"""Of the plugin's options in `--additional-config`."""


def additional_config(policy: str) -> dict[str, Any]:
    """What `--additional-config` says for a policy."""
    return {KEY: {"policy": policy}}


def servable(policy: str | KVPolicy) -> KVPolicy:
    """A policy that vLLM can serve with.

    Raises:
        InputError: there is no such policy, or its tokens cannot be packed one by one alike.
    """
    found = KVPolicy.of(policy)
    if not found.by_token:
        problem = f"key_axis={found.key_axis!r}"
    elif len(set(found.bits)) > 1 or not found.packs:
        problem = "16 bits, or bits that differ by modality"
    elif found.balance == "prompt":
        problem = "balance='prompt'"
    else:
        return found
    raise InputError(
        f"policy {policy} has {problem}: vLLM serves with key_axis='token', the same 2, 3 or 4 "
        "bits for all modalities and no balancing but by weights, such as standard, quarot or "
        "standard:bits=4/2"
    )
