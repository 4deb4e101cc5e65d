"""Draw charts as HTML, including an inspection's charts of values by layer.

The curves of a chart are SVG paths that stretch with the page; the labels are HTML elements that do
not stretch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from oscar_mm.inspect.inspection import Inspection
from oscar_mm.inspect.quantization_errors import PAIRS
from oscar_mm.inspect.report import findings

_STEPS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10)
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


@dataclass(frozen=True)
class Line:
    """A line of a chart, or an area given by its upper edge.

    Attributes:
        name: label in the legend.
        style: CSS class of the colour, such as "c-image".
        points: (x, y) pairs in ascending order of x.
        filled: whether this is an area, which extends down to the previous area, or to zero.
        dashed: whether the line is dashed.
    """

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    filled: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Note:
    """Text at a position on the horizontal axis.

    Attributes:
        x: position on the axis.
        text: text to show there.
    """

    x: float
    text: str


def chart(
    lines: Sequence[Line],
    *,
    title: str,
    summary: str,
    x_label: str,
    show_y: Callable[[float], str],
    ticks: Sequence[float] = (),
    min_x: float = 0,
    min_y: float = 0,
    events: Sequence[Note] = (),
    readouts: Sequence[Note] = (),
) -> str:
    """Return a chart as HTML, with axes from zero, a legend, and a summary for screen readers.

    Args:
        lines: areas in stacking order, then lines.
        title: caption above the chart.
        summary: description of what the chart shows.
        x_label: label of the horizontal axis.
        show_y: function that formats a value of the vertical axis.
        ticks: values to label on the horizontal axis; by default, its ends and its middle.
        min_x: minimum range of the horizontal axis.
        min_y: minimum range of the vertical axis.
        events: times at which media were shown or forgotten, drawn as vertical lines; their texts
            are for screen readers.
        readouts: texts in ascending order of x; the text nearest to the pointer is shown.
    """
    points = [point for line in lines for point in line.points]
    top = round_up(max(max((y for _, y in points), default=0), min_y) or 1)
    right = max(max((x for x, _ in points), default=0), min_x) or 1
    below: Sequence[tuple[float, float]] = ()
    drawn = []
    for line in lines:
        placed = [(100 * x / right, 100 - 100 * y / top) for x, y in line.points]
        if line.filled:
            base = below or [(x, 100.0) for x, _ in placed]
            path = f"{_path(placed)}L{_path(list(reversed(base)))[1:]}Z"
            drawn.append(f'<path class="area {line.style}" d="{path}"/>')
            below = placed
        elif placed:
            style = "line dashed" if line.dashed else "line"
            drawn.append(f'<path class="{style} {line.style}" d="{_path(placed)}"/>')
    rules = "".join(
        f'<span class="rule" style="bottom:{25 * part}%"><i>{escape(show_y(top * part / 4))}</i>'
        "</span>"
        for part in range(5)
    )
    marks = "".join(
        f'<span style="left:{100 * tick / right:.1f}%">{tick:,.0f}</span>'
        for tick in ticks or (0, right // 2, right)
    )
    lines_of_events = "".join(
        f'<span class="event" style="left:{100 * event.x / right:.2f}%"></span>' for event in events
    )
    summary = "; ".join([summary, *(event.text for event in events)])
    legend = "".join(
        f'<li><b class="{"swatch" if line.filled else "stroke"} {line.style}'
        f'{" dashed" if line.dashed else ""}"></b>{escape(line.name)}</li>'
        for line in lines
    )
    if events:
        legend += '<li><b class="event-dot"></b>media shown or forgotten</li>'
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        f'<ul class="legend">{legend}</ul>'
        f'<div class="plot" role="img" aria-label="{escape(summary)}">{rules}'
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(drawn)}</svg>{lines_of_events}{_readouts(readouts, right)}</div>"
        f'<div class="ticks" aria-hidden="true">{marks}</div>'
        f'<div class="axis">{escape(x_label)}</div></figure>'
    )


def _readouts(readouts: Sequence[Note], right: float) -> str:
    """Return one strip of the plot per readout; the strip under the pointer shows its text."""
    places = [note.x for note in readouts]
    borders = [0.0, *(sum(pair) / 2 for pair in pairwise(places)), right]
    strips = "".join(
        f'<i style="flex-grow:{stop - start:.2f}" data-text="{escape(note.text)}"></i>'
        for note, (start, stop) in zip(readouts, pairwise(borders), strict=False)
    )
    return f'<span class="readouts" aria-hidden="true">{strips}</span>' if strips else ""


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)


def round_up(value: float) -> float:
    """Return the next round number whose quarters are also round."""
    power = 10.0 ** math.floor(math.log10(value / 4))
    return next(4 * step * power for step in _STEPS if 4 * step * power >= value * 0.999)


def inspection_view(inspection: Inspection) -> str:
    """Return an inspection as HTML: its verdict, charts by layer, and the other findings."""
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
        min_x=max(1, layers - 1),
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
            label = f"{name}, {'scaled' if scaled else 'not scaled'}"
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
    variant, _ = PAIRS["channel"]
    lines = [
        Line(
            name,
            f"c-{'plain' if name == 'all' else name}",
            [(layer.index, layer.errors[variant.label][name].keys) for layer in inspection.layers],
            dashed=name == "all",
        )
        for name in inspection.parts
    ]
    title = "Error of packed keys by modality (channel)"
    return _over_layers(inspection, lines, title, "Relative error of keys in 2-bit pages")
