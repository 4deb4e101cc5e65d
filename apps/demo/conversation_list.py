"""The list of a visitor's conversations: titles, media and sizes, and their HTML.

The browser remembers which conversations it has visited. A conversation's id is a secret that
only its visitors know, so whoever names an id may see, rename and delete the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from oscar_mm.apps.demo.transcript import counted
from oscar_mm.sizes import format_bytes

MAX_TITLE = 80
"""Maximum characters of a title."""
MAX_LISTED = 50
"""Maximum number of conversations in the list; the browser names the latest first."""
ID = re.compile(r"[A-Za-z0-9_-]{32}")
"""Ids of conversations."""
MAX_QUERY = 200
"""Maximum characters that are searched for."""
SEARCH = (
    '<input type="search" placeholder="Search conversations" aria-label="Search conversations">'
    '<p role="status"></p>'
)
"""HTML of the field that shortens the list to conversations with all of its words."""
_BEFORE, _AFTER = 40, 90
"""Characters that an excerpt shows before and after the beginning of what was found."""
LIST_SCRIPT = """
let timer = null;
document.addEventListener('input', ({target}) => {
  if (!target.closest('#search')) return;
  clearTimeout(timer);
  timer = setTimeout(() => trigger('input', {}), 200);
});
watch('value', () => {
  const nothing = element.querySelector('ul') && !element.querySelector('li');
  const status = document.querySelector('#search [role=status]');
  if (status) status.textContent = nothing ? 'No conversation has these words.' : '';
});
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-action]');
  if (!button) return;
  const {action, id, title} = button.dataset;
  const name = action === 'rename' ? prompt('Title of the conversation', title) : '';
  if (name === null || (action === 'delete' && !confirm(`Delete "${title}"?`))) return;
  trigger('click', {action, id, name});
});
"""
"""Script that searches the list, and sends the button that was pressed, with the new title if there
is one."""


@dataclass(frozen=True)
class Summary:
    """What the list shows of a conversation.

    Attributes:
        id: see ``Session.id``.
        title: the visitor's title, or the beginning of the first question.
        media: number of pictures, videos and clips, by kind.
        used_bytes: bytes of keys and values.
        found: part of what was said that has words which were searched for; "" if the title has
            them all, or nothing was searched for.
    """

    id: str
    title: str
    media: Mapping[str, int]
    used_bytes: int
    found: str = ""

    def searched(self, words: Sequence[str], said: Sequence[str]) -> Summary | None:
        """Search the conversation for words, in upper or lower case.

        Args:
            words: words or parts of words.
            said: questions and answers of the conversation.

        Returns:
            The summary with an excerpt; None unless each word is in the title or was said.
        """
        found = ""
        for word in words:
            has_word = re.compile(re.escape(word), re.IGNORECASE).search
            if has_word(self.title):
                continue
            match = next(filter(None, map(has_word, said)), None)
            if match is None:
                return None
            found = found or _excerpt(match.string, match.start())
        return replace(self, found=found)


def _excerpt(text: str, place: int) -> str:
    """Return the part of a text around a place, in one line."""
    first, last = max(0, place - _BEFORE), place + _AFTER
    line = " ".join(text[first:last].encode(errors="replace").decode().split())
    return f"{'…' if first else ''}{line}{'…' if last < len(text) else ''}"


def words_in(query: str | None) -> list[str]:
    """Return the words that a visitor searches for."""
    return (query or "")[:MAX_QUERY].split()


def title_of(text: str) -> str:
    """Return a text in one line, shortened to a title; a default title for an empty text."""
    # Half a surrogate pair cannot be sent to browsers.
    whole = text[: 4 * MAX_TITLE].encode(errors="replace").decode()
    line = " ".join(whole.split())
    return (line if len(line) <= MAX_TITLE else f"{line[: MAX_TITLE - 1]}…") or "Conversation"


def ids_in(text: str | None) -> list[str]:
    """Return the different ids in a browser's text, at most ``MAX_LISTED``, in order."""
    return [*dict.fromkeys(ID.findall((text or "")[: 40 * MAX_LISTED]))][:MAX_LISTED]


def conversation_list(summaries: Sequence[Summary], current: str, words: Sequence[str] = ()) -> str:
    """Return the HTML of the list.

    Args:
        summaries: conversations to show, the latest first.
        current: id of the conversation that the page shows.
        words: words that were searched for.
    """
    if not summaries and not words:
        return '<p class="empty">Conversations of this browser are listed here.</p>'
    rows = "".join(_row(one, words, is_current=one.id == current) for one in summaries)
    return f'<ul class="conversations">{rows}</ul>'


def _row(summary: Summary, words: Sequence[str], *, is_current: bool) -> str:
    title = escape(summary.title)
    counts = [counted(n, kind) for kind, n in summary.media.items() if n]
    about = escape(" · ".join([*counts, format_bytes(summary.used_bytes)]))
    link = f'<a href="#{summary.id}"{" aria-current=page" if is_current else ""}>{title}</a>'
    buttons = "".join(
        f'<button type="button" data-action="{action}" data-id="{summary.id}" '
        f'data-title="{title}" aria-label="{action.title()} {title}">{action.title()}</button>'
        for action in ("rename", "delete")
    )
    found = f'<small class="found">{_marked(summary.found, words)}</small>' if summary.found else ""
    return f"<li>{link}<small>{about}</small>{found}{buttons}</li>"


def _marked(text: str, words: Sequence[str]) -> str:
    """Return the HTML of a text in which words are marked."""
    # With a group, every second part is a word.
    parts = re.split(f"({'|'.join(map(re.escape, words))})", text, flags=re.IGNORECASE)
    return "".join(
        f"<mark>{escape(part)}</mark>" if place % 2 else escape(part)
        for place, part in enumerate(parts)
    )
