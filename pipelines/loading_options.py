"""Arguments of transformers' ``from_pretrained`` that pipelines take, and where the others go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from transformers import GenerationConfig

from oscar_mm.engine.sampling import SamplingOptions
from oscar_mm.errors import InputError, suggestion
from oscar_mm.media.options import MediaOptions


class LoadingOptions(TypedDict, total=False):
    """Arguments of ``from_pretrained`` that pipelines take by name; None is the same as missing.

    Attributes:
        torch_dtype: earlier name of ``dtype``.
        quantization_config: how weights are quantized, such as ``BitsAndBytesConfig``.
        generation_config: a ``GenerationConfig`` that replaces the checkpoint's: how tokens are
            chosen if a request does not say.
        revision: branch, tag or commit of a hub id.
        subfolder: folder of the checkpoint within the folder or hub id.
        trust_remote_code: whether code of the checkpoint may run.
        token: token for the hub, or True for the one of ``hf auth login``.
        cache_dir: folder of the hub's cache.
        local_files_only: whether not to ask the hub.
    """

    torch_dtype: str | torch.dtype | None
    quantization_config: Any
    generation_config: GenerationConfig | None
    revision: str | None
    subfolder: str | None
    trust_remote_code: bool | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool | None


_NAMES = LoadingOptions.__annotations__.keys()
_OWN_ARGUMENTS = {
    "attn_implementation": "attn_implementation",
    "device_map": "device_map",
    "distributed_config": "tp_plan",
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "tp_plan": "tp_plan",
    "tp_size": "tp_plan",
}
"""Keys that are not allowed in model_kwargs, with the pipeline arguments to use instead."""
_PROCESSOR = "pass processor=AutoProcessor.from_pretrained(...)"
_QUANTIZED = "pass quantization_config=BitsAndBytesConfig({name}=True)"
_ELSEWHERE = {
    "distributed_config": "pass tp_plan='auto'",
    "feature_extractor": _PROCESSOR,
    "framework": "leave it out",
    "image_processor": _PROCESSOR,
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "images_kwargs": "pass its entries with each request",
    "low_cpu_mem_usage": "leave it out; weights are never in memory twice",
    "padding_side": "leave it out; requests are not padded",
    "processor_kwargs": _PROCESSOR,
    "task": "leave it out",
    "tokenizer": _PROCESSOR,
    "tp_size": "pass tp_plan='auto'",
    "use_auth_token": "pass token=...",
    "use_fast": _PROCESSOR,
}
"""Arguments that users of transformers may pass to a pipeline, with what to do instead."""


def loading_arguments(
    dtype: str | torch.dtype | None,
    model_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> tuple[str | torch.dtype | None, dict[str, Any]]:
    """Return the dtype of the weights and the arguments for ``from_pretrained``.

    Args:
        dtype, model_kwargs: arguments of the pipeline.
        options: unchecked keyword arguments, see ``LoadingOptions``.
        arguments: names of the pipeline's own arguments, for suggestions in error messages.

    Raises:
        InputError: if an option is unknown or has the wrong type, if it is given twice, or if
            ``model_kwargs`` is not a dict or has a key that is an argument of the pipeline.
    """
    for name in options.keys() - _NAMES:
        raise InputError(f"unknown argument {name}: {_remedy(name, arguments)}")
    given = {name: value for name, value in options.items() if value is not None}
    kwargs = _checked({} if model_kwargs is None else model_kwargs)
    if twice := given.keys() & kwargs.keys():
        name = min(twice)
        raise InputError(f"{name} is given twice: leave it out of model_kwargs")
    kwargs |= given
    if "torch_dtype" in given:
        if dtype not in (None, given["torch_dtype"]):
            raise InputError("torch_dtype is the earlier name of dtype: pass only dtype")
        dtype = kwargs.pop("torch_dtype")
    config = kwargs.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise InputError(
            f"generation_config must be a GenerationConfig, not {type(config).__name__}: pass "
            "transformers.GenerationConfig(...)"
        )
    return dtype, kwargs


def _checked(model_kwargs: Any) -> dict[str, Any]:
    if not isinstance(model_kwargs, Mapping):
        raise InputError(f"model_kwargs must be a dict, not {type(model_kwargs).__name__}")
    for key, argument in _OWN_ARGUMENTS.items():
        if key in model_kwargs:
            raise InputError(f"model_kwargs[{key!r}]: pass {argument}=... to the pipeline instead")
    return dict(model_kwargs)


def _remedy(name: str, arguments: Mapping[str, Any]) -> str:
    if name in _ELSEWHERE:
        return _ELSEWHERE[name].format(name=name)
    if name in SamplingOptions.__annotations__ or name in MediaOptions.__annotations__:
        return f"pass {name}=... with each request"
    meant = suggestion(name, [*arguments, *_NAMES])
    return f"other arguments of from_pretrained go into model_kwargs={{{name!r}: ...}}{meant}"
