"""Page formats as text."""

from itertools import product

import pytest

from oscar_mm import KVPolicy
from oscar_mm.ops.library import format_of, text_of
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import Bits


@pytest.mark.parametrize(
    ("preset", "bits", "head_dim"),
    list(product(("compact", "oscar", "kivi", "quarot"), ((2, 2), (4, 2), (3, 2)), (64, 80, 128))),
)
def test_there_and_back(preset: str, bits: tuple[int, int], head_dim: int) -> None:
    page_format = PageFormat.of(KVPolicy.preset(preset), Bits(*bits), 5, head_dim)
    assert format_of(text_of(page_format)) == page_format


def test_as_it_is_written() -> None:
    page_format = PageFormat(Bits(2, 2), 8, 128, "channel", 128, 128, "per_head")
    assert text_of(page_format) == "2 bits, 8 heads of 128, channel 128, value 128, per_head"
    page_format = PageFormat(Bits(3, 2), 8, 64, "token", 64, 32, None, center=True)
    text = "3/2 bits, 8 heads of 64, token 64, value 32, plain, center"
    assert text_of(page_format) == text and format_of(text) == page_format


@pytest.mark.parametrize(
    "text",
    [
        "",
        "compact",
        "2 bits, 8 heads of 128, channel 128, value 128",
        "2 bits, 8 heads of 128, channel 128, value 128, per_head ",
        "02 bits, 8 heads of 128, channel 128, value 128, per_head",
        "0 bits, 8 heads of 128, channel 128, value 128, per_head",
        "2 bits, 8 heads of 128, channel 128, value 128, per_head, middle",
        "2/2 bits, 8 heads of 128, channel 128, value 128, per_head",
        "2 bits, 8 heads of 127, channel 128, value 128, per_head",
    ],
)
def test_other_texts(text: str) -> None:
    with pytest.raises(ValueError, match="must be like '3/2 bits, 8 heads of 128"):
        format_of(text)
