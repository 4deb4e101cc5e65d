"""Docstrings begin as a native reader expects: with what the thing is or does."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENING = re.compile(r"(Inside|Whoever|Who|Of|That|Those)\b")
"""A docstring that opens with a place, a pronoun or a preposition, not a verb or a noun."""
ENTRY = re.compile(r" +(\*{0,2}\w[\w, *]*): (of|that|who)\b")
"""An entry of an argument without a noun of its own."""
SECTIONS = ("Args:", "Attributes:")


@cache
def docstrings() -> list[tuple[str, str]]:
    """Return the places and texts of all docstrings, including those of attributes."""
    found = []
    for folder in ("oscar_mm", "pipelines", "apps", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        found.append((f"{path.relative_to(ROOT)}:{node.lineno}", text))
    return found


def entries(text: str) -> Iterator[str]:
    """Yield the lines that begin an entry of a section of arguments or attributes."""
    section = None
    for line in filter(str.strip, text.split("\n")):
        indent = len(line) - len(line.lstrip())
        if line.strip() in SECTIONS:
            section = indent
        elif section is not None and indent <= section:
            section = None
        elif section is not None and indent == section + 4:
            yield line


def test_openings() -> None:
    assert not [place for place, text in docstrings() if OPENING.match(text)]


def test_arguments_have_nouns() -> None:
    assert not [
        f"{place}:{entry}"
        for place, text in docstrings()
        for entry in entries(text)
        if ENTRY.match(entry)
    ]
