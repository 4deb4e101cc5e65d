"""The benchmark of vLLM's attention, without vLLM: what it asks for and how it judges."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from benchmarks import peers, vllm_attention
from benchmarks.record import Record, Row
from benchmarks.vllm_attention import BOUNDS, bounds, engine_options, model_folder
from oscar_mm.weights.checkpoint_formats import formats_of


def test_options_of_both_kinds(tmp_path) -> None:
    folder = model_folder("qwen3-vl-30b-a3b", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["num_experts"] == 128
    ours = engine_options("standard:bits=4/2", folder, 32768, filled=True)
    assert ours["attention_backend"] == "CUSTOM" and "kv_cache_dtype" not in ours
    assert ours["additional_config"] == {"oscar_mm": {"policy": "standard:bits=4/2"}}
    theirs = engine_options("fp8", folder, 32768, filled=False)
    assert theirs["kv_cache_dtype"] == "fp8" and "attention_backend" not in theirs
    assert theirs["enable_prefix_caching"] and not ours["enable_prefix_caching"]


def test_hybrids_read_their_prompts(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder("qwen3.5-9b", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert config["text_config"]["mamba_ssm_dtype"] == "float32"
    assert config["text_config"]["layer_types"].count("full_attention") == 8
    how = {"filled": True, "hybrid": True, "sizes": (1, 2)}
    for flashinfer, expected in ((None, {"gdn_prefill_backend": "triton"}), (object(), {})):
        monkeypatch.setattr(vllm_attention, "find_spec", lambda _, found=flashinfer: found)
        theirs = engine_options("auto", folder, 2048, **how)
        assert theirs["additional_config"] == expected
        assert theirs["max_num_seqs"] == 2 and "kv_transfer_config" not in theirs
        ours = engine_options("standard", folder, 2048, **how)
        assert ours["additional_config"] == expected | {"oscar_mm": {"policy": "standard"}}


def test_formats_of_weights(tmp_path) -> None:
    """vLLM quantizes to FP8 itself; INT4 is what the configuration says."""
    for form in ("fp8", "int4"):
        folder = model_folder(f"qwen3-vl-8b-{form}", tmp_path / form)
        config = json.loads((folder / "config.json").read_text())
        options = engine_options("auto", folder, 2048, filled=True, weights=form)
        assert ("quantization_config" in config) == (form == "int4")
        assert options.get("quantization") == ("fp8" if form == "fp8" else None)
    assert formats_of(config["quantization_config"])[0].title == "INT4 (compressed-tensors)"


def rows_of(spec: dict[str, Any], seconds: float) -> list[Row]:
    """Rows as a child writes them; ours is twice as fast, and cannot read prompts."""
    speed = 2.0 if spec["attention"] == "standard" else 1.0
    row = {"model": spec["model"], "attention": spec["attention"]}
    if spec["prompts"]:
        return [row | {"what": "prompts", "error": "exit code 1"}] if speed == 2 else []
    return [
        row | {"what": "capacity", "tokens": int(1000 * speed)},
        row | {"what": "one sequence 2048", "ms": 5 / speed, "tokens_per_s": 200 * speed},
    ]


def test_a_record_of_what_ended(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_attention, "measured", rows_of)
    monkeypatch.setattr(vllm_attention, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(vllm_attention, "vllm_versions", lambda: {"vllm": "0"})
    line = ["--out", str(tmp_path), "--attention", "auto,standard", "--prompts"]
    assert vllm_attention.main(line) == 1
    printed = capsys.readouterr().out
    assert "one sequence 2048: standard / auto: 2.00, at least 1.00: met" in printed
    assert "capacity: standard / auto: 2.00, at least 5.60: NOT met" in printed
    assert "exit code 1" in printed
    [path] = tmp_path.glob("vllm_attention-*.json")
    assert [row["what"] for row in Record.load(path).rows].count("capacity") == 2
    before = Record.load(path).rows
    assert vllm_attention.main([*line[:-1], "--add"]) == 0
    after = Record.load(path).rows
    assert after == [row for row in before if "error" not in row], "each figure once"


def test_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(spec: dict[str, Any], seconds: float) -> list[Row]:
        if spec["attention"] == "fp8":
            raise KeyboardInterrupt
        return rows_of(spec, seconds)

    monkeypatch.setattr(vllm_attention, "measured", interrupted)
    monkeypatch.setattr(vllm_attention, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(vllm_attention, "vllm_versions", lambda: {"vllm": "0"})
    with pytest.raises(KeyboardInterrupt):
        vllm_attention.main(["--out", str(tmp_path), "--attention", "auto,fp8,standard"])
    [path] = tmp_path.glob("vllm_attention-*.json")
    assert {row["attention"] for row in Record.load(path).rows} == {"auto"}


def test_mixtures_have_a_bound_of_their_own() -> None:
    rows = [
        {"model": "qwen3-vl-30b-a3b", "attention": name, "what": what, "tokens_per_s": speed}
        for name, speed in (("auto", 100.0), ("standard", 380.0))
        for what in ("full memory 32768", "full memory 131072")
    ]
    [(what, found, least)] = bounds(rows)
    assert "full memory 32768" in what and (found, least) == (3.8, 3.5)
    assert {theirs for _, theirs, _, _ in BOUNDS} == {"auto", "fp8"}


def test_a_child_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"model": "qwen3-vl-8b", "attention": "auto", "prompts": False}
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    [row] = vllm_attention.measured(spec, 60.0)
    assert row["error"] == "exit code 1"


def test_a_format_that_vllm_lacks_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = SimpleNamespace(CacheDType=Literal["auto", "fp8", "turboquant_3bit_nc"])
    for name, module in (("vllm", None), ("vllm.config", None), ("vllm.config.cache", known)):
        monkeypatch.setitem(sys.modules, name, module or SimpleNamespace())
    monkeypatch.setattr(vllm_attention, "version", lambda _: "0.25.0")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=None))

    def begun(spec: dict[str, Any]) -> None:
        raise StopIteration(spec["attention"])

    monkeypatch.setattr(vllm_attention, "waiting_worker", begun)
    monkeypatch.setattr(vllm_attention, "flash_attention_of_turboquant", lambda: None)
    started, errors = list[str](), dict[str, list[Row]]()
    for attention in peers.ATTENTIONS:
        rows = tmp_path / attention
        spec = {"model": "qwen3-vl-8b", "prompts": False, "attention": attention}
        spec |= {"contexts": [2048], "full": [], "folder": str(tmp_path / "model")}
        try:
            vllm_attention.child(spec | {"rows": str(rows)})
        except StopIteration as begins:
            started.append(begins.value)
        else:
            errors[attention] = [json.loads(row) for row in rows.read_text().splitlines()]
    assert started == ["auto", "fp8", "standard", "turboquant_3bit_nc"]
    lacking = {name: rows[0]["error"] for name, rows in errors.items() if rows}
    assert list(lacking) == ["int4_per_token_head", "turboquant_k3v4_nc"]
    assert lacking["int4_per_token_head"] == (
        "vLLM 0.25.0 has no KV cache dtype int4_per_token_head; it has auto, fp8, "
        "turboquant_3bit_nc"
    )
    [row] = peers.of_vllm(errors["turboquant_k3v4_nc"])
    assert row["method"] == "vLLM, TurboQuant k3v4_nc" and "no KV cache dtype" in row["error"]


def test_steps_of_slow_attention_are_measured_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step takes 2 s and gives each of two sequences a token."""
    params = SimpleNamespace(clone=lambda: None)
    output_kind = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=0))
    fakes = {"vllm": SimpleNamespace(SamplingParams=lambda **_: params)}
    for name, module in (fakes | {"vllm.sampling_params": output_kind}).items():
        monkeypatch.setitem(sys.modules, name, module)
    seconds, running = [0.0], list[str]()

    def step() -> list[Any]:
        seconds[0] += 2.0
        token = SimpleNamespace(token_ids=[7])
        return [SimpleNamespace(request_id=name, outputs=[token]) for name in running]

    engine = SimpleNamespace(
        add_request=lambda name, *_: running.append(name),
        has_unfinished_requests=lambda: bool(running),
        step=step,
        abort_request=lambda names: [running.remove(name) for name in names],
    )
    monkeypatch.setattr(vllm_attention, "perf_counter", lambda: seconds[0])
    found = vllm_attention.decode(engine, [[1], [2]], "slow")
    assert found == {"ms": 2000.0, "tokens_per_s": 1.0}
    assert seconds[0] < 30.0, "264 tokens would take 528 s"


@pytest.mark.parametrize(("versions", "expected"), [((2, 3), 2), ((3,), 3)])
def test_turboquant_without_flash_attention_2(
    monkeypatch: pytest.MonkeyPatch, versions: tuple[int, ...], expected: int
) -> None:
    class EngineArgs:
        def create_engine_config(self) -> Any:
            return SimpleNamespace(attention_config=SimpleNamespace(flash_attn_version=2))

    supported = SimpleNamespace(is_fa_version_supported=lambda version: version in versions)
    for name in ("vllm", "vllm.engine", "vllm.vllm_flash_attn"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(
        sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=EngineArgs)
    )
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", supported)
    vllm_attention.flash_attention_of_turboquant()
    config = EngineArgs().create_engine_config()
    assert config.attention_config.flash_attn_version == expected
