"""Errors which are meant for the user, not for a traceback."""


class InputError(ValueError):
    """The user gave something that cannot be used.

    The message is one line which names the file or the argument, what is wrong with it and what
    would be right; the command line prints it as it is.
    """


class NoRoom(InputError):
    """A request is larger than the context or the memory, whatever else gives way.

    Attributes:
        asked: tokens that the request comes to: held ones of earlier turns, the prompt with its
            media, ``max_new_tokens``.
        fits: how many of such tokens have room.
    """

    def __init__(self, message: str, asked: int, fits: int) -> None:
        super().__init__(message)
        self.asked, self.fits = asked, fits


class Busy(InputError):
    """Others hold the memory that a request needs; it has room once they have ended."""
