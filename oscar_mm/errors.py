"""Errors meant for the user, shown without a traceback."""

import difflib
from collections.abc import Iterable, Mapping

_MAX_SHOWN = 80
"""Default for the maximum number of characters of a value to show in a message."""


class InputError(ValueError):
    """Invalid input from the user.

    The message is one line that names the file or argument, says what is wrong with it and what
    would be valid; the command line prints the message unchanged.
    """


class RequestTooLarge(InputError):
    """A request that does not fit into the context or the memory, even with all else freed.

    Attributes:
        asked: number of tokens that the request needs: earlier turns, the prompt with its media,
            and ``max_new_tokens``.
        fits: number of tokens that would fit.
    """

    def __init__(self, message: str, asked: int, fits: int) -> None:
        super().__init__(message)
        self.asked, self.fits = asked, fits


class ToolsUnsupported(InputError):
    """Tools for a checkpoint whose chat template does not support them."""


class MemoryBusy(InputError):
    """A request must wait for memory: it will fit once other requests end."""


class Cancelled(Exception):
    """A request was cancelled before its answer began."""


def shown(value: object, max_characters: int = _MAX_SHOWN) -> str:
    """Return the repr of a user's value for a message, in one line, shortened if it is long.

    Args:
        value: the value.
        max_characters: maximum length of the repr, after which "..." shows that it is cut off.
    """
    try:
        text = " ".join(repr(value).split("\n"))
    except ValueError:  # Python does not print integers of more than 4,300 digits.
        text = f"{type(value).__name__} of very many digits"
    return text if len(text) <= max_characters else f"{text[:max_characters]}..."


def suggestion(name: str, choices: Iterable[str] | Mapping[str, str]) -> str:
    """Return an ending for a message about an unknown name: "; did you mean X?", or "".

    Args:
        name: name given by the user.
        choices: known names, or a mapping from known names to the suggestion for each.
    """
    suggested = choices if isinstance(choices, Mapping) else {choice: choice for choice in choices}
    by_lower = {known.lower(): given for known, given in suggested.items()}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    # The name itself may be a valid choice: a model that is not on this machine.
    is_meant = close and by_lower[close[0]] != name
    return f"; did you mean {by_lower[close[0]]}?" if is_meant else ""
