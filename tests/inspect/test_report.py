"""The words follow the figures; figure and page are whole, readable alone, and safe to open."""

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from oscar_mm.inspect.inspection import Inspection
from oscar_mm.inspect.report import details, findings, page, png, tables
from tests.inspect.synthetic import inspection


def test_keys_of_unequal_length_need_token_scaling() -> None:
    found = inspection(long=4.0)
    verdict, *others = findings(found)
    assert "needs token scaling: without it, attention weights are off by " in verdict
    assert any("longer than 3 times its median are most frequent in layer" in one for one in others)


def test_even_keys_do_not() -> None:
    verdict, *others = findings(inspection())
    assert "hardly matters" in verdict
    assert any("no key is longer than 3 times its median" in one for one in others)
    assert not any("QK-norm" in one for one in others)
    assert any("QK-norm" in one for one in findings(replace(inspection(), qk_norm=True)))


def test_modalities_of_unequal_length_alone_do_not() -> None:
    verdict, *others = findings(inspection(imbalance=6.0))
    assert "hardly matters" in verdict
    [between] = [one for one in others if one.startswith("Between modalities")]
    assert "text" in between and "(6." in between and "costs nothing" in between


def test_harm_is_reported_too() -> None:
    found = inspection()
    worse = []
    for layer in found.layers:
        errors = {
            label: {
                part: replace(one, divergence=one.divergence * (0.5 if "no token" in label else 1))
                for part, one in parts.items()
            }
            for label, parts in layer.errors.items()
        }
        worse.append(replace(layer, errors=errors))
    verdict = findings(replace(found, layers=worse))[0]
    assert (
        "does not need token scaling: without it, attention weights are off by 48% less" in verdict
    )


def test_outlier_channels_and_samples_are_reported() -> None:
    found = inspection(outliers=8.0)
    said = findings(replace(found, quantized=512))
    assert any("The largest key channel is " in one for one in said)
    assert any("a sample of 512 of 1,024 tokens" in one for one in said)


def test_without_pages_nothing_is_claimed() -> None:
    found = inspection()
    empty = [replace(layer, errors={label: {} for label in layer.errors}) for layer in found.layers]
    said = findings(replace(found, layers=empty))
    assert "This prompt cannot show" in said[0]
    assert not any("error" in one or "KL" in one for one in said)


@pytest.fixture(scope="module")
def found() -> Inspection:
    return inspection(imbalance=3.0, long=6.0, outliers=4.0)


@pytest.fixture(scope="module")
def picture(found) -> bytes:
    return png(found, "A title")


def test_figure(picture) -> None:
    image = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
    assert image.shape[0] > 1500 and image.shape[1] > 1200
    colors = {tuple(one) for one in image.reshape(-1, 3)[::7].tolist()}
    # Text, image and audio in colours of their own.
    assert {(0, 114, 178), (230, 159, 0), (204, 121, 167)} <= colors


def test_figure_without_pages(found, picture) -> None:
    empty = [replace(layer, errors={"channel": {}}) for layer in found.layers]
    short = replace(found, layers=empty)
    image = Image.open(io.BytesIO(png(short, "no $formula^{$")))
    assert image.height < Image.open(io.BytesIO(picture)).height
    assert details(short) == [] and len(tables(short)) == 1


def test_tables_hold_the_figures(found) -> None:
    by_layer, by_format = tables(found)
    assert [row[0] for row in by_layer.rows] == ["0", "1"]
    assert f"{found.layers[1].norms.tokens['image'].median:.2f}" in by_layer.rows[1]
    assert [row[0] for row in by_format.rows[:2]] == ["standard", "channel"]
    assert len(by_format.rows) == 7
    [by_part] = details(found)
    assert len(by_part.rows) == 2 * 4
    for table in (by_layer, by_format, by_part):
        assert {len(row) for row in table.rows} == {len(table.heads)}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_needs_nothing_else(found, picture) -> None:
    text = page("<b>model</b>", "a & b", ["Verdict <1>", "More"], picture, tables(found))
    reader = _Reader()
    reader.feed(text)
    assert reader.open == []
    [source] = reader.sources
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == picture
    assert not re.search(r"https?://|<script|url\(|@import", text)
    assert "&lt;b&gt;model" in text and "Verdict &lt;1&gt;" in text and "<b>" not in text
