"""Formulas in answers: rules that find them in Markdown, and the script that has KaTeX draw them.

A price is no formula: "$5 and $6" stays text, and so does every "$" that might be one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererProtocol
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

MAX_CHARACTERS = 2000
"""Maximum characters of a formula."""
_CLOSERS = {r"\[": r"\]", r"\(": r"\)", "$$": "$$", "$": "$"}
"""End of a formula by its beginning; a longer beginning precedes a shorter one."""
_DISPLAYED = (r"\[", "$$")
"""Beginnings of formulas that stand in a line of their own."""
_NAMES = re.compile(
    r"\\(?:text|textbf|textit|mbox|mathrm|mathbf|mathit|operatorname)\*?\s*\{[^{}]*\}"
    r"|[_^]\{[^{}]*\}|\\[A-Za-z]+"
)
"""Parts of a formula that may contain words."""
_PROSE = re.compile(r"[A-Za-z]{3,}|\s[A-Za-z]{2}\s|[\u2e80-\uffff]")
"""Words, which formulas have only within ``_NAMES``, and Chinese, Japanese or Korean characters."""
_SYMBOLS = re.compile(r"[\\^_={}<>+]")
"""Characters that are rare between two prices."""


def add_formulas(markdown: MarkdownIt) -> None:
    """Make a Markdown parser find formulas."""
    markdown.inline.ruler.before("escape", "formula", _inline)
    interrupted = ["paragraph", "reference", "blockquote", "list"]
    markdown.block.ruler.before("fence", "formula", _block, {"alt": interrupted})
    markdown.add_render_rule("formula", _render)


def script() -> str:
    """Return a script that draws the formulas of an element, with the KaTeX among gradio's files.

    Without KaTeX, and where it cannot read a formula, the formula's source stays.
    """
    folder = files("gradio") / "templates" / "frontend" / "assets"
    names = sorted(one.name for one in folder.iterdir() if one.name.startswith("katex-"))
    paths = {end: [f"assets/{name}" for name in names if name.endswith(end)] for end in _ENDS}
    return _SCRIPT.replace("SCRIPTS", json.dumps(paths[".js"])).replace(
        "STYLES", json.dumps(paths[".css"])
    )


_ENDS = (".js", ".css")
_SCRIPT = """
const draw = () => {
  const formulas = element.querySelectorAll('.formula:not([data-drawn])');
  if (formulas.length && !window.katexLoading) {
    const load = async () => {
      for (const href of STYLES) {
        document.head.append(Object.assign(document.createElement('link'), {
          rel: 'stylesheet', href: new URL(href, document.baseURI),
        }));
      }
      for (const href of SCRIPTS) {
        const loaded = await import(new URL(href, document.baseURI));
        if (loaded.default?.render) return loaded.default;
        if (loaded.render) return loaded;
      }
    };
    window.katexLoading = load().catch(() => null).then((katex) => { window.katexLoaded = katex; });
  }
  if (formulas.length && !window.katexLoaded) {
    window.katexLoading.then(() => window.katexLoaded && update());
    return;
  }
  for (const formula of formulas) {
    const source = formula.textContent, displayMode = formula.classList.contains('display');
    const limits = {maxSize: 20, maxExpand: 200, strict: 'ignore', errorColor: 'var(--o-other)'};
    formula.dataset.drawn = '';
    try {
      window.katexLoaded.render(formula.dataset.tex, formula, {displayMode, ...limits});
    } catch {
      formula.textContent = source;
    }
  }
};
"""


def _formula(text: str, start: int, stop: int) -> tuple[str, int, bool] | None:
    """Return a formula that begins at ``start``: its TeX, its end, and whether it is in a line of
    its own.

    None if there is none that ends before ``stop``.
    """
    begin = next((one for one in _CLOSERS if text.startswith(one, start)), None)
    if begin is None:
        return None
    inner = start + len(begin)
    end = text.find(_CLOSERS[begin], inner, min(stop, inner + MAX_CHARACTERS))
    while begin == "$" and end > 0 and text[end - 1] == "\\":
        end = text.find("$", end + 1, min(stop, inner + MAX_CHARACTERS))
    if end < 0:
        return None
    tex, after = text[inner:end], end + len(begin)
    if not tex.strip():
        return None
    if begin.startswith("$"):
        around = text[start - 1 : start] if start else "", text[after : after + 1]
        if any(one.isalnum() or one == "$" for one in around):
            return None
        if begin == "$$" and not _SYMBOLS.search(tex):
            return None
        if begin == "$" and not _is_certain(tex):
            return None
    return tex.strip(), after, begin in _DISPLAYED


def _is_certain(tex: str) -> bool:
    """Return whether a text between two dollar signs can only be a formula."""
    if tex != tex.strip() or "\n" in tex or _PROSE.search(_NAMES.sub(" ", tex)):
        return False
    if not re.search(r"[^\W\d]|\\", tex):
        return False  # Numbers alone may be prices.
    return not (tex[0].isdigit() and re.search(r"\s", tex)) or bool(_SYMBOLS.search(tex))


def _inline(state: StateInline, silent: bool) -> bool:
    found = _formula(state.src, state.pos, state.posMax)
    if found is None:
        return False
    tex, end, is_displayed = found
    if not silent:
        token = state.push("formula", "", 0)
        token.content, token.markup = tex, state.src[state.pos : end]
        token.meta = {"display": is_displayed}
    state.pos = end
    return True


def _block(state: StateBlock, first: int, stop: int, silent: bool) -> bool:
    """Find a formula that fills whole lines, whose lines are therefore no lists or headings."""
    if state.is_code_block(first):
        return False
    start, last = state.bMarks[first] + state.tShift[first], first
    begin = state.src[start : start + 2]
    if begin not in _DISPLAYED:
        return False
    found_at = state.src.find(_CLOSERS[begin], start + 2, start + 2 + MAX_CHARACTERS)
    if found_at < 0:
        return False
    end = found_at + 2
    while state.eMarks[last] < end and last + 1 < stop:
        last += 1
        if state.sCount[last] < state.blkIndent:
            return False
    if end > state.eMarks[last] or state.src[end : state.eMarks[last]].strip():
        return False
    lines = range(first, last + 1)
    source = "\n".join(
        state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]] for line in lines
    ).rstrip()
    found = _formula(source, 0, len(source))
    if found is None:
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.block, token.map = True, [first, last + 1]
        token.content, token.markup, token.meta = found[0], source, {"display": True}
        state.line = last + 1
    return True


def _render(
    renderer: RendererProtocol,
    tokens: Sequence[Token],
    place: int,
    options: Mapping[str, Any],
    env: Any,
) -> str:
    token = tokens[place]
    name = "formula display" if token.meta["display"] else "formula"
    tag, tex = "div" if token.block else "span", escapeHtml(token.content)
    return f'<{tag} class="{name}" data-tex="{tex}">{escapeHtml(token.markup)}</{tag}>'
