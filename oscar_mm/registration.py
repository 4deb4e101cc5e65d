"""Registration of attention "oscar" as soon as transformers has the interface for it.

Transformers must know ``attn_implementation="oscar"`` after ``import oscar_mm``, whichever of the
two is imported first; but ``import oscar_mm`` must not wait for transformers and torch. So a finder
stays in ``sys.meta_path`` (PEP 302) until transformers imports its models' base class: it lets the
other finders find that module, then imports ``oscar_mm.attention`` and removes itself. Nothing in
transformers is changed.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODELS = "transformers.modeling_utils"
"""Module of ``AttentionInterface``; every model of transformers needs it."""
_ATTENTION = "oscar_mm.attention"


class Registration:
    """Finder of the module ``MODELS``; after its import, attention "oscar" is registered."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Spec of ``MODELS``, whose loader also registers the attention; None for other modules."""
        if name != MODELS:
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

    def __init__(self, loader: Any, finder: Registration) -> None:
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
        """Any other member of the module's own loader, such as ``get_source``."""
        return getattr(self._loader, name)


def register() -> None:
    """Register attention "oscar" now if transformers' models are imported, else when they are."""
    if MODELS in sys.modules:
        importlib.import_module(_ATTENTION)
    elif not any(isinstance(finder, Registration) for finder in sys.meta_path):
        sys.meta_path.insert(0, Registration())
