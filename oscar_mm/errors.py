"""Errors that address the user and need no traceback."""


class InputError(ValueError):
    """The user gave something that cannot be used.

    The message is one line that names the file or the argument, says what is wrong with it and
    what would be right; the command line prints it unchanged.
    """


class NoRoom(InputError):
    """A request is larger than the context or the memory, even if everything else is freed.

    Attributes:
        asked: tokens that the request needs: earlier turns, the prompt with its media, and
            ``max_new_tokens``.
        fits: tokens that there is room for.
    """

    def __init__(self, message: str, asked: int, fits: int) -> None:
        super().__init__(message)
        self.asked, self.fits = asked, fits


class Busy(InputError):
    """Other requests occupy the memory that a request needs; it fits once they end."""
