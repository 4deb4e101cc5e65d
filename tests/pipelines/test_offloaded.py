"""Weights that accelerate brings for each forward pass: answers are those in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_module
from torch import nn

from oscar_mm import OscarOmniPipeline, OscarVLPipeline
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.inspect.inspection import inspect_prompt
from tests.pipelines.conftest import NEVER
from tests.prompts import noise, prepare

KINDS: dict[str, tuple[Any, str]] = {
    "llava": (OscarVLPipeline, "llava_next_folder"),
    "qwen": (OscarVLPipeline, "qwen3_vl_folder"),
    "omni": (OscarOmniPipeline, "qwen3_omni_folder"),
}
CPU, PICTURE = torch.device("cpu"), noise(200, 220)


def talk(pipe: Any, path: Path) -> tuple[Any, ...]:
    """What is said with a pipeline's model, which a saved chat belongs to."""
    pipe.model.generation_config.eos_token_id = NEVER
    chat = pipe.chat()
    first = chat.ask("What is it?", images=[PICTURE], max_new_tokens=5).token_ids
    chat.save(path)
    second = pipe.load_chat(path).ask("And why?", max_new_tokens=3).token_ids
    return first, second, pipe.fingerprint


def offloaded(model: nn.Module, how: str, folder: Path) -> None:
    if how == "cpu":
        cpu_offload(model, CPU)
    elif how == "disk":
        disk_offload(model, folder, CPU)
    else:
        cpu_offload(model.get_decoder(), CPU, offload_buffers=True)


@pytest.mark.daily("qwen-standard")
@pytest.mark.parametrize("policy", ["standard", "bf16"])
@pytest.mark.parametrize("name", KINDS)
def test_a_model_that_was_offloaded(name: str, policy: str, request, tmp_path: Path) -> None:
    kind, folder = KINDS[name][0], request.getfixturevalue(KINDS[name][1])

    def made() -> Any:
        return kind(folder, device="cpu", policy=policy, prefix_cache="100MB")

    expected = talk(made(), tmp_path / "chat")
    for how in ("cpu", "disk", "decoder") if policy == "standard" else ("cpu",):
        pipe = made()
        offloaded(pipe.model, how, tmp_path / how)
        assert not supports(pipe.model)
        assert talk(pipe, tmp_path / "chat") == expected
        # Weights that come and go are the same weights.
        assert pipe.prefixes.hits == 0
        pipe(prompt="What is it?", images=[PICTURE], max_new_tokens=1)
        assert pipe.prefixes.hits == 1


@pytest.mark.daily("cpu", "decoder")
@pytest.mark.parametrize("how", ["cpu", "disk", "decoder"])
def test_weights_that_came_back(how: str, qwen3_vl_folder, tmp_path: Path) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu")
    assert supports(pipe.model)
    expected = talk(pipe, tmp_path / "chat")
    offloaded(pipe.model, how, tmp_path / how)
    assert not supports(pipe.model)
    remove_hook_from_module(pipe.model, recurse=True)
    assert supports(pipe.model)
    assert talk(pipe, tmp_path / "chat") == expected


@pytest.mark.daily("model.language_model.layers", "embed_tokens")
@pytest.mark.parametrize(
    "on_disk", ["model.visual", "model.language_model.layers", "lm_head", "embed_tokens", "norm"]
)
def test_parts_on_disk(on_disk: str, qwen3_vl_folder, tmp_path: Path) -> None:
    expected = talk(OscarVLPipeline(qwen3_vl_folder, device="cpu"), tmp_path / "chat")
    decoder = "model.language_model"
    inner = {f"{decoder}.{one}": "cpu" for one in ("embed_tokens", "layers", "norm", "rotary_emb")}
    place = {"model.visual": "cpu", "lm_head": "cpu"} | inner
    place[next(name for name in place if name.endswith(on_disk))] = "disk"
    pipe = OscarVLPipeline(
        qwen3_vl_folder,
        device_map=place,
        dtype="float32",
        model_kwargs={"offload_folder": tmp_path},
    )
    assert any(weight.is_meta for weight in pipe.model.parameters())
    assert pipe.family.device == CPU and set(pipe.family.layer_devices.values()) == {CPU}
    assert talk(pipe, tmp_path / "chat") == expected


def test_an_inspection_of_what_was_offloaded(qwen3_vl_folder) -> None:
    found = []
    for change in (lambda _: None, lambda model: cpu_offload(model, CPU)):
        pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu")
        change(pipe.model)
        prompt = prepare(pipe, "What is it?", pipe.read_media([PICTURE]))
        found.append(inspect_prompt(pipe.model, prompt))
    assert found[0].layers == found[1].layers and found[0].qk_norm
