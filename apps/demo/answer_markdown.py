"""Answers as HTML: Markdown with formulas and colours in code, where all text is escaped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from pygments import format
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from oscar_mm.apps.demo.formulas import add_formulas

_FETCHING = ["image", "link", "autolink", "reference"]
"""Markdown that leads to other servers: it stays text."""
_MAX_COLORED = 10_000
"""Maximum characters of a block of code with colours."""
_MAX_S = 0.1
"""Maximum seconds of processor time to find the colours of a block of code."""
_LANGUAGES = frozenset(
    {
        *("bash", "c", "c++", "cpp", "cs", "csharp", "css"),
        *("cuda", "diff", "dockerfile", "go", "haskell", "html", "java"),
        *("javascript", "js", "json", "julia", "kotlin", "latex", "lua"),
        *("makefile", "perl", "powershell", "py", "python", "python3", "r"),
        *("rb", "rs", "ruby", "rust", "scala", "sh", "shell"),
        *("sql", "swift", "tex", "toml", "ts", "typescript", "xml"),
        *("yaml", "yml", "zsh"),
    }
)
"""Names of languages with colours."""


class _Renderer(RendererHTML):
    """Render Markdown, with a button next to each block of code that copies it."""

    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: Any) -> str:
        """Render a block of code; markdown-it prescribes the arguments."""
        token = tokens[idx]
        code, (first, last) = token.content, token.map or (0, 0)
        # A block without its last line is still being written, and grows at every update.
        is_complete = code.count("\n") + 2 == last - first
        html = _colored(code, _language(token.info)) if is_complete else escape(code)
        button = copy_button(code, "Copy the code")
        return f'<div class="code"><pre><code>{html}</code></pre>{button}</div>\n'


def markdown(text: str) -> str:
    """Return the HTML of an answer: Markdown without HTML, links and pictures, which stay text.

    Line breaks are kept, because models separate lines of an answer by single ones.
    """
    return _MARKDOWN.render(text).strip()


def copy_button(text: str, label: str) -> str:
    """Return the HTML of a button that copies a text."""
    return (
        f'<button type="button" class="copy" data-text="{escape(text)}" aria-label="{label}">'
        '<svg viewBox="0 0 16 16" aria-hidden="true"><path d="M5 5h8v9H5zM3 11V2h8"/></svg>'
        "</button>"
    )


def _language(info: str) -> str:
    """Return the language of a block of code, which is the first word after its opening fence."""
    return (info.split() or [""])[0].lower()


@lru_cache(256)
def _colored(code: str, language: str) -> str:
    """Return the HTML of code, with a class for each kind of token if the language is known."""
    if language in _LANGUAGES and len(code) <= _MAX_COLORED:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
        formatter = HtmlFormatter(nowrap=True, classprefix="code-")
        with suppress(TimeoutError):
            return format(_in_time(lexer.get_tokens(code)), formatter)
    return escape(code)


def _in_time(tokens: Iterator[tuple[Any, str]]) -> Iterator[tuple[Any, str]]:
    """Yield tokens for ``_MAX_S``, since some lexers take time that grows with the square of the
    text: 20,000 line breaks took the one of C 26 s.

    Raises:
        TimeoutError: if tokens are left then.
    """
    end = time.thread_time() + _MAX_S
    for token in tokens:
        yield token
        if time.thread_time() > end:
            raise TimeoutError


_MARKDOWN = (
    MarkdownIt("commonmark", {"html": False, "breaks": True}, renderer_cls=_Renderer)
    .enable("table")
    .disable(_FETCHING)
    .use(add_formulas)
)
