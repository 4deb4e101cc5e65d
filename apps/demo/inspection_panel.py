"""The inspection of the conversation's media as charts and sentences."""

from __future__ import annotations

from html import escape

from oscar_mm.apps.demo.charts import Line, chart
from oscar_mm.inspect.inspection import Inspection
from oscar_mm.inspect.quantization_errors import PAIRS
from oscar_mm.inspect.report import findings

NOT_INSPECTED = (
    '<p class="empty">Reads the media of this conversation once more and measures, layer by layer, '
    "how long keys are in each modality, what rotation and token scaling do to them, and what "
    "packing costs.</p>"
)
_STAGES = {
    "raw": "c-plain",
    "rotated": "c-image",
    "balanced": "c-text",
    "balanced, rotated": "c-video",
}


def inspection_view(inspection: Inspection) -> str:
    """Show the verdict, charts over layers, and the other findings."""
    verdict, *others = map(escape, findings(inspection))
    charts = [_norms(inspection), _spread(inspection), _channels(inspection)]
    if inspection.has_pages:
        charts += [_errors(inspection)]
    sentences = "".join(f"<li>{finding}</li>" for finding in others)
    return (
        f'<p class="verdict">{verdict}</p><div class="charts">{"".join(charts)}</div>'
        f'<details><summary>In words</summary><ul class="said">{sentences}</ul></details>'
    )


def _over_layers(inspection: Inspection, lines: list[Line], title: str, summary: str) -> str:
    layers = len(inspection.layers)
    last = "; ".join(f"{line.name} {line.points[-1][1]:.2f}" for line in lines)
    return chart(
        lines,
        title=title,
        summary=f"{summary}. In the last layer: {last}",
        x_label="layer",
        show_y=lambda value: f"{value:g}",
        ticks=sorted({0, layers // 2, *(range(layers) if layers <= 8 else ()), layers - 1}),
        least_x=max(1, layers - 1),
    )


def _norms(inspection: Inspection) -> str:
    lines = [
        Line(
            f"{name}, {inspection.tokens[name]:,} tokens",
            f"c-{name}",
            [(layer.index, layer.norms.tokens[name].median) for layer in inspection.layers],
        )
        for name in inspection.layers[0].norms.tokens
    ]
    title = "Norm of keys by modality (median)"
    return _over_layers(inspection, lines, title, "Median norm of a token's key, by layer")


def _spread(inspection: Inspection) -> str:
    lines = []
    for name in inspection.layers[0].norms.heads:
        for scaled in (False, True):
            points = []
            for layer in inspection.layers:
                norms = (layer.norms.scaled if scaled else layer.norms.heads)[name]
                points.append((layer.index, norms.p95 / max(norms.p5, 1e-12)))
            label = f"{name}, {'scaled' if scaled else 'as it is'}"
            lines.append(Line(label, f"c-{name}", points, dashed=scaled))
    title = "Spread of norms before and after token scaling"
    return _over_layers(inspection, lines, title, "95% over 5% percentile of a head's key norms")


def _channels(inspection: Inspection) -> str:
    lines = [
        Line(name, style, [(layer.index, layer.channels[name]) for layer in inspection.layers])
        for name, style in _STAGES.items()
    ]
    title = "Outlier channels before and after rotation and balancing"
    return _over_layers(inspection, lines, title, "Largest over median channel of the worst head")


def _errors(inspection: Inspection) -> str:
    variant, _ = PAIRS["compact"]
    lines = [
        Line(
            name,
            f"c-{'plain' if name == 'all' else name}",
            [(layer.index, layer.errors[variant.label][name].keys) for layer in inspection.layers],
            dashed=name == "all",
        )
        for name in inspection.parts
    ]
    title = "Error of packed keys by modality (compact)"
    return _over_layers(inspection, lines, title, "Relative error of keys in 2-bit pages")
