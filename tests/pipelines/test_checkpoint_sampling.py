"""How tokens are chosen where a request does not say it: as the checkpoint's generation_config."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.engine.sampling import Sampling
from oscar_mm.pipelines.pipeline import Pipeline
from tests.prompts import noise

RELEASED = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
}
RULES = (0.7, 0.8, 20, 1.05)
GREEDY = (0.0, 1.0, 0, 1.0)


@pytest.fixture
def pipe(qwen, monkeypatch) -> Pipeline:
    """Its checkpoint samples as the released Qwen3-VL do."""
    return says(qwen, monkeypatch, **RELEASED)


def rules_of(sampling: Sampling) -> tuple[float, ...]:
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty


def says(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Pipeline:
    config = GenerationConfig(eos_token_id=pipe.model.generation_config.eos_token_id, **fields)
    monkeypatch.setattr(pipe.model, "generation_config", config)
    return pipe


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        ({}, RULES),
        ({"temperature": None, "top_p": None, "top_k": None, "repetition_penalty": None}, RULES),
        ({"top_k": 5}, (0.7, 0.8, 5, 1.05)),
        ({"repetition_penalty": 1.0}, (0.7, 0.8, 20, 1.0)),
        ({"temperature": 0}, GREEDY),
        ({"temperature": 1.2}, (1.2, 1.0, 0, 1.0)),
        ({"temperature": 1.2, "top_p": 0.5}, (1.2, 0.5, 0, 1.0)),
    ],
)
def test_what_is_not_said_is_the_checkpoints(pipe, given: dict[str, Any], rules: tuple) -> None:
    assert rules_of(pipe.sampling(given, ())) == rules


@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({}, GREEDY),
        ({"do_sample": False, "repetition_penalty": 1.2}, (0.0, 1.0, 0, 1.2)),
        ({"temperature": 0.7, "top_k": 20}, GREEDY),
        ({"do_sample": True}, (1.0, 1.0, 0, 1.0)),
        ({"do_sample": True, "top_p": 0.9}, (1.0, 0.9, 0, 1.0)),
        ({"do_sample": True, "min_p": 0.1}, (1.0, 1.0, 0, 1.0)),
    ],
)
def test_what_a_checkpoint_may_say(qwen, monkeypatch, fields: dict[str, Any], rules) -> None:
    sampling = says(qwen, monkeypatch, **fields).sampling({}, ())
    assert rules_of(sampling) == rules and sampling.min_p == fields.get("min_p", 0)


def test_what_a_checkpoint_may_not_say(qwen, monkeypatch) -> None:
    pipe = says(qwen, monkeypatch, do_sample=True)
    monkeypatch.setattr(pipe.model.generation_config, "top_p", 3.0)
    with pytest.raises(InputError, match=r"top_p=3\.0: must be"):
        pipe(None, "What is it?")


def test_every_way_to_ask(pipe) -> None:
    request = {"prompt": "What is it?", "images": noise(64, 96), "max_new_tokens": 12}
    rules = dict(zip(("temperature", "top_p", "top_k", "repetition_penalty"), RULES, strict=True))
    expected = pipe(**request, **rules, seed=5).token_ids
    greedy = pipe(**request, temperature=0).token_ids
    assert expected != greedy
    assert pipe(**request, seed=5).token_ids == expected
    with pipe.chat() as chat:
        assert chat.ask(**request, seed=5).token_ids == expected
    results = pipe.batch([request | {"seed": 5}, request | {"temperature": 0}])
    assert [one.answer.token_ids for one in results] == [expected, greedy]


def test_omni_says_it_of_its_outer_model(omni, speaking, monkeypatch) -> None:
    whole = omni.family.outer_model
    monkeypatch.setattr(whole, "generation_config", GenerationConfig(**RELEASED))
    assert omni.model.generation_config.do_sample is None
    assert rules_of(omni.sampling({}, ())) == RULES
    says(omni, monkeypatch, do_sample=False)
    assert omni.sampling({}, ()).temperature == 0


def test_saved_and_loaded(qwen3_omni_folder: Path, qwen3_vl_folder: Path, tmp_path: Path) -> None:
    """As a released checkpoint has it, in a file of its own."""
    for kind, folder in (
        (OscarVLPipeline, qwen3_vl_folder),
        (OscarOmniPipeline, qwen3_omni_folder),
    ):
        copy = tmp_path / folder.name
        copy.mkdir()
        for file in folder.iterdir():
            if file.name != "generation_config.json":
                (copy / file.name).symlink_to(file)
        GenerationConfig(**RELEASED).save_pretrained(copy)
        assert rules_of(kind(copy, device="cpu").sampling({}, ())) == RULES
        assert rules_of(kind(folder, device="cpu").sampling({}, ())) == GREEDY
