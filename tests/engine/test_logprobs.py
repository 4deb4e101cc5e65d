"""Log-probabilities equal those of plain transformers' logits for the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_mm.engine.answer import Answer
from tests.engine.engine import made, run
from tests.prompts import REQUESTS, Reference, Request

CLOSE = 2e-4


@pytest.fixture(scope="module")
def reference(qwen3_vl_folder: Path) -> Reference:
    return Reference(qwen3_vl_folder)


@torch.inference_mode()
def expected(reference: Reference, request: Request, answer: Answer) -> torch.Tensor:
    """Return (tokens, vocabulary) log-probabilities of a forward pass over prompt and answer."""
    inputs, count = reference.inputs([request]), len(answer.token_ids)
    written = torch.tensor([answer.token_ids])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], written], dim=1)
    for name, filling in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        inputs[name] = torch.cat([inputs[name], torch.full_like(written, filling)], dim=1)
    logits = reference.model(**inputs).logits
    return logits[0, -count - 1 : -1].log_softmax(-1)


def check(reference: Reference, request: Request, answer: Answer, top: int) -> None:
    assert answer.logprobs is not None
    assert [one.token_id for one in answer.logprobs] == answer.token_ids
    truth = expected(reference, request, answer)
    for found, row in zip(answer.logprobs, truth, strict=True):
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=CLOSE)
        values, ids = row.topk(top) if top else (row[:0], row[:0].long())
        assert [token for token, _ in found.top] == ids.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=CLOSE)


@pytest.mark.parametrize("name", ["text", "image and video"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.0, "top_k": 5, "seed": 1, "presence_penalty": 2.0, "min_tokens": 3},
    ],
)
def test_an_answer(plain, reference, name: str, options: dict[str, Any]) -> None:
    """Log-probabilities come from the model's own logits, however the token was chosen."""
    request = REQUESTS[name]
    answer = request.ask(plain, max_new_tokens=10, logprobs=4, **options)
    check(reference, request, answer, 4)
    without = request.ask(plain, max_new_tokens=10, **options)
    assert without.logprobs is None and without.token_ids == answer.token_ids


def test_rows_that_ask_for_others_or_none(plain, reference) -> None:
    prompts = ["What is on the sign?", "Why?", "How much is it?", "Which month was the wettest?"]
    tops = [2, None, 0, 20]
    answers = [
        made(plain, prompt, logprobs=top, max_new_tokens=8 + place)
        for place, (prompt, top) in enumerate(zip(prompts, tops, strict=True))
    ]
    for answer in answers:
        plain.engine.submit(answer)
    run(plain, answers)
    for prompt, top, answer in zip(prompts, tops, answers, strict=True):
        whole = answer.complete()
        if top is None:
            assert whole.logprobs is None
        else:
            check(reference, Request(prompt), whole, top)


def test_where_the_answer_ends(plain, reference) -> None:
    """There is one for each token of the answer, and none for an end token outside it."""
    free = plain(None, "Why?", max_new_tokens=12, temperature=0).token_ids
    end = next(token for token in free[3:] if free.index(token) >= 3)
    options = {"max_new_tokens": 12, "temperature": 0, "logprobs": 0, "stop_token_ids": [end]}
    for included in (False, True):
        answer = plain(None, "Why?", **options, include_stop_str_in_output=included)
        assert len(answer.token_ids) == free.index(end) + included
        check(reference, Request("Why?"), answer, 0)


def test_a_chat(plain) -> None:
    with plain.chat() as chat, plain.chat() as other:
        for question in ("Why?", "What is on the sign?"):
            answer = chat.ask(question, max_new_tokens=6, temperature=0, logprobs=1)
            stream = other.stream(question, max_new_tokens=6, temperature=0, logprobs=1)
            assert stream.complete().logprobs == answer.logprobs
            assert [one.top[0][0] for one in answer.logprobs] == answer.token_ids, "greedy"
