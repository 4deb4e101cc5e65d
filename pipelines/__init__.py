"""Pipelines: from media and a question to an answer, for each supported model family."""

from pathlib import Path

from oscar_mm.pipelines import families as families  # Registers them.
from oscar_mm.pipelines.loading import reader
from oscar_mm.pipelines.omni import OscarOmniPipeline
from oscar_mm.pipelines.registry import register_family
from oscar_mm.pipelines.vision import OscarVLPipeline

__all__ = ["OscarOmniPipeline", "OscarVLPipeline", "pipeline_for", "register_family"]

_KINDS = {kind.name: kind for kind in (OscarOmniPipeline, OscarVLPipeline)}


def pipeline_for(model: str | Path) -> type[OscarOmniPipeline] | type[OscarVLPipeline]:
    """Return the pipeline class for a checkpoint, from its configuration alone.

    Args:
        model: name of a bundled model, hub id or folder.

    Raises:
        InputError: if there is no such model, or no pipeline supports it.
    """
    return _KINDS[reader(model)]
