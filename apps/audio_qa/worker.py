"""Worker: loads the model and answers groups of rows, in this process or as an actor of Ray."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from oscar_mm.apps.audio_qa.engine import Engine
from oscar_mm.apps.audio_qa.results import Result
from oscar_mm.apps.audio_qa.rows import Row
from oscar_mm.apps.audio_qa.settings import Settings
from oscar_mm.media import MediaLimits
from oscar_mm.pipelines import pipeline_for


@dataclass(frozen=True)
class Plan:
    """Everything a worker needs to know.

    Attributes:
        model: name of a bundled model, folder or hub id.
        settings: how rows are answered.
        batch_size: most rows at once.
        kv_budget: bytes that recordings and batches may hold together, or None.
        device: by default a GPU if there is one.
        allow_remote: fetch media that are http(s) addresses.
        limits: bounds on media.
    """

    model: str
    settings: Settings
    batch_size: int = 8
    kv_budget: int | str | None = None
    device: str | None = None
    allow_remote: bool = False
    limits: MediaLimits = field(default_factory=MediaLimits)


class Worker:
    """A loaded model.

    Args:
        plan: what to load and how to answer.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        settings = plan.settings
        self._pipe = pipeline_for(plan.model)(
            plan.model,
            policy=settings.policy,
            device=plan.device,
            dtype=settings.dtype,
            limits=plan.limits,
            video_fps=settings.video_fps,
            allow_remote=plan.allow_remote,
            kv_budget=plan.kv_budget,
            spill=False,
        )
        self._engine = Engine(self._pipe, settings, plan.batch_size)
        self._loaded = time.process_time()
        self.fingerprint = settings.fingerprint(self._pipe.fingerprint)

    def run(self, groups: Iterable[list[Row]]) -> Iterator[Result]:
        """See ``Engine.run``."""
        return self._engine.run(groups)

    @property
    def kv_bytes(self) -> int:
        """Of pages and blocks that are in use now."""
        return self._pipe.store.memory().used_bytes

    @property
    def report(self) -> dict[str, Any]:
        """What it has done so far: the fields of ``Work`` that only it knows."""
        return {
            "cpu_seconds": time.process_time() - self._loaded,
            "audio_seconds": self._engine.audio_seconds,
            "kv_peak_bytes": self._engine.peak_bytes,
            "process_peak_bytes": _process_peak(),
        }


def _process_peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
