"""Pipelines, which turn media and a question into an answer, for each supported model family."""

from pathlib import Path

from oscar_mm.pipelines import families as families  # The import registers the families.
from oscar_mm.pipelines.loading import reader
from oscar_mm.pipelines.omni import OscarOmniPipeline
from oscar_mm.pipelines.registry import register_family
from oscar_mm.pipelines.vision import OscarVLPipeline

__all__ = ["OscarOmniPipeline", "OscarVLPipeline", "pipeline_for", "register_family"]

_KINDS = {kind.name: kind for kind in (OscarOmniPipeline, OscarVLPipeline)}


def pipeline_for(model: str | Path) -> type[OscarOmniPipeline] | type[OscarVLPipeline]:
    """Return the pipeline class for a checkpoint; reads only the checkpoint's configuration.

    Args:
        model: name of a bundled model, hub id or folder.

    Raises:
        InputError: if the model does not exist, or no pipeline supports it.
    """
    return _KINDS[reader(model)]
