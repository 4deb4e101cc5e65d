"""A visitor's conversation: asking, taking back, forgetting, comparing, saving, refusals."""

import gc
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from oscar_mm import OscarVLPipeline
from oscar_mm.apps.demo import measured_chat as chat_module
from oscar_mm.apps.demo.session import AS_PRESET, Visitor, chosen
from oscar_mm.apps.demo.sessions import Hall
from oscar_mm.apps.demo.uploads import LIMITS
from oscar_mm.errors import InputError
from oscar_mm.modality import Modality
from tests.apps.demo.conftest import COMPACT, asked
from tests.thinking import ids_of, saying


def test_answers_are_those_of_the_library(hall, visitor, uploads) -> None:
    files = [uploads / "0.png", uploads / "tone.wav", uploads / "clip.mp4"]
    asked(visitor, "What is it?", *files)
    asked(visitor, "Is there more?")
    with hall.pipe.chat() as chat:
        shown = {"images": [files[0]], "audio": [files[1]], "videos": [files[2]]}
        answers = [
            chat.ask("What is it?", **shown, max_new_tokens=6),
            chat.ask("Is there more?", max_new_tokens=6),
        ]
        assert [one.answer for one in visitor.exchanges] == [one.text for one in answers]
        assert visitor.side.segments == chat.segments
        last = visitor.side.curve.last
        assert last.by_modality == chat.memory.tokens
        assert last.held == chat.memory.kv_bytes - chat.memory.by_kind["unused"]
    assert all(one.counts and not one.error for one in visitor.exchanges)
    assert [one.kind for one in visitor.exchanges[0].shown] == ["picture", "video", "clip"]


def test_a_page_is_told_at_most_so_often(visitor, uploads, monkeypatch) -> None:
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 0.001)
    # The question, its media, the first word, the whole answer, its end.
    assert asked(visitor, "What?", uploads / "0.png", tokens=40) <= 5
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 1e9)
    assert asked(visitor, "What?", tokens=40) > 10
    tokens = [one.tokens for one in visitor.side.curve.samples]
    assert len(tokens) > 10 and tokens == sorted(tokens)
    assert tokens[-1] == visitor.side.chat.turns[-1].stop


def test_answers_have_a_longest_length(visitor) -> None:
    asked(visitor, "What?", tokens=5000)
    assert "5,000 tokens is over the 1,024" in visitor.exchanges[0].error
    asked(visitor, "What?", tokens=0)
    assert "max_new_tokens" in visitor.exchanges[1].error


def test_a_thinking_model(qwen3_vl_thinking_folder, uploads, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 1e9)
    pipe = OscarVLPipeline(qwen3_vl_thinking_folder, device="cpu", limits=LIMITS)
    hall = Hall(pipe, COMPACT, (uploads, tmp_path))
    visitor = hall.visitor("a")
    told = []
    with saying(pipe, ids_of(pipe, "It is a picture.\n</think>\n\nA sign.")):
        for _ in visitor.ask("What is it?", [uploads / "0.png"], max_new_tokens=2000):
            told.append((visitor.exchanges[0].reasoning, visitor.exchanges[0].answer))
    assert told[-1] == ("It is a picture.", "A sign.")
    assert len({reasoning for reasoning, answer in told if not answer}) > 3
    tokens = [one.tokens for one in visitor.side.curve.samples]
    assert tokens == sorted(tokens) and tokens[-1] == visitor.side.chat.turns[-1].stop
    visitor.save(tmp_path / "saved.safetensors")
    visitor.begin()
    visitor.load(tmp_path / "saved.safetensors")
    [exchange] = visitor.exchanges
    assert (exchange.reasoning, exchange.answer) == told[-1]
    most = f"{1024 + 8192:,}"
    asked(visitor, "What?", tokens=20_000)
    assert f"20,000 tokens is over the {most}" in visitor.exchanges[-1].error
    hall.close()


@pytest.mark.parametrize(
    ("text", "files", "why"),
    [
        ("What?", ["broken.png"], r"broken\.png"),
        ("", ["0.png"], "prompt is empty"),
        ("x" * 5000, [], "5,000 characters are more than the 4,000"),
        ("<|im_end|>", [], "control token"),
        ("What?", ["0.png"] * 25, "25 files are more than the 24"),
    ],
)
def test_what_is_wrong_is_told_and_the_chat_goes_on(visitor, uploads, text, files, why) -> None:
    asked(visitor, "What is it?", uploads / "1.png")
    held = visitor.side.curve.last
    asked(visitor, text, *(uploads / name for name in files))
    refused = visitor.exchanges[-1]
    assert not refused.counts
    with pytest.raises(InputError, match=why):
        raise InputError(refused.error)
    assert visitor.side.curve.last == held
    asked(visitor, "And now?")
    assert visitor.exchanges[-1].counts and len(visitor.side.chat.turns) == 2


def test_a_failure_of_the_server_does_not_end_the_chat(visitor, monkeypatch, caplog) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patched:
        patched.setattr(visitor.hall.pipe, "prepare", fails, raising=True)
        patched.setattr(visitor.hall.pipe.family, "prompt", fails)
        asked(visitor, "What?")
    assert visitor.exchanges[-1].error == "the server failed (ZeroDivisionError); try again"
    assert "secret" in caplog.text
    asked(visitor, "What?")
    assert visitor.exchanges[-1].counts


def test_an_answer_without_a_word_is_told(visitor) -> None:
    pipe, ends = visitor.hall.pipe, visitor.hall.pipe.model.generation_config
    usual = ends.eos_token_id
    try:
        ends.eos_token_id = list(range(pipe.model.get_input_embeddings().num_embeddings))
        asked(visitor, "What?")
    finally:
        ends.eos_token_id = usual
    [exchange] = visitor.exchanges
    assert exchange.counts and exchange.note == "the model ended without a word"
    asked(visitor, "What?")
    assert visitor.exchanges[1].answer


def test_stop_keeps_what_was_written(visitor, monkeypatch) -> None:
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 1e9)
    for count, _ in enumerate(visitor.ask("What?", [], max_new_tokens=500)):
        if count == 4:
            visitor.stop()
    [exchange] = visitor.exchanges
    assert exchange.counts and "stopped" in exchange.note
    assert exchange.answer == visitor.side.chat.turns[0].answer != ""
    assert visitor.stopped


def test_only_one_answer_at_a_time_and_others_end_it(visitor, uploads) -> None:
    running = visitor.ask("What?", [uploads / "0.png"], max_new_tokens=500)
    for _ in range(3):
        next(running)
    with pytest.raises(InputError, match="wait for it, or stop it"):
        next(visitor.ask("And?", []))
    worker = threading.Thread(target=visitor.begin)
    worker.start()
    for _ in running:
        pass
    worker.join(timeout=30)
    assert visitor.exchanges == [] and visitor.side.curve.last.held == 0


def test_who_leaves_in_the_middle_keeps_what_was_written(visitor, monkeypatch) -> None:
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 1e9)
    running = visitor.ask("What?", [], max_new_tokens=500)
    for _ in range(5):
        next(running)
    running.close()
    assert visitor.exchanges[0].counts and len(visitor.side.chat.turns) == 1
    asked(visitor, "And?")
    assert len(visitor.turns) == 2


def test_undo(visitor, uploads) -> None:
    asked(visitor, "What?", uploads / "0.png")
    before = visitor.side.curve.last
    asked(visitor, "And this?", uploads / "1.png")
    asked(visitor, "", uploads / "1.png")
    visitor.undo()  # the message that was refused
    assert [one.counts for one in visitor.exchanges] == [True, True]
    visitor.undo()
    last = visitor.side.curve.last
    # What the answer had to spare for its next tokens is given back with the turn.
    spare = before.parts["text"] - last.parts["text"]
    assert 0 <= spare <= before.parts["text"] / 2
    parts = last.parts | {"text": before.parts["text"]}
    assert len(visitor.exchanges) == 1 and replace(last, parts=parts) == before
    visitor.undo()
    assert visitor.exchanges == [] and visitor.side.curve.last.stored == 0
    with pytest.raises(InputError, match="nothing to take back"):
        visitor.undo()


def test_forget(visitor, uploads) -> None:
    asked(visitor, "What?", uploads / "0.png", uploads / "1.png")
    before = visitor.side.curve.last
    [image, _] = [one for one in visitor.side.segments if one.modality is Modality.IMAGE]
    visitor.forget(image.index)
    after = visitor.side.curve.last
    assert after.stored == before.stored - image.tokens and after.held <= before.held
    assert after.tokens == before.tokens
    assert visitor.side.segments[image.index].forgotten
    with pytest.raises(InputError, match="segment is text"):
        visitor.forget(0)


def test_comparison(visitor, uploads) -> None:
    asked(visitor, "What?", uploads / "0.png", uploads / "1.png")
    asked(visitor, "And?")
    visitor.forget(1)
    assert visitor.other is None
    for _ in visitor.compare():
        pass
    with visitor.hall.pipeline(visitor.other.chat.pipe.policy).chat() as exact:
        media = [uploads / "0.png", uploads / "1.png"]
        exact.ask("What?", images=media, max_new_tokens=6)
        wanted = exact.ask("And?", max_new_tokens=6).text
    assert visitor.other.chat.pipe.policy.packs is False
    assert visitor.exchanges[1].other == wanted
    assert visitor.other.segments[1].forgotten
    asked(visitor, "More?")
    assert visitor.exchanges[2].other is not None
    visitor.undo()
    assert len(visitor.other.chat.turns) == len(visitor.side.chat.turns) == 2
    visitor.stop_comparing()
    assert visitor.other is None and visitor.exchanges[0].other is None


def test_a_comparison_that_is_stopped_is_given_up(visitor, monkeypatch) -> None:
    visitor.begin(chosen("compact", dict.fromkeys(_LABELS, AS_PRESET), 32, None, True))
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 1e9)
    for _ in visitor.ask("What?", [], max_new_tokens=30):
        if visitor.exchanges[0].other:
            visitor.stop()
    assert visitor.exchanges[0].counts and visitor.other is None
    asked(visitor, "And?")
    assert visitor.exchanges[1].counts and visitor.exchanges[1].other is None


def test_settings_are_those_of_a_new_conversation(visitor, uploads) -> None:
    bits = {"text": "3/2", "image": "2", "video": AS_PRESET, "audio": "16"}
    visitor.begin(chosen("compact", bits, 64, " Be brief. ", False))
    policy = visitor.side.chat.pipe.policy
    assert list(map(str, policy.bits)) == ["3/2", "2", "2", "16"] and policy.window == 64
    assert visitor.side.chat.system == "Be brief." and visitor.settings.name == "compact*"
    asked(visitor, "What?", uploads / "0.png")
    assert visitor.exchanges[0].counts
    with pytest.raises(InputError, match="control token"):
        visitor.begin(chosen("compact", bits, 64, "<|im_end|>", False))
    asked(visitor, "And?")
    assert visitor.exchanges[1].counts


def test_save_and_load(hall, visitor, uploads, tmp_path) -> None:
    with pytest.raises(InputError, match="nothing to save"):
        visitor.save(tmp_path / "chat.safetensors")
    asked(visitor, "What?", uploads / "0.png")
    path = uploads / "chat.safetensors"
    visitor.save(path)
    other = hall.visitor("b")
    other.load(path)
    assert [one.question for one in other.exchanges] == ["What?"]
    assert [(one.kind, one.name, one.path) for one in other.exchanges[0].shown] == [
        ("picture", "0.png", None)
    ]
    assert other.side.segments == visitor.side.segments
    asked(visitor, "And?")
    asked(other, "And?")
    assert visitor.exchanges[1].answer == other.exchanges[1].answer
    with pytest.raises(InputError, match="without its media"):
        list(other.compare())
    elsewhere = tmp_path / "elsewhere.safetensors"
    visitor.save(elsewhere)
    with pytest.raises(InputError, match="was not uploaded here"):
        other.load(elsewhere)
    assert len(other.exchanges) == 2


def test_inspection(visitor, uploads) -> None:
    with pytest.raises(InputError, match="ask a question"):
        visitor.inspection()
    asked(visitor, "What?", uploads / "0.png")
    asked(visitor, "And this?", uploads / "1.png", uploads / "tone.wav")
    found = visitor.inspection()
    segments = visitor.side.segments
    images = sum(one.tokens for one in segments if one.modality is Modality.IMAGE)
    assert found.tokens["image"] == images and found.tokens["audio"] > 0


def test_who_has_left_holds_nothing(hall: Hall, visitor: Visitor, uploads: Path) -> None:
    gc.collect()
    used = hall.pipe.budget.used_bytes
    asked(visitor, "What?", uploads / "0.png")
    assert hall.pipe.budget.used_bytes > used
    hall.leave("a")
    assert hall.pipe.budget.used_bytes == used
    with pytest.raises(InputError, match="reload the page"):
        asked(visitor, "And?")
    hall.leave("a")


def test_who_leaves_while_it_is_answered_holds_nothing(hall, visitor, monkeypatch) -> None:
    used = hall.pipe.budget.used_bytes
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 1e9)
    running = visitor.ask("What?", [], max_new_tokens=500)
    for _ in range(4):
        next(running)
    leaving = threading.Thread(target=hall.leave, args=("a",))
    leaving.start()
    for _ in running:
        pass
    leaving.join(timeout=30)
    assert hall.pipe.budget.used_bytes == used


_LABELS = [one.label for one in Modality]
