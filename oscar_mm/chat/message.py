"""Message: what somebody said before a question, in the same turn."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """A message for the chat template.

    Attributes:
        role: "system", "user" or "assistant".
        text: may be empty.
        images: how many of the turn's images it shows: those after the ones of messages before it.
        audio: how many of the turn's recordings it shows.
    """

    role: str
    text: str
    images: int = 0
    audio: int = 0
