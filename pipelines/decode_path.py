"""Decode path: what runs the decode steps of a checkpoint, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oscar_mm.errors import InputError
from oscar_mm.fast_decode.decoder import modules_are_capturable, supports
from oscar_mm.models import source_of
from oscar_mm.pipelines.adapters import adapter_base
from oscar_mm.pipelines.loading import skeleton, weights_title
from oscar_mm.pipelines.quantized_checkpoints import quantization_of
from oscar_mm.pipelines.stored_modules import REORDERED_EXPERTS
from oscar_mm.weights.checkpoint_formats import formats_of


@dataclass(frozen=True)
class DecodePath:
    """What runs the decode steps of a checkpoint.

    Attributes:
        family: name of the model family.
        weights: format of the weights.
        fused: whether fused layers run them (``oscar_mm.fast_decode``), or the model's own modules.
        captured: whether a GPU replays them as CUDA graphs, of several requests together.
    """

    family: str
    weights: str
    fused: bool
    captured: bool

    @property
    def steps(self) -> str:
        """What runs decode steps on a GPU, as a phrase for people."""
        layers = "fused layers" if self.fused else "the model's own modules"
        if self.captured:
            return f"{layers}, captured as CUDA graphs"
        why = "layers have attention sinks, attention within chunks, or linear attention"
        return f"{layers}, one operation at a time, because {why}"


def decode_path(model: str | Path) -> DecodePath:
    """Find out what would run the decode steps of a checkpoint, without reading its weights.

    Columns of a quantized matrix are taken to be in another order if the configuration allows it
    (``desc_act``, actorder), and all matrices of a layer to have one format.

    Args:
        model: name of a bundled model, hub id, or folder of a checkpoint or an adapter.

    Raises:
        InputError: if the model does not exist or is not supported, or if the columns of its
            experts are in another order, which loading would refuse too.
    """
    source = source_of(adapter_base(model)[0])
    family, outer = skeleton(source)
    part, title = family.text_part(outer), weights_title(source, outer.config)
    if _reorders(quantization_of(outer.config)) and _stacks_experts(part):
        raise InputError(f"model {source}: {REORDERED_EXPERTS}")
    name = family.name if outer.config.model_type in family.model_types else outer.config.model_type
    fused = supports(part) and _are_ours(quantization_of(outer.config))
    captured = fused or modules_are_capturable(part, torch.device("cuda"))
    return DecodePath(name, title or "16-bit", fused, captured)


def _are_ours(fields: Any) -> bool:
    """Return whether quantized weights, if there are any, have modules that fused layers know."""
    if not fields:
        return True
    given = fields if isinstance(fields, dict) else fields.to_dict()
    return formats_of(given) is not None and not _reorders(given)


def _reorders(fields: Any) -> bool:
    """Return whether columns of quantized matrices may be in another order than those of x."""
    if not fields:
        return False
    given = fields if isinstance(fields, dict) else fields.to_dict()
    return any(one.reorders for one in formats_of(given) or ())


def _stacks_experts(part: torch.nn.Module) -> bool:
    """Return whether a model has modules that stack the weights of experts."""
    weights = (getattr(module, "gate_up_proj", None) for module in part.modules())
    return any(isinstance(weight, torch.nn.Parameter) for weight in weights)
