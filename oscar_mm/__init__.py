"""Questions about images, videos and sound with a 2-bit KV cache.

Names load on first use (PEP 562), so that `import oscar_mm` and the command line's help do not
wait for torch. Even so, transformers knows attention "oscar" after the import.
"""

import importlib
from typing import TYPE_CHECKING

from oscar_mm.registration import register as _register

if TYPE_CHECKING:
    from oscar_mm.cache.cache import OscarCache
    from oscar_mm.cache.memory import MemoryReport
    from oscar_mm.errors import InputError
    from oscar_mm.generation.answer import Answer
    from oscar_mm.inspect.quantization_errors import roundtrip
    from oscar_mm.media import MediaLimits
    from oscar_mm.modality import Modality, Span
    from oscar_mm.pipelines import OscarOmniPipeline, OscarVLPipeline
    from oscar_mm.policy import KVPolicy

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "InputError",
    "KVPolicy",
    "MediaLimits",
    "MemoryReport",
    "Modality",
    "OscarCache",
    "OscarOmniPipeline",
    "OscarVLPipeline",
    "Span",
    "__version__",
    "roundtrip",
]

_HOME = {
    "Answer": "oscar_mm.generation.answer",
    "InputError": "oscar_mm.errors",
    "KVPolicy": "oscar_mm.policy",
    "MediaLimits": "oscar_mm.media",
    "MemoryReport": "oscar_mm.cache.memory",
    "Modality": "oscar_mm.modality",
    "OscarCache": "oscar_mm.cache.cache",
    "OscarOmniPipeline": "oscar_mm.pipelines",
    "OscarVLPipeline": "oscar_mm.pipelines",
    "Span": "oscar_mm.modality",
    "roundtrip": "oscar_mm.inspect.quantization_errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


_register()
