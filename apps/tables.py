"""Tables of measured rows: columns with their formats, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table


class Column(NamedTuple):
    """Column of a table: the key of a number in the rows, and the format of the number.

    The standard error is omitted if there is only one prompt.
    """

    head: str
    key: str
    factor: float = 1
    format_spec: str = ".2f"
    offset: float = 0

    def cell(self, row: Mapping[str, Any]) -> str:
        """Format the number of a row; return "" if the row does not have it."""
        value = row.get(self.key)
        if value is None or (self.key.endswith("_error") and row["prompts"] == 1):
            return ""
        return format(self.factor * (value - self.offset), self.format_spec)


def table_of(title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of rows, which begin with the name of their method."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("method")
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["method"], *(column.cell(row) for column in columns))
    return table
