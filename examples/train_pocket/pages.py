"""Contents of pictures: codes, receipts and shapes, as facts and as drawings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.train_pocket.drawing import Compositor, Look
from examples.train_pocket.glyphs import EMPTY, GAP, SPACE
from examples.train_pocket.words import CODE_GLYPHS, COLOURS, GLYPHS, ITEMS, PRINTED, SHAPES

# Height and width in pixels. Qwen's processors make larger pictures of twice the width WIDE.
CARD, PAGE, WIDE = (96, 192), (192, 192), (128, 256)
LETTERS = 6  # of the longest code
SHAPE_ROWS, SHAPE_COLUMNS = 3, 6
RGB = {
    "red": (0.85, 0.1, 0.1),
    "green": (0.1, 0.6, 0.15),
    "blue": (0.1, 0.2, 0.9),
    "yellow": (0.9, 0.8, 0.0),
    "purple": (0.6, 0.1, 0.7),
    "black": (0.05, 0.05, 0.05),
}


@dataclass
class Codes:
    """Codes of N pictures: ``glyphs`` (N, LETTERS) int64, filled up with EMPTY."""

    glyphs: Tensor


@dataclass
class Receipts:
    """Receipts of N pictures: ``items`` and ``prices`` (N, lines) int64, ``totals`` (N,)."""

    items: Tensor
    prices: Tensor
    totals: Tensor


@dataclass
class Shapes:
    """Shapes of N pictures: all attributes are (N, most) int64, -1 for none.

    Shapes of a picture differ in shape or colour. ``cells`` count along the rows of the SHAPE_ROWS
    x SHAPE_COLUMNS grid.
    """

    shapes: Tensor
    colours: Tensor
    cells: Tensor


def _em(low: float, high: float, size: tuple[int, int]) -> tuple[float, float]:
    """Smallest and largest size of letters, scaled to the width of a picture."""
    return low * size[1] / CARD[1], high * size[1] / CARD[1]


def _spelled(words: list[str], device: torch.device) -> Tensor:
    longest = max(map(len, words))
    rows = [[GLYPHS.index(letter) for letter in word] for word in words]
    filled = [row + [EMPTY] * (longest - len(row)) for row in rows]
    return torch.tensor(filled, device=device)


class Printer:
    """Draws random facts and their pictures.

    Args:
        compositor: compositor with the atlas on the device to work on.
    """

    def __init__(self, compositor: Compositor) -> None:
        self.compositor = compositor
        self.device = compositor.atlas.cells.device
        self.printed = _spelled(PRINTED, self.device)
        self.names = _spelled(ITEMS, self.device)
        self.sum_name = _spelled(["SUM"], self.device)[0]
        self.code_glyphs = torch.tensor([GLYPHS.index(c) for c in CODE_GLYPHS], device=self.device)
        self.rgb = torch.tensor([RGB[colour] for colour in COLOURS], device=self.device)

    def _below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, device=self.device)

    def _distinct(self, rows: int, of: int, count: int) -> Tensor:
        """(rows, count) different numbers below ``of``."""
        return torch.rand(rows, of, device=self.device).argsort(-1)[:, :count]

    def codes(self, count: int, size: tuple[int, int], look: Look) -> tuple[Codes, Tensor]:
        """Random codes, a fifth only digits, a fifth printed words; easy ones are short."""
        code = self.code_glyphs[self._below(len(self.code_glyphs), count, LETTERS)]
        kind = torch.rand(count, 1, device=self.device)
        code = torch.where(kind < 0.2, self._below(10, count, LETTERS), code)
        low, high = 1 + round(3 * look.difficulty), 2 + round(4 * look.difficulty)
        if look.letters:
            low, high = 1, look.letters
        length = low + self._below(high - low + 1, count, 1)
        code = torch.where(torch.arange(LETTERS, device=self.device) < length, code, EMPTY)
        words = self.printed[self._below(len(PRINTED), count)]
        words = torch.nn.functional.pad(words, (0, LETTERS - words.shape[1]), value=EMPTY)
        code = torch.where((kind > 0.8) & (look.difficulty > 0.3 and not look.letters), words, code)
        return Codes(code), self.compositor.draw(code[:, None], _em(20, 40, size), size, look)

    def receipts(self, count: int, size: tuple[int, int], look: Look) -> tuple[Receipts, Tensor]:
        """Receipts of two items, or five on a PAGE, with their sum."""
        lines = 5 if size == PAGE else 2
        items = self._distinct(count, len(ITEMS), lines)
        prices = 1 + self._below(9 + round(90 * look.difficulty), count, lines)
        totals = prices.sum(-1)
        names = torch.cat((self.names[items], self._sum_rows(count)), dim=1)
        numbers = self._digits(torch.cat((prices, totals[:, None]), dim=1))
        gap = torch.full_like(names[..., :1], SPACE)
        glyphs = torch.cat((names, gap, gap, numbers), dim=-1)
        facts = Receipts(items, prices, totals)
        return facts, self.compositor.draw(glyphs, _em(19, 25, size), size, look)

    def _sum_rows(self, count: int) -> Tensor:
        row = torch.full((self.names.shape[1],), EMPTY, device=self.device)
        row[: len(self.sum_name)] = self.sum_name
        return row.expand(count, 1, -1)

    @staticmethod
    def _digits(numbers: Tensor) -> Tensor:
        """(..., 3) glyphs of numbers below 1000, without leading zeros."""
        digits = torch.stack((numbers // 100, numbers // 10 % 10, numbers % 10), dim=-1)
        needed = torch.stack((numbers >= 100, numbers >= 10, numbers >= 0), dim=-1)
        return torch.where(needed, digits, EMPTY)

    def shapes(self, count: int, size: tuple[int, int], look: Look) -> tuple[Shapes, Tensor]:
        """Pictures of one to eight shapes; a PAGE is not possible."""
        most = 8
        kinds = self._distinct(count, len(SHAPES) * len(COLOURS), most)
        cells = self._distinct(count, SHAPE_ROWS * SHAPE_COLUMNS, most)
        number = 1 + self._below(2 + round(6 * look.difficulty), count, 1)
        absent = torch.arange(most, device=self.device) >= number
        shapes, colours = kinds % len(SHAPES), kinds // len(SHAPES)
        grid = torch.full((count, SHAPE_ROWS * SHAPE_COLUMNS), GAP, device=self.device)
        drawn = torch.where(absent, GAP, len(GLYPHS) + shapes)
        grid = grid.scatter(1, cells, drawn).view(count, SHAPE_ROWS, SHAPE_COLUMNS)
        inks = torch.zeros(count, SHAPE_ROWS * SHAPE_COLUMNS, 3, device=self.device)
        tints = self.rgb[colours] + 0.12 * look.difficulty * (torch.rand_like(inks[:, :most]) - 0.5)
        inks = inks.scatter(1, cells[..., None].expand(-1, -1, 3), tints.clamp(0, 1))
        inks = inks.view(count, SHAPE_ROWS, SHAPE_COLUMNS, 3)
        image = self.compositor.draw(grid, _em(28, 30, size), size, look, inks)
        facts = (torch.where(absent, -1, fact) for fact in (shapes, colours, cells))
        return Shapes(*facts), image
