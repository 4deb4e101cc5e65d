"""Keys of weights from a watch, each compared with a new key."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from oscar_mm.modules import WeightsWatch, weights_key


def watched_key(model: nn.Module) -> Callable[[], object]:
    """Return a function that returns the present key of a model."""
    watch = WeightsWatch(model)

    def key() -> object:
        found = watch.key
        assert found == weights_key(model)
        return found

    return key
