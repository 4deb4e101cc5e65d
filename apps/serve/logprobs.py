"""Log-probabilities as the protocol has them: a text and bytes for each token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from oscar_mm.generation.logprobs import TokenLogprob

_SPACE = "\u2581"
"""How pieces of SentencePiece write a space, which decoding leaves out at the beginning."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte among pieces of SentencePiece."""
_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have, as in vLLM."""


def logprobs_body(
    tokenizer: PreTrainedTokenizerBase, found: Sequence[TokenLogprob] | None
) -> dict[str, Any] | None:
    """Body of ``logprobs`` of a choice; None where none were asked for."""
    if found is None:
        return None
    content = [
        _entry(tokenizer, one.token_id, one.logprob)
        | {"top_logprobs": [_entry(tokenizer, *likely) for likely in one.top]}
        for one in found
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: PreTrainedTokenizerBase, token: int, logprob: float) -> dict[str, Any]:
    data = _bytes(tokenizer, token)
    text = data.decode(errors="replace")
    return {"token": text, "logprob": max(logprob, _LEAST), "bytes": [*data]}


def _bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """The bytes of a token, which may end within a character."""
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    if "\ufffd" in text and all(character in _byte_level() for character in piece):
        return bytes(_byte_level()[character] for character in piece)
    leading = " " if piece.startswith(_SPACE) and not text.startswith(" ") else ""
    return f"{leading}{text}".encode()


@cache
def _byte_level() -> dict[str, int]:
    """The byte that each character of a byte-level piece stands for."""
    return {character: byte for byte, character in bytes_to_unicode().items()}
