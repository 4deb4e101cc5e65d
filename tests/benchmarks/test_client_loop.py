"""Loops of many clients: figures on a clock of the test, our engine, and a stand-in for vLLM's."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoProcessor

from benchmarks import client_loop
from benchmarks.client_loop import Arrival, Loop, Meter, ours, ratios, run, vllms
from benchmarks.loop_prompts import VLLMPrompts, asked, pictures, texts
from benchmarks.random_model import make_endless, random_pipeline
from benchmarks.record import Record


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(client_loop, "perf_counter", lambda: now[0])
    return now


class Engine:
    """Gives each request a token each 0.1 s, the first one after 0.5 s."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.left, self.sent = clock, dict[int, list[float]](), list[tuple[int, int]]()

    def send(self, number: int, length: int) -> None:
        self.sent.append((number, length))
        self.left[number] = [self.clock[0] + 0.5 + 0.1 * token for token in range(length)]

    def step(self, idle: float) -> Iterator[Arrival]:
        self.clock[0] += 0.1 if self.left else max(idle, 0.001)
        for number, times in list(self.left.items()):
            due = [at for at in times if at <= self.clock[0] + 1e-9]
            del times[: len(due)]
            if not times:
                del self.left[number]
            if due:
                yield Arrival(number, len(due), not times, self.clock[0])


def test_a_closed_loop(clock: list[float]) -> None:
    engine, loop = Engine(clock), Loop("m", 10, new_tokens=6, seconds=40.0, clients=5)
    row = run(loop, engine.send, engine.step)
    first, later = engine.sent[:5], engine.sent[5:]
    assert [length for _, length in first] == loop.first_lengths()
    assert later and {length for _, length in later} == {6}
    assert [number for number, _ in engine.sent] == [*range(row["requests"])]
    # Each answer of six tokens takes a second.
    assert row["tokens/s"] == pytest.approx(5 * 6, rel=0.03)
    assert row["first token p50 ms"] == row["first token p99 ms"] == 500.0
    assert row["between tokens p50 ms"] == row["between tokens p99 ms"] == 100.0


def test_arrivals(clock: list[float]) -> None:
    engine, loop = Engine(clock), Loop("m", 10, new_tokens=3, seconds=400.0, rate=2.0)
    times = [*loop.arrivals()]
    assert len(times) == pytest.approx(800, rel=0.15) and times == sorted(times)
    row = run(loop, engine.send, engine.step)
    assert row["requests"] == len(times) and {length for _, length in engine.sent} == {3}
    assert row["tokens/s"] == pytest.approx(3 * len(times) / 400, rel=0.1)
    # From the arrival, not from the step that the engine was in then.
    assert 500.0 <= row["first token p50 ms"] <= 600.0


def test_figures_are_of_the_steady_state(clock: list[float]) -> None:
    meter, loop = Meter(), Loop("m", 1, 8, seconds=8.0, clients=1)
    meter.sent(0)
    for at in (101.0, 103.0, 107.0, 109.0):
        meter.received(0, 1, at)
    row = meter.row(loop)
    assert row["tokens/s"] == round(2 / 6, 1) and row["between tokens p50 ms"] == 3000.0
    assert "first token p50 ms" not in row, "it came during the warm-up"


@pytest.mark.slow
def test_our_engine() -> None:
    pipe = make_endless(random_pipeline("qwen3-vl-8b", tiny=True, device="cpu"))
    loops = (
        Loop("tiny", 10, 6, seconds=1.0, clients=3),
        Loop("tiny", 10, 6, seconds=1.0, rate=20.0),
        Loop("tiny", 10, 6, seconds=3.0, clients=3, pictures=1),
    )
    closed, opened, shown = (ours(pipe, ["What?", "Why?"], loop) for loop in loops)
    assert shown["picture tokens"] == 64, "tiny models reduce a picture to 256 x 256"
    for row in (closed, opened, shown):
        assert row["requests"] > 6 and row["tokens/s"] > 0
        assert 0 < row["first token p50 ms"] <= row["first token p99 ms"]
        assert 0 <= row["between tokens p50 ms"] <= row["between tokens p99 ms"]
    assert pipe.engine.call(lambda: pipe.engine.running) == 0 and not pipe.engine.waiting


def test_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    sampling.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)

    class Stand:
        def __init__(self) -> None:
            self.left, self.prompts = dict[str, int](), list[list[int]]()

        def add_request(self, name: str, prompt: dict, params: SimpleNamespace) -> None:
            assert params.output_kind == "delta" and params.ignore_eos
            self.left[name] = params.max_tokens
            self.prompts.append(prompt["prompt_token_ids"])

        def step(self) -> list[SimpleNamespace]:
            for name in self.left:
                self.left[name] -= 1
            found = [
                SimpleNamespace(
                    request_id=name,
                    finished=left == 0,
                    outputs=[SimpleNamespace(token_ids=[7])],
                )
                for name, left in self.left.items()
            ]
            self.left = {name: left for name, left in self.left.items() if left}
            return found

        def abort_request(self, names: list[str]) -> None:
            for name in names:
                del self.left[name]

        def has_unfinished_requests(self) -> bool:
            return bool(self.left)

    engine = Stand()

    def prompt(number: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [number]}

    row = vllms(engine, prompt, Loop("m", 10, new_tokens=4, seconds=0.3, clients=2))
    assert row["requests"] > 2 and not engine.left
    assert engine.prompts == [[number] for number in range(row["requests"])]


def test_both_engines_read_the_same_prompt(tmp_path) -> None:
    """Ids and pixels that the folder's processor makes for vLLM are those of our pipeline."""
    pipe = random_pipeline("qwen3-vl-8b", tiny=True, device="cpu")
    source = VLLMPrompts("qwen3-vl-8b", tmp_path)
    of_vllm, processor = source.prompt(7, "Why?", 2), AutoProcessor.from_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["Qwen3VLForConditionalGeneration"]
    assert source.tokens("Why?", 2) == source.tokens("Why?") + 2 * (256 + 2)
    pipe.processor.image_processor = processor.image_processor  # In full size.
    shown = of_vllm["multi_modal_data"]["image"]
    theirs = processor(text=[of_vllm["prompt"]], images=shown, return_tensors="pt")
    own = pipe.read_request(asked(7, "Why?", 2)).inputs
    assert theirs["input_ids"].tolist() == own["input_ids"].tolist()
    # Our towers read bytes, and each picture once where the processor makes two equal frames.
    frames = theirs["pixel_values"].unflatten(1, (3, 2, -1))
    pixels = own["pixel_values"].float().unflatten(1, (3, 1, -1)) / 127.5 - 1
    torch.testing.assert_close(frames, pixels.expand_as(frames))


def test_no_picture_recurs() -> None:
    made = [picture.tobytes() for number in range(3) for picture in pictures(number, 2)]
    assert len(set(made)) == 6 and {len(pixels) for pixels in made} == {3 * 512 * 512}


def test_texts_have_the_least_number_of_words() -> None:
    found = texts(lambda text: 5 + 2 * len(text.split()), 20)
    assert {len(text.split()) for text in found} == {8}
    assert len(set(found)) == len(found)


def test_ratios() -> None:
    load = {"model": "qwen3-vl-8b", "prompt": 2000, "pictures": 0, "clients": 64, "rate": 0.0}
    rows = [
        {"engine": "oscar_mm", **load, "tokens/s": 3000.0},
        {"engine": "vLLM", **load, "tokens/s": 2000.0},
        {"engine": "oscar_mm", **load, "clients": 0, "rate": 4.0, "tokens/s": 300.0},
        {"engine": "vLLM", "model": "qwen3-vl-8b", "error": "exit code 1"},
        {"engine": "oscar_mm", **load, "pictures": 1, "tokens/s": 2000.0},
        {"engine": "vLLM", **load, "pictures": 1, "tokens/s": 1000.0},
    ]
    assert [*ratios(rows)] == [
        ("qwen3-vl-8b, 64 clients, 2000 tokens", 1.5, 1.3),
        ("qwen3-vl-8b, 64 clients, 2000 tokens, pictures: 1", 2.0, None),
    ]


@pytest.mark.slow
def test_the_command(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--tiny", "--prompts", "30", "--new-tokens", "4", "--seconds", "1"]
    for more, prompt in (([], " 30 "), (["--pictures", "1", "--add"], " 30 + 64 ")):
        assert client_loop.main([*small, *more, "--clients", "2", "--out", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert "2 clients" in printed and "oscar_mm" in printed and prompt in printed


def test_quantized_weights_with_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        client_loop.main(["--models", "qwen3-vl-8b-fp8", "--pictures", "1"])
    assert "--pictures requires models with weights in 16 bits" in capsys.readouterr().err


def test_rows_of_several_runs(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later run replaces its cells, and drops errors of earlier runs."""
    speeds = iter([100.0, None, 300.0])

    def measured(spec: dict, seconds: float) -> list[dict]:
        [loop], speed = spec["loops"], next(speeds)
        if speed is None:
            return [{"engine": spec["engine"], "model": loop["model"], "error": "exit code 1"}]
        return [{"engine": spec["engine"], **loop, "tokens/s": speed}]

    monkeypatch.setattr(client_loop, "measured", measured)
    for prompt, code in (("500", 0), ("2000", 1), ("2000", 0)):
        line = ["--prompts", prompt, "--clients", "2", "--engines", "oscar_mm", "--add"]
        assert client_loop.main([*line, "--out", str(tmp_path)]) == code
        [path] = tmp_path.iterdir()
        rows = Record.load(path).rows
        assert sum("error" in row for row in rows) == code
    assert [(row["prompt"], row["tokens/s"]) for row in rows] == [(500, 100.0), (2000, 300.0)]
