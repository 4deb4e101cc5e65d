"""Draws the pictures of this folder: receipt.jpg, chart.png and street_sign.png.

    python examples/media/make_images.py [FOLDER]

Everything is drawn by Pillow with the font that it brings along, so the pictures may be used like
the code. The same versions of Pillow and numpy give the same files.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SCALE = 2  # pictures are drawn this much larger, which smooths their edges when scaled down

INK = (47, 44, 52)
ITEMS = (
    ("Sourdough loaf", 1, 5.40),
    ("Croissant", 3, 6.60),
    ("Cinnamon roll", 2, 5.80),
    ("Flat white", 2, 7.60),
    ("Apple juice 0.3 l", 1, 3.20),
    ("Lemon tart", 1, 4.90),
)
TAX = 0.07
RAIN = (88, 71, 64, 52, 61, 74, 93, 117, 104, 126, 119, 97)  # mm
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def font(size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size=size * SCALE)


def shrink(image: Image.Image) -> Image.Image:
    size = (image.width // SCALE, image.height // SCALE)
    return image.resize(size, Image.Resampling.LANCZOS)


class Canvas:
    """Draws in final pixels on an image which is SCALE times larger."""

    def __init__(self, image: Image.Image) -> None:
        self.draw = ImageDraw.Draw(image)

    def text(self, x, y, words, size, fill, anchor="lm", bold=0.0, halo=None) -> None:
        place = (x * SCALE, y * SCALE)
        face = font(size)
        if halo:
            self.draw.text(place, words, halo, face, anchor, stroke_width=5 * SCALE)
        self.draw.text(place, words, fill, face, anchor, stroke_width=round(bold * SCALE))

    def line(self, points, fill, width) -> None:
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        self.draw.line(scaled, fill=fill, width=round(width * SCALE), joint="curve")

    def box(self, left, top, right, bottom, fill, radius=0.0, rounded=(True,) * 4) -> None:
        edges = [edge * SCALE for edge in (left, top, right, bottom)]
        self.draw.rounded_rectangle(edges, radius * SCALE, fill, corners=rounded)

    def oval(self, left, top, right, bottom, fill) -> None:
        self.draw.ellipse([edge * SCALE for edge in (left, top, right, bottom)], fill=fill)

    def shape(self, points, fill) -> None:
        self.draw.polygon([(x * SCALE, y * SCALE) for x, y in points], fill=fill)


def vertical_gradient(width: int, height: int, stops: list[tuple[float, tuple]]) -> Image.Image:
    places = [place for place, _ in stops]
    rows = np.linspace(0, 1, height)
    column = np.stack([np.interp(rows, places, [c[i] for _, c in stops]) for i in range(3)], 1)
    return Image.fromarray(np.repeat(column[:, None], width, 1).round().astype(np.uint8))


def table_top(width: int, height: int) -> Image.Image:
    """Dark oak boards: streaks of noise drawn out sideways, with gaps between the boards."""
    random = np.random.default_rng(7)
    grain = np.zeros((height, width))
    for stretch, strength in ((160, 10.0), (60, 6.0), (14, 2.5)):
        noise = random.normal(size=(height, width // stretch + 2))
        noise = (noise + np.roll(noise, 1, 0) + np.roll(noise, 2, 0)) / 1.7
        at = np.arange(width) / stretch
        left = at.astype(int)
        share = at - left
        grain += strength * (noise[:, left] * (1 - share) + noise[:, left + 1] * share)
    board = height // 4
    for index in range(4):
        grain[index * board : (index + 1) * board] += random.normal() * 7
        grain[index * board : index * board + 5] -= 38
    pixels = np.array([112.0, 77, 53]) + grain[..., None] * np.array([1.0, 0.82, 0.62])
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def receipt_paper(width: int, height: int) -> Image.Image:
    """The receipt itself, flat, RGBA, torn off in teeth at both ends."""
    paper = Image.new("RGBA", (width * SCALE, height * SCALE), (0, 0, 0, 0))
    canvas = Canvas(paper)
    teeth = 34
    step = width / teeth
    top = [(i * step / 2, 6 if i % 2 else 0) for i in range(2 * teeth + 1)]
    bottom = [(x, height - y) for x, y in reversed(top)]
    canvas.shape(top + bottom, (250, 247, 240, 255))

    left, right, middle = 44, width - 44, width / 2
    canvas.text(middle, 76, "HARBOUR BAKERY", 38, INK, "mm", bold=0.8)
    canvas.text(middle, 116, "12 Quay Street  ·  Tel 555 0142", 17, INK, "mm")
    canvas.text(left, 166, "Receipt 20418", 17, INK)
    canvas.text(right, 166, "14 March 2025, 08:52", 17, INK, "rm")

    def rule(y: float) -> None:
        for start in np.arange(left, right, 11):
            canvas.line([(start, y), (start + 6, y)], (120, 115, 118), 1.5)

    def row(y: float, name: str, amount: float, size: float, bold: float = 0.0) -> None:
        canvas.text(left, y, name, size, INK, bold=bold)
        canvas.text(right, y, f"{amount:.2f}", size, INK, "rm", bold=bold)

    rule(194)
    y = 230
    for name, count, price in ITEMS:
        canvas.text(left, y, f"{count} x", 21, INK)
        canvas.text(left + 50, y, name, 21, INK)
        canvas.text(right, y, f"{price:.2f}", 21, INK, "rm")
        y += 41
    rule(y)
    total = sum(price for _, _, price in ITEMS)
    tax = round(total * TAX, 2)
    row(y + 33, "Subtotal", total, 19)
    row(y + 66, f"Tax {TAX:.0%}", tax, 19)
    row(y + 115, "TOTAL EUR", total + tax, 32, bold=0.7)
    rule(y + 150)
    canvas.text(middle, y + 183, "Paid by card  **** 4471", 18, INK, "mm")
    canvas.text(middle, y + 217, "Thank you, see you tomorrow!", 18, INK, "mm")
    widths = np.random.default_rng(3).integers(1, 4, 76)
    x = middle - 2 * float(widths.sum()) / 2
    for index, bar in enumerate(widths.tolist()):
        if index % 2 == 0:
            canvas.box(x, y + 246, x + 2 * bar - 0.6, y + 296, INK)
        x += 2 * bar
    return paper


def receipt() -> Image.Image:
    """A till receipt on a table, 800 x 1000."""
    width, height = 800, 1000
    scene = table_top(width * SCALE, height * SCALE).convert("RGBA")
    paper = receipt_paper(500, 822).rotate(2.2, Image.Resampling.BICUBIC, expand=True)
    place = ((scene.width - paper.width) // 2, (scene.height - paper.height) // 2)
    shadow = Image.new("L", scene.size)
    shadow.paste(paper.getchannel("A"), (place[0] + 18, place[1] + 26))
    shadow = shadow.filter(ImageFilter.GaussianBlur(22)).point(lambda value: value * 0.62)
    scene.paste((22, 12, 6), mask=shadow)
    scene.alpha_composite(paper, place)
    picture = shrink(scene.convert("RGB"))

    # Light from the top left, and the grain of a camera.
    y, x = np.mgrid[0:height, 0:width]
    distance = np.hypot((x - 0.3 * width) / width, (y - 0.22 * height) / height)
    light = 1.07 - 0.34 * distance**1.6
    grain = np.random.default_rng(5).normal(0, 2.2, (height, width))
    pixels = np.asarray(picture) * light[..., None] * [1.0, 0.985, 0.95] + grain[..., None]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def chart() -> Image.Image:
    """Bars of the rain in each month, 960 x 640."""
    width, height = 960, 640
    dark, soft, blue, accent = (31, 41, 55), (107, 114, 128), (125, 170, 214), (226, 92, 61)
    paper = (252, 252, 250)
    image = Image.new("RGB", (width * SCALE, height * SCALE), paper)
    canvas = Canvas(image)
    canvas.text(60, 58, "October was the wettest month", 32, dark, bold=0.5)
    canvas.text(60, 98, "Rainfall in Port Ellis, 2024, in millimetres", 19, soft)
    left, right, floor, ceiling, top = 104, width - 48, 560, 150, 140
    for value in range(0, top + 1, 20):
        y = floor - (floor - ceiling) * value / top
        canvas.line([(left, y), (right, y)], (226, 228, 231) if value else (140, 146, 155), 1)
        canvas.text(left - 16, y, str(value), 16, soft, "rm")
    slot = (right - left) / len(RAIN)
    for index, (month, value) in enumerate(zip(MONTHS, RAIN, strict=True)):
        middle = left + slot * (index + 0.5)
        y = floor - (floor - ceiling) * value / top
        color = accent if value == max(RAIN) else blue
        only_top = (True, True, False, False)
        canvas.box(middle - 23, y, middle + 23, floor - 0.5, color, radius=5, rounded=only_top)
        ink, bold = (accent, 0.5) if color == accent else (dark, 0)
        canvas.text(middle, y - 15, str(value), 17, ink, "mm", bold, halo=paper)
        canvas.text(middle, floor + 24, month, 17, dark, "mm")
    return shrink(image)


def cloud(canvas: Canvas, x: float, y: float, size: float, fill: tuple) -> None:
    for dx, dy, radius in ((0, 0, 34), (42, -20, 44), (92, -8, 40), (130, 6, 28), (-34, 10, 24)):
        cx, cy, r = x + dx * size, y + dy * size, radius * size
        canvas.oval(cx - r, cy - r, cx + r, cy + r, fill)
    canvas.box(x - 34 * size, y, x + 130 * size, y + 34 * size, fill)


def sign_plate(canvas: Canvas, left, top, right, bottom, point, color) -> None:
    """An arrow-shaped plate with a white rim; ``point`` is -1 for left, 1 for right, 0 for none."""
    for inset, fill in ((0, (245, 247, 248)), (6, color)):
        x0, y0, x1, y1 = left + inset, top + inset, right - inset, bottom - inset
        middle, tip = (y0 + y1) / 2, (bottom - top) / 2 - inset * 0.4
        if point == 0:
            canvas.box(x0, y0, x1, y1, fill, radius=12 - inset / 2)
        elif point > 0:
            canvas.box(x0, y0, x1 - tip, y1, fill, radius=12 - inset / 2)
            canvas.shape(
                [
                    (x1 - tip - 14, y0),
                    (x1 - tip, y0),
                    (x1, middle),
                    (x1 - tip, y1),
                    (x1 - tip - 14, y1),
                ],
                fill,
            )
        else:
            canvas.box(x0 + tip, y0, x1, y1, fill, radius=12 - inset / 2)
            canvas.shape(
                [
                    (x0 + tip + 14, y0),
                    (x0 + tip, y0),
                    (x0, middle),
                    (x0 + tip, y1),
                    (x0 + tip + 14, y1),
                ],
                fill,
            )


def street_sign() -> Image.Image:
    """Three plates on a pole before hills and sea, 760 x 950."""
    width, height = 760, 950
    stops = [
        (0, (72, 142, 205)),
        (0.55, (178, 217, 240)),
        (0.72, (253, 236, 205)),
        (1, (253, 236, 205)),
    ]
    image = vertical_gradient(width * SCALE, height * SCALE, stops)
    canvas = Canvas(image)
    canvas.oval(566, 560, 656, 650, (255, 246, 214))
    cloud(canvas, 110, 150, 1.0, (240, 247, 251))
    cloud(canvas, 560, 92, 0.75, (226, 239, 247))
    cloud(canvas, 60, 424, 0.5, (226, 239, 247))

    x = np.arange(0, width + 1, 4)
    ridges = (
        (660, 40, 150, 0.6, (151, 184, 199)),
        (706, 28, 105, 2.3, (113, 158, 166)),
    )
    for base, swing, length, shift, color in ridges:
        crest = base - swing * np.sin(x / length + shift) - 8 * np.sin(x / 31 + shift)
        points = [*zip(x.tolist(), crest.tolist(), strict=True), (width, height), (0, height)]
        canvas.shape(points, color)
    canvas.box(0, 740, width, 840, (78, 138, 168))
    for y, start, end in ((756, 60, 190), (770, 420, 610), (786, 130, 250), (798, 560, 700)):
        canvas.line([(start, y), (end, y)], (124, 173, 195), 2.5)
    canvas.shape([(584, 748), (672, 748), (656, 766), (598, 766)], (245, 245, 240))
    canvas.shape([(628, 742), (628, 668), (668, 742)], (250, 250, 246))
    canvas.shape([(622, 742), (622, 684), (592, 742)], (224, 91, 69))
    meadow = 815 - 12 * np.sin(x / 120 + 1)
    points = [*zip(x.tolist(), meadow.tolist(), strict=True), (width, height), (0, height)]
    canvas.shape(points, (104, 150, 88))
    canvas.shape([*[(a, b + 62 + a * 0.03) for a, b in points[:-2]], *points[-2:]], (84, 130, 74))

    canvas.oval(268, 905, 492, 931, (66, 106, 60))
    canvas.box(364, 150, 396, 918, (92, 99, 107), radius=8)
    canvas.box(364, 150, 375, 918, (134, 141, 149), radius=5)
    canvas.oval(356, 130, 404, 178, (70, 76, 84))
    white = (250, 250, 250)
    sign_plate(canvas, 130, 212, 630, 322, 0, (24, 84, 158))
    canvas.text(380, 266, "Lighthouse Road", 52, white, "mm", bold=0.6)
    sign_plate(canvas, 200, 362, 690, 456, 1, (28, 118, 82))
    canvas.text(228, 408, "Old Harbour", 42, white, bold=0.4)
    canvas.text(634, 408, "400 m", 34, white, "rm")
    sign_plate(canvas, 70, 492, 560, 586, -1, (139, 88, 52))
    canvas.text(126, 538, "1.2 km", 34, white)
    canvas.text(532, 538, "Sea Museum", 42, white, "rm", bold=0.4)
    for y in (267, 409, 539):
        canvas.oval(376, y - 50 + 8, 384, y - 42 + 8, (210, 216, 222))
    return shrink(image)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    receipt().save(folder / "receipt.jpg", quality=86)
    chart().save(folder / "chart.png", optimize=True)
    street_sign().save(folder / "street_sign.png", optimize=True)


if __name__ == "__main__":
    main()
