"""Text-only models: any causal language model of transformers whose attention fits the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from oscar_mm.attention import IMPLEMENTATION
from oscar_mm.engine.family import Encoding, Family
from oscar_mm.engine.input_layout import InputLayout
from oscar_mm.media.media import Medium
from oscar_mm.pipelines.registry import register_general


class TextProcessor:
    """Tokenizer with the interface of a processor.

    Args:
        tokenizer: tokenizer of a language model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @property
    def chat_template(self) -> Any:
        """Chat template of the tokenizer; None if it has none."""
        return self.tokenizer.chat_template

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        """Render messages with text parts; templates of language models require strings."""
        return self.tokenizer.apply_chat_template([*map(_with_string, messages)], **options)


def _with_string(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message
    return message | {"content": "".join(part["text"] for part in content)}


# Models that also read images are loaded, or refused, as such.
@register_general(
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
)
class TextFamily(Family):
    """Family of language models: Llama, Mistral, Qwen2, Qwen3 and others; ``name`` is the type."""

    model_types = ()
    reads = frozenset()
    layout = InputLayout()
    auto_class = AutoModelForCausalLM
    fast_layers = frozenset({"Qwen3DecoderLayer", "Qwen3MoeDecoderLayer"})

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        self.name = model.config.model_type

    @classmethod
    def adapt(cls, processor: Any) -> Any:
        """See ``Family.adapt``."""
        is_tokenizer = isinstance(processor, PreTrainedTokenizerBase)
        return TextProcessor(processor) if is_tokenizer else processor

    @classmethod
    def set_attention(cls, model: Any, towers: str | None) -> None:
        """See ``Family.set_attention``; there are no towers."""
        model.set_attn_implementation(IMPLEMENTATION)

    def encode(self, text: str, media: Sequence[Medium]) -> Encoding:
        """See ``Family.encode``."""
        ids = self.tokenize(text)
        return Encoding(ids, {}, torch.arange(ids.shape[1])[None], [])

    def min_tokens(self, medium: Medium) -> int:
        """See ``Family.min_tokens``."""
        raise NotImplementedError("language models read no media, see reads")
