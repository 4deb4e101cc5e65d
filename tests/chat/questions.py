"""Any questions about small media, and ways to answer them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.chat.plain import ARGUMENTS, KINDS, Said
from tests.prompts import clip, noise, tone
from tests.recordings import write_movie

QUESTIONS = (
    "What is it?",
    "How many people are in the video, and what do they do?",
    "Why?\nSay it in one sentence.",
    "Read the text on the sign. The total is 12.50 euros, or is it?",
)
READS = {"llava": ("image",), "qwen": ("image", "video"), "omni": KINDS}


def media_of(folder: Path) -> dict[str, list[Any]]:
    """What questions show, by kind; "heard" are clips with sound, which are among "video" too.

    Args:
        folder: for the files of clips.
    """
    heard = [
        # A screen recording: a frame where something changes.
        write_movie(
            folder / "uneven.mp4", clip(6, 20), tone(2.9), times=[0, 0.2, 0.3, 1.6, 1.7, 2.6]
        ),
        write_movie(folder / "late.mkv", clip(9, 30), tone(1.8, 550), late=0.7),
        write_movie(
            folder / "gap.mov", clip(5, 40), tone(2.4, 350), times=[0.5, 0.6, 0.7, 2.1, 2.2]
        ),
    ]
    silent = write_movie(folder / "silent.mkv", clip(4, 50), None, times=[0, 0.1, 1.2, 1.5])
    return {
        "image": [noise(64, 96), noise(90, 40, 1), noise(150, 260, 2), noise(300, 300, 3)],
        "video": [clip(2), clip(4, 9), silent, *heard],
        "heard": heard,
        # None under a second: the model's own tower reads these by what it is read with.
        "audio": [tone(1.3), tone(2.2, 660), tone(4, 300)],
    }


def question(pick: random.Random, family: str, sources: dict[str, list[Any]]) -> Said:
    """About nothing, or about some media that the family reads, of ``media_of``."""
    media: dict[str, list[Any]] = {}
    sound = family == "omni" and pick.random() < 0.5
    for _ in range(pick.choice([0, 1, 1, 2, 3])):
        kind = pick.choice(READS[family])
        chosen = sources["heard" if sound and kind == "video" else kind]
        media.setdefault(ARGUMENTS[kind], []).append(pick.choice(chosen))
    return Said(pick.choice(QUESTIONS), media, sound=sound and "videos" in media)


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
    return f"{said.prompt[:12]!r} {counts}{' with sound' if said.sound else ''}"
