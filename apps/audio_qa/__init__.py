"""Audio QA: answer many questions about recordings, images and videos, here or on a cluster.

The function ``audio_qa`` is the Python equivalent of ``oscar-mm audio-qa``. It is imported on first
use (PEP 562), because importing it also imports torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oscar_mm.apps.audio_qa.job import audio_qa

__all__ = ["audio_qa"]


def __getattr__(name: str) -> object:
    if name != "audio_qa":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from oscar_mm.apps.audio_qa.job import audio_qa

    return audio_qa
