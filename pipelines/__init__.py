"""Pipelines: from media and a question to an answer, for each supported family of models."""

from pathlib import Path

from oscar_mm.pipelines.loading import reader
from oscar_mm.pipelines.omni import OscarOmniPipeline
from oscar_mm.pipelines.vision import OscarVLPipeline

__all__ = ["OscarOmniPipeline", "OscarVLPipeline", "pipeline_for"]

_KINDS = {kind.name: kind for kind in (OscarOmniPipeline, OscarVLPipeline)}


def pipeline_for(model: str | Path) -> type[OscarOmniPipeline] | type[OscarVLPipeline]:
    """Which pipeline reads a checkpoint; nothing but its configuration is loaded.

    Args:
        model: name of a bundled model, hub id or folder.

    Raises:
        InputError: no such model, or one that none reads.
    """
    return _KINDS[reader(model)]
