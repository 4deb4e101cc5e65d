"""Prompts through ``PromptLayers`` against transformers' own modules."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import torch
from accelerate import dispatch_model

from oscar_mm import OscarCache, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import as_argument
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prefill import prefill_varlen, read_prompt
from oscar_mm.engine.prompt import Prompt
from oscar_mm.fast_decode import prompt_layers
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.fast_decode.layers import FastLayer
from oscar_mm.fast_decode.prompt_layers import PromptLayers
from oscar_mm.media.part import media_parts
from oscar_mm.pipelines.pipeline import Pipeline
from tests.engine.engine_waits import engine_waits

MEDIA = Path(__file__).parents[2] / "examples" / "media"
CARDS = sorted((MEDIA / "cards").glob("*.png"))[:5]
CLIPS = sorted((MEDIA / "clips").glob("*.wav"))[:3]
KINDS = {
    "pocket-vl": OscarVLPipeline,
    "pocket-llava": OscarVLPipeline,
    "pocket-omni": OscarOmniPipeline,
}


@pytest.fixture(scope="module", params=KINDS)
def pipe(request) -> Pipeline:
    return KINDS[request.param](request.param, device="cpu", dtype="float32")


def prompt_of(pipe: Pipeline, question: str = "What is the code in picture 2?") -> Prompt:
    """Pictures, or recordings, and a question."""
    shown = {"audio": CLIPS} if isinstance(pipe, OscarOmniPipeline) else {"images": CARDS}
    return pipe.read_request(first_turn(question, media_parts(**shown)))


def held(cache: OscarCache) -> list[torch.Tensor]:
    return [x for layer in range(len(cache.layers)) for x in cache.unpacked(layer)]


def assert_same(found: torch.Tensor, expected: torch.Tensor, error: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.daily("pocket-omni-None", "pocket-llava-50", "pocket-vl-None")
@pytest.mark.parametrize(("chunk", "most"), [(None, 16), (50, 1 << 13)])
def test_logits_and_cache_are_those_of_the_modules(pipe, chunk, most: int) -> None:
    """At once and in chunks, with an MLP that sees all tokens and few."""
    prompt, layers = prompt_of(pipe), PromptLayers(pipe.model, most)
    caches = [OscarCache("bf16", model=pipe.model) for _ in range(2)]
    expected = read_prompt(pipe.model, prompt, caches[0], chunk)
    with layers.reading(caches[1]):
        found = read_prompt(pipe.model, prompt, caches[1], chunk)
    assert_same(found, expected)
    for mine, theirs in zip(held(caches[1]), held(caches[0]), strict=True):
        assert_same(mine, theirs, 1e-2)  # They are kept in 16-bit precision.


def read_by(
    layers: PromptLayers, pipe: Pipeline, prompt: Prompt, policy: str = "bf16"
) -> torch.Tensor:
    """Logits after a prompt that layers read into a cache of its own."""
    cache = OscarCache(policy, model=pipe.model)
    with layers.reading(cache):
        return read_prompt(pipe.model, prompt, cache)


def test_short_concatenated_prompts(pipe) -> None:
    prompts = [pipe.read_request(first_turn(text)) for text in ("7 W", "What is the code?", "4")]
    found = []
    for fast in (False, True):
        caches = [pipe.new_cache() for _ in prompts]
        view = BatchView(caches[0].store)
        view.set_rows(caches)
        how = PromptLayers(pipe.model, 1 << 13).reading(view) if fast else nullcontext()
        lengths = [prompt.tokens for prompt in prompts]
        with engine_waits(pipe), how:
            found.append(
                prefill_varlen(pipe.model, pipe.family.concatenate(prompts), lengths, view)
            )
        for cache in caches:
            cache.close()
    assert_same(found[1], found[0])


class Recorder:
    """Records nothing: a replay is the function, which runs once more as a capture would."""

    def __init__(self) -> None:
        self.made = self.replayed = 0

    def __call__(self, function, device):
        self.made += 1

        def replay():
            self.replayed += 1
            return function()

        return replay


def test_captured_passes(pipe) -> None:
    """Prompts of several lengths that are padded to one; what padding holds changes nothing."""
    record = Recorder()
    layers = PromptLayers(pipe.model, 1 << 13, record)
    count, used = len(pipe.model.get_decoder().layers), Counter[int]()
    for text in ("7 W", "What is the code in it?", "4", "Which, now?", "7 W"):
        prompt = pipe.read_request(first_turn(text))
        assert prompt.tokens <= 96
        caches = [OscarCache("bf16", model=pipe.model) for _ in range(2)]
        expected = read_prompt(pipe.model, prompt, caches[0])
        with layers.reading(caches[1]):
            assert_same(read_prompt(pipe.model, prompt, caches[1]), expected)
        for mine, theirs in zip(held(caches[1]), held(caches[0]), strict=True):
            assert_same(mine, theirs, 1e-2)
        # A pass zeroes what it pads with, and reads nothing else of it.
        for x in layers._graphs._whole:
            x.fill_(torch.nan)
        used[next(length for length in (8, 16, 24, 32, 64, 96) if length >= prompt.tokens)] += 1
    assert record.made == 2 * count * sum(uses > 1 for uses in used.values())
    assert record.replayed == 2 * count * sum(uses - 1 for uses in used.values()) > 0


@pytest.mark.daily("pocket-omni")
def test_a_prompt_gives_the_same_bits_each_time(pipe) -> None:
    """Before, while and after its length is recorded."""
    layers, prompt = PromptLayers(pipe.model, 1 << 13, Recorder()), prompt_of(pipe)
    found = [read_by(layers, pipe, prompt, "standard") for _ in range(4)]
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.daily("pocket-vl")
def test_graphs_are_captured_again_after_their_release(pipe) -> None:
    record = Recorder()
    layers, prompt = PromptLayers(pipe.model, 1 << 13, record), prompt_of(pipe)
    expected = [read_by(layers, pipe, prompt) for _ in range(2)]
    made, replayed = record.made, record.replayed
    layers.release_graphs()
    assert torch.equal(read_by(layers, pipe, prompt), expected[0])
    assert (record.made, record.replayed) == (made, replayed) and made == replayed > 0
    assert torch.equal(read_by(layers, pipe, prompt), expected[1])
    assert (record.made, record.replayed) == (2 * made, 2 * replayed)


@pytest.mark.daily("pocket-vl")
def test_captured_passes_with_pictures_and_a_past(pipe) -> None:
    """Features that are added between layers, and turns on a kept cache."""
    layers = PromptLayers(pipe.model, 1 << 13, Recorder())
    prompt, more = prompt_of(pipe), pipe.read_request(first_turn("And picture 1?"))
    for _ in range(4):
        caches = [OscarCache("bf16", model=pipe.model) for _ in range(2)]
        for part in (prompt, more):
            expected = read_prompt(pipe.model, part, caches[0])
            with layers.reading(caches[1]):
                assert_same(read_prompt(pipe.model, part, caches[1]), expected)


def test_graphs_of_the_lengths_that_were_used_last_are_kept(monkeypatch) -> None:
    monkeypatch.setattr("oscar_mm.fast_decode.prompt_layers._MAX_LENGTHS", 2)
    pipe = OscarVLPipeline("pocket-vl", device="cpu", dtype="float32")
    record = Recorder()
    layers, each = PromptLayers(pipe.model, 64, record), 2 * len(pipe.model.get_decoder().layers)
    prompts = [pipe.read_request(first_turn(" ".join(["7 W"] * count))) for count in (1, 15, 40)]
    made = []
    for which in (0, 0, 1, 1, 0, 2, 2, 0, 1, 1):
        read_by(layers, pipe, prompts[which])
        made.append(record.made // each)
    assert made == [0, 1, 1, 2, 2, 2, 3, 3, 3, 4], "1 had to go for 2, and 0 had not"


def test_without_memory_for_captured_passes_prompts_run_eagerly(pipe, caplog, monkeypatch) -> None:
    def empty(*_):
        raise torch.OutOfMemoryError("nothing is left")

    monkeypatch.setattr("oscar_mm.fast_decode.prompt_layers._States.empty", empty)
    layers, prompt = (
        PromptLayers(pipe.model, 1 << 13, Recorder()),
        pipe.read_request(first_turn("7 W")),
    )
    expected = read_prompt(pipe.model, prompt, OscarCache("bf16", model=pipe.model))
    for _ in range(3):
        assert_same(read_by(layers, pipe, prompt), expected)
    assert len([x for x in caplog.records if "nothing is left" in x.message]) == 1


def test_a_pass_that_cannot_be_captured_runs_eagerly(pipe, caplog) -> None:
    def record(function, device):
        raise RuntimeError("no graphs here")

    layers = PromptLayers(pipe.model, 1 << 13, record)
    prompt = pipe.read_request(first_turn("7 W"))
    expected = read_prompt(pipe.model, prompt, OscarCache("bf16", model=pipe.model))
    for _ in range(5):
        assert_same(read_by(layers, pipe, prompt), expected)
    assert len([x for x in caplog.records if "no graphs here" in x.message]) == 1
    assert layers._graphs._whole is None, "what nobody uses any more is given back"


def test_nothing_is_captured_that_has_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first pass that ends early has not compiled what it did not come to."""
    pipe, ran = OscarVLPipeline("pocket-vl", device="cpu", dtype="float32"), Counter[str]()

    class Strict(Recorder):
        def __call__(self, function, device):
            part = function.func.__name__
            assert ran[part], f"{part} has never run"
            return super().__call__(function, device)

    def counted(part):
        def run(*arguments):
            ran[part.__name__] += 1
            return part(*arguments)

        run.__name__ = part.__name__
        return run

    for part in (prompt_layers._before, prompt_layers._after):
        monkeypatch.setattr(prompt_layers, part.__name__, counted(part))
    layers = PromptLayers(pipe.model, 1 << 13, record := Strict())
    prompt = pipe.read_request(first_turn("7 W"))
    expected = read_prompt(pipe.model, prompt, OscarCache("bf16", model=pipe.model))
    with monkeypatch.context() as broken:
        broken.setattr(FastLayer, "attend", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            read_by(layers, pipe, prompt)
    for _ in range(3):
        assert_same(read_by(layers, pipe, prompt), expected)
    assert record.made == 2 * len(pipe.model.get_decoder().layers)


def test_rows_with_padding(pipe) -> None:
    ids = torch.randint(20, 60, (3, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    caches, layers = (
        [OscarCache("bf16", model=pipe.model) for _ in range(2)],
        PromptLayers(pipe.model, 64),
    )
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": True}
    with torch.inference_mode():
        expected = pipe.model(**given, **as_argument(caches[0])).logits
        with layers.reading(caches[1]):
            found = pipe.model(**given, **as_argument(caches[1])).logits
    assert_same(found[mask.bool()], expected[mask.bool()])


@pytest.mark.daily("pocket-vl")
def test_others_run_as_written(pipe) -> None:
    """Those with other caches; and all of them afterwards, also where reading fails."""
    prompt, layers = prompt_of(pipe), PromptLayers(pipe.model, 64)
    expected = read_prompt(pipe.model, prompt, OscarCache("bf16", model=pipe.model))
    with pytest.raises(KeyboardInterrupt), layers.reading(OscarCache("bf16", model=pipe.model)):
        assert torch.equal(
            read_prompt(pipe.model, prompt, OscarCache("bf16", model=pipe.model)), expected
        )
        assert supports(pipe.model) and not PromptLayers.takes(pipe.model)
        raise KeyboardInterrupt
    assert PromptLayers.takes(pipe.model)
    assert torch.equal(
        read_prompt(pipe.model, prompt, OscarCache("bf16", model=pipe.model)), expected
    )


def test_what_is_not_taken() -> None:
    model = OscarVLPipeline("pocket-vl", device="cpu").model
    assert PromptLayers.takes(model)
    hook = model.get_decoder().layers[0].register_forward_hook(lambda *_: None)
    assert not PromptLayers.takes(model)
    hook.remove()
    places: dict[str, str | int | torch.device] = {
        "model.visual": "cpu",
        "model.language_model": "cpu",
        "lm_head": "cpu",
    }
    dispatch_model(model, places, force_hooks=True)  # accelerate runs its layers.
    assert not PromptLayers.takes(model)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_on_a_gpu(name: str) -> None:
    """The engine reads so; of several prompts as near to float32 as the modules are. A single one
    may be unlucky: where two experts are as likely, rounding chooses."""
    pipe = KINDS[name](name, device="cuda", dtype="bfloat16")
    exact_model = KINDS[name](name, device="cpu", dtype="float32").model
    reader, errors = pipe.engine.reader, {False: [], True: []}
    reader.refresh()
    for picture in range(1, 9):
        prompt = prompt_of(pipe, f"What is the code in picture {picture}?")
        exact = read_prompt(
            exact_model, prompt.to(torch.device("cpu")), OscarCache("bf16", model=pipe.model)
        )
        for fast in (False, True):
            cache = pipe.new_cache()
            with engine_waits(pipe):
                by_modules = partial(read_prompt, pipe.model)
                found = (reader.read if fast else by_modules)(prompt, cache)
                cache.close()
            errors[fast].append(float((found.float().cpu() - exact).norm() / exact.norm()))
    assert median(errors[True]) < 1.5 * median(errors[False]) and max(errors[True]) < 0.1
    graphs = reader._layers._graphs._graphs.values()
    assert any(one._replays for one in graphs), "all but the first prompt were replayed"
