"""The models that come with the package: complete, small, loaded by name without a network."""

import json
import socket
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.models import BUNDLED, bundled
from oscar_mm.pipelines import pipeline_for

MB = 10**6
CLASSES = {
    "pocket-vl": "Qwen3VLForConditionalGeneration",
    "pocket-llava": "LlavaNextForConditionalGeneration",
    "pocket-omni": "Qwen3OmniMoeForConditionalGeneration",
}
KINDS = dict.fromkeys(CLASSES, OscarVLPipeline) | {"pocket-omni": OscarOmniPipeline}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))


def test_names() -> None:
    assert list(BUNDLED) == list(CLASSES)
    assert bundled("pocket-vl").name == "pocket-vl"
    for other in ("pocket", "./pocket-vl", "pocket-vl/", Path("pocket-vl"), ""):
        assert bundled(other) is None


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_in_the_folder(name: str) -> None:
    folder = bundled(name)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [CLASSES[name]]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        dtypes = {weights.get_slice(key).get_dtype() for key in names}
    assert dtypes == {"BF16"}
    # As in released checkpoints, which vLLM reads, whatever names transformers has of its own.
    clip = [key for key in names if key.startswith("vision_tower.")]
    assert all(key.startswith("vision_tower.vision_model.") for key in clip)
    assert bool(clip) == (name == "pocket-llava")
    card = " ".join((folder / "README.md").read_text().split())
    assert card.startswith(f"# {name} A {CLASSES[name]} of")
    for words in ("What it was trained on:", "What it cannot do:", "Exact match of greedy answers"):
        assert words in card
    trained = json.loads((folder / "training.json").read_text())
    assert trained["facts"]["steps"] > 1000 and trained["results"]


def test_sizes() -> None:
    sizes = [
        sum(path.stat().st_size for path in bundled(name).iterdir() if path.is_file())
        for name in CLASSES
    ]
    assert max(sizes) < 18 * MB and sum(sizes) < 38 * MB


@pytest.mark.parametrize("name", CLASSES)
def test_loaded_by_name(name: str, no_network) -> None:
    kind = KINDS[name]
    assert pipeline_for(name) is kind
    pipe = kind(name, device="cpu")
    whole = pipe.family.outer_model
    assert type(whole).__name__ == CLASSES[name]
    assert pipe.model.dtype == torch.float32
    assert pipe.max_context >= 8192
    text = pipe.model.config.get_text_config()
    assert text.head_dim in (64, 128) and text.num_key_value_heads < text.num_attention_heads
    assert len(pipe.fingerprint) > 10


def test_a_folder_of_the_same_name(
    qwen3_vl_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is the bundled model; "./name" and a Path are the folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pocket-omni").symlink_to(qwen3_vl_folder, target_is_directory=True)
    assert pipeline_for("pocket-omni") is OscarOmniPipeline
    for folder in ("./pocket-omni", Path("pocket-omni")):
        assert pipeline_for(folder) is OscarVLPipeline
        pipe = OscarVLPipeline(folder, device="cpu")
        assert pipe.model.config.model_type == "qwen3_vl"


@pytest.mark.parametrize("name", ["pocket-vi", "Pocket-VL", "pocket-vl ", "./pocket-vl"])
def test_wrong_names(name: str, tmp_path: Path, monkeypatch, no_network) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        OscarVLPipeline(name)
    message = str(caught.value)
    assert message.startswith(f"model {name}: no such folder; pass the folder of a checkpoint")
    assert "a hub id such as Qwen/" in message
    assert message.endswith(f"{', '.join(BUNDLED)}; did you mean pocket-vl?")


def test_the_other_pipelines_model(no_network) -> None:
    with pytest.raises(InputError, match="'qwen3_omni_moe' is not supported by OscarVLPipeline"):
        OscarVLPipeline("pocket-omni")
