"""The bundled models on two GPUs: whole layers on each, or a part of every layer on each."""

import logging

import pytest
import torch

from benchmarks import several_gpus
from benchmarks.record import Record
from oscar_mm import OscarVLPipeline
from tests.compiled import unexpected
from tests.models.test_answers import CARDS
from tests.pipelines.divided import (
    CARDS_OF,
    QUESTION,
    asked,
    asked_more,
    asked_of_states,
    captures,
    heard,
    pipeline,
    run,
)
from tests.tiny_qwen3_5 import qwen3_5

POCKET = ("pocket-vl", "pocket-llava", "pocket-omni")
DECODER = "model.language_model"
HALVES = {
    **dict.fromkeys(("model.visual", f"{DECODER}.embed_tokens"), 0),
    **{f"{DECODER}.layers.{layer}": layer // 2 for layer in range(4)},
    **dict.fromkeys((f"{DECODER}.norm", f"{DECODER}.rotary_emb"), 1),
    "lm_head": 1,
}
"""Device map of pocket-vl: two of its four layers on each GPU."""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_a_graph_on_the_second_gpu(caplog) -> None:
    pipes = [OscarVLPipeline("pocket-vl", device=f"cuda:{gpu}", dtype="bfloat16") for gpu in (0, 1)]
    with caplog.at_level(logging.WARNING, "oscar_mm"), captures() as devices:
        first, second = (
            pipe(images=CARDS[:14], prompt="Write all codes.", max_new_tokens=80).token_ids
            for pipe in pipes
        )
    assert first == second
    assert {device.index for device in devices} == {0, 1}
    assert not unexpected(caplog)


@pytest.mark.parametrize("policy", ["compact", "oscar", "bf16"])
def test_layers_on_two_gpus(policy, tmp_path, caplog) -> None:
    how = {"dtype": "bfloat16", "policy": policy}
    one = OscarVLPipeline("pocket-vl", device="cuda:0", **how)
    two = OscarVLPipeline("pocket-vl", device_map=HALVES, **how)
    assert set(two.family.layer_devices.values()) == {
        torch.device("cuda", index) for index in (0, 1)
    }
    expected = asked(one, 8)
    with caplog.at_level(logging.WARNING, "oscar_mm"), captures() as devices:
        found = asked(two, 8)
    # A step is a graph on each of them.
    assert {device.index for device in devices[:2]} == {0, 1}
    assert not unexpected(caplog)
    assert found["turns"] == expected["turns"]
    by_device = found["memory"]["by_device"]
    assert by_device["cuda:0"] == by_device["cuda:1"] > 0
    assert sum(by_device.values()) == found["memory"]["kv_bytes"]
    assert expected["memory"]["kv_bytes"] == found["memory"]["kv_bytes"]
    assert "cuda:0" in found["printed"] and "cuda:1" in found["printed"]
    more = [asked_more(pipe, tmp_path / "chat.safetensors") for pipe in (one, two)]
    for kind in ("gone on", "batch"):
        assert more[0][kind] == more[1][kind]


@pytest.mark.parametrize("name", POCKET)
def test_devices_that_are_found_by_themselves(name) -> None:
    one = pipeline(name, name, "bfloat16", device="cuda:0")
    two = pipeline(name, name, "bfloat16", device_map="auto")
    cards = CARDS_OF[name]
    with captures() as devices:
        found = asked(two, cards)
    # And where embeddings or the output layer are by themselves.
    assert set(two.family.layer_devices.values()) <= set(devices)
    assert found["turns"] == asked(one, cards)["turns"]


def test_a_chat_changes_between_one_gpu_and_two(tmp_path) -> None:
    saved = tmp_path / "chat.safetensors"
    one = OscarVLPipeline("pocket-vl", device="cuda:1", dtype="bfloat16")
    two = OscarVLPipeline("pocket-vl", device_map=HALVES, dtype="bfloat16")
    for here, there in ((one, two), (two, one)):
        with here.chat() as chat:
            chat.ask("What is the code in picture 3?", images=CARDS[:8], max_new_tokens=8)
            chat.save(saved)
            expected = chat.ask(QUESTION, max_new_tokens=8).token_ids
        with there.load_chat(saved) as chat:
            assert chat.ask(QUESTION, max_new_tokens=8).token_ids == expected


def test_chats_on_two_gpus_give_way_to_each_other() -> None:
    how = {"device_map": HALVES, "dtype": "bfloat16"}
    roomy, narrow = (OscarVLPipeline("pocket-vl", kv_budget=n, **how) for n in ("1GB", "0.8MB"))
    answers = []
    for pipe in (roomy, narrow):
        with pipe.chat() as first, pipe.chat() as second:
            for chat in (first, second):
                chat.ask("What is the code in picture 3?", images=CARDS[:12], max_new_tokens=8)
            spilled = first._spillable.conversation.kv is None
            answers.append([chat.ask(QUESTION, max_new_tokens=8).text for chat in (first, second)])
    assert spilled
    assert answers[0] == answers[1]
    chat = roomy.chat()
    chat.ask("What is the code in picture 3?", images=CARDS[:12], max_new_tokens=8)
    before = chat.ask(QUESTION, max_new_tokens=8).text
    chat.undo()
    assert chat.ask(QUESTION, max_new_tokens=8).text == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_on_two_gpus(dtype, tmp_path) -> None:
    found, printed = run(tmp_path, dtype, dict(zip(POCKET, POCKET, strict=True)))
    assert printed.startswith("93015\n")
    for name in POCKET:
        one = pipeline(name, name, dtype, device="cuda:0")
        turns = asked(one, CARDS_OF[name])["turns"]
        assert [rank[name]["turns"] for rank in found] == [turns, turns]
        for rank, told in enumerate(found):
            assert set(told[name]["memory"]["by_device"]) == {"cpu", f"cuda:{rank}"}
            # The kernels take no float32, and PyTorch operations cannot be captured.
            assert (told[name]["captures"] > 0) == (dtype == "bfloat16")
    assert found[0]["pocket-vl"] != found[1]["pocket-vl"]  # devices
    assert found[0]["pocket-vl"]["sampled"] == found[1]["pocket-vl"]["sampled"]
    assert [rank["pocket-omni"]["heard"] for rank in found] == 2 * [heard(one)]


def test_states_on_two_gpus(tmp_path) -> None:
    # The kernels take heads of 64 channels in Gated DeltaNet, and experts of 256 on each GPU.
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
    sizes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    experts = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 512)
    models = {name: str(tmp_path / name) for name in ("hybrid", "hybrid with experts")}
    qwen3_5(tmp_path / "hybrid", seed=3, **sizes)
    qwen3_5(tmp_path / "hybrid with experts", seed=3, moe=True, **sizes, **experts)
    by_dtype = {dtype: run(tmp_path, dtype, models)[0] for dtype in ("float32", "bfloat16")}
    for name, model in models.items():
        one = pipeline(name, model, "float32", device="cuda:0")
        turns = asked(one, CARDS_OF[name])["turns"]
        steps = asked_of_states(one, CARDS_OF[name], tmp_path / "chat.safetensors")
        for rank in by_dtype["float32"]:
            assert rank[name]["turns"] == turns and rank[name]["of states"] == steps
            assert rank[name]["captures"] == 0
        # Sums of parts are rounded otherwise, and random weights prefer no token by much.
        first, second = by_dtype["bfloat16"]
        assert first[name]["turns"] == second[name]["turns"]
        assert first[name]["of states"] == second[name]["of states"]
        assert first[name]["captures"] > 0 and second[name]["captures"] > 0


def test_benchmark(tmp_path) -> None:
    assert several_gpus.main(["--tiny", "--out", str(tmp_path)]) == 0
    [path] = tmp_path.glob("several_gpus-*.json")
    assert [row["way"] for row in Record.load(path).rows] == ["one", "layers", "heads"]
