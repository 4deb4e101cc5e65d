"""The digest of attributes changes with every attribute, and only then."""

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from oscar_mm.engine.prefix_cache import attributes_digest, processor_settings
from oscar_mm.models import BUNDLED, bundled


class Filter(enum.Enum):
    LINEAR = 1
    CUBIC = 2


@dataclass
class Extractor:
    rate: int = 16_000
    filters: Any = field(default_factory=lambda: np.arange(6.0).reshape(2, 3))
    window: Any = field(default_factory=lambda: torch.ones(4, dtype=torch.bfloat16))
    size: Any = field(default_factory=lambda: {"height": 3, "width": 4})
    inner: Any = field(default_factory=lambda: SimpleNamespace(tables=[np.zeros(3), None]))
    names: frozenset[str] = frozenset({"a", "b"})
    resample: Filter = Filter.LINEAR


CHANGES = [
    {"rate": 8_000},
    {"filters": np.arange(6.0).reshape(3, 2)},
    {"filters": np.arange(6).reshape(2, 3)},
    {"filters": np.arange(6.0)[::-1].reshape(2, 3)},
    {"window": torch.ones(4)},
    {"window": torch.tensor([1, 1, 1, 2], dtype=torch.bfloat16)},
    {"window": torch.tensor(1.0)},
    {"window": torch.ones(0)},
    {"size": {"height": 4, "width": 3}},
    {"size": [3, 4]},
    {"inner": SimpleNamespace(tables=[np.ones(3), None])},
    {"inner": SimpleNamespace(tables=[np.zeros(3), 0])},
    {"names": frozenset({"a"})},
    {"resample": Filter.CUBIC},
    {"filters": np.array([np.zeros(2), "x"], object)},
]


def test_every_change_counts() -> None:
    same = attributes_digest(Extractor())
    assert attributes_digest(Extractor(size={"width": 4, "height": 3})) == same
    turned = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert attributes_digest(Extractor(filters=turned)) == same
    others = [attributes_digest(Extractor(**change)) for change in CHANGES]
    assert len({same, *others}) == 1 + len(CHANGES)
    namesake = SimpleNamespace(**vars(Extractor()))
    assert attributes_digest(namesake) != same


@pytest.mark.parametrize("name", BUNDLED)
def test_processors(name: str) -> None:
    """Processors loaded the same way have the same digest, and each attribute counts."""
    one, other = (AutoProcessor.from_pretrained(bundled(name)) for _ in range(2))
    assert processor_settings(one) == processor_settings(other)
    parts = ("image_processor", "video_processor", "feature_extractor")
    for part in filter(None, (getattr(other, part, None) for part in parts)):
        before = processor_settings(other)
        for attribute, value in list(vars(part).items()):
            setattr(part, attribute, "another")
            assert processor_settings(other) != before, attribute
            setattr(part, attribute, value)
        assert processor_settings(other) == before
