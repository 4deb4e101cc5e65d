"""Prompts share prefixes although layers with sliding windows free what no window reaches.

Truth is a store that keeps all pages: a prefix of the same length continues with the same logits.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from oscar_mm import KVPolicy, OscarCache, OscarVLPipeline
from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.window_pages import WindowPages
from oscar_mm.engine.engine_thread import EngineThread
from oscar_mm.engine.message import user_message
from oscar_mm.engine.prefill import read_in_chunks
from oscar_mm.engine.prefix_cache import Match, PrefixCache, kept_tokens
from oscar_mm.engine.prompt import Prompt, remaining
from oscar_mm.engine.running_batches import RunningBatches
from oscar_mm.errors import MemoryBusy
from oscar_mm.media.media import Media
from tests.cache.invariants import STREAM
from tests.cache.test_window_pages import MODELS, poison
from tests.languages import CHATML, build_language_model

WINDOW, NEVER = 150, 1 << 20
POLICIES = {
    "stream": KVPolicy(bits=(4, 4), window=16, **STREAM),
    "whole pages": KVPolicy.preset("channel", window=16, sinks=2),
    "standard": KVPolicy.preset("standard", window=32),
}
DAILY = ["stream", "whole pages"]
"""Policies on a CPU; the test on a GPU takes the other one."""


@pytest.fixture(scope="module", params=["mistral", "gemma 3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, fields = MODELS[request.param]
    made = tmp_path_factory.mktemp("window_prefixes") / kind
    extra = {"sliding_window": WINDOW, "max_position_embeddings": 1 << 13}
    return build_language_model(kind, made, template=CHATML, **fields | extra)


def pipeline(folder: Path, policy: str = "stream", **options: Any) -> OscarVLPipeline:
    options = {"prefix_cache": "1GB", "device": "cpu"} | options
    pipe = OscarVLPipeline(folder, policy=POLICIES[policy], **options)
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


def text(length: int, seed: int = 0) -> str:
    """Return about as many tokens of text, whose beginning depends only on the seed."""
    chosen = random.Random(seed)
    return "".join(chosen.choice("abcdefghij klmnopqrs") for _ in range(length))


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill with NaN, after each plan of a step, what no sequence may read."""
    begin_pages = PageStore.begin_pages

    def begin(store: PageStore, *args: Any) -> None:
        begin_pages(store, *args)
        poison(store)

    with patch.object(PageStore, "begin_pages", begin):
        yield


def saved(pipe: OscarVLPipeline, **request: Any) -> int:
    assert pipe.prefixes is not None
    before = pipe.prefixes.tokens_saved
    pipe(max_new_tokens=2, temperature=0, **request)
    return pipe.prefixes.tokens_saved - before


def test_a_prefix_is_shared_from_the_third_prompt_on(folder: Path) -> None:
    """The first branch finds no window there, and keeps its own; the end of a prompt has one."""
    pipe, system = pipeline(folder), text(700)
    ask = [{"system": system, "prompt": text(900, seed)} for seed in (1, 2, 3, 4)]
    shared = pipe.prepare([user_message(system, [])], Media()).tokens // 128 * 128
    assert [saved(pipe, **one) for one in ask] == [0, 0, shared, shared]
    for length in (1200, 1500):
        [kept] = [one.get_seq_length() for one in pipe.prefixes.caches[-1:]]
        assert saved(pipe, system=system, prompt=text(length, 4)) == kept > shared


@pytest.mark.daily("gemma 3")
def test_layers_with_windows_do_not_grow(folder: Path) -> None:
    """Entries of long prompts hold a window or two of these layers, and say so."""
    pipe = pipeline(folder)
    assert pipe.prefixes is not None

    def of_windows() -> list[int]:
        pipe.store.sweep()
        [bits] = pipe.store.policy.packed_bits
        return [places.used(bits) for places in pipe.store.window_pages]

    for seed, length in enumerate((1000, 3000, 6000)):
        assert saved(pipe, prompt=text(length, seed)) == 0
        assert of_windows() <= [3 * (seed + 1)]
    assert pipe.prefixes.bytes == sum(one.held_bytes for one in pipe.prefixes.caches)
    assert pipe.prefixes.bytes == pipe.store.memory().used_bytes
    looks = list[object]()
    with patch.object(WindowPages, "_of_stream", lambda *given: looks.append(given)):
        pipe.store.sweep()  # Entries do not change.
    assert not looks
    pipe.prefixes.clear()
    assert pipe.store.memory().used_bytes == 0


@pytest.mark.daily("gemma 3")
def test_forecasts_bound_what_prompts_take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their marks; a budget for one request makes room by dropping entries."""
    pipe, keep = pipeline(folder, prefill_chunk=512), PrefixCache.keep
    forecasts, used, growth_bytes = list[int](), [0], pipe.admission.growth_bytes

    def kept(*args: Any) -> None:
        keep(*args)
        pipe.store.sweep()
        used.append(pipe.store.memory().used_bytes)

    ask = [{"system": text(900), "prompt": text(1500, seed)} for seed in (1, 2, 3, 4)]
    with monkeypatch.context() as patched:
        patched.setattr(PrefixCache, "keep", kept)
        patched.setattr(
            type(pipe.admission),
            "reserve",
            lambda _, growth, *__: forecasts.append(growth_bytes(growth)),
        )
        for one in ask:
            pipe(max_new_tokens=2, **one)
    assert pipe.prefixes is not None and pipe.prefixes.hits == 2
    growths = [after - before for before, after in pairwise(used)]
    assert all(x <= forecast for x, forecast in zip(growths, forecasts, strict=True))
    small = pipeline(folder, prefill_chunk=512, kv_budget=max(forecasts), spill=False)
    for one in ask:
        small(max_new_tokens=2, **one)
    assert small.prefixes is not None and 0 < len(small.prefixes) < 4


@pytest.mark.daily("gemma 3")
def test_what_ends_between_two_layers_frees_nothing_that_they_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = {"prompt": text(2500), "max_new_tokens": 4, "temperature": 0, "logprobs": 0}
    expected = pipeline(folder, prefill_chunk=256)(**ask)
    pipe, settle_ended = pipeline(folder, prefill_chunk=256), RunningBatches.settle_ended
    sweeps = list[int]()

    def settle(batches: RunningBatches) -> None:
        settle_ended(batches)
        pipe.store.sweep()  # As after an answer.
        sweeps.append(pipe.store.paused)

    monkeypatch.setattr(RunningBatches, "settle_ended", settle)
    monkeypatch.setattr(EngineThread, "has_calls", True)
    with poisoned():
        answer = pipe(**ask)
    assert len(sweeps) >= 2 * len(pipe.model.get_decoder().layers)
    assert answer.logprobs == expected.logprobs


def walk(pipe: OscarVLPipeline, seed: int, steps: int) -> list[list[int]]:
    """Return the answers of random requests, chats, undos and forks, one after another."""
    chosen, found, chats = random.Random(seed), list[list[int]](), list[Any]()
    for _ in range(steps):
        system = text(chosen.choice((100, 500, 900)), chosen.randrange(2))
        prompt = text(chosen.choice((5, 130, 400, 1200)), chosen.randrange(2))
        options = {"max_new_tokens": chosen.choice((2, 20, 150)), "temperature": 0}
        way = chosen.choice(("request", "chat", "ask", "ask", "undo", "fork", "drop", "trim"))
        chat = chosen.choice(chats) if chats else None
        if way == "request":
            found.append(pipe(prompt=prompt, system=system, **options).token_ids)
        elif way == "chat":
            chats.append(pipe.chat(system))
            found.append(chats[-1].ask(prompt, **options).token_ids)
        elif way == "trim":
            pipe.engine.call(pipe.store.trim)
        elif chat is None:
            continue
        elif way == "ask":
            found.append(chat.ask(prompt, **options).token_ids)
        elif way == "undo" and chat.turns:
            chat.undo()
        elif way == "fork":
            chats.append(chat.fork())
        elif way == "drop":
            chats.remove(chat)
            chat.close()
    for chat in chats:
        chat.close()
    return found


def check_walk(folder: Path, policy: str, seed: int, steps: int, **options: Any) -> None:
    lengths, sizes = deque[tuple[int, int]](), deque[int]()
    longest_crop, reached_bytes = OscarCache.longest_crop, PageStore.reached_bytes

    def crop_of(cache: OscarCache, length: int) -> int:
        lengths.append((length, longest_crop(cache, length)))
        return lengths[-1][1]

    def same_crop(cache: OscarCache, length: int) -> int:
        asked, found = lengths.popleft()
        assert asked == length and longest_crop(cache, length) >= found
        return found

    def bytes_of(*args: Any) -> int:
        sizes.append(reached_bytes(*args))
        return sizes[-1]

    def same_bytes(*args: Any) -> int:
        assert reached_bytes(*args) >= sizes[0]
        return sizes.popleft()

    options = {"prefill_chunk": 512, "prefix_cache": "300KB"} | options
    with (
        poisoned(),
        patch.object(OscarCache, "longest_crop", crop_of),
        patch.object(PageStore, "reached_bytes", bytes_of),
    ):
        pipe = pipeline(folder, policy, **options)
        found = walk(pipe, seed, steps)
        assert pipe.prefixes is not None and pipe.prefixes.bytes <= pipe.prefixes.limit
        pipe.prefixes.clear()
        assert pipe.store.memory().used_bytes == 0
    with (
        patch.object(PageStore, "free_outside_windows", lambda *_: None),
        patch.object(OscarCache, "longest_crop", same_crop),
        patch.object(PageStore, "reached_bytes", same_bytes),
    ):
        pipe = pipeline(folder, policy, **options)
        assert walk(pipe, seed, steps) == found
    assert not (lengths or sizes)


@pytest.mark.daily("mistral-whole pages", "gemma 3-stream")
@pytest.mark.parametrize("policy", DAILY)
def test_random_conversations_answer_as_with_all_pages(folder: Path, policy: str) -> None:
    check_walk(folder, policy, seed=0, steps=10)


@pytest.mark.gpu
def test_conversations_on_a_gpu_answer_as_with_all_pages(folder: Path) -> None:
    check_walk(folder, "standard", 0, 25, device="cuda", dtype="bfloat16")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("policy", DAILY)
def test_many_conversations_answer_as_with_all_pages(folder: Path, policy: str, seed: int) -> None:
    check_walk(folder, policy, seed, steps=60)


class Twins:
    """Reads what a pipeline reads, one prompt after another, into a store that keeps all pages.

    Within ``recording``, it notes where each prompt continues which other one.
    """

    def __init__(self, pipe: OscarVLPipeline) -> None:
        self.pipe, self.store = pipe, PageStore(pipe.policy)
        self.found: dict[str, tuple[Prompt, str | None, int, int]] = {}
        self.entries: dict[Any, str] = {}
        self.caches: dict[str, OscarCache] = {}

    def name(self, prompt: Prompt) -> str:
        words = self.pipe.processor.tokenizer.decode(prompt.inputs["input_ids"][0])
        return words.split("#")[1]

    @contextmanager
    def recording(self) -> Iterator[None]:
        find, keep, twins = PrefixCache.find, PrefixCache.keep, self

        def found(prefixes: PrefixCache, prompt: Prompt, state: object) -> Match:
            match = find(prefixes, prompt, state)
            if match.cache is None:
                source, length = None, 0
            else:
                source = twins.entries[prefixes._entries[-1]]
                length = match.cache.get_seq_length()
            twins.found[twins.name(prompt)] = prompt, source, length, match.shared
            return match

        def kept(prefixes: PrefixCache, prompt: Prompt, state: object, cache: OscarCache) -> None:
            before = {*prefixes._entries}
            keep(prefixes, prompt, state, cache)
            for entry in {*prefixes._entries} - before:
                twins.entries[entry] = twins.name(prompt)

        with patch.object(PrefixCache, "find", found), patch.object(PrefixCache, "keep", kept):
            yield

    def read(self, name: str, chunk: int) -> tuple[OscarCache, torch.Tensor]:
        """Return a cache after the prompt with this name, and the logits of its last token."""
        prompt, source, length, shared = self.found[name]
        if source is None:
            cache = OscarCache(self.store.policy, model=self.pipe.model, store=self.store)
        else:
            if source not in self.caches:
                self.read(source, chunk)
            cache = self.caches[source].fork()
            cache.crop(length - cache.get_seq_length())
        marked = self.pipe.family.marked(prompt, [shared, kept_tokens(prompt)])
        marked = remaining(marked, length) if length else marked
        *_, logits = read_in_chunks(self.pipe.model, marked, cache, chunk)
        assert logits is not None
        self.caches[name] = cache.fork()
        return cache, logits[0]

    @torch.inference_mode()
    def logprobs(self, name: str, answer: list[int], chunk: int) -> list[float]:
        """Return the log-probabilities of an answer's tokens."""
        cache, logits = self.read(name, chunk)
        found = list[float]()
        for token in answer:
            found.append(float(logits.float().log_softmax(-1)[token]))
            ids = torch.tensor([[token]])
            logits = self.pipe.model(ids, **as_argument(cache)).logits[0, -1]
        cache.close()
        return found


def crowd(pipe: OscarVLPipeline, seed: int, count: int) -> dict[str, tuple[list[int], list[float]]]:
    """Return the answers to requests of three threads, with their log-probabilities."""
    found, failed = dict[str, tuple[list[int], list[float]]](), list[BaseException]()

    def ask(thread: int) -> None:
        chosen = random.Random(f"{seed} {thread}")
        chat: Any = None
        for number in range(count):
            name = f"{thread}-{number}"
            system = text(chosen.choice((100, 500, 1500)), chosen.randrange(2))
            prompt = text(chosen.choice((5, 600, 1800)), chosen.randrange(2)) + f"#{name}#"
            length = chosen.choice((2, 40, 160))
            options = {"max_new_tokens": length, "temperature": 0, "logprobs": 0}
            try:
                way = chosen.choice(("request", "request", "chat", "ask", "leave"))
                if way == "leave":
                    stream = pipe.stream(prompt=prompt, system=system, **options)
                    next(iter(stream), None)
                    stream.close()
                    continue
                if way == "ask" and chat is not None:
                    answer = chat.ask(prompt, **options)
                    assert all(x.logprob == x.logprob for x in answer.logprobs)
                    if chosen.random() < 0.5:
                        chat.undo()
                    continue
                if way == "chat":
                    chat = pipe.chat(system)
                    answer = chat.ask(prompt, **options)
                else:
                    answer = pipe(prompt=prompt, system=system, **options)
            except MemoryBusy:
                continue
            found[name] = answer.token_ids, [x.logprob for x in answer.logprobs]

    def guarded(thread: int) -> None:
        try:
            ask(thread)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for error in failed:
        raise error
    return found


def check_crowd(folder: Path, policy: str, seed: int, count: int, spilled: Path) -> None:
    """The first token of an answer has the same log-probability. Keys and values of a decode step
    may be encoded differently, since matrix products of several rows are rounded differently."""
    options = {"kv_budget": "6MB", "spill": spilled} if seed % 2 else {}
    pipe = pipeline(folder, policy, prefix_cache="2MB", prefill_chunk=512, **options)
    twins = Twins(pipe)
    with poisoned(), twins.recording():
        for name in ("first", "second"):
            pipe(prompt=f"#{name}#" + text(300, 3), system=text(500), max_new_tokens=2)
        found = crowd(pipe, seed, count)
    assert pipe.prefixes is not None and pipe.prefixes.hits
    for name, (answer, logprobs) in found.items():
        expected = pipe.engine.call(partial(twins.logprobs, name, answer, 512))
        assert logprobs[0] == pytest.approx(expected[0], abs=1e-4)
        assert logprobs == pytest.approx(expected, abs=0.2)


@pytest.mark.daily("gemma 3")
def test_requests_together_answer_as_with_all_pages(folder: Path, tmp_path: Path) -> None:
    check_crowd(folder, "stream", seed=1, count=2, spilled=tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", DAILY)
def test_many_requests_together_answer_as_with_all_pages(
    folder: Path, policy: str, seed: int, tmp_path: Path
) -> None:
    check_crowd(folder, policy, seed, 12, tmp_path)
