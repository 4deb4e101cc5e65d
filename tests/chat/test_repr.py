"""One line tells what a pipeline, a chat or a cache is, at any time and from any thread."""

import re
import threading

import pytest
import torch
from transformers import AutoModelForImageTextToText

from oscar_mm import KVPolicy, OscarCache, OscarVLPipeline
from oscar_mm.cache.cache import as_argument
from oscar_mm.chat.chat import Chat
from tests.chats import packed_pipeline
from tests.prompts import noise


@pytest.fixture(scope="module")
def pipe(qwen3_vl_folder) -> OscarVLPipeline:
    return packed_pipeline(qwen3_vl_folder)


def test_pipeline(qwen3_vl_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu", max_context=2000, policy="compact")
    shown = f"OscarVLPipeline({str(qwen3_vl_folder)!r}, device=cpu, dtype=float32, context=2,000, "
    assert repr(pipe) == shown + "policy=compact)"
    assert repr(pipe.with_policy(KVPolicy(window=64))) == shown + "policy=custom)"
    assert pipe.engine.thread._thread is None, "the engine thread was started"
    loaded = AutoModelForImageTextToText.from_pretrained(qwen3_vl_folder)
    assert repr(OscarVLPipeline(loaded)).startswith(f"OscarVLPipeline({str(qwen3_vl_folder)!r}, ")
    assert repr(OscarVLPipeline.__new__(OscarVLPipeline)) == "OscarVLPipeline(not loaded)"


def test_chat(pipe) -> None:
    chat = pipe.chat()
    assert repr(chat) == "Chat(turns=0, media=0, tokens=0, memory=0 B)"
    chat.ask("What is it?", images=[noise(64, 96), noise(64, 96)], max_new_tokens=4)
    tokens = sum(chat.memory.tokens.values())
    shown = re.fullmatch(r"Chat\(turns=1, media=2, tokens=(\S+), memory=(.*) KB\)", repr(chat))
    assert int(shown[1].replace(",", "")) == tokens
    stored = chat.memory.kv_bytes - chat.memory.by_kind["tables"]
    assert float(shown[2]) * 1000 == pytest.approx(stored, abs=5)
    chat.forget(1)
    less = re.fullmatch(r"Chat\(turns=1, media=1, tokens=(\S+), memory=(.*) KB\)", repr(chat))
    assert int(less[1].replace(",", "")) < tokens and float(less[2]) < float(shown[2])
    chat.close()
    assert repr(chat) == repr(Chat.__new__(Chat)) == "Chat(closed)"


def test_chat_on_disk(qwen3_vl_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu", kv_budget="100MB")
    chat = pipe.chat()
    chat.ask("What is it?", max_new_tokens=4)
    pipe.engine.call(lambda: chat._spillable.spill(pipe.budget.new_file()))
    assert repr(chat).endswith(", memory=on disk)")


def test_chat_while_the_engine_is_busy(pipe) -> None:
    chat = pipe.chat()
    begun, over = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        over.wait(10)

    thread = threading.Thread(target=lambda: pipe.engine.call(wait))
    thread.start()
    begun.wait(10)
    assert repr(chat).endswith(", memory=unknown)")
    over.set()
    thread.join()
    assert pipe.engine.call(lambda: repr(chat)) == repr(chat)
    assert not repr(chat).endswith("unknown)")


def test_cache(oscar) -> None:
    cache = OscarCache("compact", model=oscar.model)
    assert repr(cache) == "OscarCache(policy=compact, rows=0, tokens=0, memory=0 B)"
    ids = oscar.model.config.text_config.vocab_size // 2
    tokens = torch.full((2, 40), ids)
    oscar.model(input_ids=tokens, **as_argument(cache))
    shown = re.fullmatch(
        r"OscarCache\(policy=compact, rows=2, tokens=40, memory=(.*) KB\)", repr(cache)
    )
    used = cache.store.memory().used_bytes
    assert used and float(shown[1]) * 1000 == pytest.approx(used, abs=5)
    cache.close()
    assert repr(cache) == "OscarCache(policy=compact, closed)"
    assert repr(OscarCache.__new__(OscarCache)) == "OscarCache(in use)"
