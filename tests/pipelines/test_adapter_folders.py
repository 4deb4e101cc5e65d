"""A PeftModel or an adapter's folder in place of a checkpoint answers like the merged model."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.cli import run
from oscar_mm.models import source_of
from oscar_mm.pipelines import pipeline_for
from tests.adapters import PLACES
from tests.lora import PeftReference
from tests.prompts import REQUESTS

peft = pytest.importorskip("peft")
REQUEST = REQUESTS["two images"]


def base_model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def adapted(folder: Path, config: Any = None) -> Any:
    """The checkpoint with random adapters."""
    torch.manual_seed(0)
    usual = {"r": 4, "lora_alpha": 16, "init_lora_weights": False}
    config = config or peft.LoraConfig(target_modules=list(PLACES), **usual)
    return peft.get_peft_model(base_model(folder), config).eval()


def answer(model: Any, **arguments: Any) -> list[int]:
    pipe = OscarVLPipeline(model, device="cpu", policy="bf16", **arguments)
    return REQUEST.ask(pipe, max_new_tokens=8).token_ids


@pytest.fixture(scope="module")
def adapter(qwen3_vl_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    adapted(qwen3_vl_folder).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(qwen3_vl_folder) -> list[int]:
    """What the merged model answers."""
    merged = adapted(qwen3_vl_folder).merge_and_unload()
    tokens = answer(merged)
    assert tokens != answer(qwen3_vl_folder)
    return tokens


def rewritten(folder: Path, copy: Path, **fields: Any) -> Path:
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "adapter_config.json").read_text()) | fields
    (copy / "adapter_config.json").write_text(json.dumps(config))
    return copy


def refused(model: Any, words: str, **arguments: Any) -> None:
    with pytest.raises(InputError, match=words) as caught:
        OscarVLPipeline(model, **arguments)
    assert "\n" not in str(caught.value)


def test_a_peft_model(qwen3_vl_folder, expected) -> None:
    model = adapted(qwen3_vl_folder)
    pipe = OscarVLPipeline(model, policy="bf16")
    assert REQUEST.ask(pipe, max_new_tokens=8).token_ids == expected
    with model.disable_adapter():
        assert REQUEST.ask(pipe, max_new_tokens=8).token_ids == answer(qwen3_vl_folder)
    assert pipe.model is model.get_base_model()


def test_a_folder(adapter, expected) -> None:
    assert answer(adapter) == answer(str(adapter)) == expected
    assert pipeline_for(adapter) is OscarVLPipeline


def test_commands_accept_the_folder(adapter, qwen3_vl_folder, capsys) -> None:
    asked = ["ask", "-m", str(adapter), "-p", "What?", "--max-new-tokens", "4", "--json"]
    assert run([*asked, "--policy", "bf16", "--device", "cpu"]) == 0
    pipe = OscarVLPipeline(adapter, device="cpu", policy="bf16")
    found = json.loads(capsys.readouterr().out)["token_ids"]
    assert found == pipe(prompt="What?", max_new_tokens=4).token_ids
    plans = []
    for model in (adapter, qwen3_vl_folder):
        assert run(["plan", "-m", str(model), "--images", "2"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1]
    with pytest.raises(
        InputError, match=r"holds an adapter, which cannot be .* pass the base model"
    ):
        source_of(adapter)


@pytest.mark.slow
def test_quantized_weights_do_not_round_the_adapter(qwen3_vl_folder, adapter) -> None:
    for weights in ("fp8", "int4"):
        reference = PeftReference(qwen3_vl_folder, {"a": adapter}, weights)
        tokens, _ = reference.answer("a", REQUEST, 8)
        assert answer(adapter, weights=weights, dtype="float32") == tokens
    pipe = OscarVLPipeline(adapter, device="cpu", weights="fp8")
    matrices = load_file(adapter / "adapter_model.safetensors")
    found = {name: x for name, x in pipe.model.named_parameters() if ".lora_" in name}
    assert len(found) == len(matrices)
    for name, matrix in found.items():
        stored = matrices["base_model.model." + name.replace(".default.", ".")]
        assert torch.equal(matrix, stored), name


def test_dtype(adapter) -> None:
    pipe = OscarVLPipeline(adapter, device="cpu", dtype="bfloat16")
    assert {one.dtype for one in pipe.model.parameters()} == {torch.bfloat16}
    assert not pipe.model.training


def test_adapters_beside_the_layers(qwen3_vl_folder) -> None:
    prompt = peft.PromptTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=2,
        num_layers=2,
        token_dim=64,
        num_attention_heads=4,
    )
    refused(adapted(qwen3_vl_folder, prompt), "PROMPT_TUNING .* merge the adapter .* use LoRA")
    invoked = peft.LoraConfig(target_modules=list(PLACES), alora_invocation_tokens=[5, 6])
    refused(peft.PeftModel(base_model(qwen3_vl_folder), invoked), "type LORA .* do not act within")


def test_folders_that_do_not_fit(adapter, qwen3_omni_folder, tmp_path, monkeypatch) -> None:
    name = "adapter_config.json"
    gone = rewritten(adapter, tmp_path / "gone", base_model_name_or_path="/no/such/model")
    refused(gone, "its base model /no/such/model is not on this machine; .*PeftModel")
    nameless = rewritten(adapter, tmp_path / "nameless", base_model_name_or_path=None)
    refused(nameless, "names no base model; load the base model and pass peft.PeftModel")
    other = rewritten(adapter, tmp_path / "other", base_model_name_or_path=str(qwen3_omni_folder))
    refused(other, "OscarOmniPipeline supports")
    wide = rewritten(adapter, tmp_path / "wide", r=8)
    refused(wide, f"{wide}: the adapter cannot be loaded", device="cpu")
    more = rewritten(adapter, tmp_path / "more", target_modules=[*PLACES, "o_proj"])
    refused(more, r"lacks \d+ weights, such as .*o_proj", device="cpu")
    empty = rewritten(adapter, tmp_path / "empty")
    (empty / "adapter_model.safetensors").unlink()
    refused(empty, "the adapter cannot be loaded", device="cpu")
    file = empty / "adapter_model.safetensors"
    file.write_bytes((adapter / file.name).read_bytes()[:-5])
    refused(empty, "the adapter cannot be loaded", device="cpu")
    (empty / name).write_text("[")
    refused(empty, f"{name} cannot be read")
    monkeypatch.setitem(sys.modules, "peft", None)
    refused(adapter, "needs peft: pip install peft")
