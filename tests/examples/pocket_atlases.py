"""Small atlases for tests: blots for glyphs, noise for speech; no fonts, no espeak-ng."""

from functools import cache

import torch

from examples.train_pocket import speech
from examples.train_pocket.curriculum import RECIPES
from examples.train_pocket.glyphs import EMPTY, GAP, SIZES, GlyphAtlas
from examples.train_pocket.speech import SpeechAtlas


@cache
def glyph_atlas() -> GlyphAtlas:
    """Random blots: what they look like is no matter here."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(SIZES), 3, GAP + 1, 66, 66)
    cells = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    advances = torch.full((3, GAP + 1), 0.6)
    advances[:, EMPTY] = 0
    return GlyphAtlas(cells, advances, held_out=1)


@cache
def speech_atlas() -> SpeechAtlas:
    """A quarter of a second of noise for every unit."""
    generator = torch.Generator().manual_seed(0)
    units, length = len(speech.units()), 4000
    samples = torch.randint(-127, 128, (3 * units * length,), generator=generator).to(torch.int8)
    starts = (torch.arange(3 * units) * length).view(3, units)
    return SpeechAtlas(samples, starts, torch.full((3, units), length), held_out=1)


def atlases(name: str) -> tuple:
    return glyph_atlas(), speech_atlas() if RECIPES[name].clips else None
