"""Models whose heads are divided between two processes answer as one process does."""

import re
from pathlib import Path
from typing import Any

import pytest

from oscar_mm import InputError
from oscar_mm.pipelines.loading import Placement
from tests.languages import CHATML, build_language_model
from tests.pipelines.divided import (
    CARDS_OF,
    ODD_EXPERTS,
    asked,
    asked_more,
    asked_of_states,
    by_eager_experts,
    heard,
    pipeline,
    run,
)
from tests.pipelines.test_text_models import LINEAR
from tests.tiny_qwen3_5 import qwen3_5

POCKET = ("pocket-vl", "pocket-llava", "pocket-omni")
HYBRIDS = ("hybrid", "hybrid with experts", "hybrid language model")


@pytest.fixture(scope="module")
def models(
    qwen2_5_vl_folder, qwen3_vl_moe_folder, qwen3_omni_talker_folder, tmp_path_factory
) -> dict[str, str]:
    hybrids = {name: tmp_path_factory.mktemp("hybrid") for name in HYBRIDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    # With seed 3, the logits of two tokens differ by only 0.03.
    qwen3_5(hybrids["hybrid"], seed=6, **heads)
    qwen3_5(hybrids["hybrid with experts"], seed=3, moe=True, **heads)
    # Its projections are grouped by key head.
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "template": CHATML}
    fields = LINEAR | experts | heads
    build_language_model("qwen3_next", hybrids["hybrid language model"], seed=3, **fields)
    odd = tmp_path_factory.mktemp("odd")
    build_language_model("qwen3_next", odd, seed=3, moe_intermediate_size=20, **fields)
    tiny = {
        ODD_EXPERTS: str(odd),
        "vl with biases": str(qwen2_5_vl_folder),
        "vl with experts": str(qwen3_vl_moe_folder),
        "omni with a talker": str(qwen3_omni_talker_folder),
        **{name: str(folder) for name, folder in hybrids.items()},
    }
    return dict(zip(POCKET, POCKET, strict=True)) | tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")


@pytest.fixture(scope="module")
def found(models, folder) -> tuple[list[dict[str, Any]], str]:
    """Two processes are started once."""
    return run(folder, "float32", models)


@pytest.fixture(scope="module")
def ranks(found) -> list[dict[str, Any]]:
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CARDS_OF)
def test_both_say_what_one_says(name, models, ranks, tmp_path) -> None:
    alone = pipeline(name, models[name], device="cpu")
    expected = asked(alone, CARDS_OF[name])
    for found in ranks:
        assert found[name]["turns"] == expected["turns"]
        assert found[name]["known"]
        held, whole = found[name]["memory"], expected["memory"]
        assert held["ranks"] == 2 and whole["ranks"] == 1
        assert 2 * held["bf16_bytes"] == whole["bf16_bytes"]
        for kind in ("codes", "scales", "norms", "tails", "states", "marks"):
            assert 2 * held["by_kind"][kind] == whole["by_kind"][kind]
        assert "each of the 2 ranks stores the same amount" in found[name]["printed"]
    assert whole["by_kind"]["codes"] > 0 or name not in POCKET
    if name == "pocket-vl":
        more = asked_more(alone, tmp_path / "chat.safetensors")
        for found in ranks:
            assert found[name]["gone on"] == more["gone on"]
            assert found[name]["batch"] == more["batch"]
        # By chance, but by one chance.
        assert ranks[0][name]["sampled"] == ranks[1][name]["sampled"]
        assert ranks[0][name]["sampled"][0] != ranks[0][name]["sampled"][1]
    if name in HYBRIDS:
        assert held["by_kind"]["states"] > 0
        steps = asked_of_states(alone, CARDS_OF[name], tmp_path / "chat.safetensors")
        for found in ranks:
            assert found[name]["of states"] == steps
            for how in ("recorded", "fused", "half fused"):
                assert found[name][how]["turns"] == expected["turns"]
            assert (found[name]["fused"]["mixtures"] > 8) == (name != "hybrid")
            assert len(found[name]["overflow"]) == 1 and "NaN" in found[name]["overflow"][0]
            # One rank has no kernels, so the other does not use its own.
            assert found[name]["half fused"]["mixtures"] == 0
            assert found[name]["recorded"]["replays"] > 8
    if name == "pocket-omni":
        assert [found[name]["heard"] for found in ranks] == 2 * [heard(alone)]


@pytest.mark.slow
def test_steps_are_captured_by_all_ranks_or_by_none(ranks) -> None:
    for found in ranks:
        pocket = found["pocket-vl"]
        for kind in ("recorded", "half recorded"):
            assert pocket[kind]["turns"] == pocket["turns"]
        assert pocket["recorded"]["replays"] == ranks[0]["pocket-vl"]["recorded"]["replays"] > 8
        assert pocket["half recorded"]["replays"] == 0


@pytest.mark.slow
def test_what_ranks_cannot_do_is_refused(ranks) -> None:
    for found in ranks:
        assert len(found["pocket-vl"]["refused"]) == 2
        for message in found["pocket-vl"]["refused"]:
            assert "2 ranks" in message and "per_head" in message
        assert "tensor parallelism" in found["omni with a talker"]["refused"]


@pytest.mark.slow
def test_experts_that_cannot_be_divided(models, ranks) -> None:
    expected = asked(by_eager_experts(models[ODD_EXPERTS], "float32", device="cpu"), 0)["turns"]
    for found in ranks:
        why = found[ODD_EXPERTS]["refused"]
        assert "width of 20" in why and "2 processes" in why and "start 1, or pass" in why
        assert found[ODD_EXPERTS]["turns"] == expected


@pytest.mark.slow
def test_a_rank_reads_its_own_file_only(ranks, folder) -> None:
    names = ["chat.0-of-2.safetensors", "chat.1-of-2.safetensors"]
    assert sorted(path.name for path in folder.glob("chat.*.safetensors")) == names
    alone = pipeline("pocket-vl", "pocket-vl", device="cpu")
    with pytest.raises(InputError, match=r"another model.*rank 0 of 2"):
        alone.load_chat(folder / names[0])


@pytest.mark.slow
def test_one_rank_prints(found) -> None:
    printed = found[1]
    assert printed.startswith("93015\n") and printed.count("for one rank; each of the 2 ranks") == 1


def test_without_torchrun(monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InputError, match="start the program with torchrun"):
        pipeline("pocket-vl", "pocket-vl", tp_plan="auto")


def test_one_process_has_the_whole_model(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    placement = Placement(tp_plan="auto")
    assert placement.target is not None and placement.tp_plan is None


def test_heads_that_cannot_be_sharded(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match=re.escape("2 KV heads") + ".*4 processes: start 1 or 2$"):
        pipeline("pocket-vl", "pocket-vl", tp_plan="auto")


def test_more_processes_than_gpus(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(InputError, match="4 processes were started, but there are 2 GPUs"):
        Placement(tp_plan="auto")
