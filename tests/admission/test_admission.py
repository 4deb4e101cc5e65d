"""Requests that have no room are refused with numbers, before towers run, and nothing changes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from oscar_mm import OscarOmniPipeline, OscarVLPipeline
from oscar_mm.admission import admission
from oscar_mm.admission.capacity import HIDDEN_STATES
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.cache.placement import SlotForecast, bytes_over_time, pool_bytes
from oscar_mm.errors import InputError, MemoryBusy, RequestTooLarge
from oscar_mm.models import BUNDLED
from oscar_mm.pipelines import pipeline_for
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.policy import PLAIN, KVPolicy
from tests.pipelines.conftest import NEVER, omni  # noqa: F401 - a fixture
from tests.prompts import clip, noise, prepare, tone
from tests.recordings import write_sound

PICTURES = [noise(300, 300, seed) for seed in range(6)]
POLICIES = ("channel", "oscar", "bf16")


@pytest.fixture(scope="module")
def vl(qwen3_vl_folder: Path) -> OscarVLPipeline:
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu", dtype="bfloat16")
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


def like(pipe: Pipeline, **options: Any) -> Pipeline:
    return type(pipe)(pipe.model, processor=pipe.processor, **options)


@contextmanager
def nothing_runs(pipe: Pipeline) -> Iterator[None]:
    def run(*_: object) -> None:
        raise AssertionError("the model ran")

    # But for norms, of whose weights the balancing is made.
    modules = [module for name, module in pipe.model.named_modules() if "norm" not in name]
    hooks = [module.register_forward_pre_hook(run) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def in_use(report: MemoryReport) -> int:
    return report.kv_bytes - report.by_kind["tables"] - report.by_kind["unused"]


def is_stored(planned: float, report: MemoryReport, pipe: Pipeline) -> bool:
    """Whether that much is in use, but for what an answer has to spare for its next tokens."""
    spare, rest = divmod(int(planned) - in_use(report), pipe.admission._slot_bytes()[PLAIN])
    return 0 <= spare <= 32 and not rest


@pytest.mark.daily("channel")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_forecast_is_what_is_stored(
    vl: OscarVLPipeline, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reports are of the moment before free slots go back.
    monkeypatch.setattr(OscarCache, "shrink", lambda cache: None)
    pipe = like(vl, policy=policy)
    prompt = prepare(pipe, "What is it?", pipe.read_media(PICTURES))
    for answer in (1, 40):
        growth, sizes = pipe.admission.growth(prompt, answer), pipe.admission._slot_bytes()
        stored, pools = bytes_over_time(growth.held, sizes), pool_bytes(growth.held, sizes)
        report = pipe(PICTURES, "What is it?", max_new_tokens=answer).memory
        assert len(stored) == answer and is_stored(stored[-1], report, pipe)
        # Tables are not foreseen, and pools may grow by less.
        assert 0.97 * pools < report.kv_bytes < 1.01 * pools
    # A chat: what it holds, and most that a turn adds to that while it goes on.
    seen: list[SlotForecast] = []
    pipe.admission.reserve = lambda growth, *_: seen.append(growth)
    with pipe.chat() as chat:
        for shown, answer in ((PICTURES[:3], 20), (None, 50), (PICTURES[3:], 3)):
            before, most = pipe.store.memory().used_bytes, 0
            stream = chat.stream("And now?", images=shown, max_new_tokens=answer)
            for _ in stream:
                most = max(most, pipe.store.memory().used_bytes)
            growth = seen.pop()
            planned = bytes_over_time(growth.held, pipe.admission._slot_bytes())
            assert is_stored(planned[-1], chat.memory, pipe)
            page = min(pipe.admission._slot_bytes().values())
            assert most - page <= before + pipe.admission.growth_bytes(growth) <= 1.05 * most + 1


@pytest.mark.daily("pocket-vl", "pocket-omni")
@pytest.mark.parametrize("name", BUNDLED)
def test_foreseen_of_bundled_models(name: str) -> None:
    pipe = pipeline_for(name)(name, device="cpu", dtype="bfloat16")
    shown: dict[str, Any] = {"images": PICTURES}
    if isinstance(pipe, OscarOmniPipeline):
        shown["audio"] = [tone(3.0)]
    prompt = prepare(pipe, "What does picture 2 say?", pipe.read_media(**shown))
    answer = pipe(prompt="What does picture 2 say?", **shown, max_new_tokens=20)
    growth, sizes = pipe.admission.growth(prompt, 20), pipe.admission._slot_bytes()
    stored = bytes_over_time(growth.held, sizes)
    ended = len(answer.token_ids) - (answer.finish_reason == "length")
    assert is_stored(stored[ended], answer.memory, pipe)
    assert answer.memory.kv_bytes < 1.01 * pool_bytes(growth.held, sizes)


@pytest.mark.parametrize(("new_tokens", "forecasts"), [(7, 1), (5000, 2)])
def test_a_short_request_is_foreseen_once(
    vl: OscarVLPipeline, monkeypatch: pytest.MonkeyPatch, new_tokens: int, forecasts: int
) -> None:
    """The thread that sends it makes the forecast, so that the engine thread need not. Forecasts of
    long requests are not kept, since they take memory."""
    pipe, threads, forecast = like(vl), list[threading.Thread](), admission.slot_forecast

    def noted(policy: KVPolicy, new: np.ndarray, answer: int, *past: Any) -> SlotForecast:
        if answer == new_tokens - 1:
            threads.append(threading.current_thread())
        return forecast(policy, new, answer, *past)

    monkeypatch.setattr(admission, "slot_forecast", noted)
    stream = pipe.stream(prompt="How old is that?", max_new_tokens=new_tokens)
    next(iter(stream))
    stream.close()
    assert len(threads) == forecasts and threads[0] is threading.main_thread()


def test_each_request_of_a_batch_is_foreseen(vl: OscarVLPipeline) -> None:
    requests = [{"images": PICTURES[:n], "prompt": "What?", "max_new_tokens": 9} for n in (2, 3)]
    seen = []
    pipe = like(vl)
    pipe.admission.reserve = lambda growth, prompt, _: seen.append((growth, prompt))
    results = pipe.batch(requests)
    sizes = pipe.admission._slot_bytes()
    for (growth, prompt), result in zip(seen, results, strict=True):
        assert prompt.tokens == result.answer.prompt_tokens
        assert is_stored(bytes_over_time(growth.held, sizes)[-1], result.answer.memory, pipe)


def test_headers_decide_before_pixels_are_decoded(
    vl: OscarVLPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.png"
    Image.fromarray(noise(256, 256)).save(path)
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(path.read_bytes()[:2000])
    pipe = like(vl, max_context=200)
    monkeypatch.setattr("oscar_mm.media.media.load_image", None)
    for ask in (pipe, lambda images, prompt, **how: pipe.chat().ask(prompt, images, **how)):
        with pytest.raises(
            RequestTooLarge, match="over the context, but only 200 fit: image 256"
        ) as found:
            ask([damaged] * 4, "What is it?", max_new_tokens=8)
        for said in ("damaged.png: 64", "(at least 2 of these 4 fit)"):
            assert said in str(found.value)
        assert found.value.fits == 200 < found.value.asked
    [result] = pipe.batch([{"images": [damaged] * 4, "prompt": "What?"}])
    assert isinstance(result.error, RequestTooLarge)
    # The numbers are those of the prompt itself.
    monkeypatch.undo()
    whole = prepare(vl, "What is it?", vl.read_media([path] * 4))
    assert found.value.asked == whole.tokens + 8


def test_recordings_and_videos(omni: OscarOmniPipeline, tmp_path: Path) -> None:  # noqa: F811
    long = write_sound(tmp_path / "long.flac", tone(20.0))
    short = like_omni(omni, max_context=200)
    with nothing_runs(short), pytest.raises(RequestTooLarge, match=r"audio 26. \(long.flac: 26."):
        short(prompt="Who?", audio=long, max_new_tokens=4)
    told = short.chat()
    with nothing_runs(short), pytest.raises(RequestTooLarge, match=r"audio 26. \(long.flac: 26."):
        told.tell("Who?", "Nobody.", audio=long)
    # A stream without a header: nobody knows how long it is, and it is read as far as it may fit.
    unknown = write_sound(tmp_path / "long.aac", tone(20.0))
    for ask in (short, told.ask):
        with nothing_runs(short), pytest.raises(InputError, match="longer than the 15 s that fit"):
            ask(prompt="Who?", audio=unknown, max_new_tokens=4)
    with nothing_runs(short), pytest.raises(RequestTooLarge, match="keep fewer of their frames"):
        short(prompt="Who?", videos=[clip(300)], max_new_tokens=4)
    # Not wrong by what headers do not tell.
    count = omni(prompt="Who?", audio=long, max_new_tokens=1).prompt_tokens
    assert like_omni(omni, max_context=count + 1)(prompt="Who?", audio=long, max_new_tokens=1)
    with pytest.raises(RequestTooLarge):
        like_omni(omni, max_context=count)(prompt="Who?", audio=long, max_new_tokens=1)


def like_omni(pipe: Pipeline, **options: Any) -> Pipeline:
    return OscarOmniPipeline(pipe.family.outer_model, processor=pipe.processor, **options)


def test_refusals_by_the_budget_are_right(vl: OscarVLPipeline) -> None:
    alone = like(vl)
    prompt = prepare(alone, "What?", alone.read_media(PICTURES))
    needed = alone.admission.growth_bytes(alone.admission.growth(prompt, 30))
    assert like(vl, kv_budget=needed)(PICTURES, "What?", max_new_tokens=30)
    tight = like(vl, kv_budget=needed - 1)
    with (
        nothing_runs(tight),
        pytest.raises(RequestTooLarge, match=r"over kv_budget .*, or raise") as found,
    ):
        tight(PICTURES, "What?", max_new_tokens=30)
    assert prompt.tokens < found.value.fits < found.value.asked == prompt.tokens + 30
    fits = found.value.fits - prompt.tokens
    assert len(tight(PICTURES, "What?", max_new_tokens=fits).token_ids) == fits
    with pytest.raises(RequestTooLarge):
        tight(PICTURES, "What?", max_new_tokens=fits + 1)
    # Requests of a batch one after the other, where they do not fit together.
    answers = fits, 30, min(fits, 4)
    rows = [{"images": PICTURES, "prompt": "What?", "max_new_tokens": n} for n in answers]
    errors = [result.error for result in tight.batch(rows)]
    assert errors[0] is None is errors[2] and isinstance(errors[1], RequestTooLarge)
    assert tight.budget.used_bytes == 0


def test_nothing_is_lost(vl: OscarVLPipeline, tmp_path: Path) -> None:
    one = like(vl, policy="bf16").chat()
    one.ask("What?", images=PICTURES[:2], max_new_tokens=4)
    limits = {"kv_budget": 3 * one.memory.kv_bytes, "max_context": 2000}
    pipe = like(vl, policy="bf16", spill=tmp_path, **limits)
    stored, asking = pipe.chat(), pipe.chat()
    for chat in (stored, asking):
        chat.ask("What?", images=PICTURES[:2], max_new_tokens=4)

    def state() -> tuple:
        chats = [(x.segments, x.memory.to_dict(), x.turns) for x in (stored, asking)]
        tokens = [x._spillable.conversation.token_ids.tolist() for x in (stored, asking)]
        return chats, tokens, pipe.store.memory(), list(tmp_path.iterdir())

    before = state()
    too_much: list[dict[str, Any]] = [
        {"images": PICTURES * 2, "max_new_tokens": 4},
        {"max_new_tokens": 1500},
        {"max_new_tokens": 2000},
        {"images": PICTURES * 9},
    ]
    for options in too_much:
        with (
            nothing_runs(pipe),
            pytest.raises(RequestTooLarge, match=r"tokens are needed, over .* stored"),
        ):
            asking.ask("And these?", **options)
        with nothing_runs(pipe), pytest.raises(RequestTooLarge):
            asking.stream("And these?", **options)
        assert state() == before
    # Others go to disk only for what then fits.
    asking.ask("And this?", images=PICTURES[:3], max_new_tokens=4)
    assert stored.memory.kv_bytes == 0 and len(list(tmp_path.iterdir())) == 1
    assert stored.ask("Why?", max_new_tokens=4).token_ids


def test_memory_of_a_device(vl: OscarVLPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = like(vl)
    prompt = prepare(pipe, "What?", pipe.read_media(PICTURES))
    stored = pool_bytes(pipe.admission.growth(prompt, 20).added, pipe.admission._slot_bytes())
    read = HIDDEN_STATES * 64 * 2 * prompt.tokens
    free = {"cpu": stored + read}
    monkeypatch.setattr(admission, "free_bytes", lambda device: free[device.type])
    assert pipe(PICTURES, "What?", max_new_tokens=20)
    pipe.store.trim()
    free["cpu"] -= 1
    with (
        nothing_runs(pipe),
        pytest.raises(RequestTooLarge, match=r"free memory of cpu .*prefill_chunk"),
    ):
        pipe(PICTURES, "What?", max_new_tokens=20)
    assert pipe(PICTURES[:3], "What?", max_new_tokens=20)
    assert like(vl, prefill_chunk=64)(PICTURES, "What?", max_new_tokens=20)
    with pipe.chat() as other, pipe.chat() as chat:
        free["cpu"] = 1 << 30
        other.ask("What?", images=PICTURES, max_new_tokens=20)
        other.ask("And?", images=PICTURES, max_new_tokens=20)
        free["cpu"] = read
        with nothing_runs(pipe), pytest.raises(MemoryBusy, match="free memory of cpu"):
            chat.ask("What?", images=PICTURES, max_new_tokens=20)
        with nothing_runs(pipe), pytest.raises(RequestTooLarge, match="free memory of cpu"):
            chat.ask("What?", images=PICTURES * 4, max_new_tokens=20)
    free["cpu"] = stored + read - 1
    # Free when it was asked, and taken by others when its turn comes.
    stream = pipe.stream(PICTURES[:1], "What?", max_new_tokens=4)
    free["cpu"] = 1000
    with nothing_runs(pipe), pytest.raises(MemoryBusy, match=r"1\.00 KB is free on cpu"):
        list(stream)


def test_a_request_waits_for_a_chat_that_is_closed_during_its_check(
    vl: OscarVLPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First turns are checked while the engine thread may close other chats; such a chat is neither
    forgotten nor a reason to refuse the request for good. Here the prefix cache keeps its pages."""
    pipe = like(vl)
    other, asked = pipe.chat(), {"images": PICTURES, "max_new_tokens": 20}
    other.ask("What?", **asked)
    prompt = prepare(pipe, "What?", pipe.read_media(PICTURES))
    total = pool_bytes(pipe.admission.growth(prompt, 20).added, pipe.admission._slot_bytes())
    total += HIDDEN_STATES * 64 * 2 * prompt.tokens
    fitting = admission.Admission._fitting

    def close_meanwhile(self: admission.Admission, *given: Any) -> int:
        other.close()
        return fitting(self, *given)

    monkeypatch.setattr(admission.Admission, "_fitting", close_meanwhile)
    monkeypatch.setattr(admission, "unused_bytes", lambda device: 0)
    left = lambda device: total - pipe.store.memory().pool_bytes  # noqa: E731
    monkeypatch.setattr(admission, "free_bytes", left)
    with pipe.chat() as chat, pytest.raises(MemoryBusy, match="free memory of cpu"):
        chat.ask("What?", **asked)


def test_the_driver_is_asked_only_if_torch_may_hold_too_little(
    vl: OscarVLPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = like(vl)
    prompt = prepare(pipe, "What?")
    stored = pool_bytes(pipe.admission.growth(prompt, 4).added, pipe.admission._slot_bytes())
    needed, asked = stored + HIDDEN_STATES * 64 * 2 * prompt.tokens, []
    held = [needed, needed - 1]

    def free(device: torch.device) -> int:
        asked.append(device)
        return needed

    monkeypatch.setattr(admission, "unused_bytes", lambda device: held[0])
    monkeypatch.setattr(admission, "free_bytes", free)
    pipe.admission.check_prompt(prompt, 4)
    assert not asked
    del held[0]
    pipe.admission.check_prompt(prompt, 4)
    assert len(asked) == 1
