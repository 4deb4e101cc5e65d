"""Log-probabilities of prompts equal those of plain transformers' logits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_mm import OscarVLPipeline
from oscar_mm.engine import prompt_logprobs
from oscar_mm.engine.answer import Answer
from tests.prompts import REQUESTS, Reference, Request

CLOSE = 2e-4


@pytest.fixture(scope="module")
def reference(qwen3_vl_folder: Path) -> Reference:
    return Reference(qwen3_vl_folder)


@torch.inference_mode()
def check(reference: Reference, request: Request, answer: Answer, top: int) -> None:
    inputs = reference.inputs([request])
    ids = inputs["input_ids"][0].tolist()
    truth = reference.model(**inputs).logits[0].log_softmax(-1)
    assert answer.prompt_logprobs is not None
    assert [one.token_id for one in answer.prompt_logprobs] == ids[1:]
    for found, row in zip(answer.prompt_logprobs, truth[:-1], strict=True):
        assert found.logprob == pytest.approx(float(row[found.token_id]), abs=CLOSE)
        values, _ = row.topk(top)
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=CLOSE)
        for token, value in found.top:
            assert value == pytest.approx(float(row[token]), abs=CLOSE)
        near = (row > row[found.token_id] + CLOSE).sum(), (row > row[found.token_id] - CLOSE).sum()
        assert near[0] < found.rank <= near[1]


@pytest.mark.parametrize("name", ["text", "image and video"])
@pytest.mark.parametrize("most", [prompt_logprobs._MAX_LOGITS, 3000])
def test_a_prompt(plain, reference, name: str, most: int, monkeypatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "_MAX_LOGITS", most)
    request = REQUESTS[name]
    answer = request.ask(plain, max_new_tokens=4, temperature=0, prompt_logprobs=3)
    check(reference, request, answer, 3)
    without = request.ask(plain, max_new_tokens=4, temperature=0)
    assert without.prompt_logprobs is None and without.token_ids == answer.token_ids


def test_in_chunks_and_without_the_prefix_cache(qwen3_vl_folder, reference) -> None:
    """Policy bf16 reads later chunks exactly."""
    options: dict[str, Any] = {"prefill_chunk": 50, "prefix_cache": 4 << 20}
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="bf16", device="cpu", **options)
    request = Request("What is written on the sign? " * 20)
    request.ask(pipe, max_new_tokens=1)
    answer = request.ask(pipe, max_new_tokens=2, temperature=0, prompt_logprobs=1)
    assert answer.cached_tokens == 0 and answer.prompt_tokens > 150
    check(reference, request, answer, 1)
    later = request.ask(pipe, max_new_tokens=2, temperature=0)
    assert later.cached_tokens > 0 and later.token_ids == answer.token_ids


def test_with_others(plain, reference) -> None:
    """Short prompts share a pass, except a prompt whose log-probabilities are requested."""
    request = REQUESTS["text"]
    rows = [{"prompt": request.prompt, "max_new_tokens": 3, "temperature": 0} for _ in range(3)]
    rows[1]["prompt_logprobs"] = 0
    answers = [result.answer for result in plain.batch(rows)]
    check(reference, request, answers[1], 0)
    assert answers[0].prompt_logprobs is None and answers[2].token_ids == answers[1].token_ids


@pytest.mark.parametrize("top", [-1, 21, 1.5, True])
def test_what_is_refused(plain, top: Any) -> None:
    from oscar_mm import InputError

    with pytest.raises(InputError, match="prompt_logprobs"):
        plain(prompt="Why?", prompt_logprobs=top)
