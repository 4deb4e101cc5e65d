"""ModelCard: description of a model for the demo page and the terminal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_mm.models import BUNDLED, bundled

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

# Variable parts of the bundled models' questions: codes and numbers, colors, shapes.
_FIELDS = (
    (re.compile(r"\b[A-Z0-9]+\b"), "#"),
    (re.compile(r"\b(red|green|blue|yellow|purple|black)\b"), "red"),
    (re.compile(r"\b(circle|square|triangle|star)(?=s?\b)"), "circle"),
)
_QUESTION = re.compile(r"`([A-Z][^`]*[.?])`")


@dataclass(frozen=True)
class ModelCard:
    """Name, size and abilities of a model.

    Attributes:
        name: name of a bundled model, last part of a hub id, or name of a folder.
        parameters: number of parameters.
        abilities: description of what the model can do.
        example: question that a bundled model was trained on; "" for other models.
        patterns: all questions that a bundled model was trained on, with placeholders for codes,
            numbers, colors and shapes; empty for other models.
    """

    name: str
    parameters: int
    abilities: str
    example: str = ""
    patterns: frozenset[str] = frozenset()

    @classmethod
    def of(cls, pipe: Pipeline) -> ModelCard:
        """Create the card of a pipeline's model, for a bundled model from its README.md."""
        model = pipe.family.outer_model
        folder = Path(model.name_or_path)
        name, parameters = folder.name or pipe.family.name, model.num_parameters()
        if folder != bundled(name):
            kinds = sorted(modality.label for modality in pipe.family.reads)
            return cls(name, parameters, f"reads {', '.join(kinds)}" if kinds else "reads text")
        questions = _QUESTION.findall((folder / "README.md").read_text())
        patterns = frozenset(_pattern(question) for question in questions)
        return cls(name, parameters, BUNDLED[name], re.sub(r"\d+", "1", questions[0]), patterns)

    @property
    def is_demo(self) -> bool:
        """True for a demo model, which can answer only a few kinds of questions."""
        return bool(self.patterns)

    @property
    def title(self) -> str:
        """Name and size of the model in one line."""
        size, unit = (
            (self.parameters / 1e9, "B") if self.parameters >= 1e9 else (self.parameters / 1e6, "M")
        )
        kind = ", demo model" if self.is_demo else ""
        return f"{self.name}, {size:.2g}{unit} parameters{kind}"

    def hint(self, question: str) -> str:
        """Return a hint if a bundled model was not trained on this kind of question, else ""."""
        if not self.is_demo or _pattern(question.strip()) in self.patterns:
            return ""
        return (
            f"{self.name} was not trained on this question, so the answer means nothing. "
            f"It {self.abilities}; ask for example: {self.example}"
        )


def _pattern(question: str) -> str:
    for field, replacement in _FIELDS:
        question = field.sub(replacement, question)
    return question
