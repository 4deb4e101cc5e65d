"""Requests and chats of a model with states: steps together, turns to return to, files, budgets."""

import gc
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchFeature

from oscar_mm import InputError, OscarCache, OscarVLPipeline
from oscar_mm.admission.capacity import ModelShape, Reservation
from oscar_mm.apps.demo.measured_chat import MemorySample
from oscar_mm.apps.demo.memory_panel import no_gain_reason, segment_table
from oscar_mm.cache import states as states_module
from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.checked_file import read_checked, write_checked
from oscar_mm.cache.saved_cache import load_cache, save_cache
from oscar_mm.cache.states import LinearLayer
from oscar_mm.chat.history import PastTurn
from oscar_mm.compare.comparison import Comparison
from oscar_mm.compare.decoded_answers import AnswerComparison
from oscar_mm.engine import decode_runner
from oscar_mm.engine.decode_runner import decode
from oscar_mm.engine.message import Message, user_message
from oscar_mm.engine.sampling import Sampling
from oscar_mm.fast_decode import graph_runner
from oscar_mm.inspect.inspection import inspect_prompt
from oscar_mm.media.media import Media
from oscar_mm.pipelines.plan import Session, plan
from oscar_mm.policy import KVPolicy
from tests.fast_decode.test_graph_runner import Repeat
from tests.pipelines.conftest import NEVER, exact
from tests.prompts import REQUESTS, Reference, Request, noise

SIGN = Request("What did the user ask about the sign?", [noise(64, 96)])
QUESTIONS = (SIGN, Request("And which month was the wettest?"), Request("Why?"))
TOKENS = 9


@pytest.fixture(scope="module")
def pipe(qwen3_5_folder: Path) -> OscarVLPipeline:
    return exact(OscarVLPipeline, qwen3_5_folder)


@pytest.fixture(scope="module")
def plain(qwen3_5_folder: Path) -> Reference:
    reference = Reference(qwen3_5_folder)
    reference.model.generation_config.eos_token_id = NEVER
    return reference


def like(pipe: OscarVLPipeline, **arguments: Any) -> OscarVLPipeline:
    return OscarVLPipeline(pipe.model, processor=pipe.processor, policy="bf16", **arguments)


@pytest.fixture(params=["fused", "captured", "modules"])
def stepping(pipe, request, monkeypatch: pytest.MonkeyPatch) -> OscarVLPipeline:
    """A pipeline for each way in which decode steps run: states of rows where their caches have
    them, at addresses that a graph reads, or in tensors of the batch."""
    if request.param == "captured":
        runner = partial(graph_runner.GraphRunner, capture=Repeat())
        monkeypatch.setattr(decode_runner, "GraphRunner", runner)
    if request.param == "modules":
        monkeypatch.setattr(graph_runner, "supports", lambda model: False)
    return like(pipe)


def asked(request: Request, tokens: int = TOKENS, **options: Any) -> dict[str, Any]:
    media = {"images": list(request.images), "videos": list(request.videos)}
    return {"prompt": request.prompt, "max_new_tokens": tokens} | media | options


class Told:
    """A conversation as plain transformers reads it: all of its tokens, without a cache."""

    def __init__(self, plain: Reference, request: Request) -> None:
        self.plain, self.inputs = plain, dict(plain.inputs([request]))

    def add(self, ids: list[int]) -> None:
        count = len(ids)
        self.inputs["input_ids"] = torch.cat([self.inputs["input_ids"], torch.tensor([ids])], 1)
        for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
            new = torch.full((1, count), value, dtype=self.inputs[name].dtype)
            self.inputs[name] = torch.cat([self.inputs[name], new], 1)

    def ask(self, request: Request) -> None:
        text = f"<|im_end|>\n<|im_start|>user\n{request.prompt}<|im_end|>\n<|im_start|>assistant\n"
        self.add(self.plain.processor.tokenizer(text, add_special_tokens=False).input_ids)

    def answer(self, tokens: int = TOKENS) -> list[int]:
        """The next tokens, which become part of the conversation."""
        for _ in range(tokens):
            with torch.no_grad():
                self.plain.model.model.rope_deltas = None
                logits = self.plain.model(**BatchFeature(self.inputs), use_cache=False).logits
            self.add([int(logits[0, -1].argmax())])
        return self.inputs["input_ids"][0, -tokens:].tolist()


@pytest.fixture(scope="module")
def turns(plain: Reference) -> list[list[int]]:
    """The answers to QUESTIONS in one conversation."""
    told, answers = Told(plain, SIGN), []
    for number, question in enumerate(QUESTIONS):
        if number:
            told.ask(question)
        answers.append(told.answer())
    return answers


def test_turns_are_those_of_transformers(pipe, turns, tmp_path: Path) -> None:
    """Forks, turns after an undo and saved chats continue from their own states."""
    chat = pipe.chat()
    for question, expected in zip(QUESTIONS[:2], turns, strict=False):
        assert chat.ask(**asked(question)).token_ids == expected
    fork = chat.fork()
    chat.save(tmp_path / "chat.oscar")
    again = pipe.load_chat(tmp_path / "chat.oscar")
    for one in (chat, fork, again):
        assert one.ask(**asked(QUESTIONS[2])).token_ids == turns[2]
        one.undo()
        assert one.ask(**asked(QUESTIONS[2])).token_ids == turns[2]
        one.undo(2)
        assert [one.ask(**asked(question)).token_ids for question in QUESTIONS[1:]] == turns[1:]
    assert again.memory.by_kind == chat.memory.by_kind
    with pytest.raises(InputError, match=r"forget: the states of linear-attention.*undo\(\) all"):
        chat.forget(chat.images[0])
    for one in (chat, fork, again):
        while one.turns:
            one.undo()
        assert one.ask(**asked(SIGN)).token_ids == turns[0]
        one.close()
    gc.collect()
    assert pipe.store.memory().state_bytes == pipe.store.memory().used_bytes == 0


def test_a_turn_that_failed_or_was_left_changes_no_states(pipe, turns, monkeypatch) -> None:
    chat = pipe.chat()
    chat.ask(**asked(SIGN))
    layer = pipe.model.get_decoder().layers[-1]

    def fail(*_: object) -> None:
        raise OSError("lost")

    hook = layer.register_forward_hook(fail)
    with pytest.raises(OSError, match="lost"):
        chat.ask(**asked(QUESTIONS[1]))
    hook.remove()
    stream = chat.stream(**asked(QUESTIONS[2]))
    next(stream)
    stream.close()
    assert chat.turns[-1].finish_reason == "interrupted"
    chat.undo()
    assert [chat.ask(**asked(question)).token_ids for question in QUESTIONS[1:]] == turns[1:]
    chat.close()


def test_a_step_that_ran_when_an_answer_was_left(pipe, plain) -> None:
    """The token of such a step is in the states, so it becomes part of the turn."""
    chat, entered, left = pipe.chat(), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        entered.set()
        assert left.wait(20)

    other = threading.Thread(target=pipe, kwargs=asked(REQUESTS["text"], 60))
    stream = chat.stream(**asked(QUESTIONS[1], 60))
    other.start()  # The engine makes steps as long as somebody waits for one.
    for _ in range(3):
        next(stream)
    hook = pipe.model.get_decoder().embed_tokens.register_forward_hook(wait)
    assert entered.wait(20)
    stream.close()
    hook.remove()
    left.set()
    other.join()
    stop = chat.turns[-1].stop
    assert [segment.tokens for segment in chat.segments] == [stop + 1] == [chat.turns[-1].stop]
    answer = chat.ask(**asked(QUESTIONS[2])).token_ids
    ids = chat._spillable.conversation.token_ids
    told = Told(plain, REQUESTS["text"])
    told.inputs = {name: told.inputs[name][:, :0] for name in told.inputs}
    told.add(ids[0, : 1 - len(answer)].tolist())
    assert told.answer() == answer
    chat.close()


def test_turns_told_together_end_at_marks(pipe) -> None:
    texts = [(f"What is picture {number}?", f"A sign, and {number} dogs.") for number in range(3)]
    past = [
        PastTurn([user_message(one, [])], Message("assistant", (two,), "")) for one, two in texts
    ]
    together, apart = pipe.chat(), pipe.chat()
    together.tell_all(past)
    for one in texts:
        apart.tell(*one)
    for _ in range(2):
        answers = [chat.ask(**asked(QUESTIONS[2])).token_ids for chat in (together, apart)]
        assert answers[0] == answers[1]
        for chat in (together, apart):
            chat.undo()
            chat.undo()
    assert len(together.turns) == 1
    together.close()
    apart.close()


@pytest.mark.daily("captured")
def test_requests_join_and_leave_the_batch(stepping, plain) -> None:
    """Answers of several lengths, more than rows; each is the one that it would be alone."""
    requests = [*REQUESTS.values(), *QUESTIONS]
    lengths = [3 + 7 * (number % 4) for number in range(len(requests))]
    results = stepping.batch(
        [asked(one, tokens) for one, tokens in zip(requests, lengths, strict=True)], batch_size=3
    )
    for request, tokens, result in zip(requests, lengths, results, strict=True):
        [expected] = plain.generate(plain.inputs([request]), max_new_tokens=tokens)
        assert result.answer.token_ids == expected
    assert stepping.store.memory().state_bytes == 0


@pytest.mark.daily("captured")
def test_an_answer_that_is_left_changes_no_other(stepping, plain) -> None:
    """The answer that stays in the batch is the one that it would be alone."""
    [expected] = plain.generate(plain.inputs([SIGN]), max_new_tokens=24)
    other, stream = (
        stepping.stream(**asked(REQUESTS["video"], 24)),
        stepping.stream(**asked(SIGN, 24)),
    )
    next(other)
    next(stream)
    next(other)
    other.close()
    list(stream)
    assert stream.result.token_ids == expected
    assert stepping.store.memory().state_bytes == 0


@pytest.mark.daily("captured")
def test_nan_of_a_row_is_that_rows(stepping, plain) -> None:
    [expected] = plain.generate(plain.inputs([SIGN]), max_new_tokens=24)
    chat, stream = stepping.chat(), stepping.stream(**asked(SIGN, 24))
    broken = chat.stream(**asked(REQUESTS["image and video"], 24))
    next(stream)
    next(broken)
    request = chat.answering
    assert request is not None

    @torch.inference_mode()
    def spoil() -> None:
        for state in request.cache.states:  # With those after a step that was launched early.
            state[:] = torch.nan

    stepping.engine.call(spoil)
    with pytest.raises(FloatingPointError, match="NaN"):
        list(broken)
    list(stream)
    assert stream.result.token_ids == expected
    chat.close()


def played(pipe: OscarVLPipeline, middle: str) -> list[Any]:
    """Turns that end early in every way, with tokens, states and memory after each."""
    chat, found = pipe.chat(), []

    def note(told: list[Any]) -> None:
        cache = chat._spillable.conversation.cache
        idle = chat.answering is None
        memory = (chat.memory.by_kind, pipe.store.memory().state_bytes) if idle else ()
        states = [x.clone() for layer in cache.linear_layers for x in layer.states]
        found.append((told, cache.get_seq_length(), memory, states))

    note(chat.ask(**asked(SIGN, 20, stop=[middle])).token_ids)
    for count in (1, 6):
        stream = chat.stream(**asked(QUESTIONS[1], 16))
        pieces = [next(stream) for _ in range(count)]
        stream.close()
        pipe.engine.call(lambda: None)  # The request that has ended releases its memory.
        note(pieces)
    chat.undo()
    note(chat.ask(**asked(QUESTIONS[2], 16)).token_ids)
    fork, stream = chat.fork(), chat.stream(**asked(QUESTIONS[1], 16))
    next(stream)
    note(fork.ask(**asked(QUESTIONS[2], 5)).token_ids)
    note(list(stream))
    for one in (chat, fork):
        note(one.ask(**asked(QUESTIONS[1], 12, seed=3, temperature=1.0)).token_ids)
    chat.close()
    fork.close()
    return found


def test_steps_ahead_leave_no_trace(
    pipe, monkeypatch: pytest.MonkeyPatch, guesses: list[bool]
) -> None:
    """A step that turns out to be one too many has changed nothing."""
    told = like(pipe)(**asked(SIGN, 20)).text
    middle = told[len(told) // 2 :][:4]
    expected = played(like(pipe), middle)
    assert not guesses and len(expected[0][0]) < 20
    runner = partial(graph_runner.GraphRunner, capture=Repeat())
    monkeypatch.setattr(decode_runner, "GraphRunner", runner)
    again = zip(played(like(pipe), middle), expected, strict=True)
    for number, (found, known) in enumerate(again):
        assert found[:3] == known[:3]
        # From the fork on, answers share steps, and products of other numbers of rows round
        # differently.
        bound = 0 if number < 5 else 1e-4
        for state, other in zip(found[3], known[3], strict=True):
            torch.testing.assert_close(state, other, atol=bound, rtol=bound)
    assert guesses.count(True) > 35


def test_rows_end_while_the_others_go_on(
    pipe, monkeypatch: pytest.MonkeyPatch, guesses: list[bool]
) -> None:
    """A row whose step was one too many keeps its states, and the others take theirs."""
    requests = [asked(one, 24) for one in (*QUESTIONS, REQUESTS["video"])]
    for request in requests[:3]:
        text = like(pipe)(**request).text
        request["stop"] = [text[len(text) // 3 :][:3]]
    expected = [one.answer.token_ids for one in like(pipe).batch(requests)]
    runner = partial(graph_runner.GraphRunner, capture=Repeat())
    monkeypatch.setattr(decode_runner, "GraphRunner", runner)
    assert [one.answer.token_ids for one in like(pipe).batch(requests)] == expected
    assert guesses.count(True) > 15 and max(map(len, expected[:3])) < 24


def test_rows_of_one_cache_step_ahead_together(
    pipe, plain, monkeypatch: pytest.MonkeyPatch, guesses: list[bool]
) -> None:
    """Once a row has ended, whose states must stay, steps wait for their tokens."""
    prompt, sampling = plain.prompt([SIGN, REQUESTS["text"]]), Sampling(max_new_tokens=12)

    def answers(capture: Any, ends: frozenset[int]) -> tuple[list[Any], OscarCache]:
        runner = partial(graph_runner.GraphRunner, capture=capture)
        monkeypatch.setattr(decode_runner, "GraphRunner", runner)
        cache = pipe.new_cache()
        return list(decode(pipe.model, prompt, cache, sampling, end_tokens=ends)), cache

    first, second = zip(*answers(None, frozenset())[0], strict=True)
    end = next(token for token in first[4:8] if token not in second)
    expected, eager = answers(None, frozenset({end}))
    assert not guesses and None in expected[-1]
    found, cache = answers(Repeat(), frozenset({end}))
    assert found == expected and all(map(torch.equal, cache.states[:6], eager.states))
    assert True in guesses and guesses[-1] and len(guesses) < 8


def test_spare_states_are_counted(pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only steps that are launched early take them, and only while the answer is decoded."""
    each, counts = pipe.admission._state_bytes.total(), []
    for capture in (None, Repeat()):
        runner = partial(graph_runner.GraphRunner, capture=capture)
        monkeypatch.setattr(decode_runner, "GraphRunner", runner)
        chat = (mine := like(pipe)).chat()
        stream = chat.stream(**asked(QUESTIONS[2], 30))
        for _ in range(4):
            next(stream)
        measure = chat.answering.cache.memory
        running = mine.engine.call(mine.store.memory).state_bytes, mine.engine.call(measure)
        list(stream)
        counts.append((running[0], mine.store.memory().state_bytes))
        assert running[1].by_kind["unused"] - chat.memory.by_kind["unused"] >= counts[-1][0] - each
        chat.close()
    marks = counts[0][0] - each
    assert marks >= 0 and counts == [(each + marks, each + marks), (2 * each + marks, each + marks)]
    reservation = Reservation(mine.new_cache(), 0, np.array([100, 150, 120]), 40)
    assert reservation.outstanding == 90
    reservation.cache.spares[0] = LinearLayer()
    assert reservation.outstanding == 50
    on_cpu = pipe.admission._running_state_bytes
    gpu = {index: torch.device("cuda", 0) for index in pipe.family.layer_devices}
    monkeypatch.setattr(type(pipe.family), "layer_devices", gpu)
    assert on_cpu.total() == each
    assert pipe.admission._running_state_bytes == {torch.device("cuda", 0): 2 * each}


def test_deterministic_answers_decode_alone(pipe, plain) -> None:
    [expected] = plain.generate(plain.inputs([SIGN]), max_new_tokens=TOKENS)
    stream = pipe.stream(**asked(REQUESTS["text"], 24))
    next(stream)
    assert pipe(**asked(SIGN), deterministic=True).token_ids == expected
    stream.close()


@pytest.mark.daily("system1")
@pytest.mark.parametrize("system", [None, "Be brief. " * 40])
def test_prefixes_are_shared_where_states_are_kept(pipe, plain, system: str | None) -> None:
    """An image after the same system prompt is read once; the text of two images is not cut."""
    sharing, shown = like(pipe, prefix_cache="1GB"), [noise(220, 220), noise(120, 120, 1)]
    saved = []
    for prompt, images in (
        ("What is it?", shown),
        ("How many are there?", shown),
        ("Why?", shown[:1]),
        ("Who?", shown),
        ("Where?", shown[:1]),
    ):
        before = sharing.prefixes.tokens_saved
        ask = {"prompt": prompt, "images": images, "system": system, "max_new_tokens": TOKENS}
        assert sharing(**ask).token_ids == pipe(**ask).token_ids
        saved.append(sharing.prefixes.tokens_saved - before)
    assert saved[0] == saved[2] == 0 < saved[4] < saved[1] == saved[3]
    assert sharing.prefixes.bytes >= sharing.store.memory().state_bytes > 0
    # Chats begin with a shared prefix, and return to its end.
    chat = sharing.chat(system)
    answers = [chat.ask(prompt, images, max_new_tokens=TOKENS).token_ids for prompt, images in (
        ("What is it?", shown), ("Why?", None),
    )]  # fmt: skip
    chat.undo()
    assert chat.ask("Why?", max_new_tokens=TOKENS).token_ids == answers[1]
    chat.close()
    sharing.prefixes.clear()
    assert sharing.store.memory().state_bytes == 0


def test_texts_share_whole_pages(pipe) -> None:
    sharing, system = like(pipe, prefix_cache="1GB"), "Answer in one sentence, please. " * 60
    assert sharing.prefixes is not None
    whole = pipe.prepare([user_message(system, [])], Media()).tokens // 128 * 128
    for prompt, tokens in (("What?", 0), ("Who is it?", whole), ("Who is it?", whole)):
        before = sharing.prefixes.tokens_saved
        answer = sharing(prompt=prompt, system=system, max_new_tokens=TOKENS)
        expected = pipe(prompt=prompt, system=system, max_new_tokens=TOKENS)
        assert answer.token_ids == expected.token_ids
        assert sharing.prefixes.tokens_saved - before == tokens


def test_a_beginning_is_shared_from_the_third_prompt_on(pipe) -> None:
    """The second prompt finds no states where it parts from the first, and keeps its own there."""
    sharing, system = like(pipe, prefix_cache="1GB"), "Answer in one sentence, please. " * 60
    assert sharing.prefixes is not None
    whole = pipe.prepare([user_message(system, [])], Media()).tokens // 128 * 128
    for prompt, tokens in (("What? " * 100, 0), ("Who? " * 150, 0), ("Why? " * 200, whole)):
        before = sharing.prefixes.tokens_saved
        answer = sharing(prompt=prompt, system=system, max_new_tokens=TOKENS)
        expected = pipe(prompt=prompt, system=system, max_new_tokens=TOKENS)
        assert answer.token_ids == expected.token_ids
        assert sharing.prefixes.tokens_saved - before == tokens


def test_only_so_many_states_are_kept(pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, each = pipe.chat(), pipe.admission._state_bytes.total()
    monkeypatch.setattr(states_module, "MARK_BYTES", 2 * each)
    for _ in range(4):
        chat.ask("Why?", max_new_tokens=3)
    assert chat.memory.by_kind["marks"] == 2 * each == 2 * chat.memory.by_kind["states"]
    chat.undo()
    chat.undo()
    with pytest.raises(InputError, match=r"undo: what layers.*before this turn.*a new chat"):
        chat.undo()
    assert len(chat.turns) == 2 and chat.ask("Why?", max_new_tokens=3).text
    chat.close()


def test_budgets_count_states(pipe, turns) -> None:
    """Idle chats are written to files with their states; what can never fit is refused."""
    small = like(pipe, kv_budget="700KB")
    chats = [small.chat() for _ in range(5)]
    most = 0
    for number, question in enumerate(QUESTIONS):
        for chat in chats:
            assert chat.ask(**asked(question)).token_ids == turns[number]
            most = max(most, small.engine.call(lambda: small.budget.used_bytes))
    on_disk = sum("on disk" in repr(chat) for chat in chats)
    assert 0 < on_disk < 5 and most <= 700_000
    for chat in chats:
        chat.undo()
        assert chat.ask(**asked(QUESTIONS[2])).token_ids == turns[2]
        chat.close()
    states = small.admission._state_bytes.total()
    prompt = small.prepare([user_message("Why?", [])], Media())
    tokens = 8 * 256 * (prompt.tokens + 2)  # Keys and values of 256 channels, in float32.
    with pytest.raises(InputError, match="kv_budget"):
        like(pipe, kv_budget=tokens + states // 2)(prompt="Why?", max_new_tokens=2)
    assert like(pipe, kv_budget=tokens + states + 8192)(prompt="Why?", max_new_tokens=2).token_ids


def test_a_plan_counts_states(qwen3_5_folder: Path, pipe) -> None:
    made = plan(qwen3_5_folder, Session(text_tokens=40), "bf16")
    half = OscarVLPipeline(qwen3_5_folder, policy="bf16", device="cpu", dtype="bfloat16")
    report = half(prompt="Why?", max_new_tokens=4).memory
    assert made.shape.state_bytes == report.by_kind["states"] > 0
    tokens = made.total * 2 * 256 * 2
    assert made.kv_bytes == made.bf16_bytes == made.shape.state_bytes + tokens
    none = ModelShape.of(pipe.model.config, 0).kv_bytes(KVPolicy.preset("bf16"), {})
    assert none == made.shape.state_bytes


@pytest.fixture(scope="module")
def saved(pipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat of two turns, with states at the end of each."""
    path = tmp_path_factory.mktemp("saved") / "chat.oscar"
    with pipe.chat() as chat:
        for question in QUESTIONS[:2]:
            chat.ask(**asked(question, 3))
        chat.save(path)
    return path


def _lengths(change: Any) -> Any:
    def altered(tensors: dict[str, torch.Tensor], text: dict[str, Any]) -> None:
        text["states"] = change(text["states"])

    return altered


def _state(name: str, change: Any) -> Any:
    def altered(tensors: dict[str, torch.Tensor], text: dict[str, Any]) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return altered


def _both(name: str, change: Any) -> Any:
    return lambda *content: [_state(f"{name}.{copy}", change)(*content) for copy in (0, 1)]


ALTERED = {
    "nan": (_state("layer.0.state.1", lambda x: x * torch.nan), "NaN or infinity"),
    "infinity": (_state("layer.1.conv.0", lambda x: x / 0), "NaN or infinity"),
    "two rows": (_both("layer.0.conv", lambda x: x.expand(2, -1, -1)), "number of dimensions"),
    "rows": (
        lambda *content: [
            _both(f"layer.0.{kind}", lambda x: torch.cat([x, x]))(*content)
            for kind in ("conv", "state")
        ],
        "does not have every row",
    ),
    "one copy": (_state("layer.0.state.0", lambda x: x[..., :8]), "unexpected shapes"),
    "channels": (_both("layer.0.conv", lambda x: x[:, 1:]), "the model has no such states"),
    "heads": (_both("layer.1.state", lambda x: x[:, 1:]), "the model has no such states"),
    "flat": (_both("layer.1.state", lambda x: x.flatten(1)), "number of dimensions"),
    "dtype": (_both("layer.1.state", lambda x: x.half()), "unexpected shapes or dtypes"),
    "names": (lambda tensors, _: tensors.pop("layer.1.conv.1"), "layer.1.conv.1"),
    "more": (lambda tensors, _: tensors.update(a=torch.zeros(1)), "unknown tensors"),
    "a copy too many": (_lengths(lambda x: [*x, x[-1] + 1]), "layer.0.conv.2"),
    "no lengths": (_lengths(lambda x: []), "its states are missing"),
    "words": (_lengths(lambda x: ["a", x[-1]]), "not positive whole numbers"),
    "flags": (_lengths(lambda x: [True, x[-1]]), "not positive whole numbers"),
    "an object": (_lengths(lambda x: {}), "not positive whole numbers"),
    "order": (_lengths(lambda x: x[::-1]), "do not match its tokens"),
    "zero": (_lengths(lambda x: [0, x[-1]]), "not positive whole numbers"),
    "end": (_lengths(lambda x: [x[0], x[-1] - 1]), "do not match its tokens"),
    "kinds": (lambda _, text: text["layers"].reverse(), "layer.0"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_files_with_other_states_are_refused(pipe, saved: Path, tmp_path: Path, name: str) -> None:
    change, message = ALTERED[name]
    tensors, texts = read_checked(saved, lambda *_: None)
    text = json.loads(texts["oscar_mm.cache"])
    assert len(text["states"]) == 2
    change(tensors, text)
    path = tmp_path / "chat.oscar"
    write_checked(path, tensors, texts | {"oscar_mm.cache": json.dumps(text)})
    with pytest.raises(InputError, match=f"{path} is damaged: .*{message}"):
        pipe.load_chat(path)


def test_chats_of_models_without_states_are_refused(
    pipe, saved: Path, qwen3_vl_folder: Path, tmp_path: Path
) -> None:
    """The states of another model are refused, even under this model's name."""
    other = exact(OscarVLPipeline, qwen3_vl_folder)
    with pytest.raises(InputError, match="saved with another model"):
        other.load_chat(saved)
    tensors, texts = read_checked(saved, lambda *_: None)
    text = json.loads(texts["oscar_mm.cache"]) | {"fingerprint": other.fingerprint}
    path = tmp_path / "chat.oscar"
    write_checked(path, tensors, texts | {"oscar_mm.cache": json.dumps(text)})
    with pytest.raises(InputError, match="it has 3 layers"):
        other.load_chat(path)


def test_an_empty_cache_is_saved(pipe, tmp_path: Path) -> None:
    """A cache is saved before its first tokens, and after it was cropped to none."""
    cache = pipe.new_cache()
    with torch.inference_mode():
        pipe.model(input_ids=torch.tensor([[5, 6]]), **as_argument(cache), use_cache=True)
        cache.crop(-2)
    for one in (cache, pipe.new_cache()):
        save_cache(one, tmp_path / "a", fingerprint="")
        again, _ = load_cache(tmp_path / "a", fingerprint="")
        assert again.get_seq_length() == again.state_bytes == 0


def test_what_records_keys_and_values_is_refused(pipe) -> None:
    """Formats are compared by answers instead, over the cache itself."""
    prompt = pipe.prepare([user_message("Why?", [])], Media())
    comparison = Comparison(pipe, [], 4)
    for measure in (lambda: comparison.add(prompt), lambda: inspect_prompt(pipe.model, prompt)):
        with pytest.raises(InputError, match=r"linear attention.*compare answers with verify"):
            measure()
    answers = AnswerComparison(pipe, {"compact": KVPolicy.preset("compact")}, 4)
    found = answers.add(prompt)
    assert found["compact"].answer.token_ids == pipe(prompt="Why?", max_new_tokens=4).token_ids


def test_the_demo_counts_states_and_offers_no_forgetting(pipe) -> None:
    with pipe.chat() as chat:
        for question in QUESTIONS[:2]:
            chat.ask(**asked(question, 3))
        report = chat.memory
        sample = MemorySample.of(report, 40)
        assert sample.parts["states"] == report.by_kind["states"] + report.by_kind["marks"] > 0
        assert sample.used_bytes == report.kv_bytes - report.by_kind["unused"]
        assert "states of linear attention" in no_gain_reason(sample, packs=False)
        tables = [
            segment_table(chat.segments, [[""], []], forgets=forgets) for forgets in (True, False)
        ]
        assert ["data-index" in table for table in tables] == [True, False]
