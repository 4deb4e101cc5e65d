"""Biases, penalties and bans, against transformers' processors or against hand computation."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.engine.sampling import SamplerGroup, Sampling, SamplingState, token_sequences
from tests.engine.engine import alone, loaded, made, together
from tests.prompts import Reference, Request
from tests.tiny import qwen_tokenizer

CPU = torch.device("cpu")
VOCABULARY, STEPS = 30, 25
ENDS = frozenset([2, 5])
WORDS = [(7,), (8, 9), (9, 8, 10), (8, 8), (11, 11, 11)]
PROMPTS = [torch.tensor([20, 21, 21]), torch.tensor([22]), torch.tensor([23, 24, 25, 20, 20])]
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "bias": {"logit_bias": {8: 4.0, 9: 3.0, 3: -100}},
    "bad words": {"bad_words": ["x"], "logit_bias": {8: 4.0, 9: 4.5, 11: 4.0}},
    "least length": {"min_tokens": 15, "logit_bias": {2: 3.0, 5: 3.0}},
    "all": {
        "repetition_penalty": 1.3,
        "logit_bias": {8: 9.0, 9: 9.0, 5: 5.0},
        "bad_words": ["x"],
        "min_tokens": 20,
    },
    "none": {},
}


def step_logits(row: int) -> torch.Tensor:
    """Return logits, (steps, vocabulary)."""
    return 3 * torch.randn(STEPS, VOCABULARY, generator=torch.Generator().manual_seed(row))


def by_transformers(options: dict[str, Any], prompt: torch.Tensor, row: int) -> list[int]:
    """Return greedy tokens."""
    processors = LogitsProcessorList()
    if bias := options.get("logit_bias"):
        biases = {(token,): float(value) for token, value in bias.items()}
        processors.append(SequenceBiasLogitsProcessor(biases))
    if penalty := options.get("repetition_penalty"):
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    if options.get("bad_words"):
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in WORDS]))
    if least := options.get("min_tokens"):
        made = MinNewTokensLengthLogitsProcessor(len(prompt), least, sorted(ENDS))
        processors.append(made)
    ids = prompt[None]
    for logits in step_logits(row):
        token = processors(ids, logits[None].clone()).argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
    return ids[0, len(prompt) :].tolist()


def samplers(options: dict[str, Any]) -> Iterator[SamplingState]:
    for prompt in PROMPTS:
        words = WORDS if options.get("bad_words") else ()
        yield SamplingState(Sampling(**options), prompt, ENDS, words)


def chosen(rows: Sequence[SamplingState], logits: torch.Tensor, reseated: int) -> list[list[int]]:
    """Return tokens of rows from (rows, steps, vocabulary) logits; after some steps the batch is
    rebuilt, as if other rows joined."""
    chooser = SamplerGroup(rows, CPU)
    for step in range(STEPS):
        if step == reseated:
            chooser = SamplerGroup(rows, CPU)
        tokens = chooser.choose(logits[:, step]).tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.note(token)
    return [row.chosen for row in rows]


@pytest.mark.parametrize("reseated", [0, 7])
def test_every_row_of_a_batch_as_transformers(reseated: int) -> None:
    rows = [row for options in OPTIONS.values() for row in samplers(options)]
    logits = torch.stack([step_logits(row) for row in range(len(rows))])
    found = chosen(rows, logits, reseated)
    row = 0
    changed = dict.fromkeys(OPTIONS, 0)
    for name, options in OPTIONS.items():
        for prompt in PROMPTS:
            assert found[row] == by_transformers(options, prompt, row), name
            changed[name] += found[row] != step_logits(row).argmax(-1).tolist()
            row += 1
    assert changed.pop("none") == 0 and all(changed.values()), changed


def test_presence_and_frequency_by_hand() -> None:
    """Logits are 5, 4, 3, 2 at every step; tokens of the prompt do not count."""
    logits, prompt = torch.tensor([5.0, 4.0, 3.0, 2.0]), torch.tensor([0, 1, 2, 3])
    for options, expected in (
        # 0 falls to 3.5, then 1 to 2.5; then nothing falls any more.
        ({"presence_penalty": 1.5}, [0, 1, 0, 0, 0, 0, 0]),
        # 0: 5 -> 3.75 -> 2.5; 1: 4 -> 2.75 -> 1.5; 2: 3 -> 1.75.
        ({"frequency_penalty": 1.25}, [0, 1, 0, 2, 1, 0, 3]),
        # 0: 5 -> 3.5 -> 3 -> 2.5; 1: 4 -> 2.5; 2: 3 -> 1.5.
        ({"presence_penalty": 1.0, "frequency_penalty": 0.5}, [0, 1, 0, 0, 2, 0, 1]),
        ({"presence_penalty": -2.0, "logit_bias": {3: 3.5}}, [3, 3, 3, 3]),
        ({"frequency_penalty": -1.0, "logit_bias": {1: 1.5}}, [1, 1, 1, 1]),
    ):
        sampler = SamplingState(Sampling(**options), prompt)
        chooser = SamplerGroup([sampler], CPU)
        assert [int(chooser.choose(logits[None])) for _ in expected] == expected, options
    assert torch.equal(logits, torch.tensor([5.0, 4.0, 3.0, 2.0])), "logits are the caller's"


def test_unlikely_tokens_are_never_sampled() -> None:
    probabilities = torch.tensor([0.5, 0.24, 0.2, 0.06])
    sampler = SamplingState(Sampling(temperature=1.0, min_p=0.45, seed=1), torch.tensor([0]))
    chooser = SamplerGroup([sampler], CPU)
    found = {int(chooser.choose(probabilities.log()[None])) for _ in range(200)}
    assert found == {0, 1}


def test_infinite_logits_and_bans() -> None:
    """Banning a certain token leaves the other tokens."""
    logits = torch.tensor([[float("inf"), 1.0, 2.0]])
    sampler = SamplingState(Sampling(bad_words=["x"]), torch.tensor([0]), ENDS, [(0,), (2, 1)])
    chooser = SamplerGroup([sampler], CPU)
    assert [int(chooser.choose(logits)) for _ in range(3)] == [2, 2, 2]


def test_bad_words_at_the_beginning_and_after_a_space() -> None:
    tokenizer = qwen_tokenizer(400)
    found = token_sequences(tokenizer, ["picture", " picture", "Zq9"])
    assert len(found) == 4
    assert {tokenizer.decode(list(ids)) for ids in found} == {"picture", " picture", "Zq9", " Zq9"}


@pytest.fixture(scope="module")
def reference(qwen3_vl_folder: Path) -> Reference:
    return Reference(qwen3_vl_folder)


PROMPT = "What is on the sign?"


def generated(reference: Reference, end: int | None = None, **options: Any) -> list[int]:
    inputs = reference.inputs([Request(PROMPT)])
    never = {"eos_token_id": 1 << 20} if end is None else {"eos_token_id": end}
    return reference.generate(inputs, max_new_tokens=24, **never, **options)[0]


def answered(pipe: OscarVLPipeline, **options: Any) -> Any:
    return pipe(None, PROMPT, max_new_tokens=24, temperature=0, **options)


def test_answers_of_a_pipeline_are_those_of_generate(plain, reference) -> None:
    free = generated(reference)
    assert answered(plain).token_ids == free
    tokenizer = plain.processor.tokenizer
    words = [tokenizer.decode([token]) for token in free]
    word = next(x for x, token in zip(words, free, strict=True) if tokenizer.encode(x) == [token])
    sequences = token_sequences(tokenizer, [word])
    favourite = max(set(free), key=free.count)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"logit_bias": {favourite: -3.0}}, {"sequence_bias": {(favourite,): -3.0}}),
        ({"bad_words": [word]}, {"bad_words_ids": [list(ids) for ids in sequences]}),
    ]
    for ours, theirs in cases:
        found = answered(plain, **ours).token_ids
        assert found == generated(reference, **theirs) != free, ours
    counted = {"presence_penalty": 2.0, "frequency_penalty": 1.0}
    options = [one | {"max_new_tokens": 24} for one in ({}, *(x for x, _ in cases), counted)]
    expected = [alone(plain, [PROMPT], **one)[0] for one in options]
    answers = [made(plain, PROMPT, **one) for one in options]
    assert together(plain, answers) == expected and expected[-1] != expected[0] == free


def test_where_an_answer_ends(plain, reference) -> None:
    free = generated(reference)
    end = next(token for token in free[3:] if free.index(token) >= 3)
    place = free.index(end)
    ended = answered(plain, stop_token_ids=[end])
    assert ended.token_ids == free[:place] and ended.finish_reason == "stop"
    included = answered(plain, stop_token_ids=[end], include_stop_str_in_output=True)
    assert included.token_ids == free[: place + 1] and included.finish_reason == "stop"
    at_most = plain(
        *(None, PROMPT), max_new_tokens=place + 1, temperature=0, stop_token_ids=[end],
        include_stop_str_in_output=True,
    )  # fmt: skip
    assert at_most.token_ids == free[: place + 1] and at_most.finish_reason == "stop"
    least = answered(plain, stop_token_ids=[end], min_tokens=place + 3)
    assert least.token_ids == generated(reference, end, min_new_tokens=place + 3)
    assert len(least.token_ids) >= place + 3


def test_end_tokens_that_are_ignored(qwen3_vl_folder, reference) -> None:
    free = generated(reference)
    pipe = loaded(qwen3_vl_folder)
    end = pipe.model.generation_config.eos_token_id = free[2]
    assert answered(pipe).token_ids == free[: free.index(end)]
    ignoring = answered(pipe, ignore_eos=True)
    assert ignoring.token_ids == free and ignoring.finish_reason == "length"
    other = next(token for token in free[4:] if token != end and free.index(token) >= 4)
    stopped = answered(pipe, ignore_eos=True, stop_token_ids=[other])
    assert stopped.token_ids == free[: free.index(other)]


def test_a_chat_goes_on_after_a_stop_token(plain, reference) -> None:
    """The next turn reads the stop token or not, as with a stop string."""
    free = generated(reference)
    end = next(token for token in free[3:] if free.index(token) >= 3)
    options = {"max_new_tokens": 24, "temperature": 0}
    for included in (False, True):
        with plain.chat() as chat, plain.chat() as told:
            first = chat.ask(
                PROMPT, **options, stop_token_ids=[end], include_stop_str_in_output=included
            )
            length = len(first.token_ids)
            assert length == free.index(end) + included
            # The same tokens, where the length ends them.
            assert told.ask(PROMPT, **options | {"max_new_tokens": length}).text == first.text
            again = chat.ask("Why?", **options)
            assert again.token_ids == told.ask("Why?", **options).token_ids


def test_ids_that_the_model_does_not_have_are_refused(plain) -> None:
    size = plain.model.config.text_config.vocab_size
    assert answered(plain, logit_bias={size - 1: -1.0}).token_ids
    with pytest.raises(InputError, match=f"logit_bias={size}: must be token ids below {size}"):
        answered(plain, logit_bias={size: 1.0})
