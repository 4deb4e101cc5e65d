"""Quantization errors: keys and values as the cache restores them, and the resulting errors.

``roundtrip`` uses real packed pages. Errors are measured for a layer's keys, values and attention,
by modality.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_mm.errors import InputError
from oscar_mm.modality import Modality
from oscar_mm.ops.pack import pack
from oscar_mm.ops.unpack import unpack
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.policy import DEFAULT, KVPolicy
from oscar_mm.quant.basis import Basis

SAMPLE_TOKENS = 8192
"""Maximum number of tokens to quantize per layer; of a longer prompt, evenly spaced pages are
quantized."""
QUERY_TOKENS = 64
"""Number of tokens at the end of the prompt whose attention is compared."""
ALL = "all"
_PRESETS = ("channel", "oscar", "kivi")


@dataclass(frozen=True)
class Roundtrip:
    """Result of ``roundtrip``.

    Attributes:
        k: keys, in the shape and dtype of the input.
        v: values, in the shape and dtype of the input.
        bits_per_value: bits per stored element of the packed pages, averaged over pages of
            different widths; the dtype's bits if no page was full.
        pages: number of packed pages, over batch and modalities.
    """

    k: torch.Tensor
    v: torch.Tensor
    bits_per_value: float
    pages: int


def roundtrip(
    k: torch.Tensor,
    v: torch.Tensor,
    policy: str | KVPolicy = DEFAULT,
    modality: str | Modality | torch.Tensor | None = None,
    *,
    sigma: torch.Tensor | None = None,
) -> Roundtrip:
    """Pack keys and values into pages and read them back, as the cache does in one layer.

    Every full page of each modality is packed; an incomplete last page is left unpacked. Window and
    sinks of the policy are not applied.

    Args:
        k: (batch, KV heads, tokens, head_dim), float32, bfloat16 or float16, after RoPE.
        v: (batch, KV heads, tokens, head_dim), same dtype as ``k``.
        policy: KVPolicy or name of a preset.
        modality: modality of all tokens ("text", Modality.IMAGE, ...), or a (tokens,) or (batch,
            tokens) tensor of ids (0 text, 1 image, 2 video, 3 audio). Text by default.
        sigma: (KV heads or 1, head_dim) query-key balancing of a layer, as returned by
            ``oscar_mm.quant.balance.sigmas_of_model``; if None, keys are not balanced.

    Raises:
        InputError: if shapes or dtypes do not match, or keys or values are NaN, infinite or out of
            range.
    """
    policy = KVPolicy.of(policy)
    _check(k, v)
    batch, kv_heads, tokens, head_dim = k.shape
    if sigma is not None and sigma.shape not in ((1, head_dim), (kv_heads, head_dim)):
        raise InputError(
            f"roundtrip: sigma {tuple(sigma.shape)} must be (1 or {kv_heads}, {head_dim}) for k "
            f"{tuple(k.shape)}"
        )
    ids = _modality_ids(modality, batch, tokens)
    basis = Basis(head_dim, policy.rotate, sigma if policy.balances else None)
    keys, values, stored_bytes, pages = k.clone(), v.clone(), 0, 0
    for row in range(batch):
        for kind in Modality:
            bits = policy.bits_for(kind)
            where = (ids[row] == int(kind)).nonzero()[:, 0].to(k.device)
            full = where.numel() // PAGE_TOKENS
            if not bits.packed or not full:
                continue
            where = where[: full * PAGE_TOKENS]
            page_format = PageFormat.of(policy, bits, kv_heads, head_dim)
            try:
                of_keys, of_values = (_as_pages(x[row][:, where]) for x in (k, v))
                packed = pack(of_keys, of_values, page_format, policy, basis)
            except FloatingPointError as error:
                raise InputError(
                    f"roundtrip: batch row {row}, {kind.label} tokens: {error}"
                ) from None
            restored = unpack(packed, page_format, basis, k.dtype)
            for target, pages_of_side in zip((keys, values), restored, strict=True):
                target[row][:, where] = pages_of_side.transpose(0, 1).flatten(1, 2)
            stored_bytes += packed.nbytes
            pages += full
    elements = 2 * pages * PAGE_TOKENS * kv_heads * head_dim
    bits_per_value = stored_bytes * 8 / elements if pages else k.dtype.itemsize * 8.0
    return Roundtrip(keys, values, bits_per_value, pages)


def _as_pages(x: torch.Tensor) -> torch.Tensor:
    """Reshape (KV heads, pages * 128, head_dim) to (pages, KV heads, 128, head_dim)."""
    return x.unflatten(1, (-1, PAGE_TOKENS)).transpose(0, 1)


def _check(k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"roundtrip: {name} must be a tensor, not {type(tensor).__name__}")
    if k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype:
        raise InputError(
            f"roundtrip: k {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype} must both "
            "be (batch, KV heads, tokens, head_dim) of one dtype"
        )
    if k.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"roundtrip: dtype {k.dtype}: must be float32, bfloat16 or float16")
    for name, tensor in (("k", k), ("v", v)):
        if not bool(tensor.isfinite().all()):
            raise InputError(f"roundtrip: {name} contains NaN or infinity")


def _modality_ids(
    modality: str | Modality | torch.Tensor | None, batch: int, tokens: int
) -> torch.Tensor:
    if isinstance(modality, torch.Tensor):
        if modality.shape not in ((tokens,), (batch, tokens)):
            raise InputError(
                f"roundtrip: modality {tuple(modality.shape)} must be ({tokens},) or "
                f"({batch}, {tokens})"
            )
        if not set(modality.unique().tolist()) <= set(Modality):
            raise InputError(
                "roundtrip: modality ids must be 0 (text), 1 (image), 2 (video) or 3 (audio)"
            )
        return modality.to("cpu").expand(batch, tokens)
    if isinstance(modality, str):
        if modality.upper() not in Modality.__members__:
            names = ", ".join(kind.label for kind in Modality)
            raise InputError(f"roundtrip: modality {modality!r}: must be one of {names}")
        modality = Modality[modality.upper()]
    try:
        kind = Modality(modality or Modality.TEXT)
    except ValueError:
        raise InputError(
            f"roundtrip: modality {modality!r} must be 0 (text), 1 (image), 2 (video) or 3 (audio)"
        ) from None
    return torch.full((batch, tokens), int(kind))


@dataclass(frozen=True)
class LayerStates:
    """Queries, keys and values of one layer's attention, after RoPE and QK-norm.

    Attributes:
        index: index of the layer.
        module: the attention layer.
        queries: (query heads, tokens, head_dim).
        keys: (KV heads, tokens, head_dim).
        values: (KV heads, tokens, head_dim).
        scaling: factor by which scores are multiplied.
    """

    index: int
    module: torch.nn.Module
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class Variant:
    """A policy to measure: a preset with or without token scaling.

    Attributes:
        preset: name of the preset.
        token_scaling: "shared", "per_head" or None.
    """

    preset: str
    token_scaling: str | None

    @property
    def policy(self) -> KVPolicy:
        """The preset with this token scaling, but no balancing, which ``measure_errors`` adds."""
        return KVPolicy.preset(self.preset, token_scaling=self.token_scaling, balance=None)

    @property
    def balances(self) -> bool:
        """Whether the preset balances."""
        return KVPolicy.preset(self.preset).balances

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"{self.preset}, {self.token_scaling or 'no'} token scaling"


def _variants(preset: str) -> tuple[Variant, Variant]:
    # KIVI has no token scaling, so its variant uses that of the published OScaR recipe.
    own = KVPolicy.preset(preset).token_scaling or "shared"
    return Variant(preset, own), Variant(preset, None)


PAIRS = {preset: _variants(preset) for preset in _PRESETS}
"""Each preset with and without token scaling."""
VARIANTS = (Variant(DEFAULT, None), *(variant for pair in PAIRS.values() for variant in pair))
"""All variants to measure. The default preset has no token scaling, as each token has a scale."""


@dataclass(frozen=True)
class Errors:
    """Errors from quantizing the tokens of one modality, or all tokens.

    Attributes:
        bits: bits per key or value element in a page, including scales and other overhead.
        keys: |quantized - exact| / |exact| for the keys of tokens in pages.
        values: |quantized - exact| / |exact| for the values of tokens in pages.
        output: |quantized - exact| / |exact| for the attention output, if these tokens are
            quantized and all others are exact.
        divergence: Kullback-Leibler divergence of the quantized attention weights from the exact
            ones, in nats, averaged over queries and heads. It predicts the quality of answers
            better than ``output``, which favours fits that shrink keys.
    """

    bits: float
    keys: float
    values: float
    output: float
    divergence: float


def sampled(ids: torch.Tensor, limit: int = SAMPLE_TOKENS) -> torch.Tensor:
    """Return the indices of the tokens to quantize, ascending: all tokens, or, for a long prompt, a
    sample of full pages.

    A page contains tokens of one modality in the order of the prompt. The number of pages sampled
    from each modality is proportional to its share of the prompt, but at least one.

    Args:
        ids: (tokens,) modality ids on the CPU.
        limit: approximate number of tokens.
    """
    if len(ids) <= limit:
        return torch.arange(len(ids))
    chosen = []
    for modality in Modality:
        places = (ids == int(modality)).nonzero()[:, 0]
        pages = len(places) // PAGE_TOKENS
        if pages:
            count = max(1, min(pages, round(len(places) / len(ids) * limit / PAGE_TOKENS)))
            which = torch.linspace(0, pages - 1, count).round().long()
            chosen.append(places[: pages * PAGE_TOKENS].view(pages, PAGE_TOKENS)[which].flatten())
    return torch.cat(chosen).sort().values


def measure_errors(
    states: LayerStates, sigma: torch.Tensor | None, ids: torch.Tensor, sample: torch.Tensor
) -> dict[str, dict[str, Errors]]:
    """Measure quantization errors, keyed by the variant's label, then by modality or "all".

    A modality without a full page has no errors.

    Args:
        states: states of the layer.
        sigma: (KV heads or 1, head_dim) balancing; None for no balancing.
        ids: (tokens,) modality ids on the CPU.
        sample: indices of the tokens to quantize, from ``sampled``.

    Raises:
        InputError: if keys or values are NaN, infinite or beyond float16.
    """
    device = states.keys.device
    where = sample.to(device)
    keys, values = (x[:, where].float()[None] for x in (states.keys, states.values))
    length = states.keys.shape[1]
    first = max(0, length - QUERY_TOKENS)
    attention = _Attention(
        queries=states.queries[:, first:].float().unflatten(0, (len(states.keys), -1)),
        hidden=where > torch.arange(first, length, device=device)[:, None],
        scaling=states.scaling,
    )
    exact, weights = attention(keys[0], values[0])
    parts = _paged(ids[sample], device)
    by_variant: dict[str, dict[str, Errors]] = {}
    for variant in VARIANTS:
        factor = sigma[:, None] if variant.balances and sigma is not None else 1.0
        back = roundtrip(keys / factor, values, variant.policy, ids[sample])
        errors = by_variant[variant.label] = {}
        for label, part in parts.items():
            mixed = [
                torch.where(part[:, None], new, old)
                for new, old in ((back.k * factor, keys), (back.v, values))
            ]
            output, quantized_weights = attention(mixed[0][0], mixed[1][0])
            divergence = (weights.exp() * (weights - quantized_weights)).sum(-1).mean()
            errors[label] = Errors(
                bits=back.bits_per_value,
                keys=_relative(mixed[0][:, :, part], keys[:, :, part]),
                values=_relative(mixed[1][:, :, part], values[:, :, part]),
                output=_relative(output, exact),
                divergence=float(divergence),
            )
    return by_variant


@dataclass(frozen=True)
class _Attention:
    """Attention of a few queries.

    Attributes:
        queries: (KV heads, group, queries, head_dim).
        hidden: (queries, keys) bool: keys that each query does not attend to.
        scaling: factor by which scores are multiplied.
    """

    queries: torch.Tensor
    hidden: torch.Tensor
    scaling: float

    def __call__(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the log weights; keys and values are (KV heads, keys, head_dim)."""
        scores = self.queries @ keys[:, None].mT * self.scaling
        # Use a finite value instead of -inf, so that hidden keys add 0 to a divergence.
        weights = scores.masked_fill(self.hidden, torch.finfo(scores.dtype).min / 2).log_softmax(-1)
        return weights.exp() @ values[:, None], weights


def _paged(ids: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """Return for each modality and "all" which tokens are in full pages, as (tokens,) bool."""
    parts = {}
    for modality in Modality:
        places = (ids == int(modality)).nonzero()[:, 0]
        packed = len(places) // PAGE_TOKENS * PAGE_TOKENS
        if packed:
            part = torch.zeros(len(ids), dtype=torch.bool)
            part[places[:packed]] = True
            parts[modality.label] = part.to(device)
    if parts:
        parts[ALL] = torch.stack(list(parts.values())).any(0)
    return parts


def _relative(quantized: torch.Tensor, exact: torch.Tensor) -> float:
    return float((quantized - exact).norm() / exact.norm().clamp(min=1e-30))
