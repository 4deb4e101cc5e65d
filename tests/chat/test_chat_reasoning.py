"""Chats with a thinking model: the reasoning of a turn is out of the cache after it, as chat
templates have it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from oscar_mm import OscarVLPipeline
from oscar_mm.chat.chat import Chat
from oscar_mm.engine.answer import Reasoning
from tests.engine.engine_waits import engine_waits
from tests.prompts import noise
from tests.thinking import ids_of, saying

REASONING = "The user asks what is written on the sign.\n\nIt is a picture of the rain."
THOUGHT = f"{REASONING}\n</think>\n\n"
IMAGES = [noise(64, 96), noise(96, 64, 1)]
SAID = ["The sign says rain.", "Seven items", "Brown and white dogs"]


@pytest.fixture(scope="module", params=["qwen3_vl_thinking_folder", "qwen3_5_thinking_folder"])
def pipe(request: pytest.FixtureRequest) -> OscarVLPipeline:
    """Models whose caches drop reasoning token by token, and by a return to earlier states."""
    folder: Path = request.getfixturevalue(request.param)
    return OscarVLPipeline(folder, policy="bf16", device="cpu")


def ask(chat: Chat, said: str, prompt: str = "What is it?", **options: Any) -> torch.Tensor:
    """Ask, and have the model say this; its own logits after the prompt."""
    with saying(chat.pipe, ids_of(chat.pipe, said)) as seen:
        chat.ask(prompt, **options)
    return seen[0][0]


def by_the_template(pipe: OscarVLPipeline, turns: list[tuple[list, str, str | None]]) -> Any:
    """Logits after the template's own rendering of a conversation, read at once by the model."""
    messages, images = [], []
    for shown, asked, answer in turns:
        parts = [{"type": "image"} for _ in shown]
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": asked}]})
        if answer is not None:
            content = [{"type": "text", "text": answer}]
            messages.append({"role": "assistant", "content": content})
        images += [Image.fromarray(one) for one in shown]
    text = pipe.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert REASONING not in text and text.count("think>") == pipe.family.thinks
    inputs = pipe.processor(text=[text], images=images or None, return_tensors="pt")
    with torch.inference_mode():
        return pipe.model(**inputs, use_cache=False).logits[0, -1]


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() < 1e-4 * expected.abs().max())


@pytest.mark.daily("qwen3_vl_thinking_folder")
def test_an_answer_has_its_reasoning_apart(pipe) -> None:
    with saying(pipe, ids_of(pipe, THOUGHT + SAID[0])):
        answer = pipe(IMAGES[:1], "What is it?")
    assert (answer.text, answer.reasoning) == (SAID[0], REASONING)
    with saying(pipe, ids_of(pipe, THOUGHT + SAID[0])):
        stream = pipe.stream(None, "What is it?")
        pieces = list(stream.with_reasoning())
    assert "".join(x for x in pieces if isinstance(x, Reasoning)) == REASONING
    assert "".join(x for x in pieces if not isinstance(x, Reasoning)) == SAID[0]
    cut = len(ids_of(pipe, REASONING)) - 2
    with saying(pipe, ids_of(pipe, THOUGHT + SAID[0])):
        short = pipe(None, "What is it?", max_new_tokens=cut)
    assert (short.text, short.finish_reason) == ("", "length")
    assert short.reasoning and REASONING.startswith(short.reasoning)


def test_a_batch_has_its_reasoning_apart(pipe) -> None:
    rows = [THOUGHT + SAID[0], f"No.\n</think>\n\n{SAID[1]}"]
    requests = [{"images": IMAGES[0], "prompt": "What is it?"}, {"prompt": "Who?"}]
    with saying(pipe, *(ids_of(pipe, row) for row in rows)):
        first, second = pipe.batch(requests)
    assert first.error is second.error is None
    assert (first.answer.text, first.answer.reasoning) == (SAID[0], REASONING)
    assert (second.answer.text, second.answer.reasoning) == (SAID[1], "No.")


@pytest.mark.daily("qwen3_5_thinking_folder")
def test_turns_are_a_fresh_prefill_of_the_template(pipe) -> None:
    chat = pipe.chat()
    turns: list[tuple[list, str, str | None]] = []
    shown = [IMAGES[:1], [], IMAGES[1:]]
    for images, said, prompt in zip(shown, SAID, ("What is it?", "Where?", "Who?"), strict=True):
        found = ask(chat, THOUGHT + said, prompt, images=images or None)
        assert agree(found, by_the_template(pipe, [*turns, (images, prompt, None)]))
        turns.append((images, prompt, THOUGHT + said))
        last = chat.turns[-1]
        assert (last.answer, last.reasoning) == (said, REASONING)
        # What the next turn continues is in the cache, and nothing else.
        held = sum(chat.memory.tokens.values())
        assert held == last.stop == sum(one.tokens for one in chat.segments)
    chat.undo()
    assert agree(
        ask(chat, SAID[0], "Why?"), by_the_template(pipe, [*turns[:2], ([], "Why?", None)])
    )


def test_a_model_that_opens_its_reasoning_itself(pipe) -> None:
    processor = copy.deepcopy(pipe.processor)
    processor.chat_template = processor.chat_template.replace("<think>\\n", "")
    opening = OscarVLPipeline(pipe.model, processor=processor, policy="bf16")
    chat = opening.chat()
    ask(chat, f"<think>\n{THOUGHT}{SAID[0]}", "What?", images=IMAGES[:1])
    assert (chat.turns[0].answer, chat.turns[0].reasoning) == (SAID[0], REASONING)
    expected = by_the_template(opening, [(IMAGES[:1], "What?", SAID[0]), ([], "Why?", None)])
    assert agree(ask(chat, SAID[1], "Why?"), expected)
    assert chat.turns[1].reasoning is None


def test_without_reasoning_a_turn_stays_as_it_is(pipe) -> None:
    """A model may close its reasoning at once."""
    chat = pipe.chat()
    ask(chat, f"\n</think>\n\n{SAID[0]}", "What?")
    assert chat.turns[0].reasoning == ""
    expected = by_the_template(pipe, [([], "What?", SAID[0]), ([], "Why?", None)])
    assert agree(ask(chat, SAID[1], "Why?"), expected)


@pytest.mark.daily("qwen3_vl_thinking_folder")
def test_an_answer_that_was_cut(pipe) -> None:
    chat = pipe.chat()
    count = len(ids_of(pipe, THOUGHT))
    begun = pipe.processor.tokenizer.decode(ids_of(pipe, SAID[0])[:3])
    for most, text in ((count - 4, ""), (count + 3, begun)):
        ask(chat, THOUGHT + SAID[0], "What?", max_new_tokens=most)
        last = chat.turns[-1]
        assert (last.answer, last.finish_reason) == (text, "length")
        expected = by_the_template(pipe, [([], "What?", text), ([], "Why?", None)])
        assert agree(ask(chat, SAID[1], "Why?"), expected)
        chat.undo()
        chat.undo()


def test_packed_pages_hold_no_reasoning(qwen3_vl_thinking_folder: Path) -> None:
    packed = OscarVLPipeline(qwen3_vl_thinking_folder, policy="channel", device="cpu")
    long = [noise(256, 256, seed) for seed in range(4)]
    with packed.chat() as chat:
        sizes = []
        for said in SAID[:2]:
            ask(chat, THOUGHT + said, "What?", images=long)
            sizes.append(sum(chat.memory.tokens.values()))
            assert sizes[-1] == chat.turns[-1].stop
        assert chat.memory.by_kind["codes"] > 0
        chat.undo()
        assert sum(chat.memory.tokens.values()) == sizes[0]


def test_a_caller_leaves_amid_the_text_and_amid_the_reasoning(pipe) -> None:
    chat = pipe.chat()
    with saying(pipe, ids_of(pipe, THOUGHT + SAID[0])):
        stream = chat.stream("What?")
        assert isinstance(next(stream.with_reasoning()), Reasoning)
        stream.close()
        assert chat.turns == () and chat.memory.kv_bytes == 0
    with saying(pipe, ids_of(pipe, THOUGHT + SAID[0])):
        stream = chat.stream("What?")
        said = next(stream)
        stream.close()
    [turn] = chat.turns
    assert (turn.answer, turn.reasoning, turn.finish_reason) == (said, REASONING, "interrupted")
    assert sum(chat.memory.tokens.values()) == turn.stop
    other = chat.fork()
    expected = by_the_template(pipe, [([], "What?", said), ([], "Why?", None)])
    assert agree(ask(other, SAID[1], "Why?"), expected)
    assert agree(ask(chat, SAID[1], "Why?"), expected)


def test_reasoning_that_went_to_disk_is_out_too(pipe, tmp_path: Path) -> None:
    """Left amid its text, and spilled before anything else was asked."""
    bounded = OscarVLPipeline(pipe.model, processor=pipe.processor, policy="bf16", kv_budget="1GB")
    chat = bounded.chat()
    with saying(pipe, ids_of(pipe, THOUGHT + SAID[0])):
        stream = chat.stream("What?")
        said = next(stream)
        stream.close()
    with engine_waits(bounded):
        chat._spillable.spill(tmp_path / "spilled")
    expected = by_the_template(pipe, [([], "What?", said), ([], "Why?", None)])
    assert agree(ask(chat, SAID[1], "Why?"), expected)


def test_a_saved_chat_goes_on(pipe, tmp_path: Path) -> None:
    chat = pipe.chat()
    ask(chat, THOUGHT + SAID[0], "What?", images=IMAGES[:1])
    chat.save(tmp_path / "chat.safetensors")
    loaded = pipe.load_chat(tmp_path / "chat.safetensors")
    assert loaded.turns == chat.turns and loaded.turns[0].reasoning == REASONING
    assert torch.equal(ask(loaded, SAID[1], "Why?"), ask(chat, SAID[1], "Why?"))


def test_a_given_turn_has_no_reasoning(pipe) -> None:
    chat = pipe.chat()
    chat.tell("What?", SAID[0], images=IMAGES[:1])
    expected = by_the_template(pipe, [(IMAGES[:1], "What?", SAID[0]), ([], "Why?", None)])
    assert agree(ask(chat, SAID[1], "Why?"), expected)


def test_memory_for_an_answer(pipe, qwen3_vl_folder) -> None:
    assert pipe.sampling({}, ()).max_new_tokens == 256 + 8192 == pipe.longest_answer()
    assert pipe.sampling({"max_new_tokens": 5}, ()).max_new_tokens == 5
    plain = OscarVLPipeline(qwen3_vl_folder, device="cpu")
    assert plain.sampling({}, ()).max_new_tokens == 256
    for context, longest in ((2000, 1000), (300, 256)):
        small = OscarVLPipeline(pipe.model, processor=pipe.processor, max_context=context)
        assert small.longest_answer() == longest
