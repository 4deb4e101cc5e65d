"""Write the table of clients and features in docs/serving.md: python -m tests.clients.table.

If clients are missing, the command lists them and leaves the table unchanged.
"""

import re
import sys
import tempfile
from pathlib import Path

from tests.clients import programs, python_clients  # noqa: F401
from tests.clients.matrix import CELLS, CLIENTS, FEATURES, Client, fill
from tests.clients.served import Served, serving
from tests.tiny_qwen3_omni import qwen3_omni

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
BEGIN, END = "<!-- python -m tests.clients.table writes this -->\n", "<!-- end -->\n"
WORKS, LACKS = "yes", "-"
_REASON = 200
"""Most characters of the reason of a failure in a note."""


def current_rows() -> list[list[str]]:
    """Return the cells of the table on the page, heading first."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [[text.strip() for text in row] for row in rows if not set("".join(row)) <= set("- ")]


def row_of(client: Client, served: Served, notes: list[str]) -> list[str]:
    """Run all cells of a client and return its row; failures are added to ``notes``."""
    row = [f"{client.name} {client.version}"]
    for feature in FEATURES:
        row.append(WORKS if (client.name, feature.name) in CELLS else LACKS)
        if row[-1] == WORKS:
            try:
                fill(client.name, feature.name, served)
            except Exception as error:
                reason = " ".join(f"{error} {' '.join(served.refusals)}".split())[-_REASON:]
                notes.append(f"{client.name}, {feature.name}: {reason}")
                row[-1] = f"no [{len(notes)}]"
            print(f"{client.name}, {feature.name}: {row[-1]}", file=sys.stderr)
    return row


def main() -> None:
    absent = [client.install for client in CLIENTS if client.version is None]
    if absent:
        sys.exit("\n".join(["some clients are not installed; run:", *absent]))
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        qwen3_omni(Path(folder), seed=0)
        with serving(Path(folder)) as served:
            rows = [row_of(client, served, notes) for client in CLIENTS]
    head = ["client", *(feature.name for feature in FEATURES)]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    lines += [f"\n[{number}] {note}" for number, note in enumerate(notes, 1)]
    table = "\n".join(lines) + "\n"
    text = re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + table + END, PAGE.read_text(), flags=re.S)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
