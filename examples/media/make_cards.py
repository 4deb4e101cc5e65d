"""Draws cards/01.png to 20.png, which the pocket models can read: what contents.json says.

    python examples/media/make_cards.py [FOLDER]

A code is a text, a receipt has items and prices (their sum is added), and a shape has its row and
column on a grid of 3 by 6. Needs the fonts DejaVu and Liberation (Debian: fonts-dejavu and
fonts-liberation2). The same versions of Pillow and of the fonts give the same files.
"""

import json
import math
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

CONTENTS = Path(__file__).with_name("contents.json")
WIDTH, HEIGHT = 192, 96
SCALE = 4  # cards are drawn this much larger, which smooths their edges when scaled down
COLOURS = {
    "red": "#d91a1a",
    "green": "#1a9926",
    "blue": "#1a33e6",
    "yellow": "#e6cc00",
    "purple": "#991ab3",
    "black": "#0d0d0d",
}
# Paper, ink, font, size of the letters in pixels, and turn in degrees; used in turn.
STYLES = (
    ("white", "black", "DejaVuSans", 38, 0),
    ("#fdf6e3", "#22313f", "LiberationSerif-Regular", 40, -2),
    ("#e8f0fa", "#102a6b", "DejaVuSansMono-Bold", 32, 1),
    ("#24292f", "#f2f2f2", "LiberationSans-Bold", 36, 0),
    ("white", "#8c1c13", "DejaVuSerif", 32, 3),
    ("#f2efe9", "#333333", "LiberationMono-Bold", 36, -3),
    ("#eaf7ea", "#0b4f1f", "DejaVuSans-Bold", 32, 0),
)
RECEIPT = ("#fbfaf5", "#222222", "LiberationSans-Regular", 23, 0)
CELL = 29  # pixels between neighbours on the grid of shapes


def paper(colour: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), colour)
    return image, ImageDraw.Draw(image)


def text(words: str, style: tuple) -> Image.Image:
    """Lines of text in the middle of a card."""
    background, ink, name, size, turn = style
    image, pen = paper(background)
    font = ImageFont.truetype(f"{name}.ttf", size * SCALE)
    middle = (image.width / 2, image.height / 2)
    pen.multiline_text(middle, words, ink, font, "mm", spacing=size * SCALE / 5)
    return image.rotate(turn, Image.Resampling.BICUBIC, fillcolor=background)


def receipt(prices: dict[str, int]) -> Image.Image:
    lines = prices | {"SUM": sum(prices.values())}
    return text("\n".join(f"{item}   {price}" for item, price in lines.items()), RECEIPT)


def shapes(places: dict[str, tuple[int, int]]) -> Image.Image:
    """Coloured shapes, each in a row and a column of the grid, from 1."""
    image, pen = paper("white")
    radius = 0.4 * CELL * SCALE
    for name, (row, column) in places.items():
        colour, shape = name.split()
        x = (WIDTH / 2 + (column - 3.5) * CELL) * SCALE
        y = (HEIGHT / 2 + (row - 2) * CELL) * SCALE
        ink = COLOURS[colour]
        if shape == "circle":
            pen.circle((x, y), radius, ink)
        elif shape == "square":
            half = 0.85 * radius
            pen.rectangle((x - half, y - half, x + half, y + half), ink)
        else:
            pen.polygon(corners(x, y, radius, shape), ink)
    return image


def corners(x: float, y: float, radius: float, shape: str) -> list[tuple[float, float]]:
    """Of a triangle, or of a star with five points."""
    reaches = [radius] * 3 if shape == "triangle" else [radius, 0.42 * radius] * 5
    turns = [2 * math.pi * place / len(reaches) for place in range(len(reaches))]
    return [
        (x + reach * math.sin(turn), y - reach * math.cos(turn))
        for reach, turn in zip(reaches, turns, strict=True)
    ]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "cards").mkdir(exist_ok=True)
    cards = json.loads(CONTENTS.read_text())["cards"]
    for place, (number, shown) in enumerate(cards.items()):
        if isinstance(shown, str):
            card = text(shown, STYLES[place % len(STYLES)])
        elif "receipt" in shown:
            card = receipt(shown["receipt"])
        else:
            card = shapes(shown["shapes"])
        card = card.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
        card.save(folder / "cards" / f"{number}.png", optimize=True)


if __name__ == "__main__":
    main()
