"""FieldError: error of one field of a request."""

from oscar_mm.errors import InputError


class FieldError(InputError):
    """Error of one field of a request.

    Attributes:
        field: the API's name of the field, such as ``messages[2].content[0]``; None if the request
            as a whole is wrong.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
