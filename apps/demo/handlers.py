"""Handlers: what happens when something is pressed; each returns what the page then shows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from oscar_mm.admission.capacity import ModelShape
from oscar_mm.apps.demo import views
from oscar_mm.apps.demo.examples import Example
from oscar_mm.apps.demo.fits import MODELS, how_many
from oscar_mm.apps.demo.hall import Hall
from oscar_mm.apps.demo.report import report_json
from oscar_mm.apps.demo.settings import chosen, whole
from oscar_mm.apps.demo.transcript import history, live
from oscar_mm.apps.demo.visitor import Visitor
from oscar_mm.errors import InputError

THIS_MODEL = "the model of this page"
_SAME = gr.skip()


class Handlers:
    """Of one page.

    ``shown`` is the order of what most of them return.

    Args:
        hall: the visitors.
        folder: for files that visitors download.
    """

    shown = ("history", "live", "memory", "segments", "compared", "fits", "status", "compare")

    def __init__(self, hall: Hall, folder: Path) -> None:
        self.hall, self.folder = hall, folder
        pipe = hall.pipe
        whole = pipe.family.outer_model
        self.shape = ModelShape.of(pipe.model.config, whole.num_parameters())

    def fresh(self, gpu: str, model: str, length: str) -> dict[str, Any]:
        """What a page shows before anything was said, by the names of ``shown``."""
        visitor = Visitor(self.hall)
        parts = self.all_of(visitor, gpu, model, length)
        visitor.close()
        return dict(zip(self.shown, parts, strict=True))

    def all_of(self, visitor: Visitor, gpu: str, model: str, length: str) -> tuple:
        """Every part of ``shown``."""
        return (
            history(visitor.exchanges, visitor.writing),
            live(visitor.writing),
            views.panel(visitor),
            views.segments(visitor),
            views.compared(visitor),
            self._fits(visitor, gpu, model, length),
            views.status(visitor),
            visitor.other is not None,
        )

    def ask(
        self,
        message: dict[str, Any] | None,
        temperature: float,
        longest: float,
        gpu: str,
        model: str,
        length: str,
        request: gr.Request,
    ) -> Iterator[tuple]:
        """Answer a message; the box is emptied, and filled again if it could not be answered."""
        text, files = (message or {}).get("text", ""), (message or {}).get("files", [])
        visitor = self._visitor(request)
        options = self._options(temperature, longest)
        empty = gr.MultimodalTextbox(value=None)
        sent = yield from self._answer(visitor, text, files, options, empty)
        last = visitor.exchanges[-1:]
        back = bool(last and last[0].error and not last[0].counts)
        box = gr.MultimodalTextbox(value={"text": text, "files": files}) if back else _SAME
        past, *parts = self.all_of(visitor, gpu, model, length)
        yield _SAME if past == sent else past, *parts, box

    def example(self, example: Example) -> Callable[..., Iterator[tuple]]:
        """A handler that begins anew and asks what an example asks."""

        def play(
            temperature: float,
            longest: float,
            gpu: str,
            model: str,
            length: str,
            request: gr.Request,
        ) -> Iterator[tuple]:
            visitor = self._visitor(request)
            try:
                visitor.begin()
            except InputError as error:
                raise gr.Error(str(error), print_exception=False) from None
            options = self._options(temperature, longest)
            for message in example.messages:
                sent = yield from self._answer(visitor, message.text, message.paths, options, _SAME)
                past, *parts = self.all_of(visitor, gpu, model, length)
                yield _SAME if past == sent else past, *parts, _SAME
                if visitor.stopped or not visitor.exchanges or visitor.exchanges[-1].error:
                    break

        return play

    @property
    def usual_temperature(self) -> float:
        """The checkpoint's own."""
        return self.hall.pipe.sampling({}, ()).temperature

    def _options(self, temperature: float, longest: float) -> dict[str, Any]:
        # At its own temperature the checkpoint also says among which tokens is chosen.
        chosen = None if temperature == self.usual_temperature else temperature
        return {"temperature": chosen, "max_new_tokens": whole(longest)}

    def _answer(
        self, visitor: Visitor, text: str, files: list, options: dict[str, Any], box: Any
    ) -> Generator[tuple, None, str]:
        """Tells the page of an answer that is being written; the history that it has in the end."""
        writing, sent = None, ""
        try:
            for _ in visitor.ask(text, files, **options):
                past, now = _SAME, visitor.writing
                if now is not writing or box is not _SAME:
                    past = sent = history(visitor.exchanges, now)
                    writing = now
                compared = views.compared(visitor) if visitor.other else _SAME
                parts = past, live(now), views.panel(visitor), _SAME, compared
                yield *parts, *[_SAME] * 3, box
                box = _SAME
        except InputError as error:
            gr.Warning(str(error))
        return sent

    def compare(
        self, wanted: bool, gpu: str, model: str, length: str, request: gr.Request
    ) -> Iterator[tuple]:
        """Begin or end the comparison."""
        visitor = self._visitor(request)
        try:
            if wanted:
                for _ in visitor.compare():
                    panel, compared = views.panel(visitor), views.compared(visitor)
                    yield _SAME, _SAME, panel, _SAME, compared, *[_SAME] * 3
            else:
                visitor.stop_comparing()
        except InputError as error:
            visitor.tell(error)
        yield self.all_of(visitor, gpu, model, length)

    def do(self, name: str) -> Callable[..., tuple]:
        """A handler for a method of a visitor that takes nothing: "undo" or "begin"."""

        def act(gpu: str, model: str, length: str, request: gr.Request) -> tuple:
            visitor = self._visitor(request)
            with _told(visitor):
                getattr(visitor, name)()
            return self.all_of(visitor, gpu, model, length)

        return act

    def stop(self, request: gr.Request) -> None:
        """End the answer that is being written."""
        self._visitor(request).stop()

    def begin_with(
        self,
        preset: str,
        text: str,
        image: str,
        video: str,
        audio: str,
        window: float,
        system: str,
        compare: bool,
        gpu: str,
        model: str,
        length: str,
        request: gr.Request,
    ) -> tuple:
        """A new conversation with the settings of the page."""
        visitor = self._visitor(request)
        bits = {"text": text, "image": image, "video": video, "audio": audio}
        with _told(visitor):
            visitor.begin(chosen(preset, bits, window, system, compare))
        return self.all_of(visitor, gpu, model, length)

    def forget(
        self, gpu: str, model: str, length: str, request: gr.Request, event: gr.EventData
    ) -> tuple:
        """Free a segment."""
        visitor = self._visitor(request)
        with _told(visitor):
            visitor.forget(event.index)
        return self.all_of(visitor, gpu, model, length)

    def load(
        self, path: str | None, gpu: str, model: str, length: str, request: gr.Request
    ) -> tuple:
        """Go on with a saved conversation."""
        visitor = self._visitor(request)
        with _told(visitor):
            if path:
                visitor.load(path)
        return self.all_of(visitor, gpu, model, length)

    def save(self, request: gr.Request) -> tuple[Any, Any]:
        """The conversation as a file, and the history, which may tell why there is none."""
        visitor = self._visitor(request)
        path = self._new_file("conversation.safetensors")
        with _told(visitor):
            visitor.save(path)
        return str(path) if path.exists() else None, history(visitor.exchanges)

    def report(self, request: gr.Request) -> str:
        """The memory report as a file."""
        path = self._new_file("memory.json")
        path.write_text(report_json(self._visitor(request)))
        return str(path)

    def fits(self, gpu: str, model: str, length: str, request: gr.Request) -> str:
        """How many conversations fit."""
        return self._fits(self._visitor(request), gpu, model, length)

    def why(self, request: gr.Request) -> Iterator[str]:
        """What the keys of this conversation are like."""
        from oscar_mm.apps.demo.why import why

        visitor = self._visitor(request)
        yield '<p class="empty">Reading …</p>'
        try:
            yield why(visitor.inspection())
        except InputError as error:
            yield f'<p class="empty">{escape(str(error))}</p>'

    def arrive(self, gpu: str, model: str, length: str, request: gr.Request) -> tuple:
        """A page was loaded."""
        return self.all_of(self._visitor(request), gpu, model, length)

    def _visitor(self, request: gr.Request) -> Visitor:
        try:
            return self.hall.visitor(str(request.session_hash))
        except InputError as error:
            raise gr.Error(str(error), print_exception=False) from None

    def leave(self, request: gr.Request) -> None:
        """A page was closed, or is loaded anew."""
        self.hall.leave(str(request.session_hash))

    def _fits(self, visitor: Visitor, gpu: str, model: str, length: str) -> str:
        shape = self.shape if model == THIS_MODEL else MODELS[model]
        stored = visitor.side.tokens_by_modality
        return how_many(stored, visitor.settings.policy, gpu, shape, length)

    def _new_file(self, name: str) -> Path:
        folder = self.folder / secrets.token_hex(16)
        folder.mkdir(parents=True)
        return folder / name


@contextmanager
def _told(visitor: Visitor) -> Iterator[None]:
    """Whatever the input is refused for is told in the chat."""
    try:
        yield
    except InputError as error:
        visitor.tell(error)
