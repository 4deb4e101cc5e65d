"""Docstrings begin as a native reader expects: with what the thing is or does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENING = re.compile(r"(Inside|Whoever|Who|Of|That|Those)\b")
"""Of a docstring: a place, a pronoun or a preposition instead of a verb or a noun."""
ENTRY = re.compile(r" +(\*{0,2}\w[\w, *]*): (of|that|who)\b")
"""Of an argument: it has no noun of its own."""
SECTIONS = ("Args:", "Attributes:")


def docstrings() -> Iterator[tuple[str, int, str]]:
    """Files, lines and texts of all docstrings, those of attributes too."""
    for folder in ("oscar_mm", "pipelines", "apps", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield str(path.relative_to(ROOT)), node.lineno, text


def entries(text: str) -> Iterator[str]:
    """Lines that begin an entry of a section of arguments or attributes."""
    indent = None
    for line in text.split("\n"):
        if line.strip() in SECTIONS:
            indent = len(line) - len(line.lstrip()) + 4
        elif indent is not None and line.strip():
            if len(line) - len(line.lstrip()) < indent:
                indent = None
            elif len(line) - len(line.lstrip()) == indent:
                yield line


def test_openings() -> None:
    found = [f"{path}:{line}" for path, line, text in docstrings() if OPENING.match(text)]
    assert not found


def test_arguments_have_nouns() -> None:
    found = [
        f"{path}:{line}:{entry}"
        for path, line, text in docstrings()
        for entry in entries(text)
        if ENTRY.match(entry)
    ]
    assert not found
