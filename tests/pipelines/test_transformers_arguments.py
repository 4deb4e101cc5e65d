"""Pipelines as users of transformers load and ask them."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, GenerationConfig

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from tests.prompts import REQUESTS, noise

REQUEST = REQUESTS["two images"]
ASKED = {"prompt": "What is it?", "images": noise(64, 96), "max_new_tokens": 12}


@pytest.fixture(scope="module")
def hub(qwen3_vl_folder, tmp_path_factory) -> Path:
    """A cache of the hub, with one checkpoint that has a branch "v1" and a folder "inner"."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / "models--someone--something"
    shutil.copytree(qwen3_vl_folder, repository / "snapshots" / "0123" / "inner")
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text("0123")
    return cache


def test_from_pretrained(qwen3_vl_folder, qwen3_omni_folder) -> None:
    pipe = OscarVLPipeline.from_pretrained(
        qwen3_vl_folder,
        torch_dtype=torch.bfloat16,
        device_map="cpu",
        attn_implementation="eager",
        trust_remote_code=True,
        policy="compact",
        token=None,
    )
    assert type(pipe) is OscarVLPipeline and pipe.model.dtype == torch.bfloat16
    assert pipe.model.config.vision_config._attn_implementation == "eager"
    assert pipe.model.config.text_config._attn_implementation == "oscar"
    assert REQUEST.ask(pipe, max_new_tokens=2).token_ids
    omni = OscarOmniPipeline.from_pretrained(qwen3_omni_folder, device="cpu")
    assert type(omni) is OscarOmniPipeline


def test_the_hubs_arguments(hub) -> None:
    where = {"cache_dir": hub, "revision": "v1", "subfolder": "inner", "local_files_only": True}
    OscarVLPipeline.from_pretrained("someone/something", **where, device="cpu")
    OscarVLPipeline("someone/something", model_kwargs=where, device="cpu")
    for name in ("cache_dir", "revision", "subfolder"):
        with pytest.raises(InputError, match="someone/something"):
            OscarVLPipeline("someone/something", **where | {name: None}, device="cpu")


def test_subfolder_of_a_folder(qwen3_vl_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder.parent, subfolder=qwen3_vl_folder.name, device="cpu")
    assert REQUEST.ask(pipe, max_new_tokens=2).token_ids
    with pytest.raises(InputError, match=r"missing: the folder has no config\.json"):
        OscarVLPipeline(qwen3_vl_folder, subfolder="missing")


def test_generation_config(qwen3_vl_folder) -> None:
    config = GenerationConfig(do_sample=True, temperature=0.3, top_k=7)
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu", generation_config=config)
    sampling = pipe.sampling({}, ())
    assert (sampling.temperature, sampling.top_k) == (0.3, 7)


def test_quantization_config(qwen3_vl_folder, monkeypatch) -> None:
    """It reaches ``from_pretrained`` as it is; no quantized kernels run on a CPU."""
    seen = {}

    def load(*_: Any, **options: Any) -> None:
        seen.update(options)
        raise ImportError("no quantized kernels here")

    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", load)
    with pytest.raises(InputError, match="no quantized kernels here"):
        OscarVLPipeline(qwen3_vl_folder, device="cpu", quantization_config={"bits": 4})
    assert seen["quantization_config"] == {"bits": 4}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_contxt": 5}, "unknown argument max_contxt: .* did you mean max_context?"),
        ({"max_pixels": 50_000}, "max_pixels: pass max_pixels=... with each request"),
        ({"variant": "fp16"}, r"unknown argument variant: .* model_kwargs={'variant': \.\.\.}"),
        ({"load_in_4bit": True}, r"quantization_config=BitsAndBytesConfig\(load_in_4bit=True\)"),
        ({"use_auth_token": "a"}, "pass token="),
        ({"image_processor": 5}, "pass processor="),
        ({"temperature": 0.5}, "with each request"),
        ({"generation_config": {"top_k": 5}}, "must be a GenerationConfig, not dict"),
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, "pass only dtype"),
        ({"revision": "a", "model_kwargs": {"revision": "a"}}, "revision is given twice"),
        ({"attn_implementation": {"": "sdpa"}}, "attn_implementation .* not dict"),
    ],
)
def test_refused_to_load(qwen3_vl_folder, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        OscarVLPipeline.from_pretrained(qwen3_vl_folder, **arguments)


def sampling_of(pipe: Any, **options: Any) -> tuple[float, ...]:
    sampling = pipe.sampling(options, ())
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty


def test_do_sample(qwen, monkeypatch) -> None:
    config = GenerationConfig(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    config.eos_token_id = qwen.model.generation_config.eos_token_id
    monkeypatch.setattr(qwen.model, "generation_config", config)
    for own in (None, True):
        config.do_sample = own
        assert sampling_of(qwen, do_sample=True) == (0.7, 0.8, 20, 1.05)
        assert sampling_of(qwen, do_sample=False) == (0, 1, 0, 1.05)
        assert sampling_of(qwen, do_sample=False, temperature=0)[0] == 0
        assert sampling_of(qwen, do_sample=True, temperature=0.5, top_p=0.9) == (0.5, 0.9, 0, 1)


def test_options_as_transformers_has_them(qwen) -> None:
    greedy = qwen(**ASKED, temperature=0).token_ids
    same = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "use_cache": True}
    same |= {"pad_token_id": 0, "return_full_text": False, "streamer": None, "max_length": None}
    assert qwen(**ASKED, **same).token_ids == greedy
    with qwen.chat() as chat:
        assert chat.ask(**ASKED, **same).token_ids == greedy
    (result,) = qwen.batch([ASKED | same])
    assert result.answer.token_ids == greedy
    assert qwen.sampling({"min_new_tokens": 3}, ()).min_tokens == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_length": 20}, "max_length=20: pass max_new_tokens="),
        ({"num_beams": 4}, "num_beams=4: beams are not supported"),
        ({"num_return_sequences": 2}, "pipe.batch"),
        ({"return_full_text": True}, "only the new text"),
        ({"stop_strings": ["a"]}, "pass stop="),
        ({"eos_token_id": [5]}, "stop_token_ids"),
        ({"text": "What is it?"}, "pass prompt="),
        ({"generate_kwargs": {"top_k": 5}}, "as arguments"),
        ({"do_sample": "yes"}, "do_sample='yes': must be True or False"),
        ({"do_sample": False, "temperature": 0.5}, "contradict"),
        ({"do_sample": True, "temperature": 0}, "contradict"),
        ({"min_new_tokens": 2, "min_tokens": 2}, "are the same"),
        ({"eos_token_id": torch.ones(2)}, "stop_token_ids"),
        ({"assistant_model": object()}, "drafts=True of the pipeline"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5: leave it out"),
    ],
)
def test_refused_options(qwen, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        qwen(**ASKED, **options)
    assert not re.search(r"unknown argument|\n", str(caught.value))
