"""Options of the chat template and a bound on the reasoning, against plain transformers."""

import json
from typing import Any

import pytest
import torch

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.engine.message_lists import messages_from
from oscar_mm.engine.sampling import Sampler, Sampling, SamplingState
from oscar_mm.engine.template import BUDGETS, MAX_VARIABLE_CHARACTERS, MAX_VARIABLES
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.tensor_parallel import TPGroup
from tests.prompts import noise
from tests.thinking import ids_of, saying
from tests.tiny_qwen3_vl import QWEN3_VL_TEMPLATE

OPENED = "'<|im_start|>assistant\\n'"
SWITCH = "<think>\\n' + ('' if enable_thinking | default(true) else '\\n</think>\\n\\n')"
SWITCHED = QWEN3_VL_TEMPLATE.replace(OPENED, "'<|im_start|>assistant\\n" + SWITCH).replace(
    "{%- macro", "{{- '<|im_start|>system\\n' + style + '<|im_end|>\\n' if style -}}\n{%- macro", 1
)
"""Reasons unless it is told not to, as Qwen3-Omni's and Qwen3.5's do; has a variable of its own."""
ASKED = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}]
SAID = {"role": "assistant", "content": [{"type": "text", "text": "It is a red"}]}


@pytest.fixture(scope="module")
def switched(qwen3_vl_thinking_folder) -> OscarVLPipeline:
    pipe = OscarVLPipeline(qwen3_vl_thinking_folder, policy="compact", device="cpu")
    pipe.processor.chat_template = SWITCHED
    return pipe


@pytest.fixture(params=["llava", "qwen", "omni"])
def pipe(request) -> Pipeline:
    return request.getfixturevalue(request.param)


def ids(pipe: Pipeline, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """What the model reads."""
    template = pipe.family.template(options)
    asked = messages_from(messages, open_end=template.takes_any_end)
    return pipe.read_request(asked, template=template).inputs["input_ids"][0].tolist()


def rendered(pipe: Pipeline, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """The same by transformers."""
    text = pipe.processor.apply_chat_template(messages, tokenize=False, **options)
    return pipe.processor.tokenizer(text, **pipe.family.text_options(text))["input_ids"]


@pytest.mark.daily("llava-It is a red", "omni- brown ")
@pytest.mark.parametrize("text", ["It is a red", "A sign. \n", " brown "])
def test_the_last_message_is_continued(pipe, text: str) -> None:
    messages = [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": text}]}]
    expected = rendered(pipe, messages, continue_final_message=True)
    assert ids(pipe, messages, continue_final_message=True) == expected
    options = {"temperature": 0, "max_new_tokens": 6}
    answer = pipe.chat_completion(messages, continue_final_message=True, **options)
    with torch.inference_mode():
        model, prompt = pipe.model, torch.tensor([expected])
        plain = model.generate(input_ids=prompt, do_sample=False, max_new_tokens=6)
    written = plain[0, len(expected) :].tolist()
    assert answer.token_ids == written[: len(answer.token_ids)]
    tokenizer = pipe.processor.tokenizer
    whole = tokenizer.decode([*expected, *answer.token_ids], skip_special_tokens=True)
    before = tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.text == whole.removeprefix(before), "with the space that it may begin with"
    assert pipe(messages=messages, continue_final_message=True, **options).text == answer.text


def test_a_user_and_pictures_are_continued_too(pipe) -> None:
    image = {"type": "image", "image": noise(28, 28, 1)}
    asked = {"role": "user", "content": [image, {"type": "text", "text": "What is"}]}
    found = ids(pipe, [asked], continue_final_message=True)
    closed = ids(pipe, [asked], add_generation_prompt=False)
    assert len(found) < len(closed) and found == closed[: len(found)]
    with pytest.raises(InputError, match="must end with text"):
        ids(pipe, [{"role": "user", "content": [image]}], continue_final_message=True)


@pytest.mark.parametrize("messages", [ASKED, [*ASKED, SAID]])
def test_no_answer_is_opened(pipe, messages: list[dict[str, Any]]) -> None:
    expected = rendered(pipe, messages, add_generation_prompt=False)
    assert ids(pipe, messages, add_generation_prompt=False) == expected
    opened = pipe.processor.chat_template.count("add_generation_prompt")
    assert (expected != rendered(pipe, messages, add_generation_prompt=True)) == bool(opened)


def test_variables(switched) -> None:
    for variables in ({}, {"enable_thinking": False}, {"style": "Brief.", "unknown": [1]}):
        expected = rendered(switched, ASKED, add_generation_prompt=True, **variables)
        assert ids(switched, ASKED, chat_template_kwargs=variables) == expected
    answers = [
        switched(prompt="Why?", max_new_tokens=4, temperature=0, chat_template_kwargs=variables)
        for variables in ({"enable_thinking": True}, {"enable_thinking": False})
    ]
    assert [answer.reasoning is None for answer in answers] == [False, True]
    assert answers[0].prompt_tokens < answers[1].prompt_tokens


@pytest.mark.parametrize(("effort", "reasons"), [("none", False), ("low", True), ("max", True)])
def test_effort(switched, effort: str, reasons: bool) -> None:
    variables = {"enable_thinking": reasons}
    expected = rendered(switched, ASKED, add_generation_prompt=True, **variables)
    assert ids(switched, ASKED, reasoning_effort=effort) == expected
    # What the client says of the template itself counts more.
    other = {"chat_template_kwargs": {"enable_thinking": not reasons}}
    assert ids(switched, ASKED, reasoning_effort=effort, **other) != expected
    chosen, template, *_ = switched.read_options({"reasoning_effort": effort}, ())
    assert chosen.thinking_token_budget == BUDGETS[effort] == template.budget
    given = {"reasoning_effort": effort, "thinking_token_budget": 7}
    assert switched.read_options(given, ())[0].thinking_token_budget == 7


def test_effort_of_a_model_that_does_not_reason(qwen) -> None:
    options = {"temperature": 0, "max_new_tokens": 5}
    expected = qwen(prompt="Why?", **options)
    for effort in BUDGETS:
        answer = qwen(prompt="Why?", reasoning_effort=effort, **options)
        assert answer.token_ids == expected.token_ids
        assert answer.prompt_tokens == expected.prompt_tokens


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort='much': must be one of none, "),
        ({"reasoning_effort": 3}, "reasoning_effort=3: must be one of"),
        ({"chat_template_kwargs": [1]}, "must be a dict"),
        ({"chat_template_kwargs": {1: 2}}, "must be a dict"),
        ({"chat_template_kwargs": {"messages": []}}, "messages is set by the request"),
        ({"chat_template_kwargs": {"namespace": 1}}, "namespace is set by the request"),
        ({"chat_template_kwargs": {"tools": [], "tokenize": 1}}, "tokenize, tools is set by"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "add_generation_prompt is"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template is set"),
        ({"chat_template_kwargs": {"style": {1, 2}}}, "values must be JSON"),
        ({"chat_template_kwargs": {"style": float("nan")}}, "values must be JSON"),
        ({"chat_template_kwargs": {"style": "x" * MAX_VARIABLE_CHARACTERS}}, "characters as JSON"),
        ({"chat_template_kwargs": {str(x): 1 for x in range(MAX_VARIABLES + 1)}}, "at most 64"),
        ({"chat_template_kwargs": {"style": ["<|im_end|>"]}}, "control token"),
        ({"chat_template_kwargs": {"style": {"<|im_end|>": 1}}}, "control token"),
        ({"chat_template_kwargs": {"style": 5}}, "refuses the conversation"),
        ({"continue_final_message": True}, "must end with text"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "cannot be combined"),
        ({"continue_final_message": 1}, "continue_final_message=1: must be True or False"),
        ({"thinking_token_budget": -2}, "thinking_token_budget=-2: must be"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget=1.5: must be"),
    ],
)
def test_options_that_are_refused(switched, options: dict[str, Any], expected: str) -> None:
    image = {"type": "image", "image": noise(28, 28, 1)}
    with pytest.raises(InputError, match=expected):
        switched.chat_completion([{"role": "user", "content": [image]}], **options)


def test_a_variable_that_overflows(switched) -> None:
    before = switched.processor.chat_template
    try:
        switched.processor.chat_template = before + "{{ 1 // style if style else '' }}"
        with pytest.raises(InputError, match="refuses the conversation"):
            ids(switched, ASKED, chat_template_kwargs={"style": {"a": 1}})
        switched.processor.chat_template = "{{ 1 // unit }}"
        with pytest.raises(InputError, match="refuses the conversation"):
            ids(switched, ASKED, chat_template_kwargs={"unit": 0})
    finally:
        switched.processor.chat_template = before


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("budget", [0, 3])
def test_the_reasoning_ends_with_its_budget(switched, budget: int, opened: bool) -> None:
    """Whether the template opens the reasoning or the model does."""
    said = ids_of(switched, ("" if opened else "<think>") + "It is a sign or a picture of one.")
    template = {"enable_thinking": opened}
    with saying(switched, said):
        answer = switched(
            prompt="Why?",
            chat_template_kwargs=template,
            thinking_token_budget=budget,
            max_new_tokens=12,
        )
    closing = switched.family.think_tokens.closing
    place = budget + (not opened)
    if not opened:  # The block that the template has closed is none.
        assert switched.family.think_tokens.opening == said[0]
    assert answer.token_ids[place] == closing
    assert answer.token_ids[:place] == said[:place]
    assert answer.token_ids[place + 1 :] == said[place + 1 : 12]
    assert answer.text


def test_rows_with_and_without_a_budget(switched) -> None:
    """Rows join at any step, each with what it has written, as when others come and go."""
    thinks = switched.family.think_tokens
    vocabulary, device = 20 + max(thinks.opening, thinks.closing), torch.device("cpu")
    prompt = torch.tensor([thinks.opening])

    def made(budget: int | None, *chosen: int) -> SamplingState:
        sampling = Sampling(thinking_token_budget=budget)
        sampler = SamplingState(sampling, prompt, thinks=thinks)
        for token in chosen:
            sampler.note(token)
        return sampler

    samplers = [made(None), made(1), made(2, 5), made(2, 5, 6), made(1, thinks.closing), made(-1)]
    choices = Sampler(samplers, device, TPGroup())
    logits = torch.zeros(len(samplers), vocabulary)
    logits[:, 3] = 1
    steps = [choices(logits).listed() for _ in range(3)]
    closing = thinks.closing
    assert steps[0] == [3, 3, 3, closing, 3, 3]
    assert steps[1] == [3, closing, closing, 3, 3, 3]
    assert steps[2] == [3] * 6


def test_a_grammar_begins_after_the_budget(switched) -> None:
    from oscar_mm import Grammar

    answer = switched(
        prompt="Why?",
        grammar=Grammar.json_schema({"type": "boolean"}),
        thinking_token_budget=4,
        max_new_tokens=40,
        temperature=1.0,
        seed=3,
    )
    assert json.loads(answer.text) in (True, False)
    assert answer.reasoning_tokens <= 4 + 3
