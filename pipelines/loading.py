"""Loading of checkpoints: their family, processor and dtype; ``placement`` says where they go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoProcessor, PreTrainedModel

from oscar_mm.errors import InputError
from oscar_mm.generation.family import Family
from oscar_mm.models import remedy, source_of
from oscar_mm.pipelines.llava_next import LlavaNext
from oscar_mm.pipelines.placement import Placement, on_meta
from oscar_mm.pipelines.qwen3_omni import Qwen3Omni
from oscar_mm.pipelines.qwen3_vl import Qwen3VL

FAMILIES: dict[str, tuple[type[Family], ...]] = {
    "OscarVLPipeline": (LlavaNext, Qwen3VL),
    "OscarOmniPipeline": (Qwen3Omni,),
}
"""The families that each pipeline reads."""

_CONFIG_KEYS = (
    "revision",
    "token",
    "cache_dir",
    "local_files_only",
    "trust_remote_code",
    "subfolder",
)
"""Names of model_kwargs that configuration and processor need too."""

_OWN_ARGUMENTS = {
    "attn_implementation": "attn_implementation",
    "device_map": "device_map",
    "distributed_config": "tp_plan",
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "tp_plan": "tp_plan",
    "tp_size": "tp_plan",
}
"""Names that model_kwargs may not hold, and the pipeline's arguments in their place."""


def load(
    model: str | Path | PreTrainedModel,
    processor: Any,
    pipeline: str,
    *,
    placement: Placement,
    dtype: str | torch.dtype | None,
    towers: str | None,
    model_kwargs: Mapping[str, Any],
) -> Family:
    """A family with its model and processor, decoder attention set to "oscar".

    Args:
        model: name of a bundled model, hub id, folder, or a loaded model (its decoder's attention
            is then set; with other caches that is the same as "sdpa").
        processor: for a loaded model; by default loaded from where the model came from.
        pipeline: name of the pipeline, a key of FAMILIES.
        placement: where the weights go; a loaded model can only be sent to a device.
        towers: attention implementation of vision and audio towers; None for "sdpa", or what a
            loaded model has.
        model_kwargs: for ``from_pretrained``.

    Raises:
        InputError: no such model, not a supported one, or arguments that contradict each other.
    """
    if isinstance(model, PreTrainedModel):
        for name, value in (
            ("dtype", dtype),
            ("model_kwargs", model_kwargs),
            ("device_map", placement.device_map),
            ("tp_plan", placement.tp_plan),
        ):
            if value:
                raise InputError(f"{name} is for a model that is loaded here, not a loaded one")
        family = _family(model.config.model_type, pipeline)
        if processor is None:
            processor = _processor(str(model.name_or_path), {})
        _check_processor(processor)
        if "device" in placement.given:
            torch.nn.Module.to(model, placement.target)
        _set_attention(family, model, towers)
        return family(model.eval(), processor)
    source = source_of(model)
    _check_model_kwargs(model_kwargs)
    shared = {key: model_kwargs[key] for key in _CONFIG_KEYS if key in model_kwargs}
    config = config_of(source, shared)
    family = _family(config.model_type, pipeline)
    target = placement.target
    options = {**model_kwargs, **placement.arguments(family.auto_class, config)}
    options["dtype"] = dtype_of(dtype, placement.on_cpu)
    quantized = options.get("quantization_config") or getattr(config, "quantization_config", None)
    if quantized and target is not None:
        # Weights in few bits cannot be moved after loading (bitsandbytes).
        options["device_map"], target = {"": target}, None
    if processor is None:
        processor = _processor(source, shared)
    _check_processor(processor)
    try:
        loaded = family.auto_class.from_pretrained(source, **options)
    except (OSError, ValueError, TypeError, ImportError, SafetensorError) as error:
        raise InputError(f"model {source}: {first_line(error)}") from error
    if target is not None:
        loaded = loaded.to(target)
    _set_attention(family, loaded, towers)
    return family(loaded.eval(), processor)


def outline(model: str | Path) -> Family:
    """A family made from configuration and processor alone; its model has shapes but no weights.

    Args:
        model: name of a bundled model, hub id or folder.

    Raises:
        InputError: no such model, or not a supported one.
    """
    source = source_of(model)
    config = config_of(source, {})
    family = _family(config.model_type, reader(model))
    processor = _processor(source, {})
    _check_processor(processor)
    return family(on_meta(family.auto_class, config).eval(), processor)


def reader(model: str | Path) -> str:
    """Name of the pipeline, a key of FAMILIES, that reads a checkpoint.

    Args:
        model: name of a bundled model, hub id or folder.

    Raises:
        InputError: no such model, or no pipeline reads it.
    """
    model_type = config_of(source_of(model), {}).model_type
    for name, families in FAMILIES.items():
        if any(model_type in family.model_types for family in families):
            return name
    raise InputError(f"model type {model_type!r} is not supported: {_reading()}")


def config_of(source: str, options: dict[str, Any]) -> Any:
    """Configuration of a checkpoint.

    Args:
        source: as of ``source_of``.
        options: for ``from_pretrained``.

    Raises:
        InputError: there is none that can be read.
    """
    try:
        return AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError) as error:
        known = "" if Path(source).is_dir() else f"; {remedy(source)}"
        raise InputError(f"model {source}: {first_line(error)}{known}") from error


def _check_model_kwargs(model_kwargs: Any) -> None:
    if not isinstance(model_kwargs, Mapping):
        raise InputError(f"model_kwargs must be a dict, not {type(model_kwargs).__name__}")
    for key, argument in _OWN_ARGUMENTS.items():
        if key in model_kwargs:
            raise InputError(f"model_kwargs[{key!r}]: give it as {argument}=... of the pipeline")


def _family(model_type: str, pipeline: str) -> type[Family]:
    for family in FAMILIES[pipeline]:
        if model_type in family.model_types:
            return family
    raise InputError(f"model type {model_type!r} is not supported by {pipeline}: {_reading()}")


def _reading() -> str:
    return "; ".join(
        f"{name} reads " + ", ".join(kind for family in families for kind in family.model_types)
        for name, families in FAMILIES.items()
    )


def _set_attention(family: type[Family], model: PreTrainedModel, towers: str | None) -> None:
    try:
        family.set_attention(model, towers)
    except (ValueError, ImportError) as error:
        raise InputError(f"attn_implementation {towers!r}: {first_line(error)}") from error


def _check_processor(processor: Any) -> None:
    if not hasattr(processor, "tokenizer"):
        raise InputError(
            f"processor: {type(processor).__name__} has no tokenizer; give what "
            "AutoProcessor.from_pretrained returns, or leave it out"
        )


def _processor(source: str, options: dict[str, Any]) -> Any:
    try:
        return AutoProcessor.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise InputError(
            f"processor of model {source}: {first_line(error)}; pass processor=..."
        ) from error


def dtype_of(dtype: str | torch.dtype | None, on_cpu: bool) -> torch.dtype | str:
    """The checkpoint's dtype on a GPU; float32 on a CPU, which is slow in 16 bit.

    Raises:
        InputError: an unknown dtype.
    """
    if dtype is None:
        return torch.float32 if on_cpu else "auto"
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if chosen != "auto" and chosen not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"dtype {dtype!r}: must be float32, bfloat16, float16 or auto")
    return chosen


def first_line(error: Exception) -> str:
    """The first line of a library's error."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
