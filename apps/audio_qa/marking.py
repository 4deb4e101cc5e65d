"""Marking: whether an answer is right."""

from __future__ import annotations

import unicodedata

from oscar_mm.apps.audio_qa.rows import Row
from oscar_mm.errors import InputError


def right_choices(row: Row) -> set[int]:
    """Which choices are right, by their text or else by their letter (A is the first).

    Raises:
        InputError: the row's answer is none of its choices.
    """
    texts = [normalized(choice) for choice in row.choices]
    right = set()
    for answer in row.answer:
        found = [place for place, text in enumerate(texts) if text == normalized(answer)]
        if not found and len(answer) == 1 and 0 <= ord(answer.upper()) - ord("A") < len(texts):
            found = [ord(answer.upper()) - ord("A")]
        if not found:
            raise InputError(f"answer {answer!r} is none of the choices")
        right.update(found)
    return right


def correct(row: Row, text: str, choice: int | None) -> bool | None:
    """Whether an answer is right: the choice, or else exact match; None where that is unknown."""
    if not row.answer:
        return None
    if choice is not None:
        return choice in right_choices(row)
    return normalized(text) in {normalized(answer) for answer in row.answer}


def normalized(text: str) -> str:
    """Without case, surrounding punctuation and the kind of white space."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return plain.strip(".,;:!?\"'` ") or plain
