"""Texts and bytes of single tokens, whichever way a tokenizer writes spaces and bytes."""

import pytest

from oscar_mm.apps.serve.logprobs import logprobs_body
from oscar_mm.engine.logprobs import TokenLogprob
from tests.engine.test_detokenize import BYTE_FALLBACK
from tests.tiny import llama_tokenizer, qwen_tokenizer

TEXT = "The sign: 12 \u20ac, \U0001f469\u200d\U0001f467 and \u00e9!"


@pytest.mark.parametrize("tokenizer", [qwen_tokenizer(400), llama_tokenizer(400), BYTE_FALLBACK])
def test_bytes_of_all_tokens_are_those_of_the_text(tokenizer) -> None:
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    body = logprobs_body(tokenizer, [TokenLogprob(token, -1.0) for token in ids])
    pieces = [bytes(one["bytes"]) for one in body["content"]]
    assert b"".join(pieces).decode().lstrip() == TEXT
    for one, piece in zip(body["content"], pieces, strict=True):
        assert one["token"] == piece.decode(errors="replace")


def test_what_json_does_not_have() -> None:
    tokenizer = qwen_tokenizer(400)
    [token] = tokenizer("a")["input_ids"]
    found = TokenLogprob(token, 0.0, ((token, 0.0), (token, -float("inf"))))
    [entry] = logprobs_body(tokenizer, [found])["content"]
    assert [one["logprob"] for one in entry["top_logprobs"]] == [0.0, -9999.0]
    assert logprobs_body(tokenizer, None) is None
