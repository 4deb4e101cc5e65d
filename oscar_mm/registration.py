"""Registration of attention "oscar" as soon as transformers has the interface for it.

``attn_implementation="oscar"`` must be known to transformers once ``import oscar_mm`` was there,
whichever of the two comes first; but ``import oscar_mm`` must not wait for transformers and torch.
So a finder stands in ``sys.meta_path`` (PEP 302) until transformers imports its models' base
class: it lets the other finders find that module, imports ``oscar_mm.attention`` after it and goes.
Nothing of transformers is changed.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODELS = "transformers.modeling_utils"
"""Where ``AttentionInterface`` is; no model of transformers can be made without it."""
_ATTENTION = "oscar_mm.attention"


class Registration:
    """Finder of one module, after which attention "oscar" is registered."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``; None for any other module."""
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
    """The module's own loader, and registration after it."""

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
        """What else a loader can do, such as ``get_source``."""
        return getattr(self._loader, name)


def register() -> None:
    """Register attention "oscar" now if transformers' models are imported, else when they are."""
    if MODELS in sys.modules:
        importlib.import_module(_ATTENTION)
    elif not any(isinstance(finder, Registration) for finder in sys.meta_path):
        sys.meta_path.insert(0, Registration())
