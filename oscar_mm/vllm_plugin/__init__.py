"""vLLM plugin: attention over packed pages, which vLLM loads through its entry point.

`vllm serve MODEL --attention-backend CUSTOM` selects this attention. Each token is packed as soon
as it is computed, into stream pages, which are vLLM's blocks. They have 128 tokens each and are
self-contained, so that vLLM can share, swap and recompute blocks freely. A policy's sinks and the
tokens in its window are also stored in 16-bit precision, in a ring for each running request, and
attention reads them from there.

``Settings`` specifies how tokens are packed and is read from vLLM's `--additional-config`. Torch is
imported only when pages are created, since the command line also checks policies.

Layers: ``step`` builds the tables of a step, ``attention`` stores and attends, and ``backend`` is
the interface to vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oscar_mm.errors import InputError
from oscar_mm.policy import DEFAULT, KVPolicy

if TYPE_CHECKING:
    from oscar_mm.pages.quantize import Recipe


KEY = "oscar_mm"
"""Key of the plugin's options in `--additional-config`."""
MAX_WINDOW, MAX_SINKS = 128, 64
"""Maximum window and sinks, in tokens."""


def additional_config(policy: str) -> dict[str, Any]:
    """Return the value for `--additional-config` that selects a policy."""
    return {KEY: {"policy": policy}}


def servable(policy: str | KVPolicy) -> KVPolicy:
    """Return a policy after checking that vLLM can serve a model with it.

    Raises:
        InputError: if there is no such policy, if it does not pack tokens one by one, all in one
            format, or if its window or sinks are too large.
    """
    found = KVPolicy.of(policy)
    for name, maximum in (("window", MAX_WINDOW), ("sinks", MAX_SINKS)):
        if (tokens := getattr(found, name)) > maximum:
            raise InputError(
                f"policy {policy} has {name}={tokens}: with vLLM {name} must be at most {maximum}"
            )
    if found.key_axis != "token":
        problem = f"key_axis={found.key_axis!r}"
    elif len(set(found.bits)) > 1 or not found.packs:
        problem = "16 bits, or bits that differ by modality"
    else:
        return found
    raise InputError(
        f"policy {policy} has {problem}, which the vLLM plugin does not support: it requires "
        "key_axis='token', and 2, 3 or 4 bits that are the same for all modalities; use a policy "
        "such as standard, quarot or standard:bits=4/2"
    )


@dataclass(frozen=True)
class Settings:
    """How a model's tokens are packed.

    Attributes:
        policy: policy with key_axis "token" and the same bits for all modalities. All tokens are
            packed, since a block must be self-contained; those in the window and the sinks are
            stored in 16-bit precision as well.
    """

    policy: KVPolicy

    @classmethod
    def of(cls, additional_config: object) -> Settings:
        """Read `--additional-config`: ``{"oscar_mm": {"policy": "standard:bits=4/2"}}``.

        Raises:
            InputError: if an option is unknown, or the policy cannot be served.
        """
        options: Any = {}
        if isinstance(additional_config, Mapping):
            options = additional_config.get(KEY, {})
        if not isinstance(options, Mapping):
            raise InputError(
                f"additional_config {KEY}={options!r}: must be a mapping of options, such as "
                "{'policy': 'standard'}"
            )
        if unknown := sorted(set(map(str, options)) - {"policy"}):
            raise InputError(
                f"additional_config {KEY} has no option {', '.join(unknown)}: use only 'policy'"
            )
        return cls(servable(options.get("policy", DEFAULT)))

    def recipe(self, kv_heads: int, head_dim: int) -> Recipe:
        """Return the recipe of a layer's pages."""
        from oscar_mm.pages.layout import PageFormat
        from oscar_mm.pages.quantize import Recipe

        page_format = PageFormat.of(self.policy, self.policy.bits.text, kv_heads, head_dim)
        return Recipe.of(page_format, self.policy)

    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Return the size of a page in bytes, divided by its tokens and KV heads.

        Raises:
            InputError: if the result is not an integer, as vLLM requires.
        """
        from oscar_mm.pages.layout import PAGE_TOKENS

        page_bytes = self.recipe(kv_heads, head_dim).page_format.page_bytes
        size, rest = divmod(page_bytes, PAGE_TOKENS * kv_heads)
        if rest:
            raise InputError(
                f"pages of {self.policy.bits.text} bits for {kv_heads} KV heads of {head_dim} take "
                f"{page_bytes} bytes, which is not an integer number of bytes per token and head"
            )
        return size


def register() -> None:
    """Register the attention with vLLM in the current process; can be called repeatedly."""
    from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
        AttentionBackendEnum,
        register_backend,
    )

    register_backend(AttentionBackendEnum.CUSTOM, "oscar_mm.vllm_plugin.backend.OscarBackend")
