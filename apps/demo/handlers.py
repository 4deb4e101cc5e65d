"""Handlers: functions that handle the page's events and return what the page shows next."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from oscar_mm.admission.capacity import ModelShape
from oscar_mm.apps.demo.charts import inspection_view
from oscar_mm.apps.demo.conversation_list import conversation_list, ids_in, words_in
from oscar_mm.apps.demo.curve_picture import curve_picture
from oscar_mm.apps.demo.examples import Example
from oscar_mm.apps.demo.hands_free import SPEAKING, Ears, Question
from oscar_mm.apps.demo.live_speech import in_16_bit
from oscar_mm.apps.demo.measured_chat import UPDATES_PER_S
from oscar_mm.apps.demo.memory_panel import (
    MODELS,
    capacity,
    comparison_view,
    memory_report,
    memory_view,
    segments_view,
    status_view,
)
from oscar_mm.apps.demo.model_choice import ModelChoice
from oscar_mm.apps.demo.session import Session
from oscar_mm.apps.demo.sessions import Sessions
from oscar_mm.apps.demo.transcript import as_markdown, history, live
from oscar_mm.apps.demo.visitor_input import SessionSettings, as_int
from oscar_mm.errors import InputError

THIS_MODEL = "the model of this page"
_UNCHANGED = gr.skip()
_log = logging.getLogger(__name__)


class Handlers:
    """Event handlers of the page.

    Most handlers take the scenario of the capacity estimate: GPU, model and length.

    Args:
        sessions: the visitors' sessions.
        folder: folder for the files that visitors download.
        choice: choice of another model; None for a page that offers none.

    Attributes:
        part_names: names of the page's parts that most handlers return, in order.
    """

    part_names = (
        *("history", "live", "memory", "segments"),
        *("compared", "capacity", "status", "compare"),
    )

    def __init__(self, sessions: Sessions, folder: Path, choice: ModelChoice | None = None) -> None:
        self.sessions, self.folder = sessions, folder
        self.choice = choice or ModelChoice(sessions.card.name)
        pipe = sessions.pipe
        model = pipe.family.outer_model
        self.shape = ModelShape.of(pipe.model.config, model.num_parameters())

    def initial(self, *scenario: str) -> dict[str, Any]:
        """Return the content of the page's parts for an empty conversation, by part name."""
        session = Session(self.sessions)
        parts = self.all_parts(session, *scenario)
        session.close()
        return dict(zip(self.part_names, parts, strict=True))

    def all_parts(self, session: Session, *scenario: str) -> tuple:
        """Return the content of all parts of the page, in the order of ``part_names``; no changes
        for a conversation that has ended."""
        if session.has_ended:
            return (_UNCHANGED,) * len(self.part_names)
        return (
            history(session.exchanges, session.active),
            live(session.active),
            memory_view(session),
            segments_view(session),
            comparison_view(session),
            self._capacity(session, *scenario),
            status_view(session),
            session.baseline is not None,
        )

    def ask(
        self,
        request: gr.Request,
        message: dict[str, Any] | None,
        temperature: float,
        longest: float,
        *scenario: str,
    ) -> Iterator[tuple]:
        """Answer a message; if the message is refused, put it back into the input box."""
        text, files = (message or {}).get("text", ""), (message or {}).get("files", [])
        session = self._changing(request)
        steps = session.ask(text, files, **self._options(temperature, longest))
        shown = self._answer_from_box(session, steps, text, files, scenario)
        yield from self._while_visited(request, session, shown)

    def _while_visited(
        self, request: gr.Request, session: Session, outputs: Generator[tuple]
    ) -> Iterator[tuple]:
        """Yield what a page shows of a conversation, and no changes once the page shows another
        conversation: the end of an answer would replace it."""
        key = str(request.session_hash)
        with closing(outputs):
            for shown in outputs:
                is_here = self.sessions.is_visited(key, session)
                yield shown if is_here else (_UNCHANGED,) * len(shown)

    def hear(self, request: gr.Request, event: gr.EventData) -> tuple[str, Any]:
        """Listen to a visitor, and end the answer that the visitor interrupts; return what
        ``Ears.hear`` returns, and the memory panel, unchanged unless more of the question was
        read."""
        session = self._session(request)
        marks = {name: getattr(event, name) is True for name in ("push", "begins", "ends")}
        with _errors_as_messages():
            state = self._ears(session).hear(event.sound, **marks)
        if state == SPEAKING and session.is_answering:
            session.stop()
        return state, memory_view(session) if session.read_heard() else _UNCHANGED

    def answer_heard(
        self, request: gr.Request, temperature: float, longest: float, *scenario: str
    ) -> Iterator[tuple]:
        """Answer the questions that were heard once the answer before has ended; also return the
        key of the speech once, and at the end the whole speech."""
        session = self._changing(request)
        options = self._options(temperature, longest)
        if heard := self._ears(session).take():
            try:
                session.wait_for_the_end()
                shown = self._answer_aloud(session, heard, options, scenario)
                yield from self._while_visited(request, session, shown)
            finally:
                for question in heard:
                    question.live.close()

    def _ears(self, session: Session) -> Ears:
        if session.ears is None:
            folder = self.folder / secrets.token_hex(16)
            session.ears = Ears(folder, self.folder.parent, session.begin_question)
        return session.ears

    def _answer_aloud(
        self,
        session: Session,
        heard: Sequence[Question],
        options: dict[str, Any],
        scenario: Sequence[str],
    ) -> Generator[tuple]:
        read = heard[0].live if len(heard) == 1 else None
        files = [question.path for question in heard]
        steps = session.ask("", files, is_talk=True, live=read, **options)
        key = ""
        for shown in self._answer(session, steps, gr.Audio(value=None)):
            new = session.aloud.key if session.aloud is not None else ""
            yield *shown, _UNCHANGED if new == key else new
            key = new
        speech = session.conversation.speech
        yield *self.all_parts(session, *scenario), _as_sound(speech), _UNCHANGED

    def retry(
        self, request: gr.Request, temperature: float, longest: float, *scenario: str
    ) -> Iterator[tuple]:
        """Answer the last question again."""
        yield from self._ask_again(request, None, temperature, longest, scenario)

    def retry_at(
        self,
        request: gr.Request,
        event: gr.EventData,
        temperature: float,
        longest: float,
        *scenario: str,
    ) -> Iterator[tuple]:
        """Answer the chosen question again, and remove all later ones."""
        yield from self._ask_again(request, str(event.key), temperature, longest, scenario)

    def _ask_again(
        self,
        request: gr.Request,
        key: str | None,
        temperature: float,
        longest: float,
        scenario: Sequence[str],
    ) -> Iterator[tuple]:
        session = self._changing(request)
        try:
            text, files = session.take_back(key)
        except InputError as error:
            session.show_error(error)
            yield *self.all_parts(session, *scenario), _UNCHANGED
            return
        options = self._options(temperature, longest)
        steps = session.ask(text, files, is_talk=not text, **options)
        shown = self._answer_from_box(session, steps, text, files, scenario)
        yield from self._while_visited(request, session, shown)

    def edit(self, request: gr.Request, *scenario: str) -> tuple:
        """Undo the last question, and put it back into the input box."""
        return self._put_back(request, None, scenario)

    def edit_at(self, request: gr.Request, event: gr.EventData, *scenario: str) -> tuple:
        """Undo the chosen question and all later ones, and put it back into the input box."""
        return self._put_back(request, str(event.key), scenario)

    def _put_back(self, request: gr.Request, key: str | None, scenario: Sequence[str]) -> tuple:
        session, box = self._changing(request), _UNCHANGED
        with _errors_in_chat(session):
            text, files = session.take_back(key)
            box = gr.MultimodalTextbox(value={"text": text, "files": files})
        return *self.all_parts(session, *scenario), box

    def _answer_from_box(
        self,
        session: Session,
        steps: Iterator[None],
        text: str,
        files: list,
        scenario: Sequence[str],
    ) -> Generator[tuple]:
        sent = yield from self._answer(session, steps, gr.MultimodalTextbox(value=None))
        last = session.exchanges[-1:]
        refused = bool(last and last[0].error and not last[0].counts)
        box = gr.MultimodalTextbox(value={"text": text, "files": files}) if refused else _UNCHANGED
        past, *parts = self.all_parts(session, *scenario)
        yield _UNCHANGED if past == sent else past, *parts, box

    def example(self, example: Example) -> Callable[..., Iterator[tuple]]:
        """Return a handler that asks the questions of an example."""

        def play(
            request: gr.Request, temperature: float, longest: float, *scenario: str
        ) -> Iterator[tuple]:
            session = self._changing(request)
            options = self._options(temperature, longest)
            shown = self._play(session, example, options, scenario)
            yield from self._while_visited(request, session, shown)

        return play

    def _play(
        self,
        session: Session,
        example: Example,
        options: dict[str, Any],
        scenario: Sequence[str],
    ) -> Generator[tuple]:
        for message in example.messages:
            steps = session.ask(message.text, message.paths, **options)
            sent = yield from self._answer(session, steps, _UNCHANGED)
            past, *parts = self.all_parts(session, *scenario)
            yield _UNCHANGED if past == sent else past, *parts, _UNCHANGED
            if session.stopped or not session.exchanges or session.exchanges[-1].error:
                break

    @property
    def default_temperature(self) -> float:
        """Default temperature of the checkpoint."""
        return self.sessions.pipe.sampling({}, ()).temperature

    def _options(self, temperature: float, longest: float) -> dict[str, Any]:
        # None also selects the checkpoint's top_k and top_p, which suit only its own temperature.
        sampled = None if temperature == self.default_temperature else temperature
        return {"temperature": sampled, "max_new_tokens": as_int(longest)}

    def _answer(
        self, session: Session, steps: Iterator[None], box: Any
    ) -> Generator[tuple, None, str]:
        """Show an answer while it is being generated; return the last history that was shown."""
        active, sent = None, ""
        try:
            for _ in steps:
                past, now = _UNCHANGED, session.active
                if now is not active or box is not _UNCHANGED:
                    past = sent = history(session.exchanges, now)
                    active = now
                compared = comparison_view(session) if session.baseline else _UNCHANGED
                parts = past, live(now), memory_view(session), _UNCHANGED, compared
                yield *parts, *[_UNCHANGED] * 3, box
                box = _UNCHANGED
        except InputError as error:
            gr.Warning(str(error))
        return sent

    def compare(self, request: gr.Request, wanted: bool, *scenario: str) -> Iterator[tuple]:
        """Start or end the comparison with a 16-bit cache."""
        session = self._changing(request)
        yield from self._while_visited(request, session, self._compared(session, wanted, scenario))

    def _compared(
        self, session: Session, wanted: bool, scenario: Sequence[str]
    ) -> Generator[tuple]:
        try:
            if wanted:
                for _ in session.compare():
                    panel, compared = memory_view(session), comparison_view(session)
                    yield _UNCHANGED, _UNCHANGED, panel, _UNCHANGED, compared, *[_UNCHANGED] * 3
            else:
                session.stop_comparing()
        except InputError as error:
            session.show_error(error)
        yield self.all_parts(session, *scenario)

    def undo(self, request: gr.Request, *scenario: str) -> tuple:
        """Undo the last question."""
        session = self._changing(request)
        with _errors_in_chat(session):
            session.undo()
        return self.all_parts(session, *scenario)

    def undo_at(self, request: gr.Request, event: gr.EventData, *scenario: str) -> tuple:
        """Undo the chosen question and all later ones."""
        session = self._changing(request)
        with _errors_in_chat(session):
            session.undo(str(event.key))
        return self.all_parts(session, *scenario)

    def keep_heard(self, request: gr.Request, event: gr.EventData, *scenario: str) -> tuple:
        """Remove what the visitor has not heard of an answer, whose speech was silenced."""
        session, seconds = self._changing(request), event.seconds
        with _errors_as_messages():
            if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
                raise InputError("seconds must be a number from 0 on")
            session.keep_heard(str(event.key), float(seconds))
        return self.all_parts(session, *scenario)

    def begin(self, request: gr.Request, *scenario: str) -> tuple:
        """Begin a new conversation; also return its id."""
        with _errors_as_messages():
            session = self.sessions.begin(str(request.session_hash))
        return *self.all_parts(session, *scenario), session.id

    def begin_example(self, example: Example) -> Callable[..., tuple]:
        """Return a handler that begins an example's conversation, and also returns its id."""

        def begin_shown(request: gr.Request, *scenario: str) -> tuple:
            key = str(request.session_hash)
            with _errors_as_messages():
                settings = self.sessions.session(key).settings
                compare = settings.compare or example.compare
                session = self.sessions.begin(key, replace(settings, compare=compare))
            return *self.all_parts(session, *scenario), session.id

        return begin_shown

    def stop(self, request: gr.Request) -> None:
        """End the running answer."""
        self._session(request).stop()

    def begin_with(
        self,
        request: gr.Request,
        preset: str,
        text: str,
        image: str,
        video: str,
        audio: str,
        window: float,
        system: str,
        compare: bool,
        *scenario: str,
    ) -> tuple:
        """Begin a new conversation with the page's settings; also return its id."""
        session = self._session(request)
        bits = {"text": text, "image": image, "video": video, "audio": audio}
        with _errors_in_chat(session):
            settings = SessionSettings.of_fields(preset, bits, window, system, compare)
            session = self.sessions.begin(str(request.session_hash), settings)
        return *self.all_parts(session, *scenario), session.id

    def forget(self, request: gr.Request, event: gr.EventData, *scenario: str) -> tuple:
        """Free the memory of the segment whose button was pressed."""
        session = self._changing(request)
        with _errors_in_chat(session):
            session.forget(event.index)
        return self.all_parts(session, *scenario)

    def load(self, request: gr.Request, path: str | None, *scenario: str) -> tuple:
        """Open a saved conversation; also return its id."""
        session = self._session(request)
        with _errors_in_chat(session):
            if path:
                session = self.sessions.load(str(request.session_hash), path)
        return *self.all_parts(session, *scenario), session.id

    def listed(self, request: gr.Request, ids: str, query: str) -> str:
        """List the conversations with these ids that have the words of a query."""
        words = words_in(query)
        found = self.sessions.summaries(ids_in(ids), words)
        return conversation_list(found, self._session(request).id, words)

    def change_listed(
        self, request: gr.Request, event: gr.EventData, ids: str, query: str
    ) -> tuple[str, Any]:
        """Rename or delete a conversation of the list; return the list, and "" if the conversation
        of this page is gone."""
        session, chosen = self._session(request), str(event.id)
        if event.action == "rename":
            try:
                self.sessions.rename(chosen, str(event.name))
            except InputError as error:  # It names the folder, which visitors must not see.
                _log.warning("a title could not be stored: %s", error)
                raise gr.Error("the title could not be stored", print_exception=False) from None
        elif event.action == "delete":
            self.sessions.delete(chosen, str(request.session_hash))
        is_gone = chosen == session.id and session not in self.sessions
        return self.listed(request, ids, query), "" if is_gone else _UNCHANGED

    def follow(self, request: gr.Request, *scenario: str) -> Iterator[tuple]:
        """Show the conversation as it is now, and an answer that is running until it ends; also
        return the id, which is new if the conversation was deleted."""
        session = self._session(request)
        while session.is_answering and self.sessions.is_visited(str(request.session_hash), session):
            yield *self.all_parts(session, *scenario), _UNCHANGED
            time.sleep(1 / UPDATES_PER_S)
        session = self._session(request)
        yield *self.all_parts(session, *scenario), session.id

    def save(self, request: gr.Request) -> tuple[Any, Any]:
        """Save the conversation to a file; return the path of the file and the history.

        If saving fails, the path is None, and the history shows the reason.
        """
        session = self._session(request)
        path = self._new_file("conversation.safetensors")
        with _errors_in_chat(session):
            session.save(path)
        return str(path) if path.exists() else None, history(session.exchanges)

    def report(self, request: gr.Request) -> str:
        """Write the memory report to a file, and return its path."""
        path = self._new_file("memory.json")
        path.write_text(memory_report(self._session(request)))
        return str(path)

    def curve(self, request: gr.Request) -> str:
        """Draw the memory curve into a file, and return its path."""
        session, path = self._session(request), self._new_file("memory.png")
        settings = session.settings
        picture = curve_picture(
            session.conversation.curve, self.sessions.card.name, settings.preset
        )
        path.write_bytes(picture)
        return str(path)

    def share(self) -> None:
        """Say what the link of the conversation is good for."""
        gr.Info("Whoever has the link can continue and delete this conversation.")

    def transcript(self, request: gr.Request) -> str:
        """Write the questions and answers to a file, and return its path."""
        path = self._new_file("conversation.md")
        path.write_text(as_markdown(self._session(request).turns))
        return str(path)

    def capacity(self, request: gr.Request, *scenario: str) -> str:
        """Show how many conversations like this one fit on a GPU."""
        return self._capacity(self._session(request), *scenario)

    def inspect(self, request: gr.Request) -> Iterator[str]:
        """Show an inspection of the conversation's keys."""
        session = self._session(request)
        yield '<p class="empty">Reading …</p>'
        try:
            yield inspection_view(session.inspection())
        except InputError as error:
            yield f'<p class="empty">{escape(str(error))}</p>'

    def open_page(self, request: gr.Request, session_id: str, *scenario: str) -> tuple:
        """Show the conversation whose page a browser has loaded; also return the id, and the
        browser's session hash."""
        with _errors_as_messages():
            session = self.sessions.visit(str(request.session_hash), session_id)
        if session_id and session.id != session_id:
            gr.Info(self._why_new(session_id))
        return *self.all_parts(session, *scenario), session.id, str(request.session_hash)

    def _why_new(self, session_id: str) -> str:
        model = self.sessions.model_of(session_id)
        if model in ("", self.sessions.card.name):
            return "The conversation at this address has ended: this is a new one."
        return (
            f"The conversation at this address belongs to the model {model}: load that model in "
            "Settings to continue it. This is a new one."
        )

    def load_model(self, request: gr.Request, model: str) -> None:
        """End this page, so that the server starts one with another model."""
        self._session(request).stop()
        with _errors_as_messages():
            self.choice.choose(model)
        gr.Info(f"Loading {model}: this page reloads when the model is loaded.", duration=None)

    def fork(self, request: gr.Request, *scenario: str) -> tuple:
        """Continue with a copy of the conversation; also return the id of the copy."""
        return self._continue_in_copy(request, None, scenario)

    def fork_at(self, request: gr.Request, event: gr.EventData, *scenario: str) -> tuple:
        """Continue with a copy that ends with the chosen question; also return the copy's id."""
        return self._continue_in_copy(request, str(event.key), scenario)

    def _continue_in_copy(
        self, request: gr.Request, last: str | None, scenario: Sequence[str]
    ) -> tuple:
        with _errors_as_messages():
            session = self.sessions.fork(str(request.session_hash), last)
        gr.Info("This is a copy. The Back button and the tab Chats lead to the original.")
        return *self.all_parts(session, *scenario), session.id

    def _session(self, request: gr.Request) -> Session:
        with _errors_as_messages():
            return self.sessions.session(str(request.session_hash))

    def _changing(self, request: gr.Request) -> Session:
        """Return the session of a browser that is about to change it, and shows the change."""
        session = self._session(request)
        session.changed_by = str(request.session_hash)
        return session

    def leave(self, request: gr.Request) -> None:
        """End the visit of a browser that closes or reloads the page."""
        self.sessions.leave(str(request.session_hash))

    def _capacity(self, session: Session, gpu: str, model: str, length: str) -> str:
        is_this = model == THIS_MODEL
        name, shape = (self.sessions.card.name, self.shape) if is_this else (model, MODELS[model])
        stored = session.conversation.tokens_by_modality
        return capacity(stored, session.settings.policy, gpu, name, shape, length)

    def _new_file(self, name: str) -> Path:
        folder = self.folder / secrets.token_hex(16)
        folder.mkdir(parents=True)
        return folder / name


def _as_sound(speech: tuple[int, np.ndarray] | None) -> tuple[int, np.ndarray] | None:
    """Return the sample rate and 16-bit samples of speech for the page; None without speech."""
    if speech is None or not len(speech[1]):
        return None
    rate, samples = speech
    return rate, in_16_bit(samples)


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    """Show input errors raised within the block in a corner of the page."""
    try:
        yield
    except InputError as error:
        raise gr.Error(str(error), print_exception=False) from None


@contextmanager
def _errors_in_chat(session: Session) -> Iterator[None]:
    """Show input errors raised within the block in the transcript."""
    try:
        yield
    except InputError as error:
        session.show_error(error)
