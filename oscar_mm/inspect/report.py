"""An inspection as rows of text, and as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape

from oscar_mm.inspect.inspection import Inspection
from oscar_mm.inspect.quantization_errors import ALL, PAIRS, VARIANTS


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


_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
  max-width: 68rem; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.25rem; }
.what { color: #555; margin-top: 0; }
.verdict { background: #eef5fb; border-left: 0.3rem solid #0072b2; padding: 0.75rem 1rem;
  font-size: 1.1rem; }
img { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: #555; padding: 0.75rem 0; }
th, td { text-align: right; padding: 0.25rem 0.75rem; border-bottom: 1px solid #e0e0e0; }
th { border-bottom: 2px solid #888; }
th:first-child, td:first-child { text-align: left; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(title: str, what: str, said: list[str], figure: bytes, tables: list[Table]) -> str:
    """The page.

    Args:
        title: its heading.
        what: a line below it.
        said: sentences, the verdict first.
        figure: PNG.
        tables: below the figure.
    """
    image = base64.b64encode(figure).decode()
    verdict, *others = map(escape, said)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="what">{escape(what)}</p>
<p class="verdict">{verdict}</p>
<ul>
{"".join(f"<li>{one}</li>" for one in others)}
</ul>
<img alt="Norms of keys, errors of attention and channel outliers by layer; the tables below have
the same figures" src="data:image/png;base64,{image}">
{"".join(map(_table, tables))}
</body>
</html>
"""


def _table(table: Table) -> str:
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in table.heads)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    return (
        f'<div class="wide"><table><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
