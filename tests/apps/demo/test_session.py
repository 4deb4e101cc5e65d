"""A visitor's conversation: asking, taking back, forgetting, comparing, saving, refusals."""

import gc
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from oscar_mm import OscarVLPipeline
from oscar_mm.apps.demo import measured_chat as chat_module
from oscar_mm.apps.demo import sessions as sessions_module
from oscar_mm.apps.demo.memory_panel import status_view
from oscar_mm.apps.demo.sessions import Sessions
from oscar_mm.apps.demo.transcript import history
from oscar_mm.apps.demo.visitor_input import AS_PRESET, LIMITS, SessionSettings
from oscar_mm.errors import InputError
from oscar_mm.modality import Modality
from oscar_mm.policy import KVPolicy
from tests.apps.demo.conftest import COMPACT, asked
from tests.thinking import ids_of, saying

BITS = {one.label: AS_PRESET for one in Modality}


def test_answers_are_those_of_the_library(sessions, session, uploads) -> None:
    files = [uploads / "0.png", uploads / "tone.wav", uploads / "clip.mp4"]
    asked(session, "What is it?", *files)
    asked(session, "Is there more?")
    with sessions.pipe.chat() as chat:
        shown = {"images": [files[0]], "audio": [files[1]], "videos": [files[2]]}
        answers = [
            chat.ask("What is it?", **shown, max_new_tokens=6),
            chat.ask("Is there more?", max_new_tokens=6),
        ]
        assert [one.answer for one in session.exchanges] == [one.text for one in answers]
        assert session.conversation.segments == chat.segments
        last = session.conversation.curve.last
        assert last.by_modality == chat.memory.tokens
        assert last.used_bytes == chat.memory.kv_bytes - chat.memory.by_kind["unused"]
    assert all(one.counts and not one.error for one in session.exchanges)
    assert [one.kind for one in session.exchanges[0].previews] == ["picture", "video", "clip"]


def test_pictures_between_words(sessions, session, uploads) -> None:
    """The model reads them where the text names them."""
    files = [uploads / "0.png", uploads / "tone.wav", uploads / "1.png"]
    asked(session, "First [1.png] then [tone.wav] what?", *files)
    [exchange] = session.turns
    names = [part if isinstance(part, str) else part.name for part in exchange.asked]
    assert names == ["0.png", "First", "1.png", "then", "tone.wav", "what?"]
    parts = [
        *({"type": "image", "image": uploads / "0.png"}, "First"),
        *({"type": "image", "image": uploads / "1.png"}, "then"),
        *({"type": "audio", "audio": uploads / "tone.wav"}, "what?"),
    ]
    with sessions.pipe.chat() as chat:
        seed = exchange.options["seed"]
        answer = chat.ask(parts=parts, max_new_tokens=6, temperature=0.0, seed=seed)
        assert exchange.answer == answer.text
        assert chat.turns[0].messages == session.conversation.chat.turns[0].messages
    assert session.take_back() == ("First [1.png] then [tone.wav] what?", files)


def test_a_page_is_updated_at_most_so_often(session, uploads, monkeypatch) -> None:
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 0.001)
    # The question, its media, the first word, the whole answer, its end.
    assert asked(session, "What?", uploads / "0.png", tokens=40) <= 5
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 1e9)
    assert asked(session, "What?", tokens=40) > 10
    tokens = [one.tokens for one in session.conversation.curve.samples]
    assert len(tokens) > 10 and tokens == sorted(tokens)
    assert tokens[-1] == session.conversation.chat.turns[-1].stop


def test_answers_have_a_longest_length(session) -> None:
    asked(session, "What?", tokens=5000)
    assert "5,000 tokens per answer exceeds the maximum of 1,024" in session.exchanges[0].error
    asked(session, "What?", tokens=0)
    assert "max_new_tokens" in session.exchanges[1].error


def test_a_thinking_model(qwen3_vl_thinking_folder, uploads, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 1e9)
    pipe = OscarVLPipeline(qwen3_vl_thinking_folder, device="cpu", limits=LIMITS)
    sessions = Sessions(pipe, COMPACT, (uploads, tmp_path))
    session = sessions.session("a")
    told = []
    with saying(pipe, ids_of(pipe, "It is a picture.\n</think>\n\nA sign.")):
        for _ in session.ask("What is it?", [uploads / "0.png"], max_new_tokens=2000):
            told.append((session.exchanges[0].reasoning, session.exchanges[0].answer))
    assert told[-1] == ("It is a picture.", "A sign.")
    assert len({reasoning for reasoning, answer in told if not answer}) > 3
    tokens = [one.tokens for one in session.conversation.curve.samples]
    assert tokens == sorted(tokens) and tokens[-1] == session.conversation.chat.turns[-1].stop
    session.save(tmp_path / "saved.safetensors")
    session.begin()
    session.load(tmp_path / "saved.safetensors")
    [exchange] = session.exchanges
    assert (exchange.reasoning, exchange.answer) == told[-1]
    most = f"{1024 + 8192:,}"
    asked(session, "What?", tokens=20_000)
    assert f"20,000 tokens per answer exceeds the maximum of {most}" in session.exchanges[-1].error
    sessions.close()


@pytest.mark.parametrize(
    ("text", "files", "why"),
    [
        ("What?", ["broken.png"], r"broken\.png"),
        ("", ["0.png"], "message is empty"),
        ("x" * 100_001, [], "100,001 characters are more than the 100,000"),
        ("<|im_end|>", [], "control token"),
        ("What?", ["0.png"] * 25, "25 files are more than the 24"),
    ],
)
def test_what_is_wrong_is_reported_and_the_chat_continues(
    session, uploads, text, files, why
) -> None:
    asked(session, "What is it?", uploads / "1.png")
    held = session.conversation.curve.last
    asked(session, text, *(uploads / name for name in files))
    refused = session.exchanges[-1]
    assert not refused.counts
    with pytest.raises(InputError, match=why):
        raise InputError(refused.error)
    assert session.conversation.curve.last == held
    asked(session, "And now?")
    assert session.exchanges[-1].counts and len(session.conversation.chat.turns) == 2


def test_a_failure_of_the_server_does_not_end_the_chat(session, monkeypatch, caplog) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patched:
        patched.setattr(session.sessions.pipe, "prepare", fails, raising=True)
        patched.setattr(session.sessions.pipe.family, "prompt", fails)
        asked(session, "What?")
    assert session.exchanges[-1].error == "the server failed (ZeroDivisionError); try again"
    assert "secret" in caplog.text
    asked(session, "What?")
    assert session.exchanges[-1].counts


def test_an_answer_without_a_word_is_reported(session) -> None:
    pipe, ends = session.sessions.pipe, session.sessions.pipe.model.generation_config
    usual = ends.eos_token_id
    try:
        ends.eos_token_id = list(range(pipe.model.get_input_embeddings().num_embeddings))
        asked(session, "What?")
    finally:
        ends.eos_token_id = usual
    [exchange] = session.exchanges
    assert exchange.counts and exchange.note == "the answer is empty"
    asked(session, "What?")
    assert session.exchanges[1].answer


def test_stop_keeps_what_was_written(session, monkeypatch) -> None:
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 1e9)
    for count, _ in enumerate(session.ask("What?", [], max_new_tokens=500)):
        if count == 4:
            session.stop()
    [exchange] = session.exchanges
    assert exchange.counts and "stopped" in exchange.note
    assert exchange.answer == session.conversation.chat.turns[0].answer != ""
    assert session.stopped


@pytest.mark.parametrize("when", ["prompt", "media", "waits for others"])
def test_stop_before_the_first_word_ends_the_reading(
    session, uploads, monkeypatch, when: str
) -> None:
    asked(session, "What?")
    pipe, chat = session.sessions.pipe, session.conversation.chat
    turns, call_with_memory = chat.turns, pipe.engine.call_with_memory

    def called_after_stop(begin: Callable[[], Any], *client: Any) -> Any:
        if "TurnRunner._answer." in repr(begin):
            session.stop()
        return call_with_memory(begin, *client)

    if when == "waits for others":
        monkeypatch.setattr(pipe.engine, "call_with_memory", called_after_stop)
    layers, passes = pipe.model.get_decoder().layers, []

    def stop(*_: object) -> None:
        passes.append(1)
        session.stop()

    hooks = [
        layers[0].register_forward_pre_hook(stop),
        layers[1].register_forward_pre_hook(lambda *_: passes.append(2)),
    ]
    running = session.ask("And this?", [uploads / "0.png"], max_new_tokens=6)
    next(running)
    if when == "media":
        session.stop()
    for _ in running:
        pass
    for hook in hooks:
        hook.remove()
    monkeypatch.undo()
    assert passes == ([1] if when == "prompt" else [])
    assert session.conversation.chat.turns == turns
    assert "stopped before the first word" in session.exchanges[-1].error
    asked(session, "And this?", uploads / "0.png")
    assert session.exchanges[-1].counts and session.exchanges[-1].answer


def test_only_one_answer_at_a_time_and_others_end_it(session, uploads) -> None:
    running = session.ask("What?", [uploads / "0.png"], max_new_tokens=500)
    for _ in range(3):
        next(running)
    with pytest.raises(InputError, match="wait for the answer, or stop it"):
        next(session.ask("And?", []))
    worker = threading.Thread(target=session.begin)
    worker.start()
    for _ in running:
        pass
    worker.join(timeout=30)
    assert session.exchanges == [] and session.conversation.curve.last.used_bytes == 0


def test_a_visitor_who_leaves_in_the_middle_keeps_what_was_written(session, monkeypatch) -> None:
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 1e9)
    running = session.ask("What?", [], max_new_tokens=500)
    for _ in range(5):
        next(running)
    running.close()
    [exchange] = session.exchanges
    assert exchange.counts and "stopped" in exchange.note
    assert exchange.answer == session.conversation.chat.turns[0].answer
    assert session.conversation.curve.last.tokens == session.conversation.tokens
    asked(session, "And?")
    assert len(session.turns) == 2


def test_undo(session, uploads) -> None:
    asked(session, "What?", uploads / "0.png")
    before = session.conversation.curve.last
    asked(session, "And this?", uploads / "1.png")
    asked(session, "", uploads / "1.png")
    session.undo()  # the message that was refused
    assert [one.counts for one in session.exchanges] == [True, True]
    session.undo()
    last = session.conversation.curve.last
    # What the answer had to spare for its next tokens is given back with the turn.
    spare = before.parts["text"] - last.parts["text"]
    assert 0 <= spare <= before.parts["text"] / 2
    parts = last.parts | {"text": before.parts["text"]}
    assert len(session.exchanges) == 1 and replace(last, parts=parts) == before
    session.undo()
    assert session.exchanges == [] and session.conversation.curve.last.stored_tokens == 0
    with pytest.raises(InputError, match="nothing to undo"):
        session.undo()


def test_a_question_is_taken_back_to_ask_it_again(session, uploads, tmp_path) -> None:
    asked(session, "What?", uploads / "0.png")
    text, files = session.take_back()
    assert (text, files, session.exchanges) == ("What?", [uploads / "0.png"], [])
    asked(session, "<|im_end|>", uploads / "1.png")
    assert session.take_back() == ("<|im_end|>", [uploads / "1.png"])
    with pytest.raises(InputError, match="nothing to undo"):
        session.take_back()
    asked(session, "What?", uploads / "0.png")
    session.save(uploads / "taken.safetensors")
    session.load(uploads / "taken.safetensors")
    with pytest.raises(InputError, match="files of a loaded question are missing"):
        session.take_back()
    assert len(session.turns) == 1


def test_an_earlier_question_is_undone_with_the_later_ones(sessions, session, uploads) -> None:
    session.begin(SessionSettings.of_fields("compact", BITS, 32, None, True))
    asked(session, "What?", uploads / "0.png")
    asked(session, "", uploads / "1.png")
    for question in ("And this?", "More?", "Still more?"):
        asked(session, question, uploads / "1.png")
    first, refused, second, third, _ = session.exchanges
    before = session.conversation.tokens
    assert session.take_back(third.key) == ("More?", [uploads / "1.png"])
    assert session.exchanges == [first, refused, second]
    for chat in (session.conversation.chat, session.baseline.chat):
        assert [turn.prompt for turn in chat.turns] == ["What?", "And this?"]
    assert session.conversation.curve.last.tokens == session.conversation.tokens < before
    asked(session, "Which?")
    policy = session.settings.policy
    with sessions.pipeline(policy).chat() as chat:
        shown = [{"images": [uploads / "0.png"]}, {"images": [uploads / "1.png"]}, {}]
        for turn, media in zip(session.turns, shown, strict=True):
            answer = chat.ask(turn.question, **media, max_new_tokens=6, temperature=0.0)
            # Tokens of undone turns have pushed others out of the window.
            assert turn is session.turns[-1] or answer.text == turn.answer
    session.undo(refused.key)
    assert session.exchanges == [first]
    with pytest.raises(InputError, match="this question is gone"):
        session.undo(second.key)
    with pytest.raises(InputError, match="this question is gone"):
        session.take_back("")
    session.undo(first.key)
    assert session.exchanges == [] and session.conversation.curve.last.used_bytes == 0


def test_a_chat_that_cannot_undo_keeps_its_questions(session, monkeypatch) -> None:
    for question in ("What?", "And?", "More?"):
        asked(session, question)
    keys = [one.key for one in session.exchanges]
    monkeypatch.setattr("oscar_mm.cache.cache.OscarCache.longest_crop", lambda *_: 0)
    for change in (session.undo, session.take_back, session.fork):
        with pytest.raises(InputError, match="start a new chat"):
            change(keys[1])
    assert [one.key for one in session.exchanges] == keys
    assert len(session.conversation.chat.turns) == 3


def test_an_earlier_question_is_changed_while_an_answer_is_written(session) -> None:
    asked(session, "What?")
    asked(session, "And?")
    running = session.ask("More?", [], max_new_tokens=500)
    for _ in range(3):
        next(running)
    worker = threading.Thread(target=session.undo, args=[session.exchanges[1].key])
    worker.start()
    for _ in running:
        pass
    worker.join(timeout=30)
    assert [one.question for one in session.exchanges] == ["What?"]
    assert len(session.conversation.chat.turns) == 1


def test_a_fork_ends_with_the_chosen_question(session, uploads) -> None:
    for question in ("What?", "And?", "More?"):
        asked(session, question, uploads / "0.png")
    first, second, third = session.exchanges
    fork = session.fork(second.key)
    assert [one.question for one in fork.exchanges] == ["What?", "And?"]
    assert [turn.prompt for turn in fork.conversation.chat.turns] == ["What?", "And?"]
    assert session.exchanges == [first, second, third]
    assert len(session.conversation.chat.turns) == 3
    # The copy's questions have the same keys, so the page may name them before it is shown again.
    fork.undo(second.key)
    assert len(fork.exchanges) == 1 and len(session.exchanges) == 3
    fork.close()


def test_a_fork_goes_on_by_itself(session, uploads) -> None:
    session.begin(SessionSettings.of_fields("compact", BITS, 32, None, True))
    asked(session, "What?", uploads / "0.png")
    fork = session.fork()
    asked(session, "And?")
    asked(fork, "And?")
    asked(fork, "More?")
    assert [len(one.turns) for one in (session, fork)] == [2, 3]
    for answers in ("answer", "baseline"):
        first, second = (getattr(one.exchanges[1], answers) for one in (session, fork))
        assert first == second is not None
    assert fork.id != session.id and fork.conversation.curve.samples[1].tokens > 0
    fork.undo()
    assert len(session.turns) == 2 and len(session.conversation.chat.turns) == 2
    fork.close()


def test_long_text_is_bounded_by_the_context(session, uploads) -> None:
    context = session.sessions.pipe.admission.max_context
    question = "What is the code? " * 400
    asked(session, question)
    assert session.turns[0].question == question.strip()
    assert f"{session.conversation.tokens:,} of {context:,} tokens" in status_view(session)
    for text in ("word " * 19_000, "x" * 10**6):
        asked(session, text, *[uploads / "0.png"] * 30)
        refused = session.exchanges[-1]
        assert refused.error and not refused.counts
        assert len(refused.question) <= 4000 and len(refused.files) <= 24


def test_the_transcript_forgets_old_refused_messages(session) -> None:
    asked(session, "What?")
    for index in range(100):
        session.show_error(InputError(f"refused {index}"))
    asked(session, "And?")
    assert len(session.turns) == 2 and len(session.exchanges) < 25
    assert "refused 99" in [exchange.error for exchange in session.exchanges]


def test_forget(session, uploads) -> None:
    asked(session, "What?", uploads / "0.png", uploads / "1.png")
    before = session.conversation.curve.last
    [image, _] = [one for one in session.conversation.segments if one.modality is Modality.IMAGE]
    session.forget(image.index)
    after = session.conversation.curve.last
    assert (
        after.stored_tokens == before.stored_tokens - image.tokens
        and after.used_bytes <= before.used_bytes
    )
    assert after.tokens == before.tokens
    assert session.conversation.segments[image.index].forgotten
    with pytest.raises(InputError, match="segment is text"):
        session.forget(0)


def test_comparison(session, uploads) -> None:
    asked(session, "What?", uploads / "0.png", uploads / "1.png")
    asked(session, "And?")
    session.forget(1)
    assert session.baseline is None
    for _ in session.compare():
        pass
    with session.sessions.pipeline(session.baseline.chat.pipe.policy).chat() as exact:
        media = [uploads / "0.png", uploads / "1.png"]
        exact.ask("What?", images=media, max_new_tokens=6)
        wanted = exact.ask("And?", max_new_tokens=6).text
    assert session.baseline.chat.pipe.policy.packs is False
    assert session.exchanges[1].baseline == wanted
    assert session.baseline.segments[1].forgotten
    asked(session, "More?")
    assert session.exchanges[2].baseline is not None
    session.undo()
    assert len(session.baseline.chat.turns) == len(session.conversation.chat.turns) == 2
    session.stop_comparing()
    assert session.baseline is None and session.exchanges[0].baseline is None


def test_a_comparison_that_is_stopped_is_given_up(session, monkeypatch) -> None:
    session.begin(SessionSettings.of_fields("compact", BITS, 32, None, True))
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 1e9)
    for _ in session.ask("What?", [], max_new_tokens=30):
        if session.exchanges[0].baseline:
            session.stop()
    assert session.exchanges[0].counts and session.baseline is None
    asked(session, "And?")
    assert session.exchanges[1].counts and session.exchanges[1].baseline is None


def test_settings_are_those_of_a_new_conversation(session, uploads) -> None:
    bits = {"text": "3/2", "image": "2", "video": AS_PRESET, "audio": "16"}
    session.begin(SessionSettings.of_fields("compact", bits, 64, " Be brief. ", False))
    policy = session.conversation.chat.pipe.policy
    assert list(map(str, policy.bits)) == ["3/2", "2", "2", "16"] and policy.window == 64
    assert session.conversation.chat.system == "Be brief." and session.settings.name == "compact*"
    asked(session, "What?", uploads / "0.png")
    assert session.exchanges[0].counts
    with pytest.raises(InputError, match="control token"):
        session.begin(SessionSettings.of_fields("compact", bits, 64, "<|im_end|>", False))
    asked(session, "And?")
    assert session.exchanges[1].counts


def test_save_and_load(sessions, session, uploads, tmp_path) -> None:
    with pytest.raises(InputError, match="nothing to save"):
        session.save(tmp_path / "chat.safetensors")
    asked(session, "What?", uploads / "0.png")
    path = uploads / "chat.safetensors"
    session.save(path)
    other = sessions.session("b")
    other.load(path)
    assert [one.question for one in other.exchanges] == ["What?"]
    [before], [after] = (one.exchanges[0].previews for one in (session, other))
    assert after == replace(before, path=None) and after.html.startswith("<img")
    assert other.conversation.segments == session.conversation.segments
    asked(session, "And?")
    asked(other, "And?")
    assert session.exchanges[1].answer == other.exchanges[1].answer
    with pytest.raises(InputError, match="lacks its media"):
        list(other.compare())
    elsewhere = tmp_path / "elsewhere.safetensors"
    session.save(elsewhere)
    with pytest.raises(InputError, match="was not uploaded here"):
        other.load(elsewhere)
    assert len(other.exchanges) == 2


def test_inspection(session, uploads) -> None:
    with pytest.raises(InputError, match="ask a question"):
        session.inspection()
    asked(session, "What?", uploads / "0.png")
    asked(session, "And this?", uploads / "1.png", uploads / "tone.wav")
    found = session.inspection()
    segments = session.conversation.segments
    images = sum(one.tokens for one in segments if one.modality is Modality.IMAGE)
    assert found.tokens["image"] == images and found.tokens["audio"] > 0


def test_a_visitor_who_left_long_ago_keeps_nothing(sessions, session, uploads, monkeypatch) -> None:
    gc.collect()
    used = sessions.pipe.budget.used_bytes
    asked(session, "What?", uploads / "0.png")
    sessions.leave("a")
    assert sessions.pipe.budget.used_bytes > used
    monkeypatch.setattr(sessions_module, "MAX_UNVISITED_S", -1.0)
    sessions.visit("a", session.id)
    sessions.leave("a")
    assert sessions.pipe.budget.used_bytes == used
    with pytest.raises(InputError, match="reload the page"):
        asked(session, "And?")
    sessions.leave("a")


def test_a_visitor_who_leaves_during_an_answer_keeps_nothing(
    sessions, session, monkeypatch
) -> None:
    used = sessions.pipe.budget.used_bytes
    monkeypatch.setattr(chat_module, "UPDATES_PER_S", 1e9)
    monkeypatch.setattr(sessions_module, "MAX_UNVISITED_S", -1.0)
    running = session.ask("What?", [], max_new_tokens=500)
    for _ in range(4):
        next(running)
    leaving = threading.Thread(target=sessions.leave, args=("a",))
    leaving.start()
    for _ in running:
        pass
    leaving.join(timeout=30)
    assert sessions.pipe.budget.used_bytes == used


def test_settings_say_what_is_wrong() -> None:
    for preset, window in (("kivi", 32.0), ("bf16", 0)):
        settings = SessionSettings.of_fields(preset, BITS, window, "", False)
        assert settings.policy == KVPolicy.preset(preset)
    for preset, bits, window, why_not in (
        ("nothing", BITS, 32, "unknown policy 'nothing'"),
        (
            "compact",
            BITS | {"image": "3"},
            32,
            "bits '3': must be one of 2, 3/2, 4/2, 4, 16 or 'preset'",
        ),
        ("compact", BITS | {"text": 4}, 32, "bits 4: must be one of"),
        ("compact", BITS, 32.5, "window=32.5"),
        ("compact", BITS, None, "window=None"),
        ("compact", BITS, 9999, "window=9999"),
    ):
        with pytest.raises(InputError, match=why_not):
            SessionSettings.of_fields(preset, bits, window, None, False)


def test_media_of_refused_messages_have_no_number(session, uploads) -> None:
    asked(session, "What?", uploads / "0.png")
    asked(session, "What?", uploads / "1.png", tokens=0)
    for _ in session.ask("And?", [uploads / "2.png"], max_new_tokens=4):
        captions = re.findall(
            "<figcaption>([^<]*)</figcaption>", history(session.exchanges, session.active)
        )
        assert captions == ["picture 1", "not seen", "picture 2"][: len(captions)]
    assert len(captions) == 3


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[1.png][0.png] Which?", ["1.png", "0.png", "Which?"]),
        ("[0.png] Which?", ["1.png", "0.png", "Which?"]),
        ("[1.png]", ["0.png", "1.png"]),
        ("Which?", ["0.png", "1.png", "Which?"]),
    ],
)
def test_files_that_are_named_first_are_in_this_order(session, uploads, text, parts) -> None:
    """The names are not part of the text that the model reads."""
    asked(session, text, uploads / "0.png", uploads / "1.png")
    [exchange] = session.exchanges
    assert exchange.counts, exchange.error
    shown = [part if isinstance(part, str) else part.name for part in exchange.asked]
    assert [part for part in shown if part] == parts
    [turn] = session.conversation.chat.turns
    assert [span.label for span in turn.media] == [part for part in parts if part != "Which?"]
    assert turn.prompt == ("Which?" if "Which?" in parts else "")
