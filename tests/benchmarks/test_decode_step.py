"""Decode steps of small models on a CPU: figures of a cell, tables, the record, what fails."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from benchmarks import decode_step
from benchmarks.cache_variants import VARIANTS, Decoder, Dynamic, FilledCache
from benchmarks.decode_step import STEPS, WARM_UP
from benchmarks.record import Record
from oscar_mm.engine.sampling import SampledTokens

pytestmark = pytest.mark.usefixtures("quick_collection")
WAYS = ["dynamic", "bf16-eager", "bf16-graph", "compact-eager", "compact-graph"]


class Failing(Dynamic):
    def __init__(self, error: Exception) -> None:
        self.error, self.tensor, self.freed = error, None, False

    def fill(self, decoder: Decoder, rows: int, tokens: int, steps: int) -> FilledCache:
        large = torch.zeros(1000)
        self.tensor = weakref.ref(large)
        raise self.error

    def release(self) -> None:
        gc.collect()
        self.freed = self.tensor() is None


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (ValueError("no such thing"), False),
    ],
)
def test_what_fails_is_in_its_row(decoder: Decoder, error: Exception, memory: bool) -> None:
    variant = Failing(error)
    row = decode_step.measure_cell(decoder, variant, 2, 100, 1e9)
    assert row["out_of_memory"] is memory and "ms" not in row
    assert row["error"] == f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert (row["batch"], row["context"], row["way"]) == (2, 100, "DynamicCache")
    assert error.__traceback__ is not None
    # What the failed cell held is given back, unless somebody keeps the error.
    error.__traceback__ = None
    variant.release()
    assert variant.freed


def test_figures_of_a_cell(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = iter([{"requested": 50, "peak": 60}, {}, {"requested": 950, "peak": 1_000_000}])
    monkeypatch.setattr(decode_step, "allocated", lambda device: next(stats))
    row = decode_step.measure_cell(decoder, VARIANTS["bf16-eager"], 2, 100, 1e9)
    assert row["tokens_per_s"] == pytest.approx(2e3 / row["ms"])
    assert row["floor_ms"] == pytest.approx(1e-6 * (row["weights"] + row["kv_bytes"]))
    report = decoder.resident + row["kv_bytes"]
    assert row["memory"] == {"report": report, "peak": 1_000_000, "held": 900}
    assert decoder.resident == sum(weight.nbytes for weight in decoder.model.parameters())
    for peak, same in ((1.009, True), (1.011, False), (0.98, False)):
        assert (
            decode_step.report_agrees(row | {"memory": {"report": 1000, "peak": 1000 * peak}})
            is same
        )
    assert decode_step.report_agrees(row | {"ours": False}) is None


def test_a_package_that_lacks(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = VARIANTS["quantized-hqq"]
    monkeypatch.setattr(type(variant), "missing", lambda self: "hqq is not installed")
    row = decode_step.measure_cell(decoder, variant, 1, 100, 1e9)
    assert row["error"] == "hqq is not installed" and "out_of_memory" not in row


def test_the_next_step_is_launched_before_its_tokens_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    listed = SampledTokens.listed
    monkeypatch.setattr(
        SampledTokens, "listed", lambda choice: (log.append("wait"), listed(choice))[1]
    )
    fed: list[torch.Tensor] = []

    def step(tokens: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        log.append("step")
        fed.append(tokens)
        return torch.eye(9)[tokens + 1]

    cache = FilledCache(
        step, int, ahead=lambda tokens, ended: (log.append("ahead"), fed.append(tokens))
    )
    loop = decode_step.DecodeLoop(cache, torch.device("cpu"), 2)
    loop.step()
    loop.step(last=True)
    assert log == ["step", "ahead", "wait", "step", "wait"]
    assert [tokens.tolist() for tokens in fed] == [[1, 2], [2, 3], [2, 3]]
    assert fed[1] is fed[2]
    decode_step.DecodeLoop(FilledCache(step, int), torch.device("cpu"), 2).step()
    assert log[-2:] == ["step", "wait"]


@pytest.fixture(autouse=True)
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "Decoder", lambda name, device, *, tiny: name)


def run(tmp_path, arguments: list[str], batches: dict[str, list[int]], speed: float) -> int:
    arguments = ["--tiny", "--out", str(tmp_path), *arguments]
    options = decode_step.options_of("decode_step", None, (100,)).parse_args(arguments)

    def measure(decoder: Decoder, bandwidth: float) -> Iterator[dict]:
        for batch in batches[decoder]:
            if not batch:
                raise MemoryError("none left")
            place = {"model": decoder, "way": "w", "context": 100, "batch": batch}
            yield place | {"ms": 1.0, "tokens_per_s": speed}

    cell = ("model", "way", "context", "batch")
    return decode_step.sweep(
        "decode_step", arguments, options, [], measure, lambda rows: None, cell
    )


def test_rows_that_are_not_measured_again_stay(tmp_path) -> None:
    names = ["qwen3-vl-8b", "llava-1.6-vicuna-7b"]
    both = ["--models", ",".join(names)]
    assert run(tmp_path, both, {names[0]: [1, 2], names[1]: [1]}, 10.0) == 0
    assert run(tmp_path, ["--add", "--models", names[0]], {names[0]: [2, 3]}, 20.0) == 0
    [path] = tmp_path.iterdir()
    speeds = {(x["model"], x["batch"]): x["tokens_per_s"] for x in Record.load(path).rows}
    assert speeds == {
        (names[0], 1): 10.0,
        (names[0], 2): 20.0,
        (names[0], 3): 20.0,
        (names[1], 1): 10.0,
    }
    assert {row["command"].count("--add") for row in Record.load(path).rows} == {0, 1}
    assert run(tmp_path, both, {names[0]: [1], names[1]: []}, 10.0) == 0
    assert len(Record.load(path).rows) == 1


def test_a_model_that_fails(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["qwen3-vl-8b", "llava-1.6-vicuna-7b"]
    models = ["--models", ",".join(names)]
    assert run(tmp_path, models, {names[0]: [4, 0], names[1]: [1]}, 10.0) == 1
    [path] = tmp_path.iterdir()
    record = Record.load(path)
    assert [row["batch"] for row in record.rows] == [4, 1]
    assert record.extra["failures"] == {names[0]: "MemoryError: none left"}
    assert "FAILED qwen3-vl-8b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "gpt-5,qwen3-vl-8b"], "unknown names: gpt-5; choose from llava"),
        (["--contexts", "2K"], "2K: must be whole numbers from 1"),
        (["--contexts", "0"], "0: must be whole numbers from 1"),
        (["--ways", "magic"], "unknown names: magic; choose from dynamic"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = decode_step.options_of("decode_step", None, (100,))
    decode_step.add_variants(options, None)
    with pytest.raises(SystemExit):
        options.parse_args(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_needs_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    options = decode_step.options_of("throughput", None, (100,)).parse_args([])
    assert decode_step.sweep("throughput", [], options, [], None, None, ()) == 2
    assert "CUDA" in capsys.readouterr().err


def test_every_variant_is_measured(
    tmp_path, mixture: Decoder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode_step, "Decoder", lambda name, device, *, tiny: mixture)
    arguments = ["--tiny", "--models", "qwen3-vl-30b-a3b", "--batches", "2"]
    arguments += ["--ways", ",".join(WAYS), "--kernels", "--out", str(tmp_path)]
    assert decode_step.main(arguments) == 0
    [path] = tmp_path.iterdir()
    rows = Record.load(path).rows
    assert [row["way"] for row in rows] == [
        "DynamicCache",
        "bf16, eager",
        "bf16, graph",
        "compact, eager",
        "compact, graph",
    ]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert [row["captures"] for row in rows] == [0, 0, 1, 0, 1]
    kv_bytes = {row["way"]: row["kv_bytes"] for row in rows}
    # 2 rows, 2 layers, keys and values of all tokens, 1 KV head of 128 in bfloat16.
    assert kv_bytes["DynamicCache"] == 2 * 2 * 2 * (300 + WARM_UP + STEPS) * 128 * 2
    assert kv_bytes["compact, graph"] < kv_bytes["bf16, graph"]
    assert all(row["kernels"]["launches"] > 100 for row in rows)
    printed = capsys.readouterr().out
    assert "compact, graph" in printed and "aten::mm" in printed


def test_the_compiled_peer_once_unless_chosen(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cells(variants: list[str] | None) -> list[tuple[str, int]]:
        rows = decode_step.rows_of(decoder, 1.0, (2048, 32768), (1,), variants)
        return [cell for cell in rows if "compiled" in cell[0]]

    monkeypatch.setattr(
        decode_step,
        "measure_cell",
        lambda _, variant, rows, context, __, **___: (variant.title, context),
    )
    assert cells(None) == [("StaticCache, compiled", 32768)]
    assert len(cells(["static-compiled"])) == 2
    assert cells(["dynamic"]) == []


def test_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "model": "m",
        "way": "compact, graph",
        "batch": 1,
        "context": 2048,
        "kv_bytes": 10**9,
        "ms": 5.0,
        "tokens_per_s": 200.0,
        "floor_ms": 4.0,
        "ours": True,
        "memory": {"report": 100e9, "peak": 100.5e9},
    }
    slow = row | {"context": 32768, "ms": 5.3, "memory": {"report": 100e9, "peak": 102e9}}
    decode_step.report([row, slow, row | {"context": 4096, "ms": 9.0}])
    printed = capsys.readouterr().out.splitlines()
    assert "m, compact, graph, 1 x 2,048 tokens: 1.25 floors, at most 1.3: met" in printed
    assert "m, compact, graph, 1 x 32,768 tokens: 1.32 floors, at most 1.3: NOT met" in printed
    assert sum("met" in line for line in printed) == 3
    assert "m, compact, graph, 1 x 32,768 tokens: peak 102.00 GB, report 100.00 GB" in printed[-1]


def test_rows_have_adapters_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, variant = Decoder("qwen3-vl-8b-lora-4", torch.device("cpu"), tiny=True), "bf16-graph"
    weights = sum(weight.nbytes for weight in decoder.model.parameters())
    assert weights < decoder.resident < 2 * weights
    decoder.model.set_attn_implementation({"text_config": VARIANTS[variant].attention})

    def logits(names: list[str | None]) -> torch.Tensor:
        monkeypatch.setattr(decoder, "adapters", lambda rows: names)
        with torch.inference_mode():
            cache = VARIANTS[variant].fill(decoder, 5, 20, 4)
            return cache.step(torch.full((5,), 7), torch.zeros(5, dtype=torch.bool)).clone()

    in_turn = decoder.adapters(5)
    assert in_turn == ["0", "1", "2", "3", "0"]
    without, one, all_rows = (logits(x) for x in ([None] * 5, [None, "1", *[None] * 3], in_turn))
    assert (one != without).any(1).tolist() == [False, True, False, False, False]
    assert (all_rows != without).any(1).all() and torch.equal(all_rows[1], one[1])
