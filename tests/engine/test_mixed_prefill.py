"""Prompts that are read in pieces, each with a decode step, against the same prompts alone."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from oscar_mm import OscarCache, OscarVLPipeline
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.prompt_tables import PromptTables
from oscar_mm.engine import decode_runner, mixed_prefill, running_batches
from oscar_mm.engine.device_timer import PassTimer
from oscar_mm.engine.mixed_prefill import MixedPrefill
from oscar_mm.engine.request import Request
from oscar_mm.engine.scheduler import Scheduler
from oscar_mm.fast_decode.graph_runner import GraphInputs, GraphRunner
from oscar_mm.fast_decode.prompt_scratch import PromptScratch
from tests.engine.engine import BAD, alone, embedding, empty, loaded, made, run, together
from tests.engine.engine_waits import engine_waits
from tests.engine.mixing import read_by_pieces

MEDIA = Path(__file__).parents[2] / "examples" / "media"

WORDS = ("what", "is", "on", "the", "sign", "near", "a", "red", "door", "why", "not", "every")
CARDS = sorted((MEDIA / "cards").glob("*.png"))[:1]


def text(count: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


@pytest.mark.daily("standard")
@pytest.mark.parametrize("policy", ["bf16", "standard", "compact"])
def test_answers_are_those_alone(
    qwen3_vl_folder, policy, capture, pieces, small, monkeypatch
) -> None:
    prompts = [text(count, count) for count in (3, 90, 41, 7, 150, 150, 16, 60)]
    others = [text(5, seed) for seed in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(MixedPrefill, "of", lambda *_: None)
        plain = loaded(qwen3_vl_folder, policy)
        expected = alone(plain, prompts)
        of_others = alone(plain, others, max_new_tokens=24)
    assert not pieces
    pipe = loaded(qwen3_vl_folder, policy)
    assert together(pipe, [made(pipe, prompt) for prompt in prompts]) == expected
    # Once more, now with captured passes, while other requests decode.
    running = [made(pipe, other, max_new_tokens=24) for other in others]
    for one in running:
        pipe.engine.submit(one)
    pipe.engine.run_until(lambda: all(one.tokens for one in running))
    pieces.clear()
    assert together(pipe, [made(pipe, prompt) for prompt in prompts]) == expected
    assert {with_step for _, with_step in pieces} == {False, True}
    run(pipe, running)
    assert [one.complete().token_ids for one in running] == of_others
    assert empty(pipe)


def unmixed(folder: Path, prompts: list[str], **options) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixedPrefill, "of", lambda *_: None)
        return alone(loaded(folder, "standard"), prompts, **options)


@pytest.mark.daily("options0", "options2")
@pytest.mark.parametrize(
    "options", [{"temperature": 1.0, "seed": 7}, {"logprobs": 2}, {"max_new_tokens": 1}]
)
def test_sampling(qwen3_vl_folder, options, capture, small) -> None:
    prompts = [text(count, count) for count in (60, 5, 90)]
    pipe = loaded(qwen3_vl_folder, "standard")
    requests = [made(pipe, prompt, **options) for prompt in prompts]
    assert together(pipe, requests) == unmixed(qwen3_vl_folder, prompts, **options)
    if "logprobs" in options:
        [first, *_] = requests[0].answer().logprobs
        assert len(first.top) == 2 and first.logprob <= 0


def test_a_prompt_that_comes_during_a_pass_is_in_the_next(
    qwen3_vl_folder, capture, pieces, small, monkeypatch
) -> None:
    prompts, asked, waits, read = [text(60, 1), text(9, 2)], Event(), Event(), list[int]()
    expected = unmixed(qwen3_vl_folder, prompts)
    pipe = loaded(qwen3_vl_folder, "standard")
    first, second = (made(pipe, prompt) for prompt in prompts)

    def seconds_left(_: PassTimer) -> float:
        if first.tokens and not waits.is_set():
            waits.set()
            return 60.0
        if asked.is_set():
            read.append(len(pipe.engine.scheduler._mixed_requests))
        return 0.0

    monkeypatch.setattr(PassTimer, "seconds_left", seconds_left)
    with pipe.engine.keep_stepping(lambda: None):
        pipe.engine.submit(first)
        assert waits.wait(60)
        asked.set()
        pipe.engine.submit(second)
        pipe.engine.run_until(lambda: first.ended and second.ended)
    assert [one.complete().token_ids for one in (first, second)] == expected
    assert read[0] == 1  # The wait has ended, and the next pass reads the second prompt.
    assert empty(pipe)


def test_a_cancelled_prompt_leaves(qwen3_vl_folder, capture, pieces, small) -> None:
    prompts = [text(150, seed) for seed in range(3)]
    expected = unmixed(qwen3_vl_folder, prompts)
    pipe = loaded(qwen3_vl_folder, "standard")
    requests = [made(pipe, prompt) for prompt in prompts]
    for request in requests:
        pipe.engine.submit(request)
    pipe.engine.run_until(lambda: len(pieces) >= 3)
    requests[0].cancel()
    run(pipe, requests)
    assert [request.complete().token_ids for request in requests[1:]] == expected[1:]
    assert empty(pipe)


def test_what_cannot_be_stored_fails_alone(qwen3_vl_folder, capture, small) -> None:
    """NaN in one of the prompts that a piece completes."""
    prompts = [text(4), f"{BAD}", text(5)]
    expected = unmixed(qwen3_vl_folder, prompts)
    pipe = loaded(qwen3_vl_folder, "standard")
    [bad] = {pipe.processor.tokenizer("Zq9")["input_ids"][-1]}
    pipe.model.get_input_embeddings().weight.data[bad] = torch.nan
    requests = [made(pipe, prompt) for prompt in prompts]
    for request in requests:
        pipe.engine.submit(request)
    run(pipe, requests)
    assert [requests[i].complete().token_ids for i in (0, 2)] == [expected[0], expected[2]]
    with pytest.raises(FloatingPointError):
        requests[1].complete()
    assert empty(pipe)


@pytest.mark.parametrize("broken", ["run", "_stored"])
def test_after_an_error_prompts_are_read_alone(
    qwen3_vl_folder, broken, capture, small, monkeypatch, caplog
) -> None:
    prompts = [text(count, count) for count in (60, 5, 90)]
    expected = unmixed(qwen3_vl_folder, prompts)
    pipe, works = loaded(qwen3_vl_folder, "standard"), getattr(PromptScratch, broken)
    calls = list[int]()

    def fails(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the device says no")
        return works(*args)

    monkeypatch.setattr(PromptScratch, broken, fails)
    assert together(pipe, [made(pipe, prompt) for prompt in prompts]) == expected
    assert "the device says no" in caplog.text
    assert together(pipe, [made(pipe, prompt) for prompt in prompts]) == expected
    assert empty(pipe)


def test_turns_and_prefixes(qwen3_vl_folder, capture, pieces, small) -> None:
    """Prompts that continue a cache: later turns, and prompts that begin alike."""
    start = text(80, 1)

    def answers(pipe: OscarVLPipeline) -> list[list[int]]:
        with pipe.chat() as chat, pipe.chat() as other:
            chat.ask("What is it?", images=CARDS[0], max_new_tokens=9)
            for turn in (70, 3, 40):
                chat.ask(text(turn, turn), max_new_tokens=9)
                other.ask(text(turn, 2 * turn), max_new_tokens=9)
            alike = [f"{start} {text(count, count)}" for count in (30, 2, 90)]
            found = [one.ask("Why?", max_new_tokens=9).token_ids for one in (chat, other)]
            for _ in range(2):
                found += together(pipe, [made(pipe, prompt) for prompt in alike])
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixedPrefill, "of", lambda *_: None)
        expected = answers(loaded(qwen3_vl_folder, "bf16", prefix_cache=1 << 26))
    loads = list[int]()
    load = PromptScratch.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptScratch, "load", lambda *args: loads.append(args[2]) or load(*args))
        pipe = loaded(qwen3_vl_folder, "bf16", prefix_cache=1 << 26)
        assert answers(pipe) == expected
    assert len(loads) >= 6


@pytest.mark.parametrize("policy", ["bf16", "standard", "compact", "channel"])
def test_a_past_is_unpacked_into_the_scratch(qwen3_vl_folder, policy, capture, small) -> None:
    """Logits and what is stored, against a prefill that attends to the pages."""
    pipe = loaded(qwen3_vl_folder, policy)
    if not PromptTables.takes_policy(pipe.policy):
        sigmas = pipe.engine.scheduler.reader.sigmas
        assert MixedPrefill.of(pipe.family, pipe.store, sigmas, (4,)) is None
        return
    assert_continued_alike(pipe, (150, 1, 90, 40), (1e-4, 0.02))


def assert_continued_alike(
    pipe: OscarVLPipeline, lengths: tuple[int, ...], errors: tuple[float, float]
) -> None:
    """Compare prompts that continue a cache with a usual prefill: logits, and what is stored, where
    a few codes may differ."""
    reader = pipe.engine.scheduler.reader
    before, *requests = (made(pipe, text(count, count)) for count in lengths)
    with engine_waits(pipe):
        reader.read(before.prompt, before.cache)
        usual = [before.cache.fork() for _ in requests]
        expected = [
            reader.read(request.prompt, cache)
            for request, cache in zip(requests, usual, strict=True)
        ]
        for request in requests:
            request.cache = before.cache.fork()
        found = read_by_pieces(pipe, requests)
        for request, cache, logits, truth in zip(requests, usual, found, expected, strict=True):
            assert (logits - truth).abs().max() <= errors[0] * truth.abs().max()
            theirs = torch.stack(held(cache))
            assert (unpacked(request) - theirs).norm() <= errors[1] * theirs.norm()
            assert request.cache.memory() == cache.memory()


def test_requests_that_end_before_their_first_tokens_release_all(
    qwen3_vl_folder, capture, small
) -> None:
    """Nobody waits any more, so the engine rests."""
    pipe = loaded(qwen3_vl_folder, "standard")
    requests = [made(pipe, text(20, seed)) for seed in range(3)]
    for request in requests:
        pipe.engine.submit(request)

    def completes() -> bool:
        mixed = pipe.engine.scheduler._mixed
        return mixed is not None and bool(mixed._complete)

    pipe.engine.run_until(completes)
    for request in requests:
        request.cancel()
    assert empty(pipe)


@pytest.mark.daily("KeyboardInterrupt")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_a_pass_ends_only_its_prompt(qwen3_vl_folder, error, capture, small) -> None:
    running, prompts = [text(5, seed) for seed in range(3)], [text(60, 1), BAD, text(60, 2)]
    expected = unmixed(qwen3_vl_folder, running, max_new_tokens=40)
    of_prompts = unmixed(qwen3_vl_folder, prompts)
    pipe = loaded(qwen3_vl_folder, "standard")

    def fails(ids: torch.Tensor) -> None:
        if ids.shape[1] > 1:  # Answers may have the prompt's tokens too.
            raise error("the hook says no")

    before = [made(pipe, prompt, max_new_tokens=40) for prompt in running]
    for request in before:
        pipe.engine.submit(request)
    pipe.engine.run_until(lambda: all(len(request.tokens) > 2 for request in before))
    requests = [made(pipe, prompt) for prompt in prompts]
    with embedding(pipe, fails):
        for request in requests:
            pipe.engine.submit(request)
        run(pipe, [*before, *requests])
    assert [request.complete().token_ids for request in before] == expected
    with pytest.raises(RuntimeError):
        requests[1].complete()
    if error is RuntimeError:
        others = [requests[i].complete().token_ids for i in (0, 2)]
        assert others == [of_prompts[i] for i in (0, 2)]
    assert empty(pipe)


def test_a_call_may_use_the_cache_of_a_cancelled_request(
    qwen3_vl_folder, capture, pieces, small, monkeypatch
) -> None:
    """Between its end and the next pass, which must not store its prompt."""
    pipe = loaded(qwen3_vl_folder, "standard")
    prompts = [text(20, 1), text(20, 2)]
    expected = unmixed(qwen3_vl_folder, prompts)
    requests = [made(pipe, prompt) for prompt in prompts]
    admit = Scheduler._admit

    def then_ends(self: Scheduler) -> None:
        admit(self)
        if not requests[0].ended:
            requests[0].cancel()
            requests[0].settle()

    monkeypatch.setattr(Scheduler, "_admit", then_ends)
    for request in requests:
        pipe.engine.submit(request)
    run(pipe, requests)
    assert requests[1].complete().token_ids == expected[1]
    assert requests[0].cache.closed and not requests[0].cache.kv_manager.sequences
    assert empty(pipe)


def test_graphs_are_released_while_prompts_are_read(
    qwen3_vl_folder, capture, pieces, small
) -> None:
    """The next prompts are read with the model's new weights."""
    pipe = loaded(qwen3_vl_folder)
    waiting = [made(pipe, text(150, seed), max_new_tokens=60) for seed in range(2)]
    for request in waiting:
        pipe.engine.submit(request)
    pipe.engine.run_until(lambda: len(pieces) > 2)

    def change() -> None:
        for layer in pipe.model.get_decoder().layers:
            weight = layer.mlp.down_proj.weight
            layer.mlp.down_proj.weight = torch.nn.Parameter(-weight.detach())

    pipe.engine.call(change)
    pipe.release_graphs()
    pipe.engine.run_until(lambda: all(len(request.tokens) > 2 for request in waiting))
    prompts = [text(40, 5), text(50, 6)]
    pieces.clear()
    found = together(pipe, [made(pipe, prompt) for prompt in prompts])
    assert pieces and not all(request.ended for request in waiting)
    run(pipe, waiting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixedPrefill, "of", lambda *_: None)
        fresh = loaded(qwen3_vl_folder)
        for layer in fresh.model.get_decoder().layers:
            weight = layer.mlp.down_proj.weight
            layer.mlp.down_proj.weight = torch.nn.Parameter(-weight.detach())
        assert found == alone(fresh, prompts)


def test_prompts_never_share_room() -> None:
    """Random prompts in a scratch that wraps: each token's place is free until it is stored."""
    generator, none = random.Random(0), SimpleNamespace(kv_manager=SimpleNamespace(sequences=[]))
    mixed = MixedPrefill(None, SimpleNamespace(tokens=100), None)
    for _ in range(600):
        prompt = SimpleNamespace(tokens=generator.randint(1, 100))
        mixed.add(SimpleNamespace(unread=prompt, cache=none, ended=False))
        mixed._allocate()
        held = [range(x.start, x.stop) for x in mixed._readings if x.start is not None]
        places = [place for some in held for place in some]
        assert held and len(set(places)) == len(places) and max(places) < 100
        while len(mixed._readings) > generator.randint(1, 6):
            mixed._readings.popleft()
        mixed._allocate()
        assert mixed._readings[0].start is not None


def test_a_piece_that_no_step_takes_along_runs_in_a_usual_size(
    qwen3_vl_folder, capture, small, monkeypatch
) -> None:
    """A graph of its own would be captured for any other size."""
    plan, run_alone = GraphInputs.plan_ahead, PromptScratch.run_alone
    calls, sizes = count(), list[int]()

    def refused(self: GraphInputs, modalities):
        return None if next(calls) % 2 else plan(self, modalities)

    def noted(self: PromptScratch, piece) -> None:
        sizes.append(piece.size)
        run_alone(self, piece)

    prompts = [text(words, words) for words in (3, 90, 41, 7, 150, 16)]
    expected = unmixed(qwen3_vl_folder, prompts)
    pipe = loaded(qwen3_vl_folder, "standard")
    running = [made(pipe, text(5, seed), max_new_tokens=40) for seed in range(3)]
    for one in running:
        pipe.engine.submit(one)
    pipe.engine.run_until(lambda: all(one.tokens for one in running))
    monkeypatch.setattr(GraphInputs, "plan_ahead", refused)
    monkeypatch.setattr(PromptScratch, "run_alone", noted)
    for _ in range(2):  # Passes of the first prompts run alone in any case.
        sizes.clear()
        assert together(pipe, [made(pipe, prompt) for prompt in prompts]) == expected
    assert sizes and set(sizes) <= {32, 48, 64}
    run(pipe, running)


def test_waiting_prompts_share_passes(qwen3_vl_folder, capture, pieces) -> None:
    """As many as a piece may have tokens of, without room for others."""
    pipe = loaded(qwen3_vl_folder)
    requests = [made(pipe, text(2, seed), max_new_tokens=1) for seed in range(36)]
    tokens = [request.prompt.tokens for request in requests]
    assert sum(tokens[:8]) < 256 < sum(tokens)
    together(pipe, requests)
    assert [size for size, _ in pieces] == [256, 256, 256, 256, 128]


@pytest.mark.parametrize(
    ("rows", "unread", "size"),
    [(0, 10, 64), (0, 5000, 1024), (64, 5000, 960), (64, 100, 192), (240, 100, 272)],
)
def test_rows_fill_tiles(rows: int, unread: int, size: int) -> None:
    assert mixed_prefill._piece_size(rows, unread, 1024) == size
    assert mixed_prefill._piece_size(rows, 5000) == 2560 - rows


@pytest.mark.parametrize(
    ("many", "rows", "unread", "size"),
    [
        *[(True, 64, 1900, 960), (True, 64, 2000, 2496), (True, 0, 1500, 1536)],
        *[(True, 0, 2600, 2560), (False, 64, 1900, 960), (False, 64, 2000, 1088)],
        *[(False, 64, 2200, 960), (False, 32, 1100, 1120), (False, 0, 2000, 1024)],
    ],
)
def test_passes_are_long_only_if_they_are_full_or_fewer(
    monkeypatch, many: bool, rows: int, unread: int, size: int
) -> None:
    monkeypatch.setattr(mixed_prefill, "_SEPARATE_PIECES", 0)
    scratch = SimpleNamespace(tokens=9000, prepare=lambda *given: SimpleNamespace(size=given[2]))
    cache = SimpleNamespace(kv_manager=SimpleNamespace(sequences=[]))
    prompt = SimpleNamespace(tokens=unread, positions=torch.zeros(1, unread), adapter=None)
    mixed = MixedPrefill(None, scratch, None)
    monkeypatch.setattr(mixed, "_begin", lambda readings: None)
    mixed.add(SimpleNamespace(unread=prompt, cache=cache, ended=False))
    piece = mixed.next_piece(rows, many_wait=many)
    assert piece is not None and piece.size == size


@pytest.mark.slow
def test_batches_have_few_sizes_beside_prompts(
    qwen3_vl_folder, capture, small, pieces, monkeypatch
) -> None:
    """Passes of a step and a piece have the given numbers of rows, even while batches change."""
    monkeypatch.setattr(PageStore, "version", 0)
    monkeypatch.setattr(decode_runner, "_BESIDE_PROMPTS", (1, 2, 4, 8, 24))
    monkeypatch.setattr(running_batches, "_KEPT_STEPS", 5)
    steps, together_with, run_step = list[int](), set[tuple[int, int]](), GraphRunner._launched

    def noted(self: GraphRunner, replay, piece, step):
        found = run_step(self, replay, piece, step)
        steps.append(len(found))
        if piece is not None and piece.logits is not None:
            together_with.add((len(found), piece.size))
        return found

    monkeypatch.setattr(GraphRunner, "_launched", noted)
    lengths = [40 + 3 * seed % 17 for seed in range(10)]
    prompts, others = [text(4, seed) for seed in range(10)], [text(60, seed) for seed in range(6)]
    expected = unmixed(qwen3_vl_folder, others)
    pipe = loaded(qwen3_vl_folder, "standard")
    running = [
        made(pipe, prompt, max_new_tokens=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    for one in running:
        pipe.engine.submit(one)
    pipe.engine.run_until(lambda: all(one.tokens for one in running))
    assert together(pipe, [made(pipe, prompt) for prompt in others]) == expected
    assert {rows for rows, _ in together_with} <= {1, 2, 4, 8, 24} and 24 in steps
    assert {rows + size for rows, size in together_with} <= {32, 48, 64}
    steps.clear()
    together(pipe, [made(pipe, prompt, max_new_tokens=40) for prompt in prompts])
    assert 12 in steps and 24 not in steps[steps.index(12) :]  # Some steps after the last piece.


def held(cache: OscarCache) -> list[torch.Tensor]:
    return [x.float() for layer in range(len(cache.layers)) for x in cache.unpacked(layer)]


def unpacked(request: Request) -> torch.Tensor:
    return torch.stack(held(request.cache))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "standard", "compact"])
def test_pieces_on_a_gpu(policy) -> None:
    """Eagerly, captured and replayed, against the usual prefill."""
    pipe = OscarVLPipeline("pocket-vl", device="cuda", dtype="bfloat16", policy=policy)
    lengths = [3, 200, 41, 400, 90, 2, 200, 200, 900]
    exact = pipe.with_policy("bf16")
    for _ in range(3):
        requests = [made(pipe, text(count, count)) for count in lengths]
        with engine_waits(pipe):
            found = read_by_pieces(pipe, requests)
        for request, logits in zip(requests, found, strict=True):
            usual, truth = (made(one, text(3, 0)) for one in (pipe, exact))
            with engine_waits(pipe):  # Both pipelines share the thread.
                expected = pipe.engine.scheduler.reader.read(request.prompt, usual.cache)
                exact.engine.scheduler.reader.read(request.prompt, truth.cache)
            assert (logits - expected).abs().max() <= 0.05 * expected.abs().max()
            true = unpacked(truth)
            least = (unpacked(usual) - true).norm() + 0.02 * true.norm()
            assert (unpacked(request) - true).norm() <= 1.05 * least


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "standard", "compact"])
def test_a_past_on_a_gpu(policy) -> None:
    pipe = OscarVLPipeline("pocket-vl", device="cuda", dtype="bfloat16", policy=policy)
    for _ in range(3):
        assert_continued_alike(pipe, (250, 1, 90, 400), (0.05, 0.15))


@pytest.mark.gpu
def test_decode_steps_with_pieces_on_a_gpu(pieces) -> None:
    """Requests that decode, and prompts in their passes, are answered as without pieces."""
    pipe = OscarVLPipeline("pocket-vl", device="cuda", dtype="bfloat16", policy="standard")
    cards = sorted((MEDIA / "cards").glob("*.png"))[:6]
    codes = [made(pipe, "What is the code?", card, max_new_tokens=60) for card in cards]
    expected = together(pipe, codes)
    for _ in range(3):
        running = [made(pipe, "What is the code?", card, max_new_tokens=60) for card in cards]
        for one in running:
            pipe.engine.submit(one)
        pipe.engine.run_until(lambda now=running: all(one.tokens for one in now))
        others = [made(pipe, text(600, seed), max_new_tokens=8) for seed in range(3)]
        together(pipe, others)
        run(pipe, running)
        assert [one.complete().token_ids for one in running] == expected
    assert {with_step for _, with_step in pieces} == {False, True}
    assert empty(pipe)
