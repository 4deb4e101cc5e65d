"""FieldError: an error in one field of a request."""

from oscar_mm.errors import InputError


class FieldError(InputError):
    """Error in one field of a request.

    Attributes:
        field: the API's name for the field, such as ``messages[2].content[0]``; None if the error
            is not in a single field.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
