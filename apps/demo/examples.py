"""Example conversations about the samples in the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oscar_mm.models import SAMPLES

FOLDER = SAMPLES.resolve()
"""Folder with the example media."""


@dataclass(frozen=True)
class Message:
    """A question and its files, whose paths are relative to FOLDER."""

    text: str
    files: tuple[str, ...] = ()

    @property
    def paths(self) -> list[Path]:
        """Absolute paths of the files."""
        return [FOLDER / file for file in self.files]


@dataclass(frozen=True)
class Example:
    """An example conversation.

    Attributes:
        title: label of the example's button.
        summary: short description; "" if the title says it all.
        messages: questions, in order.
        needs_sound: whether the model must support audio.
        compare: whether to answer with a 16-bit cache too, side by side.
    """

    title: str
    summary: str
    messages: tuple[Message, ...]
    needs_sound: bool = False
    compare: bool = False

    @property
    def exists(self) -> bool:
        """Whether all files of the example exist."""
        return all(path.is_file() for message in self.messages for path in message.paths)

    @property
    def picture(self) -> Path | None:
        """Path of the picture if the example is one question about one picture; otherwise None."""
        paths = self.messages[0].paths
        alone = len(self.messages) == len(paths) == 1 and paths[0].suffix == ".png"
        return paths[0] if alone else None


def _cards(*numbers: int) -> tuple[str, ...]:
    return tuple(f"cards/{number:02}.png" for number in numbers)


_ALL_CARDS = _cards(*range(1, 21))


def _clips(*numbers: int) -> tuple[str, ...]:
    return tuple(f"clips/{number:02}.wav" for number in numbers)


def _single(question: str, file: str) -> Example:
    """Return an example with one question about one file."""
    return Example(question, "", (Message(question, (file,)),), file.endswith(".wav"))


QUESTIONS = (
    _single("What is the code in picture 1?", "cards/02.png"),
    _single("What is the sum in picture 1?", "cards/16.png"),
    _single("Where is the red circle in picture 1?", "cards/18.png"),
    _single("What was said in clip 1?", "clips/01.wav"),
)
"""Examples with a single question."""
EXAMPLES = (
    Example(
        "100 pictures",
        "twenty more in each turn, beside a 16-bit cache",
        (
            Message("What is the code in picture 3?", _ALL_CARDS),
            Message("What is the code in picture 32?", _ALL_CARDS),
            Message("What is the code in picture 54?", _ALL_CARDS),
            Message("What is the sum in picture 77?", _ALL_CARDS),
            Message("What is the code in picture 81?", _ALL_CARDS),
            Message("What is the code in picture 14?"),
            Message("What is the sum in picture 57?"),
            Message("How much is RICE in picture 36?"),
        ),
        compare=True,
    ),
    Example(
        "20 pictures",
        "codes, receipts and shapes in one message",
        (
            Message("What is the code in picture 3?", _ALL_CARDS),
            Message("What is the code in picture 14?"),
            Message("What is the sum in picture 16?"),
            Message("Where is the red circle in picture 18?"),
            Message("Read pictures 1, 8 and 12."),
        ),
    ),
    Example(
        "Recordings",
        "ten clips and questions about them",
        (
            Message("What was said in clip 2?", _clips(*range(1, 11))),
            Message("Write clips 1, 4 and 9."),
            Message("What was said in clip 7?"),
        ),
        needs_sound=True,
    ),
    Example(
        "Pictures and sound",
        "both, over several turns",
        (
            Message("What is the code in picture 2?", _cards(*range(1, 11))),
            Message("What was said in clip 1?", _clips(*range(1, 7))),
            Message("How much is TEA in picture 15?", _cards(*range(11, 18))),
            Message("What was said in clip 4?"),
        ),
        needs_sound=True,
    ),
)
