"""What a type checker makes of a user's script; `make lint` runs it, nothing runs the script."""

from typing import Any, assert_type

from oscar_mm import Answer, KVPolicy, MemoryReport, OscarCache, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.apps.audio_qa import audio_qa
from oscar_mm.chat.chat import Chat
from oscar_mm.chat.conversation import Segment
from oscar_mm.engine.answer import AnswerStream
from oscar_mm.pipelines.batch import BatchResult
from oscar_mm.policy import ModalityBits


def ask() -> None:
    """Questions, with pictures and with sound, and a chat."""
    pipe = OscarVLPipeline("model", policy=KVPolicy(bits={"text": 4}), kv_budget="8GB")
    assert_type(pipe(["a.png"], "What is it?"), Answer)
    assert_type(pipe("a.png", "What is it?", max_new_tokens=5, stop=["."]).text, str)
    assert_type(pipe.stream("a.png", "What is it?", temperature=0.5), AnswerStream)
    assert_type(pipe.with_policy("bf16"), OscarVLPipeline)
    assert_type(pipe.batch([{"prompt": "Why?"}]), list[BatchResult])
    assert_type(OscarOmniPipeline("model")("Who speaks?", audio="a.wav"), Answer)
    chat = pipe.chat(system="Be brief.")
    assert_type(chat, Chat)
    assert_type(chat.ask("Why?", images=["a.png"]), Answer)
    assert_type(chat.stream("Why?", seed=1), AnswerStream)
    assert_type(chat.segments, list[Segment])
    assert_type(chat.memory, MemoryReport)


def store() -> None:
    """Policies and caches."""
    assert_type(KVPolicy(bits=4).bits, ModalityBits)
    assert_type(KVPolicy.preset("oscar", window=64), KVPolicy)
    assert_type(OscarCache("compact").memory(), MemoryReport)


def answer_many() -> None:
    """A file of questions."""
    assert_type(audio_qa("questions.jsonl", "answers.jsonl", "model"), dict[str, Any])
