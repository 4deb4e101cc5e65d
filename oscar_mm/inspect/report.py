"""Report an inspection as sentences, tables, a figure with per-layer panels, and an HTML file.

The HTML file is self-contained. Figures are drawn by matplotlib.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from oscar_mm.inspect.inspection import LONG, Inspection
from oscar_mm.inspect.quantization_errors import ALL, PAIRS, QUERY_TOKENS, VARIANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_USUAL_PRESET = "channel"
_MATTERS = 0.1
"""Relative change in divergence up to which token scaling counts as irrelevant."""
_DIFFERS = 1.05
"""Ratio between the modalities' median norms up to which they count as equal."""
_PAGE_STYLE = """
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
_PAGE_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
# Okabe and Ito's colours, which can be told apart with any colour vision. Later markers are
# smaller, so that all overlapping lines stay visible.
_MODALITY_STYLES: dict[str, dict[str, Any]] = {
    "text": {"color": "#0072B2", "marker": "o", "markersize": 10},
    "image": {"color": "#E69F00", "marker": "s", "markersize": 7.5},
    "video": {"color": "#009E73", "marker": "^", "markersize": 6},
    "audio": {"color": "#CC79A7", "marker": "D", "markersize": 4},
}
_PRESET_COLOURS = {"channel": "#0072B2", "oscar": "#D55E00", "kivi": "#7F7F7F"}
_CHANNEL_STYLES: dict[str, dict[str, Any]] = {
    "raw": {"color": "#7F7F7F", "marker": "o", "markersize": 9},
    "balanced": {"color": "#56B4E9", "marker": "^", "markersize": 6},
    "rotated": {"color": "#E69F00", "marker": "s", "markersize": 9},
    "balanced, rotated": {"color": "#009E73", "marker": "D", "markersize": 5},
}


def findings(inspection: Inspection) -> list[str]:
    """Return sentences about an inspection, the verdict first."""
    return [
        _verdict(inspection),
        *_on_scaling(inspection),
        *_on_norms(inspection),
        _on_channels(inspection),
        *_on_sample(inspection),
    ]


def _verdict(inspection: Inspection) -> str:
    if not inspection.has_pages:
        return (
            "This prompt cannot show whether the model needs token scaling: no modality has the "
            "128 tokens that fill a page, so nothing would be quantized. Use more media, a longer "
            "prompt or a longer text."
        )
    with_it, without = (
        inspection.mean_errors(variant.label).divergence for variant in PAIRS[_USUAL_PRESET]
    )
    change = without / max(with_it, 1e-12) - 1
    if change > _MATTERS:
        return (
            "On this prompt the model needs token scaling: without it, attention weights are off "
            f"by {change:.0%} more ({_USUAL_PRESET})."
        )
    if change < -_MATTERS:
        return (
            "On this prompt the model does not need token scaling: without it, attention weights "
            f"are off by {-change:.0%} less ({_USUAL_PRESET})."
        )
    return (
        "On this prompt token scaling hardly matters: without it, the divergence of attention "
        f"weights changes by {change:+.1%} ({_USUAL_PRESET})."
    )


def _on_scaling(inspection: Inspection) -> list[str]:
    if not inspection.has_pages:
        return []
    parts = []
    for preset, (with_it, without) in PAIRS.items():
        before = inspection.mean_errors(without.label).divergence
        after = inspection.mean_errors(with_it.label).divergence
        parts.append(f"{preset} {before:.4f} without, {after:.4f} with ({with_it.token_scaling})")
    return [
        "Divergence of attention weights (KL, in nats, mean over layers): "
        f"{'; '.join(parts)}. Without token scaling, channel also omits its correction of norms."
    ]


def _on_norms(inspection: Inspection) -> list[str]:
    layers = inspection.layers
    sentences = []
    widest = max(layers, key=lambda layer: layer.norms.ratio)
    if widest.norms.ratio > _DIFFERS:
        medians = ", ".join(
            f"{name} {spread.median:.2f}" for name, spread in widest.norms.tokens.items()
        )
        sentences.append(
            f"Between modalities, keys differ most in layer {widest.index}: median norms {medians}"
            f" ({widest.norms.ratio:.2f} times). The cache quantizes each modality separately, "
            "so this alone costs nothing; only differences within a modality matter."
        )
    elif len(widest.norms.tokens) > 1:
        sentences.append(
            "Between modalities, the median norms of keys differ by at most "
            f"{widest.norms.ratio - 1:.1%}."
        )
    longest = max(layers, key=lambda layer: layer.norms.long)
    if longest.norms.long > 0:
        name, spread = max(longest.norms.tokens.items(), key=lambda item: item[1].long)
        sentences.append(
            f"Within a modality, keys longer than {LONG:g} times its median are most frequent in "
            f"layer {longest.index}: {spread.long:.1%} of {name}."
        )
    else:
        sentences.append(
            f"Within a modality, no key is longer than {LONG:g} times its median in any layer."
        )
    if inspection.qk_norm:
        sentences.append(
            "This model normalizes each head's key before RoPE (QK-norm): norms can differ only by "
            "what its channel weights make of a key's direction."
        )
    return sentences


def _on_channels(inspection: Inspection) -> str:
    worst = max(inspection.layers, key=lambda layer: layer.channels["raw"])
    return (
        f"The largest key channel is {worst.channels['raw']:.1f} times the median channel (layer "
        f"{worst.index}); there it is {worst.channels['rotated']:.1f} times after rotation, "
        f"{worst.channels['balanced']:.1f} after balancing and "
        f"{worst.channels['balanced, rotated']:.1f} after both."
    )


def _on_sample(inspection: Inspection) -> list[str]:
    sentences = []
    if inspection.is_sample:
        sentences.append(
            f"Errors are measured on a sample of {inspection.quantized:,} of "
            f"{sum(inspection.tokens.values()):,} tokens, whole pages at even intervals, and "
            "attention reads only these."
        )
    if inspection.has_pages:
        sentences.append(
            f"Errors of attention are measured at the last {QUERY_TOKENS} tokens, and only full "
            "pages of 128 tokens are quantized. They compare formats on this prompt; only task "
            "scores show what answers lose."
        )
    return sentences


@dataclass(frozen=True)
class Table:
    """A title, a header for each column, and rows with one cell per column."""

    title: str
    heads: list[str]
    rows: list[list[str]]


def tables(inspection: Inspection) -> list[Table]:
    """Return a table with a row per layer and, if there are pages, one with a row per format."""
    if not inspection.has_pages:
        return [_by_layer(inspection)]
    return [_by_layer(inspection), _by_format(inspection)]


def _by_layer(inspection: Inspection) -> Table:
    modalities = list(inspection.layers[0].norms.tokens)
    pair = PAIRS["channel"]
    heads = ["layer", *modalities, "ratio", f"over {LONG:g}x", "raw", "stored"]
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
            row += [f"{layer.errors[variant.label][ALL].divergence:.4f}" for variant in pair]
        rows.append(row)
    title = (
        "By layer: median norm of keys by modality, their largest ratio, share of keys over "
        f"{LONG:g} times their modality's median; largest channel over median, raw and as stored"
    )
    if inspection.has_pages:
        title += "; KL of attention weights with channel, tokens scaled and plain"
    return Table(title, heads, rows)


def _by_format(inspection: Inspection) -> Table:
    parts = inspection.parts
    rows = []
    for variant in VARIANTS:
        mean = inspection.mean_errors(variant.label)
        row = [variant.preset, variant.token_scaling or "none"]
        row += [f"{mean.bits:.2f}", f"{mean.keys:.3f}", f"{mean.values:.3f}"]
        row += [f"{inspection.mean_errors(variant.label, part).output:.3f}" for part in parts]
        rows.append([*row, f"{mean.divergence:.4f}"])
    return Table(
        "Relative errors by format (bits per value), means over layers: of keys, of values, and of "
        "attention with this modality, or all, quantized; KL of attention weights",
        ["format", "token scaling", "bits", "keys", "values", *parts, "KL"],
        rows,
    )


def details(inspection: Inspection) -> list[Table]:
    """Return a table of errors by layer and modality for each preset; no tables if there are no
    pages."""
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


def page(
    title: str, subtitle: str, sentences: list[str], figure: bytes, tables: list[Table]
) -> str:
    """Return the HTML of an inspection.

    Args:
        title: heading of the page.
        subtitle: line below the heading.
        sentences: findings, the verdict first.
        figure: bytes of a PNG.
        tables: tables below the figure.
    """
    image = base64.b64encode(figure).decode()
    verdict, *others = map(escape, sentences)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_PAGE_POLICY}">
<title>{escape(title)}</title>
<style>{_PAGE_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="what">{escape(subtitle)}</p>
<p class="verdict">{verdict}</p>
<ul>
{"".join(f"<li>{sentence}</li>" for sentence in others)}
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


def png(inspection: Inspection, title: str) -> bytes:
    """Draw the figure of an inspection and return it as a PNG."""
    from matplotlib.figure import Figure

    drawn = [(_norms, 0), (_spread, 0.9), (_divergence, 0), (_channels, 0.9)]
    if inspection.has_pages:
        drawn += [(partial(_errors_of, field=field), 0) for field in ("keys", "output")]
    figure = Figure(figsize=(13, 2.6 * len(drawn)), dpi=120, layout="constrained")
    # A dollar sign would start a formula.
    figure.suptitle(title.replace("$", r"\$"), fontsize=15, fontweight="bold")
    panels = figure.subplots(len(drawn) // 2, 2)
    for panel, (draw, bottom) in zip(panels.flat, drawn, strict=True):
        draw(panel, inspection)
        panel.set_xlabel("layer")
        panel.set_xlim(-0.4, len(inspection.layers) - 0.6)
        if panel.lines:
            panel.set_ylim(bottom, max(1.1 * panel.dataLim.ymax, 1.1 * bottom))
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(color="#E0E0E0", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12)}
            columns = 4 if draw is _channels else 3
            panel.legend(ncols=columns, frameon=False, fontsize=10, **place)
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()


def _places(inspection: Inspection) -> list[int]:
    return [layer.index for layer in inspection.layers]


def _norms(panel: Axes, inspection: Inspection) -> None:
    panel.set_title("Norm of keys by modality (line: median; band: 5% to 95% of tokens)")
    panel.set_ylabel("norm of a token's key")
    places = _places(inspection)
    for name in inspection.layers[0].norms.tokens:
        spreads = [layer.norms.tokens[name] for layer in inspection.layers]
        style, tokens = _MODALITY_STYLES[name], f"{name} ({inspection.tokens[name]:,} tokens)"
        panel.plot(places, [spread.median for spread in spreads], label=tokens, **style)
        low, high = [spread.p5 for spread in spreads], [spread.p95 for spread in spreads]
        panel.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _spread(panel: Axes, inspection: Inspection) -> None:
    panel.set_title("Spread of key norms within a modality, before and after token scaling")
    panel.set_ylabel("95% / 5% percentile, norms of a head's keys")
    for name in inspection.layers[0].norms.heads:
        shown: dict[str, Any]
        for stage, shown in (
            ("before", {"linestyle": "-"}),
            ("after shared", {"linestyle": "--", "markerfacecolor": "white"}),
        ):
            norms = [layer.norms for layer in inspection.layers]
            spreads = [(x.heads if stage == "before" else x.scaled)[name] for x in norms]
            ratios = [spread.p95 / max(spread.p5, 1e-12) for spread in spreads]
            style = _MODALITY_STYLES[name] | shown
            panel.plot(_places(inspection), ratios, label=f"{name}, {stage}", **style)
    panel.axhline(1, color="black", linewidth=1, label="after scaling per head")


def _divergence(panel: Axes, inspection: Inspection) -> None:
    panel.set_title("Divergence of attention weights, with and without token scaling")
    panel.set_ylabel("KL, exact against quantized, in nats")
    if not inspection.has_pages:
        text = "no modality has the 128 tokens\nthat fill a page"
        panel.text(0.5, 0.5, text, ha="center", va="center", transform=panel.transAxes)
        return
    for preset, pair in PAIRS.items():
        for variant in pair:
            values = [layer.errors[variant.label][ALL].divergence for layer in inspection.layers]
            style: dict[str, Any] = {"marker": "o", "markersize": 5}
            if variant.token_scaling is None:
                hollow = {"marker": "s", "markersize": 9, "markerfacecolor": "none"}
                style = hollow | {"linestyle": "--"}
            label = f"{preset}, {'scaled' if variant.token_scaling else 'not scaled'}"
            panel.plot(
                _places(inspection), values, color=_PRESET_COLOURS[preset], label=label, **style
            )


def _errors_of(panel: Axes, inspection: Inspection, field: str) -> None:
    what = "keys" if field == "keys" else "attention, where only one modality is quantized"
    panel.set_title(f"Error of {what} (channel)")
    panel.set_ylabel("relative error, |quantized - exact| / |exact|")
    variant, _ = PAIRS["channel"]
    for name in inspection.parts:
        style = _MODALITY_STYLES.get(name, {"color": "black", "linestyle": ":"})
        values = [getattr(layer.errors[variant.label][name], field) for layer in inspection.layers]
        panel.plot(_places(inspection), values, label=name, **style)


def _channels(panel: Axes, inspection: Inspection) -> None:
    panel.set_title("Outlier channels of keys, in the head where they are worst")
    panel.set_ylabel("largest / median channel (root mean square)")
    panel.axhline(1, color="black", linewidth=1)
    for name, style in _CHANNEL_STYLES.items():
        ratios = [layer.channels[name] for layer in inspection.layers]
        panel.plot(_places(inspection), ratios, label=name, **style)
