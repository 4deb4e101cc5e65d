"""Settings: what a visitor chooses for a new conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oscar_mm.apps.demo.uploads import checked_text
from oscar_mm.errors import InputError
from oscar_mm.modality import Modality
from oscar_mm.policy import KVPolicy

AS_PRESET = "preset"
"""Of bits: what the preset says."""
WIDTHS = ("2", "3/2", "4/2", "4", "16")
"""Bits of keys and of values that can be chosen, one number where they are the same."""


@dataclass(frozen=True)
class Settings:
    """Of one conversation.

    Attributes:
        policy: how its keys and values are stored.
        preset: which preset the policy is, or was made from.
        system: system prompt, or None.
        compare: whether a 16-bit cache answers beside it.
    """

    policy: KVPolicy
    preset: str
    system: str | None = None
    compare: bool = False

    @property
    def name(self) -> str:
        """Of the policy, for people."""
        return self.preset if self.policy == KVPolicy.preset(self.preset) else f"{self.preset}*"


def chosen(
    preset: str, bits: Mapping[str, str], window: float, system: str | None, compare: bool
) -> Settings:
    """Settings from what the fields of the page hold.

    Args:
        preset: a preset's name.
        bits: by modality: like "2", "3/2", "16", or AS_PRESET.
        window: latest tokens that stay in 16 bit.
        system: system prompt; empty for none.

    Raises:
        InputError: a value that is not allowed.
    """
    base = KVPolicy.preset(preset)
    given = {
        one.label: base.bits_for(one) if bits[one.label] == AS_PRESET else _bits(bits[one.label])
        for one in Modality
    }
    policy = KVPolicy.preset(preset, bits=given, window=whole(window))
    text = checked_text("system prompt", system or "")
    return Settings(policy, preset, text or None, bool(compare))


def whole(value: Any) -> Any:
    """A slider's 32.0 as 32; anything else as it is, for others to refuse."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bits(text: str) -> tuple[int, int]:
    if text not in WIDTHS:
        raise InputError(f"bits {text!r}: must be one of {', '.join(WIDTHS)} or {AS_PRESET!r}")
    first, *second = map(int, text.split("/"))
    return first, second[0] if second else first
