"""Settings: how tokens are packed, as the user of vLLM says in `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oscar_mm.errors import InputError
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.policy import DEFAULT, KVPolicy
from oscar_mm.quant.quantize import Recipe
from oscar_mm.vllm_plugin.policies import KEY, servable


@dataclass(frozen=True)
class Settings:
    """How the tokens of a model are packed.

    Attributes:
        policy: of key_axis "token", with the same bits for all modalities. Its window and its sinks
            play no part: no token stays in 16 bit, as a block must be complete in itself.
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
        page_format = PageFormat.of(self.policy, self.policy.bits.text, kv_heads, head_dim)
        return Recipe.of(page_format, self.policy)

    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes of a page for each of its tokens and KV heads.

        Raises:
            InputError: they are no whole number, as vLLM counts them.
        """
        page_bytes = self.recipe(kv_heads, head_dim).page_format.page_bytes
        size, rest = divmod(page_bytes, PAGE_TOKENS * kv_heads)
        if rest:
            raise InputError(
                f"pages of {self.policy.bits.text} bits for {kv_heads} KV heads of {head_dim} take "
                f"{page_bytes} bytes, which is no whole number for each token and head"
            )
        return size
