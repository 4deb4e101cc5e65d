"""Pipelines: from media and a question to an answer, for each supported family of models."""

from oscar_mm.pipelines.omni import OscarOmniPipeline
from oscar_mm.pipelines.vision import OscarVLPipeline

__all__ = ["OscarOmniPipeline", "OscarVLPipeline"]
