"""What a conversation takes, and what a budget holds: chats go to disk, or turns are refused."""

import gc
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.random_model import synthetic_cache
from oscar_mm import InputError, OscarCache, OscarVLPipeline
from oscar_mm.admission.capacity import (
    RESERVED,
    ModelShape,
    Reservation,
    activation_bytes,
    free_bytes,
    unused_bytes,
)
from oscar_mm.chat import turn_runner
from oscar_mm.errors import MemoryBusy, RequestTooLarge
from oscar_mm.policy import PLAIN, KVPolicy
from oscar_mm.sizes import parse_bytes
from tests.cache.invariants import STREAM
from tests.checkpoints import build_decoder
from tests.engine.engine_waits import engine_waits
from tests.pipelines.conftest import NEVER
from tests.prompts import noise, prepare

pytestmark = pytest.mark.usefixtures("quick_collection")

GB = 10**9
LLAMA_LIKE = ModelShape(layers=32, kv_heads=8, head_dim=128, parameters=8 * GB)
POCKET = ModelShape(layers=4, kv_heads=2, head_dim=64, parameters=0)
POLICIES = [
    *KVPolicy.preset_names(),
    KVPolicy.preset("channel", bits={"image": 4, "text": 16}),
    KVPolicy.preset("channel", window=200, sinks=40),
    KVPolicy(bits=(3, 2), **STREAM),
    KVPolicy(bits={"text": (4, 2), "image": 2}, window=0, sinks=0, **STREAM),
]


@pytest.mark.parametrize(
    ("policy", "tokens"),
    [*((policy, 700) for policy in POLICIES), *((POLICIES[at], 40) for at in (0, -1))]
    + [(POLICIES[at], 2100) for at in (0, -1)],
    ids=str,
)
def test_bytes_are_those_that_a_cache_holds(policy, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # So many of them come one by one that the window holds text only, as after an answer.
    cache = synthetic_cache(policy, (1, 2, tokens, 64), generator, answer=min(tokens // 2, 220))
    report = cache.memory()
    shape = ModelShape(layers=1, kv_heads=2, head_dim=64, parameters=0)
    held = report.kv_bytes - report.by_kind["tables"] - report.by_kind["unused"]
    assert shape.kv_bytes(KVPolicy.of(policy), report.tokens) == held


@pytest.mark.parametrize("shape", [LLAMA_LIKE, POCKET], ids=["llama", "pocket"])
def test_a_short_conversation_takes_no_more_than_in_16_bit(shape: ModelShape) -> None:
    policy = KVPolicy.preset("standard")
    plain = shape.layers * shape.slot_bytes(policy)[PLAIN]

    def ratio(text: int, image: int = 0) -> float:
        return (text + image) * plain / shape.kv_bytes(policy, {"text": text, "image": image})

    for tokens in range(1, 301):
        for image in (0, tokens // 2, max(0, tokens - 20)):
            assert ratio(tokens - image, image) >= 1
    # What is promised of heads of 128 channels; a page of two streams each may be nearly empty.
    if shape.head_dim == 128:
        assert min(ratio(tokens) for tokens in range(300, 430)) > 2.8
        assert min(ratio(tokens) for tokens in range(1000, 1130)) > 4.4
        assert min(ratio(text, 8192 - text) for text in range(40, 8192, 61)) > 5.4
        assert min(ratio(text, 1000 - text) for text in range(40, 1000, 7)) > 4.1


def test_how_many_fit() -> None:
    tokens, compact = {"text": 1000, "image": 31_000}, KVPolicy.preset("channel")
    one = LLAMA_LIKE.kv_bytes(compact, tokens)
    available = 80 * GB * (1 - RESERVED) - 16 * GB
    count = LLAMA_LIKE.conversations(80 * GB, compact, tokens)
    assert count * one <= available < (count + 1) * one
    plain = LLAMA_LIKE.conversations(80 * GB, KVPolicy.preset("bf16"), tokens)
    assert 6 < count / plain < 7
    assert LLAMA_LIKE.conversations(16 * GB, compact, tokens) == 0
    assert LLAMA_LIKE.conversations(80 * GB, compact, {}) > 10**9


def test_shape_of_a_configuration() -> None:
    model = build_decoder("llama")
    shape = ModelShape.of(model.config, model.num_parameters())
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (2, 2, 64)
    assert shape.weight_bytes == 2 * model.num_parameters()


RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "full_size-nvidia-h200.json"
HIDDEN = {"llava": 4096, "qwen3-vl-8b": 4096, "qwen3-vl-30b-a3b": 2048, "qwen3-omni": 2048}


def test_a_reservation_is_the_most_that_an_answer_may_still_take() -> None:
    """Also where bytes shrink: a page that begins takes less than the tokens before it."""
    cache = OscarCache(KVPolicy.preset("standard"))
    added = np.random.default_rng(0).integers(0, 1000, 30)
    reservation = Reservation(cache, 4, added)
    assert reservation.outstanding == added.max()
    for length in range(1, 40):
        cache.begin(np.zeros((1, 1), np.int8))
        written = min(max(length - 4, 0), 29)
        expected = max(added[written:]) - (added[written] if length >= 4 else 0)
        assert reservation.outstanding == expected
    cache.close()
    assert reservation.outstanding == 0


def test_a_cpu_has_no_bound() -> None:
    assert free_bytes(torch.device("cpu")) is None
    assert unused_bytes(torch.device("cpu")) == 0


def test_less_than_any_model_took() -> None:
    rows = json.loads(RECORD.read_text())["rows"]
    assert len(rows) >= 4
    for row in rows:
        [hidden] = [size for name, size in HIDDEN.items() if row["model"].startswith(name)]
        took = row["held"]["activations"]
        assert took / 5 < activation_bytes(row["prompt_tokens"], hidden, 2) < took


@pytest.mark.gpu(alone=True)
def test_memory_that_torch_keeps_is_free() -> None:
    device = torch.device("cuda", 0)
    before = free_bytes(device)
    held = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    assert free_bytes(device) <= before - held.nbytes // 2
    del held
    assert free_bytes(device) >= before - (1 << 26)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    assert unused_bytes(device) == held > 0


LIMIT = 227_000
"""Bytes: one chat has room after its first turn, two have not."""
SHOWN = {"images": [noise(300, 300, seed) for seed in range(3)], "max_new_tokens": 4}
MORE = {"prompt": "And now?", "images": [noise(64, 64)], "max_new_tokens": 4}


def pipeline(folder: Path, **options: Any) -> OscarVLPipeline:
    pipe = OscarVLPipeline(folder, device="cpu", **{"policy": "channel"} | options)
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


@pytest.fixture(scope="module")
def free(qwen3_vl_folder) -> OscarVLPipeline:
    return pipeline(qwen3_vl_folder)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_spilled_chats_come_back(free, qwen3_vl_folder, tmp_path) -> None:
    folder = tmp_path / "a" / "b"
    pipe = pipeline(qwen3_vl_folder, kv_budget=297_000, spill=folder)
    chats, others = [[one.chat() for _ in range(4)] for one in (pipe, free)]
    for round_ in range(2):
        for chat, other in zip(chats, others, strict=True):
            question = {"prompt": "What is it?", **SHOWN} if not round_ else MORE
            assert chat.ask(**question).token_ids == other.ask(**question).token_ids
            assert pipe.store.memory().used_bytes <= 297_000
            assert chat.segments == other.segments
    assert free.store.memory().used_bytes > 2 * LIMIT
    on_disk = len(files(folder))
    assert on_disk >= 2
    # The least recently used ones.
    assert [chat.memory.kv_bytes == 0 for chat in chats] == [True] * on_disk + [False] * (
        4 - on_disk
    )
    spilled, plain = chats[0], others[0]
    assert [one.tokens for one in spilled.segments] == [one.tokens for one in plain.segments]
    assert spilled.turns == plain.turns
    assert not any(one.bytes for one in spilled.segments)
    spilled.forget(1)
    plain.forget(1)
    assert spilled.segments == plain.segments
    second = chats[1].fork()
    assert second.ask(**MORE).token_ids == others[1].ask(**MORE).token_ids
    chats[2].save(tmp_path / "chat.safetensors")
    saved = pipe.load_chat(tmp_path / "chat.safetensors")
    chats[2].undo()
    others[2].undo()
    assert chats[2].ask(**MORE).token_ids == others[2].ask(**MORE).token_ids
    assert saved.turns[:1] == chats[2].turns[:1]
    assert files(folder)
    for chat in (*chats, second):
        chat.close()
    del saved
    gc.collect()
    assert files(folder) == [] and pipe.store.memory().pool_bytes == 0
    for other in others:
        other.close()


def test_files_go_with_their_chats(qwen3_vl_folder, tmp_path) -> None:
    pipe = pipeline(qwen3_vl_folder, kv_budget="227 kB", spill=tmp_path)
    chats = [pipe.chat() for _ in range(3)]
    for chat in chats:
        chat.ask("What is it?", **SHOWN)
    assert len(files(tmp_path)) == 2
    del chat, chats[1]
    gc.collect()
    [left] = files(tmp_path)
    left.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        chats[0].ask(**MORE)
    chats[0].close()
    # In a temporary folder, unless another one is named.
    pipe = pipeline(qwen3_vl_folder, kv_budget=LIMIT)
    folder = pipe.budget.folder
    chats = [pipe.chat() for _ in range(2)]
    for chat in chats:
        chat.ask("What is it?", **SHOWN)
    assert len(files(folder)) == 1
    del pipe, chats, chat
    gc.collect()
    assert not folder.exists()


def test_refused(qwen3_vl_folder) -> None:
    pipe = pipeline(qwen3_vl_folder, kv_budget=LIMIT, spill=False)
    first, second = pipe.chat(), pipe.chat()
    first.ask("What is it?", **SHOWN)
    with pytest.raises(MemoryBusy, match=r"kv_budget is 227,000 bytes: .* close\(\) chats"):
        second.ask("What is it?", **SHOWN)
    assert second.turns == ()
    assert first.ask(**MORE).token_ids
    first.close()
    assert second.ask("What is it?", **SHOWN).token_ids
    alone = pipeline(qwen3_vl_folder, kv_budget=LIMIT).chat()
    alone.ask("What is it?", **SHOWN)
    with pytest.raises(
        RequestTooLarge, match=r"over kv_budget \(.* of 227.00 KB\).*raise kv_budget"
    ):
        alone.ask("And these?", **SHOWN)
    alone.forget(1)
    alone.forget(2)
    alone.forget(3)
    assert alone.ask(**MORE).token_ids


def test_a_chat_that_answers_stays(qwen3_vl_folder, tmp_path) -> None:
    pipe = pipeline(qwen3_vl_folder, kv_budget=LIMIT, spill=tmp_path)
    first, second = pipe.chat(), pipe.chat()
    stream = first.stream("What is it?", **SHOWN)
    next(stream)
    with pytest.raises(InputError, match="kv_budget"):
        second.ask("What is it?", **SHOWN)
    list(stream)
    assert second.ask("What is it?", **SHOWN).token_ids
    assert len(files(tmp_path)) == 1 and first.memory.kv_bytes == 0


@pytest.mark.parametrize("policy", ["bf16", "channel"])
def test_forgetting_what_a_fork_stores_too_needs_no_memory(qwen3_vl_folder, policy: str) -> None:
    """Not a byte is to spare, and nothing can be spilled."""
    pipe = pipeline(qwen3_vl_folder, policy=policy, kv_budget="1GB", spill=False)
    chat = pipe.chat()
    chat.ask("What is it?", **SHOWN)
    fork = chat.fork()
    used = pipe.budget.limit = pipe.budget.used_bytes
    segments = fork.segments
    chat.forget(1)
    chat.forget(3)
    assert pipe.budget.used_bytes <= used and fork.segments == segments
    assert [one.forgotten for one in chat.segments] == [False, True, False, True]
    fork.close()
    assert pipe.budget.used_bytes < used
    fork = chat.fork()
    fork.undo()
    chat.undo()
    assert pipe.budget.used_bytes == 0


def in_another_thread(work: Any, seconds: float = 30) -> None:
    """Waits for it so long."""
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(seconds)


def test_a_chat_goes_to_disk_while_its_media_are_looked_at(
    qwen3_vl_folder, tmp_path, monkeypatch
) -> None:
    pipe = pipeline(qwen3_vl_folder, kv_budget=LIMIT, spill=tmp_path, max_context=2000)
    chat, other = pipe.chat(), pipe.chat()
    chat.ask("What is it?", **SHOWN)
    look = pipe.media_reader.outline

    def other_asks_meanwhile(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            in_another_thread(lambda: other.ask("What is it?", **SHOWN))
            assert len(other.turns) == 1 and chat.memory.kv_bytes == 0
        return look(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pipe.media_reader, "outline", other_asks_meanwhile)
        with pytest.raises(
            RequestTooLarge, match=r"over the context.*forget\(1\) frees .*undo\(\)"
        ):
            chat.ask("And?", images=MORE["images"], max_new_tokens=1990)
    assert len(chat.turns) == 1
    assert chat.ask(**MORE).token_ids and len(chat.turns) == 2


def test_a_chat_goes_to_disk_while_its_media_are_decoded(
    free, qwen3_vl_folder, tmp_path, monkeypatch
) -> None:
    pipe = pipeline(qwen3_vl_folder, kv_budget=LIMIT, spill=tmp_path)
    chat, other, undisturbed = pipe.chat(), pipe.chat(), free.chat()
    expected = [
        undisturbed.ask("What is it?", **SHOWN).token_ids,
        undisturbed.ask(**MORE).token_ids,
    ]
    found = [chat.ask("What is it?", **SHOWN).token_ids]
    reading = pipe.media_reader.reading

    def other_asks_meanwhile(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            in_another_thread(lambda: other.ask("What is it?", **SHOWN))
            assert len(other.turns) == 1 and chat.memory.kv_bytes == 0
        return reading(*arguments, **options)

    monkeypatch.setattr(pipe.media_reader, "reading", other_asks_meanwhile)
    assert [*found, chat.ask(**MORE).token_ids] == expected
    assert len(chat.turns) == 2 and chat.memory.kv_bytes > 0


def test_a_chat_that_begins_to_answer_stays(free, qwen3_vl_folder, tmp_path, monkeypatch) -> None:
    pipe = pipeline(qwen3_vl_folder, kv_budget=LIMIT, spill=tmp_path)
    chat, second, other = pipe.chat(), pipe.chat(), free.chat()
    expected = [other.ask("What is it?", **SHOWN).token_ids, other.ask(**MORE).token_ids]

    def settle() -> None:
        with engine_waits(pipe):
            pipe.budget.settle(second._spillable)

    class Begun(turn_runner.Request):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            monkeypatch.setattr(pipe.budget, "limit", 0)
            in_another_thread(settle, seconds=0.2)
            monkeypatch.setattr(pipe.budget, "limit", LIMIT)

    found = [chat.ask("What is it?", **SHOWN).token_ids]
    monkeypatch.setattr(turn_runner, "Request", Begun)
    assert [*found, chat.ask(**MORE).token_ids] == expected
    assert not files(tmp_path)


@pytest.mark.daily("True")
@pytest.mark.parametrize("alone", [True, False])
def test_memory_is_kept_for_an_answer_that_is_being_written(alone, free, qwen3_vl_folder) -> None:
    asked = {"prompt": "What?", "max_new_tokens": 60}
    whole = free.admission.growth_bytes(free.admission.growth(prepare(free, "What?"), 60))
    pipe = pipeline(qwen3_vl_folder, kv_budget=whole * 3 // 2)

    def others() -> list[Any]:
        if alone:
            return [pipe(None, **asked)]
        return [result.answer for result in pipe.batch([asked]) if result.answer]

    stream = pipe.stream(None, **asked)
    next(stream)
    # There is room for both just now, but not for what both will write: the second one waits.
    assert pipe.budget.used_bytes < whole // 2
    used: list[int] = []
    hook = pipe.model.lm_head.register_forward_hook(lambda *_: used.append(pipe.budget.used_bytes))
    assert [len(answer.token_ids) for answer in others()] == [60]
    hook.remove()
    assert whole // 2 < max(used) <= whole
    assert len(list(stream)) > 0
    assert stream.result.memory.kv_bytes > whole // 2
    del stream
    gc.collect()
    assert [len(answer.token_ids) for answer in others()] == [60]
    left = pipe.stream(None, **asked)
    next(left)
    left.close()
    del left
    gc.collect()
    assert [len(answer.token_ids) for answer in others()] == [60]


def test_prefixes_go_first(qwen3_vl_folder, tmp_path) -> None:
    options = {"kv_budget": LIMIT, "spill": tmp_path, "prefix_cache": "1GB"}
    pipe = pipeline(qwen3_vl_folder, **options)
    pipe(SHOWN["images"][::-1], "What is it?", max_new_tokens=4)
    assert len(pipe.prefixes) == 1
    pipe.chat().ask("What is it?", **SHOWN)
    assert pipe.store.memory().used_bytes <= LIMIT and not files(tmp_path)


def test_beginnings_that_a_batch_reads_ahead_have_memory(qwen3_vl_folder) -> None:
    pipe = pipeline(qwen3_vl_folder, kv_budget=LIMIT, prefix_cache="1GB")
    plain = pipeline(qwen3_vl_folder)
    used = []
    pipe.model.get_decoder().register_forward_hook(lambda *_: used.append(pipe.budget.used_bytes))
    requests = [
        {"prompt": "What is it?", "images": [noise(300, 300, seed)], "max_new_tokens": 4}
        for seed in range(9)
    ]
    found = [result.answer.token_ids for result in pipe.batch(requests, batch_size=2)]
    assert max(used) <= LIMIT
    assert found == [result.answer.token_ids for result in plain.batch(requests, batch_size=2)]


def test_arguments(qwen3_vl_folder, tmp_path) -> None:
    for size in ("8 gallons", 0, -1, "", True, 1.5):
        with pytest.raises(InputError, match=r'kv_budget=.*such as "8GB"'):
            OscarVLPipeline(qwen3_vl_folder, device="cpu", kv_budget=size)
    file = tmp_path / "file"
    file.touch()
    for folder in (file, 3, None):
        with pytest.raises(InputError, match=r"spill=.* cannot be used as a folder"):
            OscarVLPipeline(qwen3_vl_folder, device="cpu", kv_budget="8GB", spill=folder)
    sizes = {"8GB": 8 * 10**9, " 512 MiB ": 2**29, "1.5kb": 1500, "7": 7, 9: 9}
    assert [parse_bytes("size", size) for size in sizes] == list(sizes.values())
