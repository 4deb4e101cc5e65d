"""Figure: an inspection as panels over layers, by matplotlib."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING, Any

from oscar_mm.errors import InputError
from oscar_mm.inspect.inspection import Inspection
from oscar_mm.inspect.quantization_errors import ALL, PAIRS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, distinct with any colour vision. Later markers are smaller, so that lines
# on top of each other are all seen.
_MODALITIES: dict[str, dict[str, Any]] = {
    "text": {"color": "#0072B2", "marker": "o", "markersize": 10},
    "image": {"color": "#E69F00", "marker": "s", "markersize": 7.5},
    "video": {"color": "#009E73", "marker": "^", "markersize": 6},
    "audio": {"color": "#CC79A7", "marker": "D", "markersize": 4},
}
_PRESETS = {"compact": "#0072B2", "oscar": "#D55E00", "kivi": "#7F7F7F"}
_CHANNELS: dict[str, dict[str, Any]] = {
    "raw": {"color": "#7F7F7F", "marker": "o", "markersize": 9},
    "balanced": {"color": "#56B4E9", "marker": "^", "markersize": 6},
    "rotated": {"color": "#E69F00", "marker": "s", "markersize": 9},
    "balanced, rotated": {"color": "#009E73", "marker": "D", "markersize": 5},
}


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        InputError: it is not.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(
            "plots need matplotlib: pip install '.[plots]' in a clone, or leave --out away for the "
            "tables alone"
        ) from None


def png(inspection: Inspection, title: str) -> bytes:
    """The bytes of a PNG with the figure of an inspection."""
    from matplotlib.figure import Figure

    drawn = [(_norms, 0), (_spread, 0.9), (_divergence, 0), (_channels, 0.9)]
    if inspection.has_pages:
        drawn += [(partial(_errors_of, field=field), 0) for field in ("keys", "output")]
    figure = Figure(figsize=(13, 2.6 * len(drawn)), dpi=120, layout="constrained")
    # A dollar sign would begin a formula.
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
        style, tokens = _MODALITIES[name], f"{name} ({inspection.tokens[name]:,} tokens)"
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
            style = _MODALITIES[name] | shown
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
            panel.plot(_places(inspection), values, color=_PRESETS[preset], label=label, **style)


def _errors_of(panel: Axes, inspection: Inspection, field: str) -> None:
    what = "keys" if field == "keys" else "attention, where only one modality is quantized"
    panel.set_title(f"Error of {what} (compact)")
    panel.set_ylabel("relative error, |quantized - exact| / |exact|")
    variant, _ = PAIRS["compact"]
    for name in inspection.parts:
        style = _MODALITIES.get(name, {"color": "black", "linestyle": ":"})
        values = [getattr(layer.errors[variant.label][name], field) for layer in inspection.layers]
        panel.plot(_places(inspection), values, label=name, **style)


def _channels(panel: Axes, inspection: Inspection) -> None:
    panel.set_title("Outlier channels of keys, in the head where they are worst")
    panel.set_ylabel("largest / median channel (root mean square)")
    panel.axhline(1, color="black", linewidth=1)
    for name, style in _CHANNELS.items():
        ratios = [layer.channels[name] for layer in inspection.layers]
        panel.plot(_places(inspection), ratios, label=name, **style)
