"""Adapters of peft in place of a checkpoint: a ``PeftModel``, or the folder of an adapter."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import shorten
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from oscar_mm.errors import InputError
from oscar_mm.models import ADAPTER_CONFIG, is_adapter

MERGE = "merge the adapter (merge_and_unload) and pass the merged model"
PEFT_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, RuntimeError, AttributeError, ArithmeticError),
    *(re.error, SafetensorError),
)
"""Errors of peft about an adapter that it cannot read or that does not fit the model."""


def unwrapped(model: Any) -> Any:
    """Return the transformers model within a ``PeftModel``, with its adapters; others unchanged.

    Raises:
        InputError: if the adapters act outside of the model's layers, as prompt tuning does.
    """
    if sys.modules.get("peft") is None:  # Otherwise the model cannot be one of peft's.
        return model
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    if not isinstance(model, PeftModel):
        return model
    kinds = {str(one.peft_type).rpartition(".")[2] for one in model.peft_config.values()}
    invoked = any(
        getattr(one, "alora_invocation_tokens", None) for one in model.peft_config.values()
    )
    inner = model.get_base_model()
    within = isinstance(model.base_model, BaseTuner) and "XLORA" not in kinds and not invoked
    if not within or not isinstance(inner, PreTrainedModel):
        raise InputError(
            f"model: adapters of type {', '.join(sorted(kinds))} on {type(inner).__name__} do not "
            f"act within the layers of a transformers model, which they must: {MERGE}, or use LoRA"
        )
    return inner


def adapter_base(model: Any) -> tuple[Any, str | None]:
    """Return the base model that an adapter's folder names, and that folder.

    Returns:
        A folder or hub id and the folder; the model itself and None if it is not such a folder.

    Raises:
        InputError: if the adapter cannot be read or names no base model, or if peft is missing.
    """
    if not is_adapter(model):
        return model, None
    folder = Path(model)
    try:
        from peft import PeftConfig

        base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    except ImportError as error:
        raise InputError(
            f"model {folder}: is an adapter, which needs peft: pip install peft"
        ) from (error)
    except PEFT_ERRORS as error:
        raise InputError(
            f"model {folder}: {ADAPTER_CONFIG} cannot be read ({one_line(error)})"
        ) from error
    if not isinstance(base, str) or not base.strip():
        raise InputError(
            f"model {folder}: {ADAPTER_CONFIG} names no base model; {_own_base(folder)}"
        )
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise InputError(
            f"model {folder}: its base model {base} is not on this machine; {_own_base(folder)}"
        )
    return base, str(folder)


def _own_base(folder: Path) -> str:
    return f"load the base model and pass peft.PeftModel.from_pretrained(base, {str(folder)!r})"


def one_line(error: Exception) -> str:
    """Return an error of peft, shortened, in one line."""
    return shorten(str(error), 300)


def add_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """Load an adapter into its base model, in the model's dtype.

    Args:
        model: the base model, on its devices.
        folder: folder of the adapter.

    Returns:
        The same model, with the adapter in its layers.

    Raises:
        InputError: if the adapter does not fit the model, or its type is not supported.
    """
    from peft import PeftConfig, PeftModel

    try:
        config = PeftConfig.from_pretrained(folder)
        config.inference_mode = True
        adapted = PeftModel(model, config, autocast_adapter_dtype=False)
        missing = adapted.load_adapter(folder, "default", autocast_adapter_dtype=False).missing_keys
    except PEFT_ERRORS as error:
        raise InputError(
            f"model {folder}: the adapter cannot be loaded ({one_line(error)})"
        ) from error
    if missing:
        raise InputError(
            f"model {folder}: the adapter lacks {len(missing)} weights, such as {missing[0]}; it "
            "belongs to another model"
        )
    return unwrapped(adapted)
