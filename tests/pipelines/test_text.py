"""Language models with their tokenizers: what loads, what is read, what is refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from oscar_mm import InputError, OscarCache
from oscar_mm.admission.capacity import ModelShape
from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.states import layers_of_states
from oscar_mm.pipelines.plan import Session, plan
from oscar_mm.pipelines.text import (
    context_of,
    is_text_model,
    load_text_model,
    outline_text_model,
)
from tests.checkpoints import build_decoder
from tests.languages import build_language_model
from tests.tiny import TEXT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_language_model("llama", tmp_path_factory.mktemp("text") / "llama")


def test_a_model_and_its_prompt(folder: Path) -> None:
    language = load_text_model(folder, device="cpu")
    assert language.context == 1024 and language.model.dtype == torch.float32
    assert language.model.config._attn_implementation == "oscar" and not language.model.training
    whole = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    for most in (7, 100, 10_000):
        prompt = language.prompt(TEXT, most)
        assert torch.equal(prompt.inputs["input_ids"], whole[:, :most])
        count = prompt.inputs["input_ids"].shape[1]
        assert prompt.tokens == count == prompt.next_position.item()
        assert prompt.positions.tolist() == [list(range(count))] and not prompt.modalities.any()
    with torch.no_grad():
        found = language.model(prompt.inputs["input_ids"], position_ids=prompt.positions).logits
        plain = AutoModelForCausalLM.from_pretrained(folder).eval()
        torch.testing.assert_close(found, plain(whole).logits, rtol=1e-4, atol=1e-4)
    assert load_text_model(str(folder), device="cpu", dtype="bfloat16").model.dtype.itemsize == 2


def test_a_text_of_long_tokens_is_read_to_its_end(folder: Path) -> None:
    """Most of a text may be in few tokens."""
    language = load_text_model(folder, device="cpu")
    tokenizer = language.tokenizer
    tokenizer.add_tokens(["=" * 400])
    assert language.prompt("=" * 4000 + TEXT, 50).tokens == 50
    with pytest.raises(InputError, match="the text has no tokens"):
        language.prompt("", 50)


def test_which_models_are_language_models(folder, qwen3_vl_folder, qwen3_omni_folder) -> None:
    assert is_text_model(folder) and is_text_model(str(folder))
    for other in (qwen3_vl_folder, qwen3_omni_folder, "pocket-vl", "pocket-llava"):
        assert not is_text_model(other)
    with pytest.raises(InputError, match="no such folder"):
        is_text_model("gone/at/all")


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_model_without_a_tokenizer(name: str, tmp_path: Path) -> None:
    build_decoder(name).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has no readable tokenizer; pass a folder"):
        load_text_model(tmp_path, device="cpu")


def test_models_that_cannot_be_used(folder: Path, tmp_path: Path, qwen3_vl_folder: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_text_model(tmp_path / "gone")
    with pytest.raises(InputError, match="dtype 'int8'"):
        load_text_model(folder, device="cpu", dtype="int8")
    with pytest.raises(InputError, match="device 'abacus' cannot be used"):
        load_text_model(folder, device="abacus")
    for weights in build_language_model("llama", tmp_path / "broken").glob("*.safetensors"):
        weights.write_bytes(b"nothing")
    with pytest.raises(InputError, match="broken: "):
        load_text_model(tmp_path / "broken", device="cpu")
    with pytest.raises(InputError, match=r"model .*: "):
        load_text_model(qwen3_vl_folder, device="cpu")


LINEAR = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def test_layers_of_states_are_no_keys(tmp_path: Path) -> None:
    build_language_model("qwen3_5_text", tmp_path, **LINEAR)
    assert layers_of_states(outline_text_model(tmp_path).config) == ["linear_attention"] * 2
    assert plan(tmp_path, Session()).shape.layers == 2
    with pytest.raises(InputError, match="has layers of linear_attention, which keep states"):
        load_text_model(tmp_path, device="cpu")
    sliding = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    build_language_model("qwen3", tmp_path / "sliding", **sliding)
    assert not layers_of_states(load_text_model(tmp_path / "sliding", device="cpu").model.config)


@pytest.mark.parametrize("policy", ["compact", "oscar", "bf16"])
def test_a_plan_is_what_a_cache_holds(folder: Path, policy: str) -> None:
    made = plan(folder, Session(text_tokens=900), policy)
    assert made.tokens == {"text": 900, "image": 0, "video": 0, "audio": 0}
    assert (made.family, made.context) == ("llama", 1024)
    language = load_text_model(folder, device="cpu", dtype="bfloat16")
    assert made.shape == ModelShape.of(language.model.config, language.model.num_parameters())
    cache = OscarCache(policy)
    with torch.no_grad():
        language.model(torch.arange(900)[None] % 300, **as_argument(cache))
    report = cache.memory()
    held = report.kv_bytes - report.by_kind["tables"] - report.by_kind["unused"]
    assert made.kv_bytes == held


def test_plans_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    for media in ({"images": 1}, {"audio_s": 60.0}, {"video_s": 5.0}):
        with pytest.raises(InputError, match="is a language model, which supports no images"):
            plan(folder, Session(**media))
    with pytest.raises(InputError, match="'bloom': its configuration has no context length"):
        context_of(AutoConfig.for_model("bloom"))
    AutoConfig.for_model("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has keys and values of different sizes"):
        plan(tmp_path, Session())
