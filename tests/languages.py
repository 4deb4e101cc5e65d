"""A tiny language model with a tokenizer, as a folder, and a file of text for it."""

from pathlib import Path
from typing import Any

from tests.checkpoints import build_decoder
from tests.tiny import TEXT, qwen_tokenizer

_VOCABULARY = 400


CHATML = """
{%- for message in messages -%}
{%- set text = message.content if message.content is string else '' -%}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ text ~ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
""".strip()
"""As in Qwen3: a list of parts is read as no text."""


def build_language_model(
    name: str, folder: Path, *, template: str | None = None, **overrides: Any
) -> Path:
    """Write a tiny decoder and a byte-level tokenizer; arguments as of ``build_decoder``."""
    fields = {"vocab_size": _VOCABULARY, "max_position_embeddings": 1024} | overrides
    build_decoder(name, **fields).save_pretrained(folder)
    tokenizer = qwen_tokenizer(_VOCABULARY)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def write_text(path: Path, copies: int = 6) -> Path:
    """About 800 tokens a copy."""
    path.write_text(TEXT * copies)
    return path
