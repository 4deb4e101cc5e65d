"""The list of a visitor's conversations: titles, media and sizes, and their HTML.

The browser remembers which conversations it has visited. A conversation's id is a secret that
only its visitors know, so whoever names an id may see, rename and delete the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from oscar_mm.apps.demo.transcript import counted
from oscar_mm.sizes import format_bytes

MAX_TITLE = 80
"""Maximum characters of a title."""
MAX_LISTED = 50
"""Maximum number of conversations in the list; the browser names the latest first."""
ID = re.compile(r"[A-Za-z0-9_-]{32}")
"""Ids of conversations."""
SEARCH = (
    '<input type="search" placeholder="Search titles" aria-label="Search titles">'
    '<p role="status"></p>'
)
"""HTML of the field that shortens the list to titles with all of its words."""
LIST_SCRIPT = """
const search = () => {
  const typed = document.querySelector('#search input')?.value.toLowerCase() ?? '';
  const words = typed.split(/\\s+/), rows = [...element.querySelectorAll('li')];
  for (const row of rows) {
    const title = row.querySelector('a').textContent.toLowerCase();
    row.hidden = !words.every((word) => title.includes(word));
  }
  const nothing = rows.length > 0 && rows.every((row) => row.hidden);
  const status = document.querySelector('#search [role=status]');
  if (status) status.textContent = nothing ? 'No title has these words.' : '';
};
document.addEventListener('input', ({target}) => target.closest('#search') && search());
watch('value', search);
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
    """

    id: str
    title: str
    media: Mapping[str, int]
    used_bytes: int


def title_of(text: str) -> str:
    """Return a text in one line, shortened to a title; a default title for an empty text."""
    # Half a surrogate pair cannot be sent to browsers.
    whole = text[: 4 * MAX_TITLE].encode(errors="replace").decode()
    line = " ".join(whole.split())
    return (line if len(line) <= MAX_TITLE else f"{line[: MAX_TITLE - 1]}…") or "Conversation"


def ids_in(text: str | None) -> list[str]:
    """Return the different ids in a browser's text, at most ``MAX_LISTED``, in order."""
    return [*dict.fromkeys(ID.findall((text or "")[: 40 * MAX_LISTED]))][:MAX_LISTED]


def conversation_list(summaries: Sequence[Summary], current: str) -> str:
    """Return the HTML of the list.

    Args:
        summaries: conversations to show, the latest first.
        current: id of the conversation that the page shows.
    """
    if not summaries:
        return '<p class="empty">Conversations of this browser are listed here.</p>'
    rows = "".join(_row(one, is_current=one.id == current) for one in summaries)
    return f'<ul class="conversations">{rows}</ul>'


def _row(summary: Summary, *, is_current: bool) -> str:
    title = escape(summary.title)
    counts = [counted(n, kind) for kind, n in summary.media.items() if n]
    about = escape(" · ".join([*counts, format_bytes(summary.used_bytes)]))
    link = f'<a href="#{summary.id}"{" aria-current=page" if is_current else ""}>{title}</a>'
    buttons = "".join(
        f'<button type="button" data-action="{action}" data-id="{summary.id}" '
        f'data-title="{title}" aria-label="{action.title()} {title}">{action.title()}</button>'
        for action in ("rename", "delete")
    )
    return f"<li>{link}<small>{about}</small>{buttons}</li>"
