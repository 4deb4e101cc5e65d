"""PreviewStore: small pictures of media, for conversations that are loaded without their files."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from oscar_mm.apps.demo.transcript import Preview
from oscar_mm.modality import MediumSpan

_MAX_CHARACTERS = 64 * 2**20


class PreviewStore:
    """The previews of the media that were shown lately, by their content and name.

    Content is a SHA-256: a conversation that names it comes from somebody who has seen the medium.
    """

    def __init__(self) -> None:
        self._htmls: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._size, self._lock = 0, threading.Lock()

    def add(self, media: Sequence[MediumSpan], htmls: Sequence[str]) -> None:
        """Add previews; the oldest ones go where there are too many."""
        with self._lock:
            for span, html in zip(media, htmls, strict=True):
                key = span.digest, span.label
                self._size += len(html) - len(self._htmls.pop(key, ""))
                self._htmls[key] = html
            while self._size > _MAX_CHARACTERS:
                self._size -= len(self._htmls.popitem(last=False)[1])

    def html(self, span: MediumSpan) -> str:
        """Return the picture of a medium, or ""."""
        with self._lock:
            return self._htmls.get((span.digest, span.label), "")

    def preview(self, span: MediumSpan) -> Preview:
        """Describe a medium whose file is missing."""
        return Preview.named(span.modality, span.label, self.html(span))
