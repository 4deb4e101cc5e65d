"""Registry of model families by checkpoint model type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from oscar_mm.engine.family import Family
from oscar_mm.errors import InputError
from oscar_mm.fast_decode.decoder import KNOWN_LAYERS
from oscar_mm.modality import Modality
from oscar_mm.models.released import add_released

F = TypeVar("F", bound=Family)
_FAMILIES: dict[str, type[Family]] = {}
_GENERAL: dict[str, type[Family]] = {}
"""Families by model type for the types without a family of their own."""


def register_family(family: type[F]) -> type[F]:
    """Register a family for its model types; use this as a class decorator.

    Pipelines, planner and fast decoder then read the attributes that the class declares.

    Raises:
        ValueError: if another family already supports one of the model types.
    """
    for model_type in family.model_types:
        if (other := _FAMILIES.get(model_type, family)) is not family:
            raise ValueError(
                f"{family.__name__}: {other.__name__} already supports model type {model_type!r}"
            )
    _FAMILIES.update(dict.fromkeys(family.model_types, family))
    KNOWN_LAYERS.update(family.fast_layers)
    add_released(family.released)
    return family


def register_general(model_types: Iterable[str]) -> Callable[[type[F]], type[F]]:
    """Return a class decorator that registers a family for model types of transformers.

    A family that ``register_family`` registers for one of the types takes precedence.
    """

    def register(family: type[F]) -> type[F]:
        _GENERAL.update(dict.fromkeys(model_types, family))
        KNOWN_LAYERS.update(family.fast_layers)
        return family

    return register


def family_of(model_type: str, pipeline: str | None = None) -> type[Family]:
    """Return the family that supports a model type.

    Args:
        model_type: ``config.model_type`` of a checkpoint.
        pipeline: name of the pipeline that must support it; None for any pipeline.

    Raises:
        InputError: if no family supports the model type, or the pipeline does not.
    """
    family = find_family(model_type)
    if family is None or pipeline not in (None, pipeline_of(family)):
        by = f" by {pipeline}" if pipeline else ""
        raise InputError(f"model type {model_type!r} is not supported{by}: {_reading()}")
    return family


def pipeline_of(family: type[Family]) -> str:
    """Return the name of the pipeline that supports a family's media."""
    return "OscarOmniPipeline" if Modality.AUDIO in family.reads else "OscarVLPipeline"


def find_family(model_type: str) -> type[Family] | None:
    """Return the family that supports a model type; None if no family does."""
    return _FAMILIES.get(model_type) or _GENERAL.get(model_type)


def readers(modality: Modality) -> str:
    """Return a phrase for error texts that lists the models that support a modality.

    Example: "a Qwen3-Omni model or pocket-omni".
    """
    families = dict.fromkeys(one for one in _FAMILIES.values() if modality in one.reads)
    pockets = dict.fromkeys(one.pocket for one in families if hasattr(one, "pocket"))
    names = " or ".join(family.name for family in families)
    return " or ".join([f"a {names} model", *pockets])


def _reading() -> str:
    by_pipeline: dict[str, list[str]] = {}
    for model_type, family in _FAMILIES.items():
        by_pipeline.setdefault(pipeline_of(family), []).append(model_type)
    own = "; ".join(f"{name} supports {', '.join(kinds)}" for name, kinds in by_pipeline.items())
    return f"{own}; and text-only models of transformers run in OscarVLPipeline"
