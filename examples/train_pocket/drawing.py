"""Drawing: pages of glyphs as pictures, thousands in one call, on the device of the atlas."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.train_pocket.glyphs import CELL, EMPTY, MARGIN, SIZES, GlyphAtlas


@dataclass
class Look:
    """How hard the pictures are.

    Attributes:
        difficulty: 0 (upright, black on white, no noise) to 1.
        held_out: draw with the fonts that are never trained on.
        letters: most letters of a code, or digits of a clip; 0 lets the difficulty decide.
    """

    difficulty: float = 1.0
    held_out: bool = False
    letters: int = 0


class Compositor:
    """Draws pages of glyphs.

    Args:
        atlas: glyphs that can be drawn.
    """

    def __init__(self, atlas: GlyphAtlas) -> None:
        self.atlas, self.paint = atlas, paint
        self.sizes = torch.tensor(SIZES, dtype=torch.float, device=atlas.cells.device)

    def compile(self) -> None:
        """Compile the drawing of a picture, for any number of them."""
        self.paint = torch.compile(paint, dynamic=True)

    def draw(
        self,
        glyphs: Tensor,
        em: tuple[float, float],
        size: tuple[int, int],
        look: Look,
        colours: Tensor | None = None,
    ) -> Tensor:
        """Draw one page for each row of ``glyphs``.

        Args:
            glyphs: (N, rows, columns) int64 glyph numbers, EMPTY where a line has ended.
            em: smallest and largest size of the letters, in pixels.
            size: height and width of the pictures, in pixels.
            look: how hard the pictures are.
            colours: (N, rows, columns, 3) colours of the glyphs, 0 .. 1; None for one ink a
                picture.

        Returns:
            (N, 3, height, width) uint8.
        """
        count, rows, columns = glyphs.shape
        hard, (height, width), device = look.difficulty, size, glyphs.device

        def uniform(low: float | Tensor, high: float | Tensor, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(count, *(shape or (1,)), device=device)

        fonts = self._fonts(count, look, device)
        stretch = uniform(1.0, 1.0 + 0.25 * hard)
        steps = self.atlas.advances[fonts][:, None].expand(-1, rows, -1).gather(-1, glyphs)
        steps = steps * stretch[..., None]
        lengths = steps.sum(-1).amax(-1, keepdim=True)  # of the longest line, in em
        # Easy pictures have large letters.
        scale = uniform(em[1] - (em[1] - em[0]) * hard, em[1])
        scale = torch.minimum(scale, (width - 12) / lengths)
        scale = torch.minimum(scale, torch.full_like(scale, (height - 4) / rows / 1.1))
        wide, pitch = lengths * scale, torch.minimum(scale * 1.35, (height - 4) / rows + 0 * scale)
        angle = uniform(-1, 1) * hard * math.radians(5)
        loose = (width - wide - 10).clamp(min=0) / 2, (height - rows * pitch).clamp(min=0) / 2
        centre_x = width / 2 + uniform(-1, 1) * loose[0] * hard
        centre_y = height / 2 + uniform(-1, 1) * loose[1] * hard

        edges = torch.cat((torch.zeros_like(steps[..., :1]), steps.cumsum(-1)), -1)
        edges = edges * scale[..., None]
        bins = torch.arange(width, device=device) + 0.5
        bins = bins.expand(count, rows, width).contiguous()
        column = torch.searchsorted(edges[..., 1:].contiguous(), bins, right=True)
        inside = column < columns
        column = column.clamp(max=columns - 1)
        glyph = torch.where(inside, glyphs.gather(-1, column), EMPTY)
        start = edges.gather(-1, column)

        ink, paper = self._inks(count, hard, device, colours is not None)
        if colours is None:
            inks = ink[:, None, None].repeat(1, rows, width, 1)
        else:
            inks = colours.gather(2, column[..., None].expand(-1, -1, -1, 3))
        shade = uniform(-1, 1, 2) * 0.15 * hard
        grain = uniform(0, 0.12) * hard
        rule = uniform(0, height) + 1e4 * (uniform(0, 1) > 0.3 * hard)
        size_place = (scale > 0.85 * SIZES[0]).long() + (scale > 0.85 * SIZES[1]).long()
        texels = self.sizes[size_place] / scale
        geometry = (centre_x, centre_y, angle, scale, pitch, wide, texels)
        numbers = torch.cat((*geometry, shade, grain, rule), -1)
        noise = torch.randn(count, height, width, 1, device=device)
        return self.paint(
            self.atlas.cells, glyph, start, inks, paper, fonts, size_place[:, 0], numbers, noise
        )

    def _fonts(self, count: int, look: Look, device: torch.device) -> Tensor:
        fonts, trained = len(self.atlas.advances), len(self.atlas.advances) - self.atlas.held_out
        low, high = (trained, fonts) if look.held_out else (0, trained)
        return torch.randint(low, high, (count,), device=device)

    @staticmethod
    def _inks(count: int, hard: float, device: torch.device, pale: bool) -> tuple[Tensor, Tensor]:
        """Ink and paper (N, 3); their brightness differs by at least a third of the range."""
        contrast = 1 - hard * (0.6 * torch.rand(count, 1, device=device))
        depth = 0.3 if pale else 0.9
        paper = 1 - torch.rand(count, 3, device=device) * (1 - contrast) * depth
        ink = (paper.mean(-1, keepdim=True) - contrast).clamp(0, 1)
        ink = ink + hard * 0.3 * (torch.rand(count, 3, device=device) - 0.5)
        if not pale:
            swap = torch.rand(count, 1, device=device) < 0.3 * hard
            ink, paper = torch.where(swap, paper, ink), torch.where(swap, ink, paper)
        return ink.clamp(0, 1), paper.clamp(0, 1)


def paint(
    cells: Tensor,
    glyph: Tensor,
    start: Tensor,
    inks: Tensor,
    paper: Tensor,
    fonts: Tensor,
    size_place: Tensor,
    numbers: Tensor,
    noise: Tensor,
) -> Tensor:
    """Find the line and the glyph of every pixel, and interpolate its ink from four texels.

    Args:
        cells: (sizes, fonts, glyphs, side, side) uint8.
        glyph, start: (N, rows, width) the glyph at each pixel of a line, and where it begins.
        inks: (N, rows, width, 3) ink at each pixel of a line, 0 .. 1.
        paper: (N, 3), 0 .. 1.
        fonts, size_place: (N,) places in ``cells``.
        numbers: (N, 11): centre, angle, em, pitch, line length, texels a pixel, two gradients,
            grain, rule.
        noise: (N, height, width, 1) standard normal.

    Returns:
        (N, 3, height, width) uint8.
    """
    count, rows, width = glyph.shape
    height, side = noise.shape[1], cells.shape[-1]
    centre_x, centre_y, angle, em, pitch, wide, texels, shade_x, shade_y, grain, rule = (
        number[:, None, None] for number in numbers.unbind(-1)
    )
    y, x = torch.meshgrid(
        torch.arange(height, device=glyph.device) + 0.5,
        torch.arange(width, device=glyph.device) + 0.5,
        indexing="ij",
    )
    x, y = x - centre_x, y - centre_y
    along = angle.cos() * x + angle.sin() * y + wide / 2
    down = angle.cos() * y - angle.sin() * x
    line = (down / pitch + rows / 2).floor()
    on_page = (line >= 0) & (line < rows) & (along >= 0) & (along < width)
    line = line.clamp(0, rows - 1)
    place = (line * width + along.clamp(0, width - 1).floor()).long().flatten(1)
    letter = glyph.flatten(1).gather(1, place)
    begin = start.flatten(1).gather(1, place).view_as(along)
    colour = inks.flatten(1, 2).gather(1, place[..., None].expand(-1, -1, 3))

    u = ((along - begin) + MARGIN * em) * texels
    v = ((down - (line + 0.5 - rows / 2) * pitch) + CELL / 2 * em) * texels
    u, v = (u - 0.5).clamp(0, side - 1.001), (v - 0.5).clamp(0, side - 1.001)
    left, top = u.floor(), v.floor()
    page = (size_place * cells.shape[1] + fonts)[:, None] * cells.shape[2] + letter
    base = (page * side**2).view_as(along) + (top * side + left).long()
    flat = cells.view(-1)
    right, below = u - left, v - top
    upper = flat[base] * (1 - right) + flat[base + 1] * right
    lower = flat[base + side] * (1 - right) + flat[base + side + 1] * right
    ink = (upper * (1 - below) + lower * below) / 255 * on_page
    ink = ink[..., None]
    across = (2 * x / width * shade_x + 2 * y / height * shade_y)[..., None]
    image = paper[:, None, None] * (1 - ink) + colour.view(count, height, width, 3) * ink
    image = torch.where(((y + centre_y - rule).abs() < 1)[..., None], image * 0.6, image)
    image = image + across + noise * grain[..., None]
    return (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 3, 1, 2).contiguous()
