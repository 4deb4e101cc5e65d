"""Log-probabilities in OpenAI's and vLLM's formats, with the text and bytes of each token."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from oscar_mm.engine.logprobs import TokenLogprob
from oscar_mm.engine.think_tokens import ThinkTokens

_SPACE = "\u2581"
"""Space in SentencePiece pieces; decoding drops it at the start of a text."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""Pattern of SentencePiece pieces for single bytes."""
_MIN_LOGPROB = -9999.0
"""Replacement for minus infinity, which JSON does not support; the value is vLLM's."""


def logprobs_body(
    tokenizer: PreTrainedTokenizerBase, found: Sequence[TokenLogprob] | None
) -> dict[str, Any] | None:
    """Return a choice's ``logprobs`` object; None if no log-probabilities were requested."""
    if found is None:
        return None
    return {"content": logprob_entries(tokenizer, found), "refusal": None}


def logprob_entries(
    tokenizer: PreTrainedTokenizerBase, found: Sequence[TokenLogprob]
) -> list[dict[str, Any]]:
    """Return one JSON entry per token, with the most likely tokens at the same position."""
    return [
        _entry(tokenizer, one.token_id, one.logprob)
        | {"top_logprobs": [_entry(tokenizer, *likely) for likely in one.top]}
        for one in found
    ]


def after_reasoning(
    tokenizer: PreTrainedTokenizerBase, thinks: ThinkTokens | None, found: Sequence[TokenLogprob]
) -> Sequence[TokenLogprob]:
    """Drop the reasoning and the line breaks after it if the reasoning ends in these tokens."""
    ids = [one.token_id for one in found]
    if thinks is None or thinks.closing not in ids:
        return found
    left = found[ids.index(thinks.closing) + 1 :]
    texts = (_bytes(tokenizer, one.token_id).strip(b"\n") for one in left)
    return left[next((at for at, text in enumerate(texts) if text), len(left)) :]


def prompt_logprobs_body(
    tokenizer: PreTrainedTokenizerBase, found: Sequence[TokenLogprob], top: int
) -> list[dict[str, Any] | None]:
    """Return ``prompt_logprobs`` in vLLM's format, with one entry per prompt token.

    The entry of the first token is null. Every other entry maps token ids to log-probabilities, for
    the ``top`` likeliest tokens and the prompt's own token.
    """
    return [None, *(_by_id(tokenizer, one, top) for one in found)]


def _by_id(tokenizer: PreTrainedTokenizerBase, one: TokenLogprob, top: int) -> dict[str, Any]:
    ranked = [(*likely, rank) for rank, likely in enumerate(one.top[:top], 1)]
    if one.token_id not in [token for token, _, _ in ranked]:
        ranked.insert(0, (one.token_id, one.logprob, one.rank or 0))
    return {
        str(token): {
            "logprob": max(logprob, _MIN_LOGPROB),
            "rank": rank,
            "decoded_token": _bytes(tokenizer, token).decode(errors="replace"),
        }
        for token, logprob, rank in ranked
    }


class LegacyLogprobs:
    """Converter of one answer's log-probabilities to the completions API's format, piece by piece.

    Args:
        tokenizer: tokenizer of the model.
        top: number of most likely tokens to return per position.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, top: int) -> None:
        self._tokenizer, self._top = tokenizer, top
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def body(self, found: Sequence[TokenLogprob], first: int | None = None) -> dict[str, list[Any]]:
        """Return the log-probabilities of the next tokens.

        Args:
            found: log-probabilities of the tokens.
            first: id of the prompt's first token, which has no log-probability, if it precedes
                these tokens; otherwise None.
        """
        rows = [] if first is None else [self._row(first, None)]
        rows += [self._row(one.token_id, one) for one in found]
        names = "text_offset", "tokens", "token_logprobs", "top_logprobs"
        columns = zip(*rows, strict=True) if rows else ([] for _ in names)
        return {name: list(column) for name, column in zip(names, columns, strict=True)}

    def _row(
        self, token: int, found: TokenLogprob | None
    ) -> tuple[int, str, float | None, dict[str, float] | None]:
        data, offset = _bytes(self._tokenizer, token), self._offset
        self._offset += len(self._decoder.decode(data))
        text = data.decode(errors="replace")
        if found is None:
            return offset, text, None, None
        likely = [(token, found.logprob), *found.top[: self._top]]
        names = [_bytes(self._tokenizer, one).decode(errors="replace") for one, _ in likely]
        values = [max(logprob, _MIN_LOGPROB) for _, logprob in likely]
        # Several tokens may have the same text: keep the likeliest one.
        by_name = dict(reversed([*zip(names, values, strict=True)]))
        return offset, text, values[0], by_name


def _entry(tokenizer: PreTrainedTokenizerBase, token: int, logprob: float) -> dict[str, Any]:
    data = _bytes(tokenizer, token)
    text = data.decode(errors="replace")
    return {"token": text, "logprob": max(logprob, _MIN_LOGPROB), "bytes": [*data]}


def _bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return the bytes of a token, which may end in the middle of a character."""
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
    """Return the byte value of each character used in byte-level pieces."""
    return {character: byte for byte, character in bytes_to_unicode().items()}
