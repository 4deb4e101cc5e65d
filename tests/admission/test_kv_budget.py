"""kv_budget: chats that wait go to disk and come back as they were, or turns are refused."""

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from oscar_mm import InputError, OscarVLPipeline
from oscar_mm.chat import chat as chat_module
from oscar_mm.errors import Busy, NoRoom
from oscar_mm.sizes import parse_bytes
from tests.pipelines.conftest import NEVER
from tests.prompts import noise

LIMIT = 340_000
"""Bytes: one chat has room after its first turn, two have not."""
SHOWN = {"images": [noise(300, 300, seed) for seed in range(3)], "max_new_tokens": 4}
MORE = {"prompt": "And now?", "images": [noise(64, 64)], "max_new_tokens": 4}


def pipeline(folder: Path, **options: Any) -> OscarVLPipeline:
    pipe = OscarVLPipeline(folder, device="cpu", **{"policy": "compact"} | options)
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


@pytest.fixture(scope="module")
def free(qwen3_vl_folder) -> OscarVLPipeline:
    return pipeline(qwen3_vl_folder)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_spilled_chats_come_back(free, qwen3_vl_folder, tmp_path) -> None:
    folder = tmp_path / "a" / "b"
    pipe = pipeline(qwen3_vl_folder, kv_budget=445_000, spill=folder)
    chats, others = [[one.chat() for _ in range(4)] for one in (pipe, free)]
    for round_ in range(2):
        for chat, other in zip(chats, others, strict=True):
            question = {"prompt": "What is it?", **SHOWN} if not round_ else MORE
            assert chat.ask(**question).token_ids == other.ask(**question).token_ids
            assert pipe.store.memory().used_bytes <= 445_000
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
    pipe = pipeline(qwen3_vl_folder, kv_budget="340 kB", spill=tmp_path)
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
    with pytest.raises(Busy, match=r"kv_budget is 340,000 bytes: .* close\(\) chats"):
        second.ask("What is it?", **SHOWN)
    assert second.turns == ()
    assert first.ask(**MORE).token_ids
    first.close()
    assert second.ask("What is it?", **SHOWN).token_ids
    alone = pipeline(qwen3_vl_folder, kv_budget=LIMIT).chat()
    alone.ask("What is it?", **SHOWN)
    with pytest.raises(NoRoom, match=r"over kv_budget \(.* of 340.00 KB\).*raise kv_budget"):
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


@pytest.mark.parametrize("policy", ["bf16", "compact"])
def test_forgetting_what_a_fork_holds_too_needs_no_room(qwen3_vl_folder, policy: str) -> None:
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
        with pytest.raises(NoRoom, match=r"over the context.*forget\(1\) frees .*undo\(\)"):
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
    read = pipe.media_reader.read

    def other_asks_meanwhile(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            in_another_thread(lambda: other.ask("What is it?", **SHOWN))
            assert len(other.turns) == 1 and chat.memory.kv_bytes == 0
        return read(*arguments, **options)

    monkeypatch.setattr(pipe.media_reader, "read", other_asks_meanwhile)
    assert [*found, chat.ask(**MORE).token_ids] == expected
    assert len(chat.turns) == 2 and chat.memory.kv_bytes > 0


def test_a_chat_that_begins_to_answer_stays(free, qwen3_vl_folder, tmp_path, monkeypatch) -> None:
    pipe = pipeline(qwen3_vl_folder, kv_budget=LIMIT, spill=tmp_path)
    chat, second, other = pipe.chat(), pipe.chat(), free.chat()
    expected = [other.ask("What is it?", **SHOWN).token_ids, other.ask(**MORE).token_ids]

    def settle() -> None:
        with pipe.lock:
            pipe.budget.settle(second._spillable)

    class Begun(chat_module.Generation):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            monkeypatch.setattr(pipe.budget, "limit", 0)
            in_another_thread(settle, seconds=0.2)
            monkeypatch.setattr(pipe.budget, "limit", LIMIT)

    found = [chat.ask("What is it?", **SHOWN).token_ids]
    monkeypatch.setattr(chat_module, "Generation", Begun)
    assert [*found, chat.ask(**MORE).token_ids] == expected
    assert not files(tmp_path)


@pytest.mark.parametrize("alone", [True, False])
def test_room_is_kept_for_an_answer_that_is_being_written(alone, free, qwen3_vl_folder) -> None:
    asked = {"prompt": "What?", "max_new_tokens": 120}
    whole = free.admission.growth_bytes(free.admission.growth(free.prepare("What?", (), None), 120))
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
    assert [len(answer.token_ids) for answer in others()] == [120]
    hook.remove()
    assert whole // 2 < max(used) <= whole
    assert len(list(stream)) > 0
    assert stream.result.memory.kv_bytes > whole // 2
    del stream
    gc.collect()
    assert [len(answer.token_ids) for answer in others()] == [120]
    left = pipe.stream(None, **asked)
    next(left)
    left.close()
    del left
    gc.collect()
    assert [len(answer.token_ids) for answer in others()] == [120]


def test_prefixes_go_first(qwen3_vl_folder, tmp_path) -> None:
    options = {"kv_budget": LIMIT, "spill": tmp_path, "prefix_cache": "1GB"}
    pipe = pipeline(qwen3_vl_folder, **options)
    pipe(SHOWN["images"][::-1], "What is it?", max_new_tokens=4)
    assert len(pipe.prefixes) == 1
    pipe.chat().ask("What is it?", **SHOWN)
    assert pipe.store.memory().used_bytes <= LIMIT and not files(tmp_path)


def test_beginnings_that_a_batch_reads_ahead_have_room(qwen3_vl_folder) -> None:
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
        with pytest.raises(InputError, match=r"spill=.* no folder that can be used"):
            OscarVLPipeline(qwen3_vl_folder, device="cpu", kv_budget="8GB", spill=folder)
    sizes = {"8GB": 8 * 10**9, " 512 MiB ": 2**29, "1.5kb": 1500, "7": 7, 9: 9}
    assert [parse_bytes("size", size) for size in sizes] == list(sizes.values())
