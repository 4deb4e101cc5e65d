"""The demo page: components, handlers, and isolation.

Isolation prevents gradio from sending data off the machine and from reading files other than
uploads.
"""

from __future__ import annotations

import base64
from functools import partial
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import gradio as gr
from gradio_client.utils import is_file_obj_with_meta, is_http_url_like, traverse
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oscar_mm.apps.demo import (
    file_drop,
    formulas,
    live_speech,
    media_links,
    message_menu,
    shortcuts,
    visitor_input,
)
from oscar_mm.apps.demo.changes import WATCH_SCRIPT
from oscar_mm.apps.demo.charts import NOT_INSPECTED
from oscar_mm.apps.demo.conversation_list import (
    LIST_SCRIPT,
    MAX_LISTED,
    SEARCH,
    conversation_list,
)
from oscar_mm.apps.demo.examples import EXAMPLES, QUESTIONS, Example
from oscar_mm.apps.demo.handlers import THIS_MODEL, Handlers
from oscar_mm.apps.demo.hands_free import FAILED_SCRIPT, MARKUP, SCRIPT, TOLD_SCRIPT
from oscar_mm.apps.demo.memory_panel import FORGET_SCRIPT, LENGTHS, MODELS, format_label
from oscar_mm.apps.demo.sessions import Sessions
from oscar_mm.apps.demo.transcript import SCROLL_SCRIPT
from oscar_mm.apps.demo.visitor_input import (
    AS_PRESET,
    MAX_CHARACTERS,
    MAX_NEW_TOKENS,
    WIDTHS,
    stored_bytes,
)
from oscar_mm.media.kinds import SUFFIXES
from oscar_mm.modality import Modality
from oscar_mm.policy import KVPolicy
from oscar_mm.sizes import GPUS

TITLE = "oscar_mm"
_THEME_SCRIPT = """
element.querySelector('#theme').addEventListener('click', () => {
  const dark = document.body.classList.toggle('dark');
  localStorage.setItem('oscar-mm-theme', dark ? 'dark' : 'light');
});
const kept = localStorage.getItem('oscar-mm-theme');
if (kept) document.body.classList.toggle('dark', kept === 'dark');
const field = document.querySelector('#message textarea');
if (field) field.setAttribute('aria-label', 'Message');
"""
_THUMBNAIL_SCRIPT = """(message) => {
  const names = (message?.files ?? []).map((file) => file.path.split(/[\\\\/]/).pop());
  const text = document.querySelector('#message textarea');
  document.querySelectorAll('#message .thumbnail-item').forEach((item, place) => {
    const name = names[place] ?? '', placed = `[${name}]`;
    item.dataset.name = name;
    item.title = `Click to put ${placed} into the text, where the model shall see it`;
    item.draggable = true;
    item.ondragstart = (event) => event.dataTransfer.setData('text/plain', placed);
    item.onclick = (event) => {
      if (event.target.closest('button')) return;
      text.setRangeText(placed, text.selectionStart, text.selectionEnd, 'end');
      text.dispatchEvent(new Event('input', {bubbles: true}));
      text.focus();
    };
  });
  for (const item of document.querySelectorAll('#message [role=listitem]')) item.role = 'group';
}"""
"""Script that names a message's files, lets visitors place them between words, and corrects their
ARIA roles: gradio shows no names, and marks the files as list items without a list."""
_ADDRESS_SCRIPT = """(id) => {
  const key = 'oscar-mm-conversations', hash = '#' + id;
  if (!id) history.replaceState(null, '', location.pathname);
  if (!id) return location.reload();
  if (location.hash !== hash) {
    history[window.onhashchange ? 'pushState' : 'replaceState'](null, '', hash);
  }
  window.onhashchange = () => location.reload();
  const others = (localStorage.getItem(key) ?? '').split(' ').filter((one) => one && one !== id);
  localStorage.setItem(key, [id, ...others].slice(0, LISTED).join(' '));
}""".replace("LISTED", str(MAX_LISTED))
"""Script that puts the conversation's id into the URL fragment, which browsers do not send to
servers, and into the browser's list. No id: the conversation was deleted."""
_LIST_SCRIPT = """() => [
  localStorage.getItem('oscar-mm-conversations') ?? '',
  document.querySelector('#search input')?.value ?? '',
]"""
_COPY_SCRIPT = """() => navigator.clipboard?.writeText(location.href)
  ?? prompt('The link of this conversation', location.href)"""
"""Script that copies the link; pages on http without TLS have no clipboard, unless this machine
serves them."""
_NEXT_PAGE_SCRIPT = """() => {
  const reload = async () => {
    const config = await (await fetch('config', {cache: 'no-store'})).json();
    if (config.app_id !== window.gradio_config.app_id) location.reload();
  };
  setInterval(() => reload().catch(() => {}), 1000);
}"""
"""Script that reloads the page once the server serves another one."""
GPU, MODEL, LENGTH = "H100", "Qwen3-VL-8B", "32K tokens"
"""Initial scenario of the capacity estimate."""
_HTML = partial(gr.HTML, padding=False, apply_default_css=False, js_on_load=None)
# Answers are decoded in one batch, and each occupies a worker for long; other handlers are quick.
_ANSWERS_AT_ONCE = 32
_QUEUE = 64
_CONTENT_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""Content security policy that prevents requests to other servers, whatever an answer contains."""
_FETCHING_PATHS = ("/file=http:", "/file=https:", "/proxy=")
"""Parts of URL paths that make gradio fetch from other servers."""


def build(handlers: Handlers) -> gr.Blocks:
    """Build the page and connect its components to the handlers."""
    initial = handlers.initial(GPU, MODEL, LENGTH)
    with LocalBlocks(title=TITLE, fill_width=True, analytics_enabled=False) as page:
        _header(handlers)
        with gr.Row(elem_id="columns"):
            with gr.Column(scale=6, min_width=340, elem_id="talk"):
                chat = _conversation_column(handlers, initial)
            with gr.Column(scale=5, min_width=340, elem_id="side"), gr.Tabs():
                panels = _panel_tabs(handlers, initial)
        status = _HTML(initial["status"], elem_id="status")
        parts = chat | panels | {"status": status}
        _wire(page, handlers, parts)
    page.queue(default_concurrency_limit=8, max_size=_QUEUE)
    return page


def _header(handlers: Handlers) -> None:
    card = handlers.sessions.card
    _HTML(
        "<header><h1>oscar_mm</h1><p>Long conversations about images, audio and video in a "
        f'low-bit KV cache</p><span class="chip">{escape(card.title)}</span>'
        '<button id="theme" type="button" aria-label="Switch between dark and light">◐</button>'
        "</header>",
        js_on_load=_THEME_SCRIPT + shortcuts.SCRIPT + file_drop.SCRIPT,
        elem_id="head",
    )


def _conversation_column(handlers: Handlers, initial: dict[str, Any]) -> dict[str, Any]:
    reads = handlers.sessions.pipe.family.reads
    kinds = {Modality.IMAGE: "images", Modality.VIDEO: "videos", Modality.AUDIO: "audio"}
    suffixes = [end for one, kind in kinds.items() if one in reads for end in SUFFIXES[kind]]
    with gr.Column(elem_id="transcript"):
        script = formulas.script() + SCROLL_SCRIPT
        history = _HTML(
            initial["history"],
            js_on_load=script + message_menu.SCRIPT + media_links.SCRIPT,
            elem_id="history",
        )
        live = _HTML("", js_on_load=script, elem_id="live")
        examples = _example_buttons(supports_audio=Modality.AUDIO in reads)
    message = gr.MultimodalTextbox(
        label="Message",
        show_label=False,
        elem_id="message",
        placeholder="Ask about what you show …",
        file_count="multiple",
        file_types=suffixes,
        sources=["upload", "microphone"] if Modality.AUDIO in reads else ["upload"],
        max_plain_text_length=MAX_CHARACTERS,
        lines=1,
        max_lines=6,
        autofocus=True,
    )
    talk: dict[str, Any] = _talk_parts(handlers) if Modality.AUDIO in reads else {}
    with gr.Row(elem_id="actions"):
        stop = gr.Button("Stop", elem_id="stop", size="sm", min_width=60)
        undo = gr.Button("Undo", elem_id="undo", size="sm", min_width=60)
        retry = gr.Button("Retry", elem_id="retry", size="sm", min_width=60)
        edit = gr.Button("Edit", elem_id="edit", size="sm", min_width=60)
        fork = gr.Button("Fork", elem_id="fork", size="sm", min_width=60)
        clear = gr.Button("New chat", elem_id="clear", size="sm", min_width=80)
    _HTML(_limits_of(handlers.sessions), elem_id="model-limits")
    return talk | {
        "history": history,
        "live": live,
        "message": message,
        "stop": stop,
        "undo": undo,
        "retry": retry,
        "edit": edit,
        "fork": fork,
        "clear": clear,
        "examples": examples,
    }


def _talk_parts(handlers: Handlers) -> dict[str, Any]:
    """Add buttons for spoken questions, and a player if the model speaks."""
    speaks = handlers.sessions.pipe.family.talker is not None
    with gr.Accordion("Talk", open=False, elem_id="aloud"):
        hands = _HTML(MARKUP, js_on_load=SCRIPT, elem_id="hands")
        spoken = gr.Audio(
            label="Answer",
            interactive=False,
            visible=speaks,
            buttons=["download"],
            waveform_options=gr.WaveformOptions(show_recording_waveform=False),
            elem_id="spoken",
        )
        voice = _HTML(live_speech.MARKUP, js_on_load=live_speech.SCRIPT, elem_id="voice")
        key = gr.Textbox(label="Speech", visible="hidden")
    return {"hands": hands, "spoken": spoken, "voice": voice, "speech": key}


def _limits_of(sessions: Sessions) -> str:
    card, context = sessions.card, sessions.pipe.admission.max_context
    limits = f"{card.name} {card.abilities}."
    if card.is_demo:
        limits += " It can answer only questions like those of its examples and a few more."
    limits += (
        f" A conversation can have {context:,} tokens, a message {MAX_CHARACTERS:,} characters."
    )
    return f'<p class="how">{escape(limits)}</p>'


def _example_buttons(*, supports_audio: bool) -> list[tuple[gr.Button, Example]]:
    """Add the example buttons, which style.css shows while the conversation is empty."""
    buttons = []
    with gr.Column(elem_id="examples"):
        for examples in (EXAMPLES[:1], QUESTIONS, EXAMPLES[1:]):
            with gr.Row():
                for example in examples:
                    if example.exists and (supports_audio or not example.needs_sound):
                        label = ": ".join(filter(None, (example.title, example.summary)))
                        name = None if example.picture is None else _icon_name(example)
                        button = gr.Button(label, elem_id=name, size="sm", min_width=140)
                        buttons.append((button, example))
    return buttons


def icon_style() -> str:
    """Return CSS for buttons with a picture, because gradio's own icons would reveal file paths."""
    rules = []
    for example in QUESTIONS:
        if example.exists and example.picture is not None:
            data = base64.b64encode(example.picture.read_bytes()).decode()
            rules.append(
                f"#{_icon_name(example)}::before {{ content: ''; flex: none; width: 4rem; "
                f"height: 2rem; background: url(data:image/png;base64,{data}) "
                "center / contain no-repeat }"
            )
    return "\n".join(rules)


def _icon_name(example: Example) -> str:
    return f"example-{QUESTIONS.index(example)}"


def _panel_tabs(handlers: Handlers, initial: dict[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    with gr.Tab("Memory", id="memory"):
        parts["memory"] = _HTML(initial["memory"], elem_id="memory")
        parts["segments"] = _HTML(initial["segments"], js_on_load=FORGET_SCRIPT, elem_id="segments")
        with gr.Column(elem_id="capacity"):
            with gr.Row():
                gpus = [(f"{name}, {size} GB", name) for name, size in GPUS.items()]
                parts["gpu"] = gr.Dropdown(gpus, value=GPU, label="GPU")
                models = [THIS_MODEL, *MODELS]
                parts["model"] = gr.Dropdown(models, value=MODEL, label="Model")
                parts["length"] = gr.Dropdown(list(LENGTHS), value=LENGTH, label="Length")
            parts["capacity"] = _HTML(initial["capacity"], elem_id="fits")
        with gr.Row(elem_id="files"):
            parts["save"] = gr.Button("Save", elem_id="save", size="sm", min_width=60)
            parts["load"] = gr.UploadButton(
                "Load", elem_id="load", size="sm", min_width=60, file_types=[".safetensors"]
            )
            parts["report"] = gr.Button("JSON report", elem_id="report", size="sm", min_width=90)
            parts["transcript"] = gr.Button(
                "Transcript", elem_id="as-text", size="sm", min_width=80
            )
            parts["curve"] = gr.Button("Picture", elem_id="curve", size="sm", min_width=70)
            parts["share"] = gr.Button("Copy link", elem_id="share", size="sm", min_width=80)
        for name in ("saved", "reported", "written", "drawn"):
            parts[name] = gr.DownloadButton(name, elem_id=name, visible="hidden")
    with gr.Tab("Chats", id="chats") as parts["chats"]:
        _HTML(SEARCH, elem_id="search")
        parts["list"] = _HTML(conversation_list((), ""), js_on_load=LIST_SCRIPT, elem_id="chats")
    with gr.Tab("Compare", id="compare"):
        parts["compare"] = gr.Checkbox(
            initial["compare"], label="Also answer with a 16-bit cache", elem_id="compare"
        )
        parts["compared"] = _HTML(initial["compared"], elem_id="compared")
    with gr.Tab("Why", id="why"):
        parts["why"] = _HTML(NOT_INSPECTED, elem_id="why")
        parts["inspect"] = gr.Button("Inspect this conversation", elem_id="inspect", size="sm")
    with gr.Tab("Settings", id="settings"):
        parts |= _settings(handlers)
    return parts


def _settings(handlers: Handlers) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    gr.Markdown("For every answer")
    with gr.Row():
        default, pipe = handlers.default_temperature, handlers.sessions.pipe
        parts["temperature"] = gr.Slider(0, 2, value=default, step=0.1, label="Temperature")
        maximum, longest = pipe.longest_answer(MAX_NEW_TOKENS), pipe.longest_answer()
        label = "Maximum tokens of an answer"
        parts["longest"] = gr.Slider(1, maximum, value=longest, step=1, label=label)
    gr.Markdown("For a new conversation")
    parts["system"] = gr.Textbox(label="System prompt", lines=2, max_length=MAX_CHARACTERS)
    settings = handlers.sessions.settings
    formats = [(format_label(name, handlers.shape), name) for name in KVPolicy.preset_names()]
    parts["preset"] = gr.Radio(
        formats,
        value=settings.preset,
        label="Cache format",
        info="Bits of keys/values, and the ratio to 16-bit for 32K tokens, mostly of images",
    )
    with gr.Row(elem_id="bits"):
        for modality in Modality:
            parts[modality.label] = gr.Dropdown(
                [AS_PRESET, *WIDTHS],
                value=AS_PRESET,
                label=f"Bits of {modality.label}",
                min_width=90,
            )
    window = settings.policy.window
    parts["window"] = gr.Slider(
        0, 512, value=window, step=1, label="Latest tokens stored in 16-bit"
    )
    parts["apply"] = gr.Button(
        "Start a conversation with these settings", elem_id="apply", variant="primary"
    )
    return parts | _model_choice(handlers)


def _model_choice(handlers: Handlers) -> dict[str, Any]:
    """Add the choice of another model, which is hidden if there is none."""
    choice, sessions = handlers.choice, handlers.sessions
    ends = "are kept until it is loaded again" if sessions.folder else "end"
    with gr.Column(visible=len(choice.models) > 1):
        gr.Markdown("Load another model of this machine")
        other = gr.Dropdown(
            choice.models,
            value=choice.current,
            label="Model",
            info=choice.failure
            or f"The model of this page is freed, and its conversations {ends}.",
        )
        load = gr.Button("Load this model", elem_id="load-model")
    return {"other_model": other, "load_model": load}


def _wire(page: gr.Blocks, handlers: Handlers, parts: dict[str, Any]) -> None:
    all_outputs = [parts[name] for name in handlers.part_names]
    address = gr.Textbox(label="Address", visible="hidden")
    moved = [*all_outputs, address]
    scenario = [parts[name] for name in ("gpu", "model", "length")]
    options = [parts["temperature"], parts["longest"]]
    private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    answer = private | {
        "concurrency_limit": _ANSWERS_AT_ONCE,
        "concurrency_id": "answers",
        "show_progress": "minimal",
        "show_progress_on": parts["message"],
    }
    box = parts["message"]
    box.change(None, box, None, js=_THUMBNAIL_SCRIPT, **private)
    box.submit(handlers.ask, [box, *options, *scenario], [*all_outputs, box], **answer)
    if "hands" in parts:
        speech = parts["speech"]
        answered = [*all_outputs, parts["spoken"], speech]
        speech.change(None, speech, None, js=live_speech.PLAY_SCRIPT, **private)
        parts["stop"].click(None, None, None, js=f"() => {{ {live_speech.QUIET}; }}", **private)
        kept = parts["voice"].input(handlers.keep_heard, scenario, all_outputs, **private)
        # The last update of the streamed answer may arrive later and show all of it again.
        kept.success(handlers.follow, scenario, moved, **answer)
        told = gr.Textbox(label="Heard", visible="hidden")
        hands = parts["hands"]
        heard = hands.input(handlers.hear, None, [told, parts["memory"]], **private)
        heard.success(None, told, None, js=TOLD_SCRIPT, **private)
        heard.failure(None, None, None, js=FAILED_SCRIPT, **private)
        hands.submit(handlers.answer_heard, [*options, *scenario], answered, **answer)
    for button, example in parts["examples"]:
        begun = button.click(handlers.begin_example(example), scenario, moved, **private)
        begun.success(
            handlers.example(example), [*options, *scenario], [*all_outputs, box], **answer
        )
    parts["compare"].input(handlers.compare, [parts["compare"], *scenario], all_outputs, **answer)
    again: dict[str, Any] = answer | {"trigger_mode": "multiple"}
    parts["retry"].click(handlers.retry, [*options, *scenario], [*all_outputs, box], **again)
    parts["edit"].click(handlers.edit, scenario, [*all_outputs, box], **private)
    parts["stop"].click(handlers.stop, queue=False, **private)
    parts["undo"].click(handlers.undo, scenario, all_outputs, **private)
    parts["clear"].click(handlers.begin, scenario, moved, **private)
    past = parts["history"]
    past.retry(handlers.retry_at, [*options, *scenario], [*all_outputs, box], **again)
    past.edit(handlers.edit_at, scenario, [*all_outputs, box], **private)
    past.undo(handlers.undo_at, scenario, all_outputs, **private)
    past.copy(handlers.fork_at, scenario, moved, **private)
    fields = [
        parts[name] for name in ("preset", *(modality.label for modality in Modality), "window")
    ]
    fields += [parts["system"], parts["compare"], *scenario]
    parts["apply"].click(handlers.begin_with, fields, moved, **private)
    parts["segments"].click(handlers.forget, scenario, all_outputs, **private)
    for field in scenario:
        field.input(handlers.capacity, scenario, parts["capacity"], **private)
    parts["load"].upload(handlers.load, [parts["load"], *scenario], moved, **private)
    for button, handler, outputs, target in (
        ("save", handlers.save, [parts["saved"], parts["history"]], "saved"),
        ("report", handlers.report, [parts["reported"]], "reported"),
        ("transcript", handlers.transcript, [parts["written"]], "written"),
        ("curve", handlers.curve, [parts["drawn"]], "drawn"),
    ):
        done = parts[button].click(handler, None, outputs, **private)
        done.success(None, None, None, js=_press(target), **private)
    copied = parts["share"].click(None, None, None, js=_COPY_SCRIPT, **private)
    copied.success(handlers.share, queue=False, **private)
    loading = parts["load_model"].click(handlers.load_model, parts["other_model"], None, **private)
    loading.success(None, None, None, js=_NEXT_PAGE_SCRIPT, **private)
    parts["inspect"].click(handlers.inspect, None, parts["why"], **answer)
    visitor = gr.Textbox(label="Visitor", visible="hidden")
    page.load(
        handlers.open_page,
        [address, *scenario],
        [*moved, visitor],
        js="(_, ...rest) => [location.hash.slice(1), ...rest]",
        **private,
    )
    follow = gr.Button("Follow", elem_id="follow", visible="hidden")
    latest: dict[str, Any] = answer | {"trigger_mode": "always_last"}
    follow.click(handlers.follow, scenario, moved, **latest)
    visitor.change(None, visitor, None, js=WATCH_SCRIPT, **private)
    parts["fork"].click(handlers.fork, scenario, moved, **private)
    address.change(None, address, None, js=_ADDRESS_SCRIPT, **private)
    if "spoken" in parts:
        spoken = [parts["spoken"], parts["speech"]]
        address.change(lambda: (None, ""), None, spoken, **private)
    _wire_list(handlers, parts, address, private)
    page.unload(handlers.leave)


def _wire_list(
    handlers: Handlers, parts: dict[str, Any], address: gr.Textbox, private: dict[str, Any]
) -> None:
    ids = gr.Textbox(label="Conversations", visible="hidden")
    query = gr.Textbox(label="Query", visible="hidden")
    listing: dict[str, Any] = private | {"inputs": [ids, query], "js": _LIST_SCRIPT}
    listed: dict[str, Any] = listing | {"outputs": parts["list"], "trigger_mode": "always_last"}
    parts["chats"].select(handlers.listed, **listed)
    parts["list"].input(handlers.listed, **listed)
    address.change(handlers.listed, **listed)
    parts["list"].click(handlers.change_listed, outputs=[parts["list"], address], **listing)


def _press(name: str) -> str:
    """Return a script that clicks the hidden button with this id once its file has been set."""
    return f"() => setTimeout(() => document.getElementById('{name}').click(), 100)"


class LocalBlocks(gr.Blocks):
    """Gradio ``Blocks`` that accept only uploaded files; gradio's own also download URLs."""

    async def preprocess_data(
        self, block_fn: Any, inputs: list[Any], state: Any, explicit_call: bool = False
    ) -> list[Any]:
        """Refuse URLs in place of files, then preprocess as ``gradio.Blocks`` does."""
        traverse(inputs, _check_file, is_file_obj_with_meta)
        return await super().preprocess_data(block_fn, inputs, state, explicit_call)


def _check_file(file: dict[str, Any]) -> dict[str, Any]:
    if is_http_url_like(str(file.get("path"))):
        raise gr.Error("URLs are not fetched: upload the file", print_exception=False)
    return file


class Isolation:
    """Middleware that confines the browser to this server, refuses downloads and limits uploads.

    Args:
        app: application to isolate.
        folder: folder for uploads.
    """

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        self.app, self.folder = app, folder
        self._coming: dict[object, int] = {}
        """Number of bytes that have not arrived yet, for each running upload."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse downloads and excessive uploads, and pass on all other requests."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = unquote(scope["path"]).lower()
        if any(part in path for part in _FETCHING_PATHS):
            await PlainTextResponse("URLs are not fetched", 403)(scope, receive, send)
            return
        if path.endswith("/openapi.json"):
            await PlainTextResponse("Not Found", 404)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _CONTENT_POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        if path.endswith("/upload"):
            await self._upload(scope, receive, with_headers)
        else:
            await self.app(scope, receive, with_headers)

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept an upload if there is enough space for all running uploads."""
        announced = Headers(scope=scope).get("content-length", "")
        if not announced.isdecimal():
            await PlainTextResponse("uploads require a Content-Length header", 411)(
                scope, receive, send
            )
            return
        upload, size = object(), int(announced[:19])
        expected = stored_bytes(self.folder) + sum(self._coming.values()) + size
        if expected > visitor_input.MAX_STORED_BYTES:
            refusal = PlainTextResponse(
                "the server cannot store more files at the moment; try again later", 507
            )
            await refusal(scope, receive, send)
            return

        async def counted() -> Message:
            message = await receive()
            # Bytes that have arrived count as part of the folder.
            self._coming[upload] -= len(message.get("body", b""))
            return message

        self._coming[upload] = size
        try:
            await self.app(scope, counted, send)
        finally:
            del self._coming[upload]
