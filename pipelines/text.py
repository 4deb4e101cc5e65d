"""Language models with their tokenizers, for texts without a conversation.

The compare and inspect commands read texts with these models, which need no chat template. To chat
with a language model, load it with a pipeline (``oscar_mm.pipelines.families.text``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from oscar_mm.attention import IMPLEMENTATION
from oscar_mm.engine.prompt import Prompt
from oscar_mm.errors import InputError
from oscar_mm.models import check_source, check_weights, source_of
from oscar_mm.pipelines.adapters import adapter_base
from oscar_mm.pipelines.families.text import TextFamily
from oscar_mm.pipelines.loading import config_of, device_of, dtype_of, first_line, meta_model
from oscar_mm.pipelines.registry import find_family
from oscar_mm.pipelines.requirements import LATENT, check_fits

_CHARACTERS = 16
"""Upper bound on the average number of characters per token of a text."""
_VOCABULARY = 16
"""Minimum vocabulary size of a usable tokenizer."""
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError)


@dataclass(frozen=True)
class TextModel:
    """Language model for plain text.

    Attributes:
        name: model name as the user gave it.
        model: model in eval mode, with the "oscar" attention.
        tokenizer: tokenizer of the model.
    """

    name: str
    model: Any
    tokenizer: Any

    @property
    def context(self) -> int:
        """Context length of the model, in tokens."""
        return context_of(self.model.config)

    def prompt(self, text: str, max_tokens: int) -> Prompt:
        """Return the first ``max_tokens`` tokens of a text as a prompt.

        Raises:
            InputError: if the text has no tokens.
        """
        # Tokenize only the beginning of a long text.
        ids = self._ids(text[: _CHARACTERS * max_tokens])
        if ids.shape[1] < max_tokens:
            ids = self._ids(text)
        ids = ids[:, :max_tokens]
        if not ids.shape[1]:
            raise InputError("the text has no tokens: pass text that is not empty")
        ids, count = ids.to(self.model.device), ids.shape[1]
        return Prompt(
            inputs={"input_ids": ids},
            positions=torch.arange(count, device=ids.device)[None],
            next_position=torch.tensor([count], device=ids.device),
            modalities=torch.zeros(1, count, dtype=torch.int8),
        )

    def _ids(self, text: str) -> torch.Tensor:
        return self.tokenizer(text, return_tensors="pt").input_ids


def is_text_model(model: str | Path) -> bool:
    """Return whether a checkpoint is a causal language model, which reads text only.

    Args:
        model: name of a bundled model, hub id, or folder of a checkpoint or an adapter; only its
            configuration is read.

    Raises:
        InputError: if the model does not exist.
    """
    family = find_family(config_of(source_of(adapter_base(model)[0]), {}).model_type)
    return family is not None and issubclass(family, TextFamily)


def load_text_model(
    model: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    options: Mapping[str, Any] | None = None,
) -> TextModel:
    """Load a language model and its tokenizer.

    Args:
        model: hub id or folder.
        device: "cuda", "cpu", ...; by default a GPU if there is one.
        dtype: dtype of the weights; by default the checkpoint's on a GPU, float32 on a CPU.
        options: ``from_pretrained`` arguments for model and tokenizer, such as ``gguf_file``.

    Raises:
        InputError: if the model does not exist, has no tokenizer, or does not fit the cache, see
            ``check_fits``.
    """
    given, target = dict(options or {}), device_of(device)
    # A folder with a GGUF file has no configuration.
    source = str(model) if "gguf_file" in given else source_of(model)
    if "gguf_file" not in given:
        given = check_source(source, given)
    tokenizer = _tokenizer(source, given)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype_of(dtype, target.type == "cpu"), **given
        )
    except (*_UNREADABLE, SafetensorError) as error:
        if "gguf_file" not in given:  # Its weights are in that file alone.
            check_weights(source, given)
        raise InputError(f"model {source}: {first_line(error)}") from error
    check_fits(source, loaded.config, states=False)  # The caller crops caches to any length.
    try:
        loaded.set_attn_implementation(IMPLEMENTATION)
    except (ValueError, KeyError) as error:
        raise InputError(f"model {source}: {first_line(error)}") from error
    return TextModel(str(model), loaded.to(target).eval(), tokenizer)


def _tokenizer(source: str, options: Mapping[str, Any]) -> Any:
    complaint = (
        f"model {source}: has no readable tokenizer; pass a folder or hub id that contains the "
        "tokenizer's files"
    )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **options)
        # For some models, if files are missing, transformers creates an almost empty tokenizer.
        if len(tokenizer) >= _VOCABULARY and tokenizer("a b", add_special_tokens=False).input_ids:
            return tokenizer
    except _UNREADABLE as error:
        raise InputError(complaint) from error
    raise InputError(complaint)


def outline_text_model(model: str | Path) -> PreTrainedModel:
    """Create a language model without weights; reads only the configuration.

    Raises:
        InputError: if the model does not exist, or its keys and values have different sizes.
    """
    source = source_of(model)
    config = config_of(source, {})
    if getattr(config, "kv_lora_rank", None):
        raise InputError(
            f"model {source}: has {LATENT}, which the packed cache does not support; use a model "
            "with multi-head or grouped-query attention"
        )
    return meta_model(AutoModelForCausalLM, config)


def context_of(config: Any) -> int:
    """Return the context length of a model, in tokens.

    Raises:
        InputError: if the configuration does not specify it.
    """
    max_tokens = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not max_tokens:
        raise InputError(
            f"model type {config.model_type!r}: its configuration has no context length, such as "
            "max_position_embeddings"
        )
    return int(max_tokens)
