"""Answer questions about images, videos and audio with a low-bit KV cache.

Names are loaded on first use (PEP 562), so that `import oscar_mm` and the command line's help text
need not import torch.

Even so, transformers supports ``attn_implementation="oscar"`` once both packages are imported, in
either order. To achieve this, a finder stays in ``sys.meta_path`` (PEP 302) until transformers
imports the base class of its models. The finder then lets the other finders find that module,
imports ``oscar_mm.attention``, and removes itself. Nothing in transformers is changed.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oscar_mm.cache.cache import OscarCache, as_argument
    from oscar_mm.cache.memory import MemoryReport
    from oscar_mm.engine.answer import Answer
    from oscar_mm.engine.grammar import Grammar
    from oscar_mm.engine.speech import Speech
    from oscar_mm.errors import InputError
    from oscar_mm.inspect.quantization_errors import roundtrip
    from oscar_mm.media import MediaLimits
    from oscar_mm.modality import Modality, Span
    from oscar_mm.pipelines import OscarOmniPipeline, OscarVLPipeline
    from oscar_mm.policy import KVPolicy

__version__ = "0.2.0"

__all__ = [
    "Answer",
    "Grammar",
    "InputError",
    "KVPolicy",
    "MediaLimits",
    "MemoryReport",
    "Modality",
    "OscarCache",
    "OscarOmniPipeline",
    "OscarVLPipeline",
    "Span",
    "Speech",
    "__version__",
    "as_argument",
    "roundtrip",
]

_HOME = {
    "Answer": "oscar_mm.engine.answer",
    "Grammar": "oscar_mm.engine.grammar",
    "InputError": "oscar_mm.errors",
    "KVPolicy": "oscar_mm.policy",
    "MediaLimits": "oscar_mm.media",
    "MemoryReport": "oscar_mm.cache.memory",
    "Modality": "oscar_mm.modality",
    "OscarCache": "oscar_mm.cache.cache",
    "OscarOmniPipeline": "oscar_mm.pipelines",
    "OscarVLPipeline": "oscar_mm.pipelines",
    "Span": "oscar_mm.modality",
    "Speech": "oscar_mm.engine.speech",
    "as_argument": "oscar_mm.cache.cache",
    "roundtrip": "oscar_mm.inspect.quantization_errors",
}
_MODELS = "transformers.modeling_utils"
"""Module that defines ``AttentionInterface``, imported by every transformers model."""
_ATTENTION = "oscar_mm.attention"


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


class _Registration:
    """Import finder that registers attention "oscar" once the module ``_MODELS`` is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return a spec for ``_MODELS`` that also registers attention; None for other modules."""
        if name != _MODELS:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)  # pyright: ignore[reportAttributeAccessIssue]
                return spec
        return None


class _Loader:
    """Runs the module's own loader, then registers attention "oscar"."""

    def __init__(self, loader: Any, finder: _Registration) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        importlib.import_module(_ATTENTION)

    def __getattr__(self, name: str) -> Any:
        """Forward other attributes, such as ``get_source``, to the module's own loader."""
        return getattr(self._loader, name)


def _register() -> None:
    """Register attention "oscar" now if transformers' base class of models has been imported;
    otherwise, as soon as it is."""
    if _MODELS in sys.modules:
        importlib.import_module(_ATTENTION)
    # Compare by name, because the class of an existing finder differs if this module was reloaded.
    elif not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Registration())


_register()
