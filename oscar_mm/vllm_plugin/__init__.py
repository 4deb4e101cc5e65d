"""vLLM with packed pages: the plugin that vLLM finds by its entry point.

`vllm serve MODEL --attention-backend CUSTOM` takes this attention. Every token is packed as soon as
it is read, into stream pages that are vLLM's blocks: 128 tokens each, complete in themselves, so
that blocks are shared, swapped and computed anew as vLLM likes. The tokens of a policy's window and
its sinks are stored in 16-bit precision too, in a ring for each request that may run, and read so.

``Settings`` says how tokens are packed, as the user of vLLM does in `--additional-config`. It
imports torch only where pages are made: the command line checks policies too.

Layers: ``step`` makes the tables of a step, ``attention`` stores and attends, ``backend`` is what
vLLM calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oscar_mm.errors import InputError
from oscar_mm.policy import DEFAULT, KVPolicy

if TYPE_CHECKING:
    from oscar_mm.quant.quantize import Recipe


KEY = "oscar_mm"
"""Name under which `--additional-config` has the plugin's options."""
MAX_WINDOW, MAX_SINKS = 128, 64
"""Most tokens of each kind that are stored in 16-bit precision."""


def additional_config(policy: str) -> dict[str, Any]:
    """What `--additional-config` says for a policy."""
    return {KEY: {"policy": policy}}


def servable(policy: str | KVPolicy) -> KVPolicy:
    """A policy that vLLM can serve with.

    Raises:
        InputError: there is no such policy, its tokens cannot be packed one by one alike, or too
            many of them are to be kept in 16-bit precision.
    """
    found = KVPolicy.of(policy)
    for name, most in (("window", MAX_WINDOW), ("sinks", MAX_SINKS)):
        if (tokens := getattr(found, name)) > most:
            raise InputError(
                f"policy {policy} has {name}={tokens}: with vLLM {name} must be at most {most}"
            )
    if not found.by_token:
        problem = f"key_axis={found.key_axis!r}"
    elif len(set(found.bits)) > 1 or not found.packs:
        problem = "16 bits, or bits that differ by modality"
    else:
        return found
    raise InputError(
        f"policy {policy} has {problem}: vLLM serves with key_axis='token' and the same 2, 3 or 4 "
        "bits for all modalities, such as standard, quarot or standard:bits=4/2"
    )


@dataclass(frozen=True)
class Settings:
    """How the tokens of a model are packed.

    Attributes:
        policy: of key_axis "token", with the same bits for all modalities. All tokens are packed,
            as a block must be complete in itself; those of its window and its sinks are stored in
            16-bit precision as well.
    """

    policy: KVPolicy

    @classmethod
    def of(cls, additional_config: object) -> Settings:
        """What `--additional-config` says: ``{"oscar_mm": {"policy": "standard:bits=4/2"}}``.

        Raises:
            InputError: an unknown option, or a policy that cannot be served.
        """
        options: Any = {}
        if isinstance(additional_config, Mapping):
            options = additional_config.get(KEY, {})
        if not isinstance(options, Mapping):
            raise InputError(f"additional_config {KEY}={options!r}: must be a mapping of options")
        if unknown := sorted(set(map(str, options)) - {"policy"}):
            raise InputError(
                f"additional_config {KEY} has no option {', '.join(unknown)}: must be 'policy'"
            )
        return cls(servable(options.get("policy", DEFAULT)))

    def recipe(self, kv_heads: int, head_dim: int) -> Recipe:
        """How pages of a layer are made."""
        from oscar_mm.pages.layout import PageFormat
        from oscar_mm.quant.quantize import Recipe

        page_format = PageFormat.of(self.policy, self.policy.bits.text, kv_heads, head_dim)
        return Recipe.of(page_format, self.policy)

    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of a page for each of its tokens and KV heads.

        Raises:
            InputError: they are no whole number, as vLLM counts them.
        """
        from oscar_mm.pages.layout import PAGE_TOKENS

        page_bytes = self.recipe(kv_heads, head_dim).page_format.page_bytes
        size, rest = divmod(page_bytes, PAGE_TOKENS * kv_heads)
        if rest:
            raise InputError(
                f"pages of {self.policy.bits.text} bits for {kv_heads} KV heads of {head_dim} take "
                f"{page_bytes} bytes, which is no whole number for each token and head"
            )
        return size


def register() -> None:
    """Make the attention known to vLLM, in each of its processes; may be called again."""
    from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
        AttentionBackendEnum,
        register_backend,
    )

    register_backend(AttentionBackendEnum.CUSTOM, "oscar_mm.vllm_plugin.backend.OscarBackend")
