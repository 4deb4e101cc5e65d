"""A saved chat goes on as if it had never been away, and only where it belongs."""

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from oscar_mm import InputError, OscarCache, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.cache.checked_file import write_checked
from oscar_mm.cache.memory import token_bytes
from oscar_mm.cache.saved_cache import SavedCache, save_cache
from oscar_mm.chat import chat as chat_module
from oscar_mm.chat import turn_fields as saved_module
from oscar_mm.chat.chat_file import chat_content, model_fingerprint
from oscar_mm.chat.conversation import Conversation
from oscar_mm.engine.message import user_message
from oscar_mm.modality import Modality
from tests.checkpoints import build
from tests.engine.engine_waits import engine_waits
from tests.pipelines.conftest import NEVER
from tests.processes import Forked
from tests.prompts import clip, noise, tone

FAMILIES = {
    "llava": (OscarVLPipeline, "llava_next_folder", {"images": [noise(90, 130)]}),
    "qwen": (OscarVLPipeline, "qwen3_vl_folder", {"images": [noise(300, 300)], "videos": clip(6)}),
    "omni": (OscarOmniPipeline, "qwen3_omni_folder", {"audio": [tone(12)], "videos": clip(4)}),
}


def save_chat(path: Path, *conversation: Any) -> None:
    write_checked(path, *chat_content(path, *conversation))


def first_turn(**changes: Any) -> Any:
    """A conversation whose first turn is another."""

    def change(held: Conversation) -> Conversation:
        first = dataclasses.replace(held.turns[0], **changes)
        return dataclasses.replace(held, turns=(first, *held.turns[1:]))

    return change


def first_medium(**changes: Any) -> Any:
    def change(held: Conversation) -> Conversation:
        [medium] = held.turns[0].media
        asked = dataclasses.replace(
            held.turns[0].messages[0], parts=(dataclasses.replace(medium, **changes), "What?")
        )
        return first_turn(messages=(asked,))(held)

    return change


FORGED = {
    "pending": lambda held: dataclasses.replace(held, pending=(10**9,)),
    "ids": lambda held: dataclasses.replace(held, token_ids=torch.zeros(1, 3, dtype=torch.long)),
    "large ids": lambda held: dataclasses.replace(held, token_ids=held.token_ids + 10**9),
    "position": lambda held: dataclasses.replace(held, next_position=torch.tensor([float("nan")])),
    "positions": lambda held: dataclasses.replace(held, next_position=torch.tensor([True])),
    "turns": lambda held: dataclasses.replace(held, turns=()),
    "a turn's pending": first_turn(pending=(10**9,)),
    "a turn's ids": first_turn(pending=("1",)),
    "a turn's position": first_turn(position=1e300),
    "no position": first_turn(position="1"),
    "start": first_turn(start=0.0),
    "stop": first_turn(stop=0),
    "answer": first_turn(answer=None),
    "reason": first_turn(finish_reason=7),
    "forgotten": first_turn(forgotten=(True,)),
    "flag": first_turn(forgotten=(0,)),
    "medium": first_medium(stop=10**9),
    "a medium's label": first_medium(label=["a"]),
    "a medium's kind": first_medium(modality=Modality.TEXT),
}
AGAIN = {"prompt": "And this?", "images": [noise(64, 96, 7)], "max_new_tokens": 6}


def loaded(kind: Any, folder: Path, **options: Any) -> Any:
    pipe = kind(folder, device="cpu", **options)
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


def go_on(folder: Path, saved: Path) -> None:
    print(loaded(OscarVLPipeline, folder).load_chat(saved).ask(**AGAIN).token_ids)


@pytest.fixture(scope="module")
def qwen(qwen3_vl_folder) -> OscarVLPipeline:
    return loaded(OscarVLPipeline, qwen3_vl_folder)


@pytest.mark.daily("qwen", "omni")
@pytest.mark.parametrize("name", FAMILIES)
def test_goes_on_where_it_was(name, tmp_path, request) -> None:
    kind, fixture, media = FAMILIES[name]
    folder, path = request.getfixturevalue(fixture), tmp_path / "chat.safetensors"
    pipe = loaded(kind, folder)
    chat = pipe.chat("Be brief.")
    chat.ask("What?", **media, max_new_tokens=4)
    chat.ask("And this?", images=[noise(64, 64, 5)], max_new_tokens=4)
    chat.forget(1)
    next(chat.stream("Go on."))
    chat.save(path)
    other = loaded(kind, folder).load_chat(path)
    assert other.turns == chat.turns and other.system == "Be brief."
    assert other.segments == chat.segments
    assert other.ask(**AGAIN).token_ids == chat.ask(**AGAIN).token_ids
    other.undo()
    other.undo()
    chat.undo()
    chat.undo()
    assert other.ask(**AGAIN).token_ids == chat.ask(**AGAIN).token_ids


def test_goes_on_in_another_process(qwen, qwen3_vl_folder, tmp_path) -> None:
    path = tmp_path / "chat.safetensors"
    chat = qwen.chat()
    chat.ask("What?", images=[noise(400, 400)], max_new_tokens=4)
    chat.save(path)
    chat.save(path)
    expected = chat.ask(**AGAIN).token_ids
    with Forked(go_on, qwen3_vl_folder, path) as process:
        code, out, errors = process.end()
    assert (code, out.decode()) == (0, f"{expected}\n"), errors.decode()
    assert list(tmp_path.iterdir()) == [path]
    with safe_open(path, "pt") as file:
        names = set(file.keys())
    assert {"given.token_ids", "given.next_position", "layer.0.pages.3.2"} <= names


def test_an_empty_chat(qwen, tmp_path) -> None:
    path = tmp_path / "chat.safetensors"
    qwen.chat("Be kind.").save(path)
    chat = qwen.load_chat(path)
    assert chat.turns == () and chat.system == "Be kind."
    fresh = qwen.chat("Be kind.").ask("What?", max_new_tokens=4)
    assert chat.ask("What?", max_new_tokens=4).token_ids == fresh.token_ids


def test_refused(qwen, tmp_path, tmp_path_factory, qwen3_vl_folder) -> None:
    path = tmp_path / "chat.safetensors"
    chat = qwen.chat()
    chat.ask("What?", images=[noise(64, 64)], max_new_tokens=2)
    chat.save(path)
    used = qwen.store.memory().used_bytes
    other = OscarVLPipeline(build("qwen3_vl", tmp_path / "other", seed=1), device="cpu")
    digit = "[0-9a-f]"
    words = rf"another model \(fingerprint qwen3_vl float32 {digit}{{12}}, here .* {digit}{{12}}\):"
    with pytest.raises(InputError, match=words):
        other.load_chat(path)
    half = OscarVLPipeline(qwen3_vl_folder, device="cpu", dtype="bfloat16")
    with pytest.raises(InputError, match=r"qwen3_vl float32 .*, here qwen3_vl bfloat16 "):
        half.load_chat(path)
    plain = OscarVLPipeline(qwen3_vl_folder, device="cpu", policy="channel")
    with pytest.raises(InputError, match="policy 'standard', but here it is 'channel'"):
        plain.load_chat(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(InputError, match="is truncated"):
        qwen.load_chat(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match="was altered"):
        qwen.load_chat(path)
    save_cache(OscarCache(), path, fingerprint=qwen.fingerprint)
    with pytest.raises(InputError, match="is not a chat of version 1"):
        qwen.load_chat(path)
    given = {"chat": 1, "system": None, "turns": [{"prompt": "What?"}], "pending": []}
    tensors = {"token_ids": torch.zeros(1, 0), "next_position": torch.zeros(1)}
    save_cache(OscarCache(), path, fingerprint=qwen.fingerprint, metadata=given | tensors)
    with pytest.raises(InputError, match="cannot be read as a chat"):
        qwen.load_chat(path)
    with pytest.raises(InputError, match=r"gone.*cannot be read"):
        qwen.load_chat(tmp_path / "gone")
    with pytest.raises(InputError, match="cannot be written"):
        chat.save(tmp_path / "no such folder" / "chat")
    assert qwen.store.memory().used_bytes == used
    assert chat.ask("And?", max_new_tokens=2).token_ids


@pytest.fixture(scope="module")
def held(qwen) -> Conversation:
    """A conversation of one turn with an image."""
    chat = qwen.chat()
    chat.ask("What?", images=[noise(64, 64)], max_new_tokens=2)
    return chat._spillable.conversation


@pytest.mark.parametrize("name", FORGED)
def test_forged_chats(qwen, held, tmp_path, name) -> None:
    """Refused without the pipeline's lock: here another thread has it all the time."""
    path, used = tmp_path / "forged", qwen.store.memory()
    save_chat(path, FORGED[name](held), None, qwen.fingerprint)
    with ThreadPoolExecutor(1) as thread, engine_waits(qwen):
        loading = thread.submit(qwen.load_chat, path)
        with pytest.raises(InputError, match=r"forged: cannot be read as a chat: .{,250}$"):
            loading.result(20)
    assert qwen.store.memory() == used


def test_a_million_layers(qwen, tmp_path) -> None:
    path = tmp_path / "forged"
    qwen.chat().save(path)
    with safe_open(path, "pt") as file:
        text = json.loads(file.metadata()["oscar_mm.cache"])
    text["layers"] = [{}] * 1_200_000
    write_checked(path, load_file(path), {"oscar_mm.cache": json.dumps(text)})
    with ThreadPoolExecutor(1) as thread, engine_waits(qwen):
        loading = thread.submit(qwen.load_chat, path)
        with pytest.raises(InputError, match="forged is damaged: it has 1200000 layers"):
            loading.result(20)


def test_a_chat_of_two_rows(qwen, held, tmp_path) -> None:
    path, cache = tmp_path / "forged", held.cache.fork()
    cache.batch_repeat_interleave(2)
    save_chat(path, dataclasses.replace(held, kv=cache), None, qwen.fingerprint)
    with pytest.raises(InputError, match="its tokens and its cache differ"):
        qwen.load_chat(path)


def test_a_chat_too_large_for_the_budget_is_not_loaded(qwen, held, qwen3_vl_folder, tmp_path):
    path = tmp_path / "chat"
    save_chat(path, held, None, qwen.fingerprint)
    needed = SavedCache.read(path, fingerprint=qwen.fingerprint).bytes
    enough = loaded(OscarVLPipeline, qwen3_vl_folder, kv_budget=needed)
    assert enough.load_chat(path).turns == held.turns
    limit = needed - 1
    small = loaded(OscarVLPipeline, qwen3_vl_folder, kv_budget=limit)
    with pytest.raises(InputError, match=f"{needed:,} bytes, but kv_budget is only {limit:,}; "):
        small.load_chat(path)
    assert small.store.memory().pool_bytes == 0


def test_turns_are_counted(qwen, held, tmp_path, monkeypatch) -> None:
    """What would not be read again is not written either."""
    path = tmp_path / "chat"
    save_chat(path, held, None, qwen.fingerprint)
    for limit in ("MAX_TURNS", "MAX_MEDIA"):
        monkeypatch.setattr(saved_module, limit, 0)
        with pytest.raises(InputError, match="chat: cannot be read as a chat: 1 turns and 1 me"):
            qwen.load_chat(path)
        with pytest.raises(InputError, match="chat: cannot be written: 1 turns and 1 media"):
            save_chat(path, held, None, qwen.fingerprint)
        monkeypatch.undo()
    assert qwen.load_chat(path).turns == held.turns


def test_segments_of_many_turns_take_one_look(held) -> None:
    """Their bytes are those of each one's tokens; a file may name thousands of turns."""
    turn = held.turns[0]
    parts = [turn, *turn.media]
    found = [token_bytes(held.cache.kv_manager, one.start, one.stop) for one in parts]
    assert [one.bytes for one in held.segments()] == [found[0] - found[1], found[1]]
    cache = OscarCache("channel")
    cache.begin(np.zeros((1, 200_000), np.int8))
    asked = (user_message("What?"),)
    turns = tuple(
        dataclasses.replace(turn, start=start, stop=start + 10, messages=asked, forgotten=())
        for start in range(0, 200_000, 10)
    )
    start = time.perf_counter()
    assert len(dataclasses.replace(held, kv=cache, turns=turns).segments()) == 20_000
    assert time.perf_counter() - start < 10


def test_fingerprint_notices_a_changed_weight(qwen3_vl_folder) -> None:
    model = OscarVLPipeline(qwen3_vl_folder, device="cpu").model
    before = model_fingerprint(model)
    assert model_fingerprint(model) == before
    layer = model.get_decoder().layers[1].self_attn.q_proj.weight
    with torch.no_grad():
        layer[0, 0] += 1e-3
    assert model_fingerprint(model) != before
    with torch.no_grad():
        layer[0, 0] -= 1e-3
    model.config.get_text_config().rope_parameters["rope_theta"] += 1
    assert model_fingerprint(model) != before


def test_others_answer_while_a_chat_is_written(qwen, tmp_path, monkeypatch) -> None:
    """The chat itself goes on when its file is complete."""
    chat, asking = qwen.chat(), []

    def write(path, *content) -> None:
        with qwen.chat() as other:
            assert threads.submit(other.ask, "Hi", max_new_tokens=2).result(60).text
        asking.append(threads.submit(chat.ask, "And?", max_new_tokens=2))
        assert not wait(asking, timeout=0.2).done
        write_checked(path, *content)

    monkeypatch.setattr(chat_module, "write_checked", write)
    with ThreadPoolExecutor(2) as threads, chat:
        chat.ask("Hello", max_new_tokens=2)
        chat.save(tmp_path / "a")
        asking[0].result(60)
        assert (len(qwen.load_chat(tmp_path / "a").turns), len(chat.turns)) == (1, 2)
