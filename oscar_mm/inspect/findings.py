"""Findings: what the figures of an inspection say about token scaling, in words."""

from __future__ import annotations

from oscar_mm.inspect.inspection import Inspection
from oscar_mm.inspect.quantization_errors import PAIRS, QUERY_TOKENS

_USUAL = "compact"
_MATTERS = 0.1
"""A change of the divergence by less than this share is called none."""
_DIFFERS = 1.05
"""Median norms of modalities that differ by less than this factor are called equal."""


def findings(inspection: Inspection) -> list[str]:
    """Sentences, the verdict first."""
    return [
        _verdict(inspection),
        *_about_scaling(inspection),
        *_about_norms(inspection),
        _about_channels(inspection),
        *_about_the_sample(inspection),
    ]


def _verdict(inspection: Inspection) -> str:
    if not inspection.has_pages:
        return (
            "Whether this model needs token scaling cannot be told from this prompt: no modality "
            "has the 128 tokens that fill a page, so nothing would be quantized. Give more media, "
            "a longer prompt or a longer text."
        )
    with_it, without = (inspection.mean_errors(one.label).divergence for one in PAIRS[_USUAL])
    change = without / max(with_it, 1e-12) - 1
    if change > _MATTERS:
        return (
            "On this prompt the model needs token scaling: without it, attention weights are off "
            f"by {change:.0%} more ({_USUAL})."
        )
    if change < -_MATTERS:
        return (
            "On this prompt the model does not need token scaling: without it, attention weights "
            f"are off by {-change:.0%} less ({_USUAL})."
        )
    return (
        "On this prompt token scaling hardly matters: without it, the divergence of attention "
        f"weights changes by {change:+.1%} ({_USUAL})."
    )


def _about_scaling(inspection: Inspection) -> list[str]:
    if not inspection.has_pages:
        return []
    parts = []
    for preset, (with_it, without) in PAIRS.items():
        before = inspection.mean_errors(without.label).divergence
        after = inspection.mean_errors(with_it.label).divergence
        parts.append(f"{preset} {before:.4f} without, {after:.4f} with ({with_it.token_scaling})")
    return [
        "Divergence of attention weights (KL, in nats, mean over layers): "
        f"{'; '.join(parts)}. Without token scaling, compact also goes without its correction of "
        "norms."
    ]


def _about_norms(inspection: Inspection) -> list[str]:
    layers = inspection.layers
    said = []
    widest = max(layers, key=lambda layer: layer.norms.ratio)
    if widest.norms.ratio > _DIFFERS:
        medians = ", ".join(
            f"{name} {spread.median:.2f}" for name, spread in widest.norms.tokens.items()
        )
        said.append(
            f"Between modalities, keys differ most in layer {widest.index}: median norms {medians}"
            f" ({widest.norms.ratio:.2f} times). The cache quantizes each modality by itself, so "
            "this alone costs nothing; only differences within one do."
        )
    elif len(widest.norms.tokens) > 1:
        said.append(
            f"Between modalities, the median norms of keys differ by {widest.norms.ratio - 1:.1%} "
            "at most."
        )
    longest = max(layers, key=lambda layer: layer.norms.long)
    if longest.norms.long > 0:
        name, spread = max(longest.norms.tokens.items(), key=lambda item: item[1].long)
        said.append(
            f"Within a modality, keys over 3 times its median are most frequent in layer "
            f"{longest.index}: {spread.long:.1%} of {name}."
        )
    else:
        said.append("Within a modality, no key is over 3 times its median in any layer.")
    if inspection.qk_norm:
        said.append(
            "This model normalizes each head's key before RoPE (QK-norm): norms can differ only by "
            "what its channel weights make of a key's direction."
        )
    return said


def _about_channels(inspection: Inspection) -> str:
    worst = max(inspection.layers, key=lambda layer: layer.channels["raw"])
    return (
        f"The largest key channel is {worst.channels['raw']:.1f} times the median channel (layer "
        f"{worst.index}); there it is {worst.channels['rotated']:.1f} times after rotation, "
        f"{worst.channels['balanced']:.1f} after balancing and "
        f"{worst.channels['balanced, rotated']:.1f} after both."
    )


def _about_the_sample(inspection: Inspection) -> list[str]:
    said = []
    if inspection.is_sample:
        said.append(
            f"Errors are those of a sample of {inspection.quantized:,} of "
            f"{sum(inspection.tokens.values()):,} tokens, whole pages at even distances, and "
            "attention is to these."
        )
    if inspection.has_pages:
        said.append(
            f"Errors of attention are those of the last {QUERY_TOKENS} tokens, and only full pages "
            "of 128 tokens are quantized. They compare formats in this prompt; what an answer "
            "loses is told by tasks only."
        )
    return said
