"""The glyph atlas: letters, digits and shapes in several fonts and sizes, drawn with Pillow.

python -m examples.train_pocket.glyphs OUT.npz
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from examples.train_pocket.words import GLYPHS, SHAPES

SIZES = (22, 31, 44)  # pixels of an em
CELL = 1.5  # side of a glyph's cell, in em
MARGIN = 0.25  # left of the glyph's origin, in em
DEJAVU = "/usr/share/fonts/truetype/dejavu/DejaVu"
LIBERATION = "/usr/share/fonts/truetype/liberation2/Liberation"
# Both families are free: Bitstream Vera's licence and the SIL Open Font License.
FONTS = [
    DEJAVU + name + ".ttf" for name in ["Sans", "Sans-Bold", "SansMono", "Serif", "Serif-Bold"]
]
FONTS += [DEJAVU + name + ".ttf" for name in ["SansCondensed", "Sans-Oblique", "SansMono-Bold"]]
FONTS += [
    f"{LIBERATION}{name}.ttf"
    for name in [
        "Sans-Regular",
        "Sans-Bold",
        "Sans-Italic",
        "Serif-Regular",
        "Serif-Bold",
        "Mono-Bold",
    ]
]
HELD_OUT = [DEJAVU + "SerifCondensed.ttf", LIBERATION + "Mono-Regular.ttf"]
EMPTY = len(GLYPHS) + len(SHAPES)  # a cell with nothing in it
SPACE = EMPTY + 1
GAP = SPACE + 1  # as wide as a shape


@dataclass
class GlyphAtlas:
    """Glyphs that can be printed, on one device.

    Attributes:
        cells: (sizes, fonts, glyphs, side, side) uint8, ink 255; smaller sizes are in the corner.
        advances: (fonts, glyphs) float32, in em; 0 for EMPTY.
        held_out: number of fonts, the last ones, that are not for training.
    """

    cells: torch.Tensor
    advances: torch.Tensor
    held_out: int

    @classmethod
    def load(cls, path: Path, device: torch.device) -> GlyphAtlas:
        """Read the file that ``main`` wrote."""
        with np.load(path) as file:
            tensors = {name: torch.from_numpy(file[name]).to(device) for name in file.files}
        return cls(tensors["cells"], tensors["advances"], int(tensors["held_out"]))


def draw(fonts: list[str], held_out: int) -> GlyphAtlas:
    """Draw the atlas.

    Args:
        fonts: paths of font files.
        held_out: number of fonts, the last ones, that are not for training.
    """
    side = round(CELL * SIZES[-1])
    cells = np.zeros((len(SIZES), len(fonts), GAP + 1, side, side), np.uint8)
    advances = np.zeros((len(fonts), GAP + 1), np.float32)
    for place, path in enumerate(fonts):
        for size_place, size in enumerate(SIZES):
            font = ImageFont.truetype(path, size)
            height = font.getbbox("H")
            for glyph, letter in enumerate(GLYPHS):
                cell = Image.new("L", (side, side))
                top = CELL * size / 2 - (height[1] + height[3]) / 2
                ImageDraw.Draw(cell).text((MARGIN * size, top), letter, fill=255, font=font)
                cells[size_place, place, glyph] = np.asarray(cell)
                advances[place, glyph] = font.getlength(letter) / size
            for shape in range(len(SHAPES)):
                cells[size_place, place, len(GLYPHS) + shape] = _shape(shape, size, side)
        advances[place, len(GLYPHS) : EMPTY] = 1.0
        advances[place, SPACE], advances[place, GAP] = 0.6, 1.0
    return GlyphAtlas(torch.from_numpy(cells), torch.from_numpy(advances), held_out)


def _shape(shape: int, size: int, side: int) -> np.ndarray:
    """One filled shape, 0.8 em wide, centred on its em."""
    scale = 4
    image = Image.new("L", (side * scale, side * scale))
    pen = ImageDraw.Draw(image)
    x, y = (MARGIN + 0.5) * size * scale, CELL / 2 * size * scale
    radius = 0.4 * size * scale
    if SHAPES[shape] == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
    elif SHAPES[shape] == "square":
        half = 0.85 * radius
        pen.rectangle((x - half, y - half, x + half, y + half), fill=255)
    else:
        corners = 3 if SHAPES[shape] == "triangle" else 10
        turns = 2 * np.pi * np.arange(corners) / corners - np.pi / 2
        reach = np.full(corners, radius)
        if SHAPES[shape] == "star":
            reach[1::2] *= 0.42
        points = zip(x + reach * np.cos(turns), y + reach * np.sin(turns), strict=True)
        pen.polygon([tuple(point) for point in points], fill=255)
    return np.asarray(image.resize((side, side), Image.Resampling.BOX))


def main() -> None:
    """Draw the atlas and write it to the path on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    atlas = draw(FONTS + HELD_OUT, len(HELD_OUT))
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        out, cells=atlas.cells, advances=atlas.advances, held_out=np.int64(atlas.held_out)
    )
    print(f"{out}: {len(FONTS)} fonts, {len(HELD_OUT)} held out, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
