"""Words that can be printed, said and asked about."""

import string

# Codes leave out I and O, which look like 1 and 0 in many fonts. Printed words may use them.
GLYPHS = string.digits + string.ascii_uppercase
CODE_GLYPHS = "".join(glyph for glyph in GLYPHS if glyph not in "IO")

ITEMS = [
    "TEA",
    "HAM",
    "JAM",
    "EGG",
    "NUT",
    "PEA",
    "RYE",
    "FIG",
    "CAKE",
    "MILK",
    "PEAR",
    "PLUM",
    "BEEF",
    "SALT",
    "RICE",
    "SOUP",
]
PRINTED = [
    "STOP",
    "EXIT",
    "OPEN",
    "LEFT",
    "RIGHT",
    "NORTH",
    "SOUTH",
    "EAST",
    "WEST",
    "GATE",
    "ROOM",
    "FLOOR",
    "HOTEL",
    "BANK",
    "TAXI",
    "METRO",
    "CAFE",
    "BREAD",
    "SUGAR",
    "WATER",
    "LEMON",
    "APPLE",
    "GRAPE",
    "MELON",
    "ROSE",
    "TULIP",
    "RIVER",
    "OCEAN",
    "CLOUD",
    "STORM",
]
SPOKEN = [
    "apple",
    "banana",
    "tiger",
    "window",
    "garden",
    "yellow",
    "monday",
    "winter",
    "summer",
    "doctor",
    "music",
    "paper",
    "river",
    "silver",
    "orange",
    "dragon",
]
COLOURS = ["red", "green", "blue", "yellow", "purple", "black"]
SHAPES = ["circle", "square", "triangle", "star"]
PLACES = [
    f"{row} {column}"
    for row in ("top", "middle", "bottom")
    for column in ("left", "center", "right")
]

# Text between media, as users write it; it also varies the distances.
FILLERS = [
    "and",
    "then",
    "this",
    "one",
    "next",
    "also",
    "here",
    "is",
    "another",
    "note",
    "the",
    "of",
    "a",
    "in",
    "it",
    "was",
    "very",
]
