"""KVPolicy: how keys and values are stored, with named presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from oscar_mm.errors import InputError, suggestion
from oscar_mm.modality import Modality

PAGE_TOKENS = 128
"""Tokens per page; must match csrc/common/page_tokens.cuh."""


class Bits(NamedTuple):
    """Bits per stored element, for keys and for values."""

    keys: int
    values: int

    def __str__(self) -> str:
        """Return one number for both if they are equal, else two: "2", "3/2"."""
        return str(self.keys) if self.keys == self.values else f"{self.keys}/{self.values}"

    @property
    def packed(self) -> bool:
        """Whether keys and values are stored in fewer than 16 bits."""
        return self.keys < 16


PLAIN = Bits(16, 16)
"""Unpacked: stored in the model's dtype, or in bfloat16 if the model is float32 and other
modalities are packed."""
_NARROWEST = Bits(2, 2)
Width = int | tuple[int, int] | list[int]
"""Bits of keys and values: one number for both, or a pair."""


class ModalityBits(NamedTuple):
    """Bits per stored element for each modality, in the order of ``Modality``."""

    text: Bits
    image: Bits
    video: Bits
    audio: Bits


WHOLE_HEAD = "head"
"""Value of ``key_group``: all channels of a head are one group."""
_KEY_GROUPS = (32, 64, 128)
FITS = ("minmax", "lsq")
NORMS = ("plain", "refit", "unbiased")
VALUE_SCALES = ("plain", "unbiased")
TOKEN_SCALINGS = (None, "per_head", "shared")
"""Allowed values of policy fields; a value's index is the value of the kernels' macro."""
_ALLOWED: dict[str, tuple] = {
    "key_group": (WHOLE_HEAD, *_KEY_GROUPS),
    "value_group": (32, 64, 128),
    "fit": FITS,
    "norm": NORMS,
    "value_scale": VALUE_SCALES,
    "rotate": (True, False),
    "balance": (None, "weights"),
    "token_scaling": TOKEN_SCALINGS,
    "center": (True, False),
}


class Limit(NamedTuple):
    """Values that a page format allows for a policy field, and the reason."""

    field: str
    allowed: tuple
    why: str


KEY_AXES: dict[str, tuple[Limit, ...]] = {
    "channel": (
        Limit("center", (False,), "a channel's zero point is its center"),
        Limit("key_group", _KEY_GROUPS, "a key group is a number of tokens of a channel"),
    ),
    "token": (
        Limit("token_scaling", (None,), "each token has its own scale anyway"),
        Limit("norm", ("plain", "unbiased"), "keys have a scale, but no norm"),
    ),
}
"""Values of ``key_axis`` and the limits of each; ``oscar_mm.pages.codecs.registry`` adds more."""
_WORDS = {"none": None, "true": True, "false": False}
"""Values of fields that are written as words."""
ALLOWED_BITS = (2, 3, 4)
"""Allowed numbers of bits for packed values."""
_MAX_WIDTHS = 2
_MAX_RECENT = 4096


class _Bits:
    """Descriptor of the field ``bits``, which can be set to a width, a pair or a mapping, and is
    always read as ``ModalityBits``."""

    def __get__(self, policy: KVPolicy | None, owner: type) -> ModalityBits:
        return ModalityBits(*[_NARROWEST] * 4) if policy is None else policy.__dict__["bits"]

    def __set__(self, policy: KVPolicy, bits: Width | Mapping[str, Width] | ModalityBits) -> None:
        policy.__dict__["bits"] = _checked_bits(bits)


@dataclass(frozen=True)
class KVPolicy:
    """How the cache stores keys and values. Immutable, hashable, and validated at construction.

    ``KVPolicy()`` equals the preset "compact"; the default policy is "standard". Use
    ``KVPolicy.preset("standard", ...)`` to change some of its fields.

    Attributes:
        bits: bits per value: 2, 3, 4 or 16. Either one number for keys and values or a pair such
            as ``(3, 2)``; for all modalities, or in a mapping such as
            ``{"image": (3, 2), "text": 4}`` (other modalities get 2). 16, which must apply to both
            keys and values, means ``PLAIN``. At most two different widths below 16.
        key_axis: "token" quantizes each token over a group of channels (QuaRot): a token that
            leaves the window takes a slot in a page, and a new page is begun only when its first
            tokens would take as much memory as the page in 16-bit precision. "channel" quantizes
            each key channel over a group of tokens (KIVI, OScaR), in full pages of 128 tokens.
            Other formats may be registered (``oscar_mm.pages.codecs.registry``).
        key_group: with ``key_axis="token"``, "head" for one group with all channels of a head, or
            channels per key group: 32, 64 or 128. With ``key_axis="channel"``, tokens per key
            group: 32, 64 or 128. The kernels support only "head" or as many channels as a head has.
        value_group: channels per value group: 32, 64 or 128. If head_dim is not divisible by a
            number of channels, the largest divisor of head_dim below it is used.
        fit: "minmax" spans the group's range, "lsq" minimizes the squared error.
        norm: what the stored keys preserve once their codes are fixed. "plain" keeps the norm of
            each key; "refit" stores the norm with the least squared error; "unbiased" stores the
            norm with <K^, K> = |K|^2 and, with ``fit="lsq"``, scales with
            <K^ - mean, K - mean> = |K - mean|^2 in each group, so that neither scores nor their
            differences shrink on average. If keys have their own scales (``key_axis="token"``) and
            ``rotate`` is on, "unbiased" also changes a few codes to reduce the errors of scores.
        value_scale: what the stored values preserve: "plain" keeps the fitted scale, which shrinks
            each group towards its mean; "unbiased", only with ``fit="lsq"``, makes
            <V^ - mean, V - mean> = |V - mean|^2 in each group.
        rotate: Hadamard rotation of keys and values along head_dim.
        balance: "weights" scales queries and keys per channel, in opposite directions, by
            sigma = sqrt(rms_k / rms_q), which is computed from the model's weights (see
            ``oscar_mm.quant.balance``); None does not scale them. Attention is unchanged in exact
            arithmetic.
        token_scaling: whether keys are divided by a norm per token: "shared" by all KV heads,
            "per_head", or None for no division. Only with ``key_axis="channel"``; otherwise each
            token already has its own scale.
        center: with ``key_axis="token"``, whether to store for each token and head either the key
            or the key minus its page's center, whichever has the smaller error. The center is the
            mean of the page's first keys, or, if the window is below 4 tokens and the page begins
            while decoding, of keys stored in the previous page.
        window: number of a sequence's most recent tokens that stay in 16-bit precision.
        sinks: number of a sequence's first tokens that stay in 16-bit precision.

    Raises:
        InputError: if a value is not allowed; the message names the field and the allowed values.
    """

    bits: _Bits = _Bits()
    key_axis: str = "token"
    key_group: int | str = WHOLE_HEAD
    value_group: int = 128
    fit: str = "lsq"
    norm: str = "unbiased"
    value_scale: str = "unbiased"
    rotate: bool = True
    balance: str | None = "weights"
    token_scaling: str | None = None
    center: bool = True
    window: int = 32
    sinks: int = 4

    def __post_init__(self) -> None:
        for field, allowed in ({"key_axis": tuple(KEY_AXES)} | _ALLOWED).items():
            value = getattr(self, field)
            if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
                options = ", ".join(repr(a) for a in allowed)
                raise InputError(f"KVPolicy {field}={value!r}: must be one of {options}")
        if self.value_scale == "unbiased" and self.fit != "lsq":
            raise InputError(
                f"KVPolicy value_scale='unbiased' with fit={self.fit!r}: must be 'plain', because "
                "only a least-squares fit ('lsq') shrinks values"
            )
        for limit in KEY_AXES[self.key_axis]:
            self._check(*limit)
        for field in ("window", "sinks"):
            value = getattr(self, field)
            if type(value) is not int or not 0 <= value <= _MAX_RECENT:
                raise InputError(
                    f"KVPolicy {field}={value!r}: must be a number of tokens, 0 to {_MAX_RECENT}"
                )

    def _check(self, field: str, allowed: tuple, why: str) -> None:
        value = getattr(self, field)
        if value not in allowed:
            options = " or ".join(map(repr, allowed))
            raise InputError(
                f"KVPolicy {field}={value!r} with key_axis={self.key_axis!r}: must be {options}, "
                f"because {why}"
            )

    def bits_for(self, modality: Modality) -> Bits:
        """Return the bits per stored element of a modality; ``PLAIN`` if it is not packed."""
        return self.bits[int(modality)]

    @property
    def packed_bits(self) -> tuple[Bits, ...]:
        """Distinct widths of the packed modalities, in ascending order."""
        return tuple(sorted({bits for bits in self.bits if bits.packed}))

    @property
    def packs(self) -> bool:
        """Whether any modality is stored in fewer than 16 bits."""
        return bool(self.packed_bits)

    @property
    def balances(self) -> bool:
        """Whether keys are scaled per channel before they are stored (field ``balance``); unpacked
        keys never are."""
        return self.packs and self.balance is not None

    @classmethod
    def preset(cls, name: str, **changes: Any) -> KVPolicy:
        """Return a preset, with some fields changed if given: ``preset("compact", window=128)``.

        The name itself may contain changes, as on the command line: "compact:window=128,bits=3/2",
        or "standard:bits.audio=2" for the bits of one modality. Modalities missing from a mapping
        for ``bits`` keep the preset's bits.

        Raises:
            InputError: if the preset or a field is unknown, or a value is not allowed.
        """
        if isinstance(name, str) and ":" in name:
            name, _, text = name.partition(":")
            changes = _parsed_changes(text) | changes
        if not isinstance(name, str) or name not in _PRESETS:
            close = suggestion(str(name), cls.preset_names())
            raise InputError(f"unknown policy {name!r}: choose one of {', '.join(_PRESETS)}{close}")
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(changes) - set(names)):
            close = suggestion(unknown[0], names)
            raise InputError(f"KVPolicy has no field {', '.join(unknown)}{close}")
        base, bits = cls(**_PRESETS[name]), changes.get("bits")
        if isinstance(bits, Mapping):
            changes["bits"] = base.bits._asdict() | dict(bits)
        return replace(base, **changes)

    @property
    def name(self) -> str | None:
        """Name of the preset with exactly these fields; None if there is no such preset."""
        return next((name for name in _PRESETS if KVPolicy.preset(name) == self), None)

    @classmethod
    def preset_names(cls) -> tuple[str, ...]:
        """Names of all presets."""
        return tuple(_PRESETS)

    @classmethod
    def of(cls, policy: str | KVPolicy) -> KVPolicy:
        """Return a policy unchanged, or the preset with the given name.

        Raises:
            InputError: if the name is unknown, or the value has another type.
        """
        if isinstance(policy, KVPolicy):
            return policy
        if isinstance(policy, str):
            return cls.preset(policy)
        raise InputError(
            f"policy must be a KVPolicy or a preset's name, not {type(policy).__name__}"
        )


def _parsed_changes(text: str) -> dict[str, Any]:
    """Parse fields and values from text such as "window=128,bits=3/2" or "bits.audio=2"."""
    changes: dict[str, Any] = {}
    bits: dict[str, Any] = {}
    for change in text.split(","):
        field, equals, value = (part.strip() for part in change.partition("="))
        if not (field and equals and value):
            raise InputError(
                f"policy change {change!r}: must be FIELD=VALUE, as in compact:window=128,bits=3/2"
            )
        name, dot, modality = field.partition(".")
        if dot and name == "bits":
            bits[modality] = _parsed_value(value)
        else:
            changes[field] = _parsed_value(value)
    if bits and "bits" in changes:
        raise InputError(
            f"policy changes {text!r}: bits is for all modalities, and bits.{next(iter(bits))} for "
            "one: use one of them"
        )
    return changes | ({"bits": bits} if bits else {})


def _parsed_value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    numbers = text.split("/")
    # Python refuses to parse numbers with thousands of digits.
    if all(number.isascii() and number.isdecimal() and len(number) < 20 for number in numbers):
        return int(text) if len(numbers) == 1 else tuple(map(int, numbers))
    return text


def _checked_bits(bits: Any) -> ModalityBits:
    names = ModalityBits._fields
    if isinstance(bits, Mapping):
        unknown = [str(key) for key in bits if key not in names]
        if unknown:
            raise InputError(
                f"KVPolicy bits: unknown modality {', '.join(unknown)}; "
                f"modalities are {', '.join(names)}"
            )
        given = [bits.get(name, _NARROWEST) for name in names]
    else:
        given = list(bits) if isinstance(bits, ModalityBits) else [bits] * len(names)
    checked = ModalityBits(*map(_checked_width, names, given))
    packed = sorted({str(width) for width in checked if width.packed})
    if len(packed) > _MAX_WIDTHS:
        raise InputError(
            f"KVPolicy bits: {', '.join(packed)}: must be at most {_MAX_WIDTHS} different widths "
            "below 16"
        )
    return checked


def _checked_width(name: str, width: Any) -> Bits:
    pair = list(width) if isinstance(width, (tuple, list)) else [width, width]
    if len(pair) == 2 and all(type(count) is int for count in pair):
        bits = Bits(*pair)
        if bits == PLAIN or (bits.keys in ALLOWED_BITS and bits.values in ALLOWED_BITS):
            return bits
    raise InputError(
        f"KVPolicy bits of {name} = {width!r}: must be 2, 3, 4 or 16, or a pair of 2, 3 or 4 for "
        "keys and values, such as (3, 2)"
    )


DEFAULT = "standard"
"""Name of the default preset."""
_WHOLE_PAGES: dict[str, Any] = {"key_axis": "channel", "key_group": 128, "center": False}
_PRESETS: dict[str, dict[str, Any]] = {
    # Keys benefit more from extra bits than values do; 2.8 bits per element overall.
    "standard": {"bits": (3, 2)},
    # The smallest preset: 2.3 bits per element.
    "compact": {},
    # OScaR's full pages with improvements: least-squares fit, unbiased per-head norms and values,
    # scale factors per channel, groups of 128; 2.31 bits per element.
    "channel": {**_WHOLE_PAGES, "token_scaling": "per_head"},
    # The published OScaR recipe (rotation, one norm per token over all heads, min-max fit).
    "oscar": {
        **_WHOLE_PAGES,
        "key_group": 32,
        "value_group": 32,
        "fit": "minmax",
        "norm": "plain",
        "value_scale": "plain",
        "balance": None,
        "token_scaling": "shared",
        "sinks": 0,
    },
    # KIVI (arXiv:2402.02750): keys per channel, values per token, no rotation.
    "kivi": {
        **_WHOLE_PAGES,
        "key_group": 32,
        "value_group": 32,
        "fit": "minmax",
        "norm": "plain",
        "value_scale": "plain",
        "rotate": False,
        "balance": None,
        "sinks": 0,
    },
    # QuaRot (arXiv:2404.00456): rotated, keys per token over all channels of a head, values
    # over up to 128.
    "quarot": {
        "fit": "minmax",
        "norm": "plain",
        "value_scale": "plain",
        "balance": None,
        "center": False,
        "sinks": 0,
    },
    # Everything in the model's own 16-bit dtype (or float32 in a float32 model), in the same pages.
    "bf16": {**_WHOLE_PAGES, "token_scaling": "per_head", "bits": 16, "window": 0, "sinks": 0},
}
