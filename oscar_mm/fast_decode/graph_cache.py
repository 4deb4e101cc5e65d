"""Graph cache: work that is repeated becomes CUDA graphs."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from oscar_mm.fast_decode.decoder import Capture

MAX_GRAPHS = 18
"""Maximum number of graphs in a cache by default: more than mixed passes have sizes."""
_log = logging.getLogger(__name__)


class GraphCache:
    """Graphs by key: work runs eagerly once, is captured the second time, and then replayed.

    The first run may be the only one, and compiles any missing kernels.

    Args:
        capture: capture function.
        device: device of the work.
        most: maximum number of graphs; the least recently used one is dropped.
        what: subject and verb of the warning that the work runs eagerly.

    Attributes:
        fails: whether a capture failed; from then on, work without a graph runs eagerly.
    """

    def __init__(
        self,
        capture: Capture,
        device: torch.device,
        most: int = MAX_GRAPHS,
        what: str = "short prompts are read",
    ) -> None:
        self._capture, self._device, self._most, self._what = capture, device, most, what
        self.fails = False
        self._ran = set[Hashable]()
        self._replays = OrderedDict[Hashable, Callable[[], Any]]()

    def has(self, key: Hashable) -> bool:
        """Return whether there is a graph of a key."""
        return key in self._replays

    def run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """Run work, which must depend only on ``key`` and on tensors at fixed addresses."""
        if (replay := self.replay(key, work)) is not None:
            return replay()
        return work()

    def replay(self, key: Hashable, work: Callable[[], Any]) -> Callable[[], Any] | None:
        """Return the replay of work; None if it is to run eagerly."""
        if key in self._replays:
            self._replays.move_to_end(key)
        elif key in self._ran and not self.fails:
            try:
                self._replays[key] = self._capture(work, self._device)
            except Exception as error:
                # Ending a broken capture raises an error that hides the cause.
                self.fails = True
                _log.warning(
                    "%s eagerly: no CUDA graph could be captured: %s",
                    *(self._what, error.__context__ or error),
                )
            while len(self._replays) > self._most:
                self._replays.popitem(last=False)
        self._ran.add(key)
        return self._replays.get(key)

    def clear(self) -> None:
        """Drop all graphs, which read tensors that have moved."""
        self._replays.clear()
        self._ran.clear()
