"""Tables: the figures of an inspection as rows of text, for a terminal or a page."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_mm.inspect.errors import ALL, PAIRS, VARIANTS
from oscar_mm.inspect.inspection import Inspection


@dataclass(frozen=True)
class Table:
    """A title, the head of each column, and rows of as many cells."""

    title: str
    heads: list[str]
    rows: list[list[str]]


def tables(inspection: Inspection) -> list[Table]:
    """One row for each layer; and, where there are pages, one for each format."""
    found = [_by_layer(inspection)]
    if inspection.has_pages:
        found.append(_by_format(inspection))
    return found


def _by_layer(inspection: Inspection) -> Table:
    modalities = list(inspection.layers[0].norms.tokens)
    with_it, without = PAIRS["compact"]
    heads = ["layer", *modalities, "ratio", "over 3x", "raw", "stored"]
    if inspection.has_pages:
        heads += ["scaled", "plain"]
    rows = []
    for layer in inspection.layers:
        row = [
            str(layer.index),
            *(f"{layer.norms.tokens[name].median:.2f}" for name in modalities),
            f"{layer.norms.ratio:.2f}",
            f"{layer.norms.long:.1%}",
            f"{layer.channels['raw']:.1f}",
            f"{layer.channels['balanced, rotated']:.1f}",
        ]
        if inspection.has_pages:
            row += [f"{layer.errors[one.label][ALL].divergence:.4f}" for one in (with_it, without)]
        rows.append(row)
    title = (
        "By layer: median norm of keys by modality, their largest ratio, share of keys over 3 "
        "times their modality's median; largest channel over median, raw and as stored"
    )
    if inspection.has_pages:
        title += "; KL of attention weights with compact, tokens scaled and plain"
    return Table(title, heads, rows)


def _by_format(inspection: Inspection) -> Table:
    parts = inspection.parts
    rows = []
    for variant in VARIANTS:
        whole = inspection.mean_errors(variant.label)
        row = [variant.preset, variant.token_scaling or "none"]
        row += [f"{whole.bits:.2f}", f"{whole.keys:.3f}", f"{whole.values:.3f}"]
        row += [f"{inspection.mean_errors(variant.label, one).output:.3f}" for one in parts]
        rows.append([*row, f"{whole.divergence:.4f}"])
    return Table(
        "Relative errors by format (bits per value), means over layers: of keys, of values, and of "
        "attention with this modality, or all, quantized; KL of attention weights",
        ["format", "token scaling", "bits", "keys", "values", *parts, "KL"],
        rows,
    )


def details(inspection: Inspection) -> list[Table]:
    """Errors of each preset by layer and modality, where there are pages."""
    if not inspection.has_pages:
        return []
    fields = ("keys", "values", "output", "divergence")
    rows = [
        [str(layer.index), part]
        + [
            f"{getattr(layer.errors[with_it.label][part], field):.3f}"
            for with_it, _ in PAIRS.values()
            for field in fields
        ]
        for layer in inspection.layers
        for part in inspection.parts
    ]
    names = ("keys", "values", "output", "KL")
    heads = ["layer", "quantized", *(f"{preset}: {name}" for preset in PAIRS for name in names)]
    return [Table("Relative errors by layer and modality, tokens scaled", heads, rows)]
