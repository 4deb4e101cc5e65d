"""/v1/completions: prompts without a chat template, against plain transformers."""

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import openai
import pytest
import torch
from openai.types import Completion
from openai.types.completion_choice import CompletionChoice, Logprobs
from pydantic import BaseModel, ConfigDict

from oscar_mm import OscarVLPipeline
from tests.apps.serve.conftest import served
from tests.apps.serve.test_openai_types import sent
from tests.apps.serve.test_server import client_of, metrics
from tests.apps.serve.test_service import eventually
from tests.pipelines.conftest import NEVER

PROMPT = "The man said"
MODELS = {"qwen": "qwen3_vl_folder", "llava": "llava_next_vicuna_folder", "omni": None}


class StreamedLogprobs(Logprobs):
    """The first token of a prompt has none, which OpenAI's own server sends as null."""

    model_config = ConfigDict(extra="forbid")
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class StreamedChoice(CompletionChoice):
    """A choice that has not ended has no reason, which OpenAI's own server sends as null."""

    model_config = ConfigDict(extra="forbid")
    finish_reason: str | None
    logprobs: StreamedLogprobs | None = None


class Chunk(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str
    object: str
    created: int
    model: str
    choices: list[StreamedChoice]
    usage: dict[str, Any] | None = None


@pytest.fixture(scope="module", params=MODELS)
def pipe(request) -> Any:
    if (folder := MODELS[request.param]) is None:
        return request.getfixturevalue("omni")
    options = {"policy": "compact", "device": "cpu", "prefix_cache": 4 << 20}
    made = OscarVLPipeline(request.getfixturevalue(folder), **options)
    made.model.generation_config.eos_token_id = NEVER
    return made


@pytest.fixture(scope="module")
def where(pipe) -> Iterator[str]:
    with served(pipe) as address:
        yield address


@pytest.fixture
def asked(where) -> Iterator[Any]:
    with client_of(where) as client:
        yield lambda prompt=PROMPT, **options: client.completions.create(
            model="tiny", prompt=prompt, **({"temperature": 0, "max_tokens": 6} | options)
        )


def ids_of(pipe: Any, text: str) -> list[int]:
    return pipe.processor.tokenizer(text)["input_ids"]


@torch.inference_mode()
def generated(pipe: Any, ids: list[int], count: int = 6) -> list[int]:
    """By transformers, with a plain cache."""
    given = torch.tensor([ids])
    output = pipe.model.generate(input_ids=given, do_sample=False, max_new_tokens=count)
    return output[0, len(ids) :].tolist()


def text_after(pipe: Any, ids: list[int], written: list[int]) -> str:
    decode = pipe.processor.tokenizer.decode
    before = decode(ids, skip_special_tokens=True)
    return decode([*ids, *written], skip_special_tokens=True).removeprefix(before)


@pytest.mark.daily("llava", "qwen")
def test_the_prompt_is_raw(pipe, asked) -> None:
    ids = ids_of(pipe, PROMPT)
    expected = text_after(pipe, ids, generated(pipe, ids))
    answer = asked()
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (expected, "length")
    assert answer.usage.prompt_tokens == len(ids) and answer.usage.completion_tokens == 6
    assert asked(ids).choices[0].text == expected
    assert asked(echo=True).choices[0].text == PROMPT + expected
    assert asked(stop=expected[-3:]).choices[0].finish_reason == "stop"


def test_control_tokens_are_those_of_the_client(pipe, asked) -> None:
    end = pipe.processor.tokenizer.eos_token
    ids = ids_of(pipe, f"Yes.{end}No")
    assert pipe.processor.tokenizer.eos_token_id in ids
    answer = asked(f"Yes.{end}No")
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].text == text_after(pipe, ids, generated(pipe, ids))


@pytest.mark.daily("qwen")
def test_several_prompts(pipe, asked) -> None:
    prompts = [PROMPT, "Why", "What is written on the"]
    alone = [asked(prompt).choices[0].text for prompt in prompts]
    together = asked(prompts)
    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    by_ids = [ids_of(pipe, prompt) for prompt in prompts]
    assert [choice.text for choice in asked(by_ids).choices] == alone
    assert together.usage.prompt_tokens == sum(map(len, by_ids))
    assert together.usage.completion_tokens == 18
    echoed = asked(prompts, echo=True, n=2, temperature=1, seed=4)
    assert len(echoed.choices) == 6
    for index, choice in enumerate(echoed.choices):
        assert choice.index == index and choice.text.startswith(prompts[index // 2])
    again = asked(prompts[1], n=2, temperature=1, seed=4)
    assert [x.text for x in again.choices] == [
        x.text.removeprefix("Why") for x in echoed.choices[2:4]
    ]


@pytest.mark.daily("qwen", "omni-options0")
@pytest.mark.parametrize("options", [{}, {"echo": True}, {"logprobs": 2}, {"n": 2, "seed": 1}])
def test_streamed(where, asked, options: dict[str, Any]) -> None:
    prompts = [PROMPT, "Why"]
    options = {"temperature": 1, "seed": 3} | options
    whole = asked(prompts, **options)
    body = {"prompt": prompts, "max_tokens": 6, "stream": True, **options}
    _, stream = sent(where, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    *events, end, _ = stream.split("\n\n")
    assert end == "data: [DONE]"
    chunks = [Chunk.model_validate_json(event.removeprefix("data: ")) for event in events]
    assert chunks[-1].choices == [] and chunks[-1].usage["total_tokens"] == whole.usage.total_tokens
    for choice in whole.choices:
        own = [x for one in chunks for x in one.choices if x.index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert [one.finish_reason for one in own if one.finish_reason] == ["length"]
        if "logprobs" in options:
            for name in ("tokens", "text_offset"):
                parts = [getattr(one.logprobs, name) for one in own]
                assert [*chain(*parts)] == getattr(choice.logprobs, name)
            parts = [*chain(*(one.logprobs.token_logprobs for one in own))]
            # Prompts that are read together round in another way.
            assert parts == pytest.approx(choice.logprobs.token_logprobs, abs=1e-3)
            tops = [*chain(*(one.logprobs.top_logprobs for one in own))]
            assert [set(top) for top in tops] == [set(x) for x in choice.logprobs.top_logprobs]


@torch.inference_mode()
def test_log_probabilities_of_prompt_and_answer(pipe, asked) -> None:
    ids = ids_of(pipe, PROMPT)
    written = generated(pipe, ids)
    truth = pipe.model(input_ids=torch.tensor([[*ids, *written]])).logits[0].log_softmax(-1)
    expected = truth[:-1].gather(1, torch.tensor([[*ids, *written]]).T[1:])[:, 0].tolist()
    [choice] = asked(echo=True, logprobs=2).choices
    found = choice.logprobs
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    assert found.token_logprobs[1 : len(ids)] == pytest.approx(expected[: len(ids) - 1], abs=2e-4)
    # The answer reads packed keys and values.
    assert found.token_logprobs[len(ids) :] == pytest.approx(expected[len(ids) - 1 :], abs=0.1)
    for place, row in enumerate(truth[: len(ids) - 1], 1):
        top = found.top_logprobs[place]
        assert max(top.values()) == pytest.approx(float(row.max()), abs=2e-4)
        assert 1 <= len(top) <= 3
    special = len(choice.text) - sum(map(len, found.tokens))
    assert special <= 0
    if not special:
        ends = [*found.text_offset[1:], len(choice.text)]
        pieces = zip(found.text_offset, ends, found.tokens, strict=True)
        assert all(choice.text[start:stop] == token for start, stop, token in pieces)
    [only] = asked(echo=True, logprobs=2, max_tokens=0).choices
    assert only.text == PROMPT and len(only.logprobs.tokens) == len(ids)
    assert only.logprobs.token_logprobs[1:] == found.token_logprobs[1 : len(ids)]
    assert asked(echo=True, max_tokens=0).usage.completion_tokens == 0
    [after] = asked(logprobs=0).choices
    assert after.logprobs.tokens == found.tokens[len(ids) :]
    assert after.logprobs.text_offset[0] == 0


def test_log_probabilities_as_vllm_has_them(pipe, where) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "prompt_logprobs": 2, "temperature": 0, "n": 2}
    _, text = sent(where, "/v1/completions", body)
    ids, choices = ids_of(pipe, PROMPT), json.loads(text)["choices"]
    for choice in choices:
        first, *rest = choice["prompt_logprobs"]
        assert first is None and len(rest) == len(ids) - 1
        for token, found in zip(ids[1:], rest, strict=True):
            own = found[str(token)]
            assert sorted(one["rank"] for one in found.values())[:2] == [1, 2]
            assert own["decoded_token"] and len(found) == 2 + (own["rank"] > 2)
            better = [one for one in found.values() if one["logprob"] > own["logprob"]]
            assert own["rank"] == len(better) + 1 or own["rank"] > 2
    message = {"role": "user", "content": [{"type": "text", "text": "Why?"}]}
    chat = {"messages": [message], "max_tokens": 2, "prompt_logprobs": 0}
    _, text = sent(where, "/v1/chat/completions", chat)
    answer = json.loads(text)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.daily("omni")
def test_the_best_of_several(asked) -> None:
    options = {"temperature": 1.3, "seed": 5, "logprobs": 0}
    every = asked(n=6, **options)
    likely = sorted(every.choices, key=lambda one: -sum(one.logprobs.token_logprobs))
    best = asked(n=2, best_of=6, **options)
    assert [one.text for one in best.choices] == [one.text for one in likely[:2]]
    assert [one.index for one in best.choices] == [0, 1]
    assert best.usage.completion_tokens == 36, "all that were written"
    del options["logprobs"]
    [one] = asked(best_of=6, **options).choices
    assert one.text == likely[0].text and one.logprobs is None
    echoed = asked(["Why", PROMPT], best_of=3, echo=True, logprobs=0, temperature=1.3)
    assert [one.text[: len(x)] for one, x in zip(echoed.choices, ["Why", PROMPT], strict=True)] == [
        "Why",
        PROMPT,
    ]
    assert all(one.logprobs.token_logprobs[1] < 0 for one in echoed.choices)


def test_types(where) -> None:
    for options in ({}, {"logprobs": 1, "n": 2}, {"echo": True}):
        body = {"prompt": PROMPT, "max_tokens": 4} | options
        _, text = sent(where, "/v1/completions", body)
        answer = Completion.model_validate_json(text, strict=True)
        assert answer.object == "text_completion"


@pytest.mark.daily("qwen")
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [5, True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**400]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 5, "n": 16}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 17}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_refused(where, options: dict[str, Any], field: str) -> None:
    status, text = sent(where, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2} | options)
    error = json.loads(text)["error"]
    assert status == (404 if field == "model" else 400)
    assert error["param"] == field, error


@pytest.mark.daily("llava")
def test_media_and_long_prompts_are_refused(pipe, where, asked) -> None:
    for token in pipe.family.placeholders:
        with pytest.raises(openai.BadRequestError, match="stands for media"):
            asked(f"What is {token}?")
        with pytest.raises(openai.BadRequestError, match="stands for media"):
            asked(pipe.processor.tokenizer(token)["input_ids"])
    with pytest.raises(openai.BadRequestError) as caught:
        asked([5] * (pipe.max_context + 1))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        asked("7!" * 200_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="all prompts together"):
        asked(["7!" * (pipe.max_context // 3)] * 40)
    with pytest.raises(openai.BadRequestError, match="log-probabilities"):
        asked([5] * 20_000, extra_body={"prompt_logprobs": 20})
    eventually(lambda: metrics(where, None)["oscar_mm_running"] == 0)


def test_that_raw_prompts_have_no_reasoning(qwen3_vl_thinking_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_thinking_folder, policy="compact", device="cpu")
    pipe.model.generation_config.eos_token_id = NEVER
    with served(pipe) as address, client_of(address) as client:
        prompt = "<|im_start|>assistant\n<think>\n"
        options = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0}
        [choice] = client.completions.create(**options).choices
    ids = ids_of(pipe, prompt)
    assert choice.text == text_after(pipe, ids, generated(pipe, ids, 5)) != ""
