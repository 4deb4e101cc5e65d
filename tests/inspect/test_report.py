"""Figure and page: whole, readable by themselves, and safe to open."""

import base64
import io
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from oscar_mm import InputError
from oscar_mm.inspect.figure import png, require_matplotlib
from oscar_mm.inspect.inspection import Inspection
from oscar_mm.inspect.report import details, page, tables
from tests.inspect.synthetic import inspection


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
    empty = [replace(layer, errors={"compact": {}}) for layer in found.layers]
    short = replace(found, layers=empty)
    image = Image.open(io.BytesIO(png(short, "no $formula^{$")))
    assert image.height < Image.open(io.BytesIO(picture)).height
    assert details(short) == [] and len(tables(short)) == 1


def test_tables_hold_the_figures(found) -> None:
    by_layer, by_format = tables(found)
    assert [row[0] for row in by_layer.rows] == ["0", "1"]
    assert f"{found.layers[1].norms.tokens['image'].median:.2f}" in by_layer.rows[1]
    assert [row[0] for row in by_format.rows[:2]] == ["standard", "compact"]
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


def test_without_matplotlib(monkeypatch) -> None:
    require_matplotlib()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install '\.\[plots\]'"):
        require_matplotlib()
