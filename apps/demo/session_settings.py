"""SessionSettings: what a visitor chooses for a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oscar_mm.apps.demo.uploads import bounded_text
from oscar_mm.errors import InputError
from oscar_mm.policy import KVPolicy

AS_PRESET = "preset"
"""The choice of bits that leaves them to the preset."""
WIDTHS = ("2", "3/2", "4/2", "4", "16")
"""Bits of keys and of values that the page offers, one number where they are the same."""


@dataclass(frozen=True)
class SessionSettings:
    """What a visitor chooses for a conversation.

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

    @classmethod
    def of_fields(
        cls, preset: str, bits: Mapping[str, str], window: float, system: str | None, compare: bool
    ) -> SessionSettings:
        """Check what the fields of the page contain.

        Args:
            preset: a preset's name.
            bits: one of WIDTHS, or AS_PRESET, by modality.
            window: latest tokens that stay in 16 bit.
            system: system prompt; empty for none.
            compare: whether a 16-bit cache answers beside it.

        Raises:
            InputError: a value is not allowed.
        """
        widths = {name: _bits(text) for name, text in bits.items() if text != AS_PRESET}
        policy = KVPolicy.preset(preset, bits=widths, window=as_int(window))
        text = bounded_text("system prompt", system or "")
        return cls(policy, preset, text or None, bool(compare))

    @property
    def name(self) -> str:
        """The policy's name for people; a star marks a changed preset."""
        return self.preset if self.policy == KVPolicy.preset(self.preset) else f"{self.preset}*"


def as_int(value: Any) -> Any:
    """Turn a slider's 32.0 into 32; leave anything else to the checks of others."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bits(text: str) -> tuple[int, int]:
    if text not in WIDTHS:
        raise InputError(f"bits {text!r}: must be one of {', '.join(WIDTHS)} or {AS_PRESET!r}")
    first, *second = map(int, text.split("/"))
    return first, second[0] if second else first
