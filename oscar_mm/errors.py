"""Errors which are meant for the user, not for a traceback."""


class InputError(ValueError):
    """The user gave something that cannot be used.

    The message is one line which names the file or the argument, what is wrong with it and what
    would be right; the command line prints it as it is.
    """
