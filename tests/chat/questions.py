"""Any questions about small media, and ways to answer them."""

from __future__ import annotations

import random
from typing import Any

from tests.chat.plain import ARGUMENTS, KINDS, Said
from tests.prompts import clip, noise, tone

QUESTIONS = (
    "What is it?",
    "How many people are in the video, and what do they do?",
    "Why?\nSay it in one sentence.",
    "Read the text on the sign. The total is 12.50 euros, or is it?",
)
MEDIA = {
    "image": [noise(64, 96), noise(90, 40, 1), noise(150, 260, 2), noise(300, 300, 3)],
    "video": [clip(2), clip(4, 9)],
    # None under a second: the model's own tower reads these by what it is read with.
    "audio": [tone(1.3), tone(2.2, 660), tone(4, 300)],
}
READS = {"llava": ("image",), "qwen": ("image", "video"), "omni": KINDS}


def question(pick: random.Random, family: str) -> Said:
    """About nothing, or about some media that the family reads."""
    media: dict[str, list[Any]] = {}
    for _ in range(pick.choice([0, 1, 1, 2, 3])):
        kind = pick.choice(READS[family])
        media.setdefault(ARGUMENTS[kind], []).append(pick.choice(MEDIA[kind]))
    return Said(pick.choice(QUESTIONS), media)


def options(pick: random.Random) -> dict[str, Any]:
    """How to answer."""
    sampling: dict[str, Any] = {"max_new_tokens": pick.randint(1, 6), "temperature": 0.0}
    if pick.random() < 0.3:
        sampling |= {"temperature": 1.0, "seed": pick.randrange(1000)}
    if pick.random() < 0.2:
        sampling["repetition_penalty"] = 1.3
    if pick.random() < 0.2:
        sampling["stop"] = ["e", "a"]
    return sampling


def described(said: Said) -> str:
    """For the story of a walk."""
    counts = ", ".join(f"{len(sources)} {kind}" for kind, sources in said.media.items())
    return f"{said.prompt[:12]!r} {counts}"
