"""Pipelines of the tiny checkpoints."""

from pathlib import Path

from oscar_mm import OscarOmniPipeline, OscarVLPipeline
from oscar_mm.pipelines.pipeline import Pipeline


def pipelines(folders: dict[str, Path], policy: str) -> dict[str, Pipeline]:
    """A pipeline of each family on the CPU."""
    return {
        name: (OscarOmniPipeline if name == "omni" else OscarVLPipeline)(
            folder, device="cpu", policy=policy
        )
        for name, folder in folders.items()
    }
