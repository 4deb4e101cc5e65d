"""Turn off the caller's torch modes, autocast and compilation, for a cache's arithmetic.

Under ``torch.autocast``, attention to a cache computes in autocast's dtype, like all attention in
transformers, but packing and unpacking choose their own dtypes. Under ``torch.compile``, the graph
breaks at each call to a cache, because its tables are Python objects.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_KINDS = ("cpu", "cuda")
_REASON = (
    "OscarCache keeps its tables in Python objects, so one graph cannot contain a full forward "
    "pass; compile with fullgraph=False"
)


def eager(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a function run eagerly and without autocast, whatever the caller's mode."""

    @wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        kinds = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
        if not kinds:
            return function(*args, **kwargs)
        with ExitStack() as modes:
            for kind in kinds:
                modes.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    # By its declared type, ``disable`` might also return a decorator.
    return cast(Callable[_Arguments, _Result], torch.compiler.disable(run, reason=_REASON))


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which attention computes with a tensor, taking autocast into account."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
