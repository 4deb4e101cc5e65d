"""What the library warns of while a benchmark runs."""

from __future__ import annotations

import logging


class Said(logging.Handler):
    """Keeps what the library warns of, such as operations that are not done by their kernels."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("oscar_mm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def close(self) -> None:
        logging.getLogger("oscar_mm").removeHandler(self)
        super().close()
