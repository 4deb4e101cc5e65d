"""Settings: how rows are answered, and the fingerprint of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from oscar_mm.errors import InputError
from oscar_mm.policy import KVPolicy

_FORMAT = 1
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Settings:
    """How all rows of a run are answered.

    Attributes:
        policy: how keys and values are stored.
        system: system prompt.
        max_new_tokens: longest free answer.
        list_choices: write the choices under the question, with letters, and choose among the
            letters; else the choices themselves are scored as answers.
        use_audio_in_video: hear the sound of videos too.
        video_fps: frames per second that are sampled from videos.
        dtype: of the weights; None for the default.

    Raises:
        InputError: a value that is not allowed.
    """

    policy: KVPolicy
    system: str | None = None
    max_new_tokens: int = 64
    list_choices: bool = False
    use_audio_in_video: bool = False
    video_fps: float = 2.0
    dtype: str | None = None

    def __post_init__(self) -> None:
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise InputError(
                f"max_new_tokens={self.max_new_tokens!r}: must be a whole number, at least 1"
            )

    def prompt(self, question: str, choices: tuple[str, ...]) -> tuple[str, list[str]]:
        """What is asked, and the answers to choose from."""
        if not (self.list_choices and choices):
            return question, list(choices)
        if len(choices) > len(_LETTERS):
            raise InputError(f"choices: {len(choices)} are more than there are letters")
        letters = list(_LETTERS[: len(choices)])
        listed = [f"{letter}. {text}" for letter, text in zip(letters, choices, strict=True)]
        return "\n".join([question, *listed, "Answer with the letter."]), letters

    def fingerprint(self, model: str | None = None) -> dict[str, Any]:
        """What answers depend on; ``model`` is ``Pipeline.fingerprint``, None if not known yet."""
        values = {"format": _FORMAT, "model": model}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                values |= {f"{name}.{part}": of_part for part, of_part in value.items()}
            else:
                values[name] = value
        return values
