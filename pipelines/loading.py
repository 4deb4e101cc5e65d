"""Load checkpoints with their family, processor and dtype, and choose devices for the weights.

``Placement`` puts the weights on one device, distributes the layers over several devices, or
splits every layer among several processes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import distributed
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)
from transformers.distributed.configuration_utils import DistributedConfig

from oscar_mm.admission.capacity import heads_by_layer
from oscar_mm.cache.states import layers_of_states
from oscar_mm.engine.family import Family
from oscar_mm.errors import InputError
from oscar_mm.media.sequence_lengths import read_lengths_once
from oscar_mm.models import (
    check_source,
    check_weights,
    folder_of,
    remedy,
    source_of,
    stored_bytes,
)
from oscar_mm.pipelines import divided_experts, divided_states
from oscar_mm.pipelines.adapters import adapter_base, add_adapter, unwrapped
from oscar_mm.pipelines.drafts import add_drafts
from oscar_mm.pipelines.quantized_checkpoints import (
    check_complete,
    checked_formats,
    quantization_of,
    quantized_arguments,
)
from oscar_mm.pipelines.registry import family_of, find_family, pipeline_of
from oscar_mm.pipelines.requirements import check_fits, check_logits, check_modules
from oscar_mm.pipelines.row_adapters import add_row_adapters
from oscar_mm.pipelines.weight_formats import adopt_fp8, already_quantized, check_format, quantize
from oscar_mm.rank_watch import watch
from oscar_mm.tensor_parallel import TPGroup

_CONFIG_KEYS = (
    "revision",
    "token",
    "cache_dir",
    "local_files_only",
    "trust_remote_code",
    "subfolder",
)
"""Keys of model_kwargs that are also passed when the configuration and the processor are loaded."""

_WHOLE = "replicated_with_grad_allreduce"
"""Tensor-parallel style that keeps a full copy of a module on every rank. It differs from having
no style only in training."""
_LAYERS = divided_states.PLAN | {
    name: style
    for name, style in (Qwen3NextConfig.base_model_tp_plan or {}).items()
    if style != _WHOLE and ".linear_attn." not in name
}
"""Tensor-parallel styles of decoder modules, which have the same names in all our families. They
replace transformers' own plans, which lack Qwen3-VL's layers, lack the sum over experts (5.17),
contain rules for the talker that transformers cannot apply (5.23), and leave states whole."""


def load(
    model: str | Path | torch.nn.Module,
    processor: Any,
    pipeline: str,
    *,
    placement: Placement,
    dtype: str | torch.dtype | None,
    weights: str | None,
    towers: str | None,
    adapters: Mapping[str, str | Path],
    drafts: bool = False,
    model_kwargs: Mapping[str, Any],
) -> Family:
    """Load a checkpoint as a family, with the decoder's attention set to "oscar".

    Args:
        model: name of a bundled model, hub id, folder of a checkpoint or of a peft adapter, or a
            loaded model, perhaps a ``PeftModel``. The attention of a loaded model's decoder is
            replaced; with caches of other classes it still behaves like "sdpa".
        processor: processor of a loaded model; None loads it from the model's folder or hub id.
        pipeline: name of the pipeline, see ``pipeline_of``.
        placement: devices for the weights; a loaded model can only be moved to a single device.
        dtype: dtype of the weights, see ``dtype_of``.
        weights: format for the decoder's weights, a key of ``weight_formats.FORMATS``; None keeps
            the checkpoint's.
        towers: attention implementation of the vision and audio towers. None selects "sdpa", or
            keeps the implementation of a loaded model.
        adapters: folders of adapters that requests choose, by name.
        drafts: whether to load the checkpoint's draft module.
        model_kwargs: arguments of ``from_pretrained``, see ``loading_arguments``.

    Raises:
        InputError: if the model does not exist or is not supported, or if arguments conflict.
    """
    model = unwrapped(model)
    if isinstance(model, PreTrainedModel):
        for name, value in (
            ("dtype", dtype),
            ("weights", weights),
            (", ".join(model_kwargs), model_kwargs),
            ("device_map", placement.device_map),
            ("tp_plan", placement.tp_plan),
            ("drafts", drafts),
        ):
            if value:
                raise InputError(
                    f"{name} cannot be used with a model that is already loaded: leave it out"
                )
        family = _fitting(str(model.name_or_path), model.config, pipeline, model)
        if processor is None:
            processor = _processor(str(model.name_or_path), {})
        processor = _adapted(family, processor)
        if "device" in placement.given:
            torch.nn.Module.to(model, placement.target)
        adopt_fp8(model)
        add_row_adapters(model, family.text_part(model), adapters)
        _set_attention(family, model, towers)
        return _checked(str(model.name_or_path), family(model.eval(), processor))
    if weights is not None:
        check_format(weights, placement.tp_plan)
    model, adapter = adapter_base(model)
    if adapter is not None and placement.tp_plan:
        raise InputError("tp_plan cannot be used with an adapter: merge it and save the model")
    if adapters and placement.tp_plan:
        raise InputError("adapters cannot be used with tp_plan: merge one and save the model")
    source = source_of(model, model_kwargs.get("subfolder") or "")
    shared = {key: model_kwargs[key] for key in _CONFIG_KEYS if key in model_kwargs}
    shared = check_source(source, shared)
    config = _config(source, shared)
    family = _fitting(source, config, pipeline)
    target = placement.target
    options = {**model_kwargs, **shared, **placement.arguments(family.auto_class, config)}
    options["dtype"] = dtype_of(dtype, placement.on_cpu)
    quantized = options.get("quantization_config") or quantization_of(config)
    if quantized and weights is not None:
        raise already_quantized(weights)
    if quantized and target is not None:
        # Quantized weights (bitsandbytes) may not be movable after loading.
        options["device_map"], target = {"": target}, None
    if shared.get("local_files_only"):
        # transformers does not pass it on where it looks for an adapter.
        local = {key: shared[key] for key in ("local_files_only", "cache_dir") if key in shared}
        options["adapter_kwargs"] = local | (options.get("adapter_kwargs") or {})
    if processor is None:
        processor = _processor(source, shared)
    processor = _adapted(family, processor)
    check_weights(source, shared)
    try:
        loaded = _loaded(family, source, config, placement.tp_plan, options)
    except (OSError, ValueError, TypeError, ImportError, SafetensorError) as error:
        raise InputError(f"model {source}: {first_line(error)}") from error
    adopt_fp8(loaded)  # Made by transformers if ``quantization_config`` is an argument.
    if weights is not None:
        quantize(loaded, family.text_part(loaded).get_decoder(), weights, target)
    if target is not None:
        loaded = loaded.to(target)
    if adapter is not None:
        loaded = add_adapter(loaded, adapter)
    add_row_adapters(loaded, family.text_part(loaded), adapters)
    if drafts:
        add_drafts(family.text_part(loaded), source, shared)
    if (ranks := TPGroup.of(loaded)).count > 1:
        divided_experts.check(loaded, ranks)
        divided_states.keep_own_heads(family.text_part(loaded).get_decoder(), ranks)
    watch(ranks)
    _set_attention(family, loaded, towers)
    return _checked(source, family(loaded.eval(), processor))


def _loaded(
    family: type[Family], source: str, config: Any, tp_plan: object, options: dict[str, Any]
) -> Any:
    """Load a model, with our own modules if its weights are quantized in one of our formats.

    Raises:
        ValueError: if the checkpoint does not fit the model; errors of transformers too.
    """
    own = None if "quantization_config" in options else quantized_arguments(config, tp_plan)
    # Without the first, the error of transformers does not name the tensors of another shape.
    how = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    loaded, report = family.auto_class.from_pretrained(source, **{**options, **(own or {}), **how})
    is_quantized = "quantization_config" in options or quantization_of(config) is not None
    check_complete(loaded, report, quantized=is_quantized)
    return loaded


def outline(model: str | Path) -> Family:
    """Create a family without weights; reads only the configuration and the processor.

    Args:
        model: name of a bundled model, hub id or folder.

    Raises:
        InputError: if the model does not exist or is not supported.
    """
    source = source_of(adapter_base(model)[0])
    family, made = skeleton(source)
    processor = _adapted(family, _processor(source, check_source(source)))
    return family(made, processor)


def skeleton(source: str) -> tuple[type[Family], PreTrainedModel]:
    """Return the family of a checkpoint and a model without weights; reads only the configuration.

    Args:
        source: result of ``source_of``.

    Raises:
        InputError: if the model does not exist or is not supported.
    """
    config = config_of(source, {})
    family = _fitting(source, config)
    return family, meta_model(family.auto_class, config).eval()


def _fitting(
    source: str, config: Any, pipeline: str | None = None, model: PreTrainedModel | None = None
) -> type[Family]:
    """Return the family of a checkpoint or a loaded model, whose attention fits the cache."""
    check_fits(source, config)
    family = family_of(config.model_type, pipeline)
    if config.model_type in family.model_types:
        return family  # A family of its own, whose modules are known.
    try:
        model = meta_model(family.auto_class, config) if model is None else model
    except (ValueError, TypeError, AttributeError, KeyError, ImportError) as error:
        raise InputError(f"model {source}: {first_line(error)}") from error
    check_modules(source, model, family.text_part(model))
    return family


def _checked(source: str, family: Family) -> Family:
    """Return a family whose model computes the same with the cache; tested families do."""
    if family.outer_model.config.model_type not in family.model_types:
        check_logits(source, family.model)
    return family


def stored_weights(source: str) -> tuple[str, int] | None:
    """Return the format of a checkpoint's quantized weights and their bytes; None for 16-bit
    weights.

    Args:
        source: result of ``source_of``.

    Raises:
        InputError: if the format is not supported, or the size of a hub id's files is unknown.
    """
    title = weights_title(source, config_of(source, {}))
    return None if title is None else (title, stored_bytes(source))


def weights_title(source: str, config: Any) -> str | None:
    """Return the name of the format of a checkpoint's quantized weights; None for 16-bit weights.

    Raises:
        InputError: if the format is not supported.
    """
    if not (fields := quantization_of(config)):
        return None
    try:
        formats = checked_formats(fields)
    except ValueError as error:
        raise InputError(f"model {source}: {error}") from error
    names = [one.title for one in formats or ()] or [
        str(fields.get("quant_method", "bitsandbytes"))
    ]
    return " and ".join(names)


def reader(model: str | Path) -> str:
    """Return the name of the pipeline that supports a checkpoint, see ``pipeline_of``.

    Args:
        model: name of a bundled model, hub id or folder.

    Raises:
        InputError: if the model does not exist, or no pipeline supports it.
    """
    return pipeline_of(family_of(config_of(source_of(adapter_base(model)[0]), {}).model_type))


def config_of(source: str, options: dict[str, Any]) -> Any:
    """Read the configuration of a checkpoint.

    Args:
        source: result of ``source_of``.
        options: arguments of ``from_pretrained``.

    Raises:
        InputError: if the configuration is missing or unreadable.
    """
    return _config(source, check_source(source, options))


def _config(source: str, options: dict[str, Any]) -> Any:
    _check_types(source, options)
    try:
        return AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError) as error:
        _check_version(source, options)
        known = "" if Path(source).is_dir() else f"; {remedy(source)}"
        raise InputError(f"model {source}: {first_line(error)}{known}") from error
    except (AttributeError, TypeError, StrictDataclassError) as error:
        raise InputError(
            f"model {source}: config.json has a value of a wrong type "
            f"({shorten(str(error), 300)}); download it again"
        ) from error


def _check_types(source: str, options: dict[str, Any]) -> None:
    """Check that a configuration and its ``quantization_config`` are JSON objects.

    transformers would raise an error that names neither.

    Raises:
        InputError: if one is not; the message names its type.
    """
    try:
        folder = folder_of(source, options)
        fields = {} if folder is None else json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return
    if not isinstance(fields, dict):
        raise InputError(
            f"model {source}: config.json must be a JSON object, not {type(fields).__name__}; "
            "download it again"
        )
    for part in (fields, fields.get("text_config")):
        found = part.get("quantization_config") if isinstance(part, dict) else None
        if not isinstance(found, dict | None):
            raise InputError(
                f"model {source}: quantization_config must be a JSON object, not "
                f"{type(found).__name__}; download config.json again"
            )


def _check_version(source: str, options: dict[str, Any]) -> None:
    """Refuse a supported model that the installed transformers does not know.

    Raises:
        InputError: if it is too old; names the version that the model needs.
    """
    try:
        kind = PreTrainedConfig.get_config_dict(source, **options)[0].get("model_type", "")
    except (OSError, ValueError):
        return
    family = find_family(kind)
    if family is not None and kind not in CONFIG_MAPPING:
        raise InputError(
            f"model {source}: {kind} needs transformers {family.since} or newer, not "
            f"{transformers.__version__}; upgrade transformers"
        )


def _set_attention(family: type[Family], model: PreTrainedModel, towers: str | None) -> None:
    if not isinstance(towers, str | None):
        raise InputError(
            "attn_implementation must be the name of an attention for the vision and audio "
            f"towers, such as 'sdpa', not {type(towers).__name__}; the decoder's is always 'oscar'"
        )
    try:
        family.set_attention(model, towers)
    except (ValueError, ImportError) as error:
        raise InputError(f"attn_implementation {towers!r}: {first_line(error)}") from error
    read_lengths_once(model)


def _adapted(family: type[Family], processor: Any) -> Any:
    """Return the processor that a family uses, see ``Family.adapt``."""
    processor = family.adapt(processor)
    if not hasattr(processor, "tokenizer"):
        raise InputError(
            f"processor: {type(processor).__name__} has no tokenizer; pass the result of "
            "AutoProcessor.from_pretrained, or leave it out"
        )
    return processor


def _processor(source: str, options: dict[str, Any]) -> Any:
    try:
        return AutoProcessor.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise InputError(
            f"processor of model {source}: {first_line(error)}; pass processor=..."
        ) from error


def dtype_of(dtype: str | torch.dtype | None, on_cpu: bool) -> torch.dtype | str:
    """Return the dtype to load weights in, as a torch dtype or "auto".

    None selects the checkpoint's dtype on a GPU, and float32 on a CPU, because CPUs are slow in
    16-bit precision.

    Raises:
        InputError: if the dtype is unknown.
    """
    if dtype is None:
        return torch.float32 if on_cpu else "auto"
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if chosen != "auto" and chosen not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"dtype {dtype!r}: must be float32, bfloat16, float16 or auto")
    return chosen


def first_line(error: Exception) -> str:
    """Return the first line of an error message from a library."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class Placement:
    """Devices of a checkpoint's weights; pass at most one argument.

    Args:
        device: "cuda", "cpu", ...; by default a GPU if there is one.
        device_map: a transformers device map: "auto", "balanced", ..., or a dict from module to
            device. Layers go to different devices, each with the pages of its keys and values.
        tp_plan: "auto", or a dict from module to one of transformers' tensor-parallel styles. Each
            process started by torchrun gets a part of every layer, and stores the keys and values
            of its own heads.

    Raises:
        InputError: if more than one argument is passed, a device cannot be used, or tp_plan is used
            without torchrun.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        device_map: str | Mapping[str, Any] | None = None,
        tp_plan: str | Mapping[str, str] | None = None,
    ) -> None:
        arguments = {"device": device, "device_map": device_map, "tp_plan": tp_plan}
        given = [name for name, value in arguments.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} cannot be combined: pass only one of them")
        if tp_plan is not None and tp_plan != "auto" and not isinstance(tp_plan, Mapping):
            raise InputError(
                f"tp_plan={tp_plan!r}: must be 'auto' or a dict that maps module names to styles"
            )
        self.given = given
        self.device_map = device_map
        self.tp_plan = None if tp_plan is None or _processes() == 1 else tp_plan
        self.target: torch.device | None = None
        if device_map is None and self.tp_plan is None:
            self.target = device_of(device)

    @property
    def on_cpu(self) -> bool:
        """True if the weights are on a CPU."""
        if self.target is None:
            return not torch.cuda.is_available()
        return self.target.type == "cpu"

    def arguments(self, auto_class: Any, config: Any) -> dict[str, Any]:
        """Return arguments for ``from_pretrained``.

        If ``target`` is not None, the caller must then move the loaded model to it.

        Raises:
            InputError: if the heads cannot be divided among the processes.
        """
        if self.device_map is not None:
            return {"device_map": self.device_map}
        if self.tp_plan is None:
            return {}
        count = _processes()
        plan = self.tp_plan
        if layers_of_states(config):
            divided_states.check(config, plan)
        _check_heads(config, count)
        if isinstance(plan, str):
            plan = tensor_plan(meta_model(auto_class, config), count)
        return {"distributed_config": DistributedConfig(tp_size=count, tp_plan=dict(plan))}


def tensor_plan(model: PreTrainedModel, count: int) -> dict[str, str]:
    """Return tensor-parallel styles for the modules to shard: heads, MLPs, experts, output layer.

    Args:
        model: a model, with or without weights.
        count: number of processes.
    """
    family = family_of(model.config.model_type)
    writer = family.text_part(model)
    names = {id(module): name for name, module in model.named_modules()}
    decoder, head = (
        names[id(part)] for part in (writer.get_decoder(), writer.get_output_embeddings())
    )
    layers = dict(_LAYERS)
    if whole := family.undivided.get(model.config.model_type):
        layers |= {name: _WHOLE for name in layers if whole in name}
    # Newer versions of transformers also apply the model's own rules, so override each of these.
    plan = dict.fromkeys(model.tp_plan, _WHOLE)
    plan |= {f"{decoder}.{name}": style for name, style in layers.items()}
    if writer.get_output_embeddings().out_features % count == 0:
        plan[head] = "colwise_gather_output"
    parts = chain(model.named_modules(), model.named_parameters())
    there = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in parts}
    return {name: style for name, style in plan.items() if name in there}


def meta_model(auto_class: Any, config: Any) -> PreTrainedModel:
    """Create a model on the meta device, without weights."""
    make = getattr(auto_class, "from_config", None) or auto_class._from_config
    with torch.device("meta"):
        return make(config)


def device_of(device: str | torch.device | None) -> torch.device:
    """Convert a device name to a torch device; None selects a GPU if there is one, else the CPU.

    Raises:
        InputError: if the device cannot be used.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"device {device!r} cannot be used: {reason[0]}") from error
    return chosen


def _processes() -> int:
    """Return the number of processes that torchrun started."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    if "WORLD_SIZE" not in os.environ:
        raise InputError(
            "tp_plan needs one process per GPU: start the program with "
            "torchrun --nproc-per-node 2 PROGRAM (or 4, 8, ...)"
        )
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if gpus and here > gpus:
        raise InputError(
            f"tp_plan: {here} processes were started, but there are {gpus} GPUs; start at most one "
            "process per GPU"
        )
    return int(os.environ["WORLD_SIZE"])


def _check_heads(config: Any, count: int) -> None:
    found = {"KV heads in a layer": math.gcd(*(heads for heads, _ in heads_by_layer(config)))}
    if layers_of_states(config):
        kind = "key heads in a linear-attention layer"
        found[kind] = divided_states.heads_of_states(config)
    common = math.gcd(*found.values())
    for kind, heads in found.items():
        if heads % count:
            possible = " or ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise InputError(
                f"tp_plan: the model has {heads} {kind}, which cannot be divided among {count} "
                f"processes: start {possible}"
            )
