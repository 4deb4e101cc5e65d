"""The bundled models on a GPU: CUDA graphs of decode steps, and chats that change devices."""

from __future__ import annotations

import gc
import logging
from functools import partial

import pytest
import torch

from oscar_mm import OscarOmniPipeline, OscarVLPipeline
from oscar_mm.engine import decode_runner
from oscar_mm.engine.message import first_turn
from oscar_mm.fast_decode.graph_runner import GraphRunner, capture_cuda_graph
from oscar_mm.kernels.address_range import AddressRange, bytes_in_ranges
from tests.compiled import unexpected
from tests.models.test_answers import CARDS

CUDA = torch.device("cuda")
PIPELINES = {
    "pocket-vl": OscarVLPipeline,
    "pocket-llava": OscarVLPipeline,
    "pocket-omni": OscarOmniPipeline,
}


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "channel"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_graph_answers_like_eager_steps(name, policy, monkeypatch, caplog) -> None:
    pipe = PIPELINES[name](name, policy=policy, device="cuda", dtype="bfloat16")
    requests = [
        ({"images": CARDS[:14]}, "Write all codes."),
        ({"images": 3 * CARDS[:14]}, "Write all codes."),
    ]
    captures = []

    def record(function, device):
        captures.append(function)
        return capture_cuda_graph(function, device)

    answers = {}
    for how in ("eager", "graph"):
        recorder = record if how == "graph" else None
        monkeypatch.setattr(decode_runner, "GraphRunner", partial(GraphRunner, capture=recorder))
        pipe = pipe.with_policy(policy)
        with caplog.at_level(logging.WARNING, "oscar_mm"):
            answers[how] = [
                pipe(**media, prompt=question, max_new_tokens=200).text
                for media, question in requests
            ]
            with pipe.chat() as chat:
                chat.ask("Write all codes.", images=CARDS[:9], max_new_tokens=80)
                answers[how].append(chat.ask("Write all codes.", max_new_tokens=80).text)
    assert answers["graph"] == answers["eager"]
    assert len(answers["eager"][0]) > 40
    assert not unexpected(caplog)
    # One for all answers, and for tables that grew.
    assert 1 <= len(captures) < 20


@pytest.mark.gpu
def test_a_request_is_prepared_without_waiting_for_the_gpu() -> None:
    """Decode steps of others may be queued there."""
    pipe = OscarVLPipeline("pocket-vl", device="cuda", prefix_cache="8MB")
    messages, sampling = first_turn("What is on the sign?"), pipe.sampling({}, ())
    pipe.new_request(pipe.read_request(messages), sampling, 0.0)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pipe.new_request(pipe.read_request(messages), sampling, 0.0)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "channel"])
def test_growth_in_place_spares_captures_and_changes_no_answer(policy, monkeypatch) -> None:
    captures, answers = {}, {}

    def record(function, device):
        captures[way] += 1
        return capture_cuda_graph(function, device)

    monkeypatch.setattr(decode_runner, "GraphRunner", partial(GraphRunner, capture=record))
    for way in ("in place", "moving"):
        if way == "moving":
            monkeypatch.setattr(AddressRange, "reserve", lambda device: None)
        captures[way] = 0
        pipe = OscarVLPipeline("pocket-vl", policy=policy, device="cuda", dtype="bfloat16")
        answers[way] = [
            pipe(images=count * CARDS[:14], prompt="Write all codes.", max_new_tokens=200).text
            for count in (1, 3)
        ]
        with pipe.chat() as chat:
            for _ in range(3):
                answers[way].append(
                    chat.ask("Write all codes.", images=CARDS[:9], max_new_tokens=80).text
                )
            assert way == "moving" or bytes_in_ranges(CUDA)[0] > 0
        del pipe, chat
        gc.collect()
    assert answers["in place"] == answers["moving"]
    assert captures["in place"] < captures["moving"]


@pytest.mark.gpu
def test_a_float32_model_decodes_without_graphs(caplog) -> None:
    """The kernels take no float32, and PyTorch operations cannot be captured."""
    pipe = OscarVLPipeline("pocket-vl", device="cuda", dtype="float32")
    asked = {"images": CARDS[:3], "prompt": "Write all codes.", "max_new_tokens": 24}
    with caplog.at_level(logging.WARNING, "oscar_mm"):
        assert pipe(**asked).text.split() == ["7KQ2", "B4XM9", "93015"]
        sampled = [pipe(**asked, temperature=1.0, seed=3).token_ids for _ in range(2)]
        assert sampled[0] == sampled[1]
        assert pipe(**asked, temperature=1.0).token_ids
    assert "CUDA graph could be captured" not in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}])
def test_the_host_waits_for_nothing_but_tokens(options) -> None:
    """And who ends an answer in the middle, with a step on its way, disturbs no other."""
    pipe = OscarVLPipeline("pocket-vl", device="cuda", dtype="bfloat16")
    asked = {"images": CARDS[:14], "prompt": "Write all codes.", "max_new_tokens": 80, **options}
    whole = pipe(**asked).text
    for _ in range(3):
        pieces = pipe.stream(**asked)
        said = [next(pieces) for _ in range(8)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            said += [next(pieces) for _ in range(12)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        pieces.close()
        assert whole.startswith("".join(said))
    assert pipe(**asked).text == whole


@pytest.mark.gpu
def test_answers_leave_no_memory_behind(monkeypatch) -> None:
    pipe = OscarVLPipeline("pocket-vl", device="cuda", dtype="bfloat16")
    captures, held = [], []

    def record(function, device):
        captures.append(function)
        return capture_cuda_graph(function, device)

    monkeypatch.setattr(decode_runner, "GraphRunner", partial(GraphRunner, capture=record))
    for _ in range(4):
        pipe(images=CARDS[:14], prompt="Write all codes.", max_new_tokens=40)
        gc.collect()
        requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
        held.append(requested + bytes_in_ranges(CUDA)[1])
    assert held[3] - held[1] < 1 << 20, held
    assert 1 <= len(captures) < 4, "answers share what was captured"


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "channel"])
def test_a_chat_goes_on_on_another_device(policy, tmp_path) -> None:
    saved = tmp_path / "chat.safetensors"
    question, how = "What is the code in picture 5?", {"policy": policy, "dtype": "bfloat16"}
    pipes = {one: OscarVLPipeline("pocket-vl", device=one, **how) for one in ("cpu", "cuda")}
    for here, there in (("cpu", "cuda"), ("cuda", "cpu")):
        with pipes[here].chat() as chat:
            chat.ask("What is the code in picture 3?", images=CARDS, max_new_tokens=12)
            chat.save(saved)
        with pipes[there].load_chat(saved) as chat:
            assert chat.ask(question, max_new_tokens=12).text == "T6ZPAE"
