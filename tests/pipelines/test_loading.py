"""What a pipeline is made of, and one line for everything that it cannot be made of."""

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    ViTConfig,
    ViTModel,
)

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.models import bundled
from oscar_mm.pipelines import loading
from oscar_mm.pipelines.families.llava_next import LlavaNext
from oscar_mm.pipelines.families.qwen3_5 import Qwen3_5
from oscar_mm.pipelines.families.qwen3_omni import Qwen3Omni
from oscar_mm.pipelines.families.qwen3_vl import Qwen3VL
from oscar_mm.pipelines.loading import Placement, meta_model, tensor_plan
from oscar_mm.policy import DEFAULT
from tests.prompts import REQUESTS
from tests.tiny_qwen3_5 import qwen3_5

REQUEST = REQUESTS["two images"]


@pytest.fixture(scope="module")
def expected(qwen3_vl_folder) -> list[int]:
    return REQUEST.ask(OscarVLPipeline(qwen3_vl_folder, device="cpu"), max_new_tokens=8).token_ids


@pytest.fixture
def loaded(qwen3_vl_folder) -> Any:
    return AutoModelForImageTextToText.from_pretrained(qwen3_vl_folder, dtype=torch.float32)


def refused(model: Any, *words: str, **arguments: Any) -> str:
    with pytest.raises(InputError) as caught:
        OscarVLPipeline(model, **arguments)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    for word in words:
        assert re.search(word, message), (word, message)
    return message


def answers(pipe: OscarVLPipeline, expected: list[int]) -> bool:
    return REQUEST.ask(pipe, max_new_tokens=8).token_ids == expected


def test_folder(qwen3_vl_folder, expected) -> None:
    for model in (qwen3_vl_folder, str(qwen3_vl_folder), f"{qwen3_vl_folder}/"):
        pipe = OscarVLPipeline(model, device=torch.device("cpu"))
        assert answers(pipe, expected)
        assert not pipe.model.training and pipe.model.dtype == torch.float32
        assert pipe.model.config.text_config._attn_implementation == "oscar"


def test_relative_folder(qwen3_vl_folder, expected, monkeypatch) -> None:
    monkeypatch.chdir(qwen3_vl_folder.parent)
    assert answers(OscarVLPipeline(qwen3_vl_folder.name, device="cpu"), expected)
    monkeypatch.chdir(qwen3_vl_folder)
    assert answers(OscarVLPipeline(".", device="cpu"), expected)


def test_loaded_model(qwen3_vl_folder, loaded, expected) -> None:
    loaded.train()
    assert answers(OscarVLPipeline(loaded), expected)
    assert not loaded.training
    processor = AutoProcessor.from_pretrained(qwen3_vl_folder)
    pipe = OscarVLPipeline(loaded, processor=processor, device="cpu", policy=DEFAULT)
    assert pipe.model is loaded and pipe.processor is processor
    assert answers(pipe, expected)
    assert loaded.config.vision_config._attn_implementation == "sdpa"
    OscarVLPipeline(loaded, attn_implementation="eager")
    assert loaded.config.vision_config._attn_implementation == "eager"
    assert loaded.config.text_config._attn_implementation == "oscar"


def test_two_pipelines_share_a_model(loaded, expected) -> None:
    packed, exact = OscarVLPipeline(loaded), OscarVLPipeline(loaded, policy="bf16")
    first = REQUEST.ask(exact, max_new_tokens=8).memory
    assert answers(packed, expected)
    assert REQUEST.ask(exact, max_new_tokens=8).memory == first


def test_loaded_model_with_arguments_of_loading(loaded) -> None:
    refused(loaded, "dtype", "loaded", dtype="bfloat16")
    refused(loaded, "revision", "loaded", model_kwargs={"revision": "main"})
    refused(loaded, "^revision", "loaded", revision="main")
    refused(loaded, "device 'nowhere'", device="nowhere")
    refused(loaded, "attn_implementation", "nothing", attn_implementation="nothing")
    refused(loaded, "processor", "int", "no tokenizer", processor=5)
    tokenizer = AutoProcessor.from_pretrained(loaded.name_or_path).tokenizer
    refused(loaded, "processor", "no tokenizer", processor=tokenizer)
    loaded.config._name_or_path = loaded.name_or_path = ""
    refused(loaded, "processor", "pass processor=")


def test_other_models(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vit = ViTModel(ViTConfig(**sizes, num_hidden_layers=1, image_size=28, patch_size=14))
    words = (
        "'vit' is not supported",
        "OscarVLPipeline supports llava_next, .*, qwen2_5_vl, qwen3_vl, qwen3_vl_moe",
        "and text-only models of transformers",
    )
    refused(vit, *words)
    vit.save_pretrained(tmp_path)
    refused(tmp_path, *words)


def test_the_other_pipelines_models(qwen3_vl_folder, qwen3_omni_folder) -> None:
    refused(qwen3_omni_folder, "'qwen3_omni_moe'", "OscarOmniPipeline supports qwen3_omni_moe")
    with pytest.raises(
        InputError, match=r"OscarVLPipeline supports llava_next, .*, qwen2_5_vl, qwen3_vl"
    ):
        OscarOmniPipeline(qwen3_vl_folder)


def test_no_chat_template(qwen3_vl_folder) -> None:
    processor = AutoProcessor.from_pretrained(qwen3_vl_folder)
    processor.chat_template = None
    refused(qwen3_vl_folder, "no chat template", processor=processor, device="cpu")


def test_what_is_no_checkpoint(tmp_path: Path, qwen3_vl_folder) -> None:
    refused(tmp_path, re.escape(str(tmp_path)), "no config.json")
    refused(qwen3_vl_folder / "config.json", "is a file")
    refused(tmp_path / "missing", "no such folder")
    refused(f"{tmp_path}/missing", "no such folder")
    refused("./missing", "no such folder")
    refused("some/missing/folder", "no such folder")
    refused("", "empty")
    refused(" ", "empty")
    for value in (5, None, ["a/b"], b"a/b", torch.nn.Linear(2, 2)):
        refused(value, "hub id, a folder or a loaded model", type(value).__name__)


def test_damaged_checkpoints(tmp_path: Path, qwen3_vl_folder) -> None:
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "JSON")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "model_type")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_tomorrow"}))
    refused(tmp_path, "of_tomorrow")
    usual = json.loads((qwen3_vl_folder / "config.json").read_text())
    for fields, words in (
        ([usual], "config.json must be a JSON object, not list; download it"),
        (
            usual | {"quantization_config": [1]},
            "quantization_config must be a JSON object, not list",
        ),
        (usual | {"text_config": 3}, r"wrong type \(.*text_config.*\); download it again"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        refused(tmp_path, words)
    folder = tmp_path / "copy"
    shutil.copytree(qwen3_vl_folder, folder)
    (folder / "model.safetensors").unlink()
    refused(folder, "model.safetensors")
    (folder / "model.safetensors").write_bytes(b"no tensors")
    refused(folder, re.escape(str(folder)), device="cpu")
    shutil.copy(qwen3_vl_folder / "model.safetensors", folder)
    for path in folder.glob("*processor*.json"):
        path.unlink()
    refused(folder, "processor", "pass processor=")
    OscarVLPipeline(folder, processor=AutoProcessor.from_pretrained(qwen3_vl_folder))


def test_hub_id_without_a_network(monkeypatch) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", connect)
    refused("oscar-mm-tests/of-no-model", "oscar-mm-tests/of-no-model", "or one of the bundled")
    refused("of-no-model", "of-no-model: no such folder", "pocket-vl, pocket-llava, pocket-omni")


def test_hub_id_of_local_files_only(monkeypatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    refused("oscar-mm-tests/no-model", "no-model", model_kwargs={"local_files_only": True})


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("policy", "fast", ["unknown policy 'fast'", "compact"]),
        ("policy", None, ["policy", "NoneType"]),
        ("policy", 2, ["policy", "int"]),
        ("dtype", "int8", ["dtype 'int8'", "bfloat16"]),
        ("dtype", "load", ["dtype 'load'", "bfloat16"]),
        ("dtype", torch.float64, ["float64", "bfloat16"]),
        ("dtype", 16, ["dtype 16", "bfloat16"]),
        ("device", "nowhere", ["device 'nowhere'"]),
        ("device", ["cpu"], ["device"]),
        ("max_context", 0, ["max_context=0", "positive"]),
        ("max_context", True, ["max_context=True", "positive"]),
        ("max_context", "8k", ["max_context='8k'", "positive"]),
        ("prefill_chunk", -1, ["prefill_chunk=-1", "positive"]),
        ("prefill_chunk", 0.5, ["prefill_chunk=0.5", "positive"]),
        ("limits", {"max_image_pixels": 5}, ["limits", "MediaLimits", "dict"]),
        ("video_fps", 0, ["fps", "0"]),
        ("video_fps", "2", ["fps", "'2'"]),
        ("attn_implementation", "nothing", ["nothing", "eager"]),
        ("processor", 5, ["processor", "int", "no tokenizer"]),
        ("model_kwargs", {"of_tomorrow": 1}, ["of_tomorrow"]),
        ("model_kwargs", "revision", ["model_kwargs", "dict", "str"]),
        ("model_kwargs", ["revision"], ["model_kwargs", "dict", "list"]),
        ("device_map", "nowhere", ["nowhere"]),
        ("model_kwargs", {"device_map": "auto"}, ["device_map", "pipeline"]),
        ("model_kwargs", {"tp_plan": "auto"}, ["tp_plan", "pipeline"]),
        ("model_kwargs", {"attn_implementation": "sdpa"}, ["attn_implementation", "pipeline"]),
        ("model_kwargs", {"dtype": "float16"}, ["dtype=", "pipeline"]),
        ("model_kwargs", {"torch_dtype": "float16"}, ["torch_dtype", "dtype=", "pipeline"]),
    ],
)
def test_arguments(qwen3_vl_folder, argument: str, value: Any, words: list[str]) -> None:
    refused(qwen3_vl_folder, *words, **{argument: value})


def test_missing_packages_are_reported(qwen3_vl_folder, monkeypatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ImportError("a package is missing: pip install it\nand so on")

    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", load)
    refused(qwen3_vl_folder, "pip install it$", device="cpu")


def test_device_and_device_map(qwen3_vl_folder, expected) -> None:
    refused(qwen3_vl_folder, "device and device_map", device="cpu", device_map="auto")
    assert answers(OscarVLPipeline(qwen3_vl_folder, device_map="cpu", dtype="auto"), expected)
    assert answers(OscarVLPipeline(qwen3_vl_folder, device_map={"": "cpu"}), expected)


def test_model_kwargs_go_through(qwen3_vl_folder, expected) -> None:
    kwargs = {"revision": "main", "local_files_only": True, "use_safetensors": True}
    assert answers(OscarVLPipeline(qwen3_vl_folder, device="cpu", model_kwargs=kwargs), expected)
    assert kwargs == {"revision": "main", "local_files_only": True, "use_safetensors": True}


def test_dtypes(qwen3_vl_folder) -> None:
    for dtype, chosen in {"bfloat16": torch.bfloat16, torch.float16: torch.float16}.items():
        pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu", dtype=dtype)
        assert pipe.model.dtype == chosen
    auto = OscarVLPipeline(qwen3_vl_folder, dtype="auto", device_map="cpu")
    assert auto.model.dtype == torch.float32


def test_context_of_the_model(qwen3_vl_folder, loaded) -> None:
    assert OscarVLPipeline(loaded).max_context == 65536
    assert OscarVLPipeline(loaded, max_context=10**9).max_context == 65536
    assert OscarVLPipeline(loaded, max_context=100).max_context == 100


def test_quantized_weights_are_placed_as_they_are_loaded(qwen3_vl_folder, monkeypatch) -> None:
    """They cannot be moved afterwards: bitsandbytes raises where a model is sent to a device."""
    load = AutoModelForImageTextToText.from_pretrained
    seen: dict[str, Any] = {}

    def fake(source: str, **options: Any) -> Any:
        seen.update(options)
        options.pop("quantization_config")
        model, report = load(source, **options)
        model.to = None
        return model, report

    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", fake)
    OscarVLPipeline(
        qwen3_vl_folder, device="cpu", model_kwargs={"quantization_config": {"bits": 4}}
    )
    assert seen["device_map"] == {"": torch.device("cpu")}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "cpu", "device_map": "auto"}, "device and device_map"),
        ({"device": "cpu", "tp_plan": "auto"}, "device and tp_plan"),
        ({"device_map": {"": "cpu"}, "tp_plan": "auto"}, "device_map and tp_plan"),
        ({"tp_plan": "all"}, "tp_plan='all': must be 'auto'"),
        ({"device": "nowhere"}, "device 'nowhere' cannot be used"),
        ({"device": ["cpu"]}, "device ['cpu'] cannot be used"),
    ],
)
def test_what_contradicts_itself(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        Placement(**arguments)


def test_places() -> None:
    assert Placement("cpu").target == torch.device("cpu") and Placement("cpu").on_cpu
    assert Placement(device_map="auto").target is None


def test_a_loaded_model_stays_as_it_is(qwen3_vl_folder) -> None:
    loaded = OscarVLPipeline(qwen3_vl_folder, device="cpu").model
    with pytest.raises(
        InputError, match="device_map cannot be used with a model that is already loaded"
    ):
        OscarVLPipeline(loaded, device_map="auto")


def plan_of(family: Any, folder: Path, count: int = 2) -> dict[str, str]:
    model = meta_model(family.auto_class, AutoConfig.from_pretrained(folder))
    return tensor_plan(model, count)


def divided(plan: dict[str, str]) -> set[str]:
    """Last names of what is not left whole."""
    return {name.split(".")[-1] for name, style in plan.items() if "replicated" not in style}


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(("family", "name"), [(Qwen3VL, "pocket-vl"), (LlavaNext, "pocket-llava")])
def test_dense_decoders(family, name) -> None:
    plan = plan_of(family, bundled(name))
    assert divided(plan) == {*ATTENTION, *MLP, "lm_head"}
    assert plan["model.language_model.layers.*.self_attn.k_proj"] == "colwise"
    assert not any("vis" in place for place in plan)


def test_experts() -> None:
    plan = plan_of(Qwen3Omni, bundled("pocket-omni"))
    assert divided(plan) == {*ATTENTION, "experts", "gate_up_proj", "down_proj", "lm_head"}


def test_experts_that_cannot_be_cut(qwen3_vl_moe_folder) -> None:
    assert divided(plan_of(Qwen3VL, qwen3_vl_moe_folder)) == {*ATTENTION, "lm_head"}


def test_states_are_divided_by_heads(qwen3_5_moe_folder) -> None:
    plan = plan_of(Qwen3_5, qwen3_5_moe_folder)
    linear = {"in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}
    experts = {"experts", "gate_up_proj"}
    assert divided(plan) == {*ATTENTION, *MLP, *linear, *experts, "lm_head"}
    shared = "model.language_model.layers.*.mlp.shared_expert"
    assert plan[f"{shared}.up_proj"] == "colwise" and plan[f"{shared}.down_proj"] == "rowwise"


def test_states_that_cannot_be_divided(tmp_path, monkeypatch) -> None:
    qwen3_5(tmp_path, seed=1, num_attention_heads=4, num_key_value_heads=4)
    monkeypatch.setattr(loading, "_processes", lambda: 4)
    with pytest.raises(InputError, match=r"a plan of your own .* of qwen3_5: pass 'auto'$"):
        OscarVLPipeline(tmp_path, tp_plan={"lm_head": "colwise_gather_output"})
    with pytest.raises(InputError, match=r"2 key heads .* among 4 processes: start 1 or 2$"):
        OscarVLPipeline(tmp_path, tp_plan="auto")
    qwen3_5(tmp_path / "other", seed=1, num_attention_heads=6, num_key_value_heads=3)
    for kind in ("3 KV heads in a layer", "2 key heads in a linear-attention layer"):
        count = 5 - int(kind[0])  # that divides the other heads
        monkeypatch.setattr(loading, "_processes", lambda count=count: count)
        with pytest.raises(InputError, match=rf"{kind}, .* {count} processes: start 1$"):
            OscarVLPipeline(tmp_path / "other", tp_plan="auto")


def test_the_talker_stays_whole(qwen3_omni_talker_folder) -> None:
    plan = plan_of(Qwen3Omni, qwen3_omni_talker_folder)
    talking = {name: style for name, style in plan.items() if not name.startswith("thinker.")}
    assert talking and not divided(talking)
    assert "k_proj" in divided(plan)


def test_an_output_layer_that_cannot_be_sharded(qwen3_vl_folder) -> None:
    # 500 tokens.
    assert "lm_head" in divided(plan_of(Qwen3VL, qwen3_vl_folder, 2))
    assert "lm_head" not in divided(plan_of(Qwen3VL, qwen3_vl_folder, 3))
