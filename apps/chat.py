"""`oscar-mm chat`: a conversation in the terminal that keeps its cache."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oscar_mm.apps import options, terminal
from oscar_mm.apps.terminal import harmless, warnings_as_lines, written
from oscar_mm.errors import InputError
from oscar_mm.media import load_image
from oscar_mm.media.image import eighth
from oscar_mm.media.source import existing_file, is_address
from oscar_mm.modality import Modality
from oscar_mm.policy import DEFAULT, KVPolicy

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_HELP = """\
/image PATH  /video PATH  /audio PATH   show it with the next message
/drop       take back what is waiting to be shown
/segments   what the chat holds, with numbers
/forget N   free the memory of segment N, an image, video or recording
/undo       take back the last message and its answer
/memory     bytes of the cache
/save PATH  /load PATH                  the chat as a file
/help       this list
/quit       end, as does the end of the input; Ctrl-C ends an answer"""
_SUFFIX = ".safetensors"
_AS_BEFORE = "stopped; the chat is as it was before"
_LONGEST_TEXT = 1024
"""Tokens of an answer by default."""


def chat(
    model: options.Model = None,
    policy: options.Policy = DEFAULT,
    system: options.System = None,
    load: Annotated[
        str | None, typer.Option("--load", metavar="FILE", help="Go on with a saved chat.")
    ] = None,
    max_new_tokens: options.Longest = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    dtype: options.Dtype = None,
    max_context: options.MaxContext = None,
    audio_in_video: options.AudioInVideo = False,
    allow_remote: options.AllowRemote = False,
) -> None:
    """Talk about images, videos and sound; earlier ones stay in sight.

    A line is a message, or a command: /help lists them. Answers go to stdout, a thinking model's
    reasoning to stderr.
    """
    KVPolicy.preset(policy)
    if load is not None:
        existing_file(load, load)
        if system is not None:
            raise InputError("--system is for a new chat: a saved one has its own")
    how = options.checked_sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    model = options.chosen_model(model, hears=audio_in_video)
    terminal.on_loading()
    from oscar_mm.pipelines import pipeline_for  # brings transformers' models, slow to import

    pipe = pipeline_for(model)(
        model,
        policy=policy,
        device=device,
        device_map=device_map,
        dtype=dtype,
        max_context=max_context,
        allow_remote=allow_remote,
    )
    if audio_in_video:
        _check_reads(pipe, Modality.AUDIO)
        how["use_audio_in_video"] = True
    how.setdefault("max_new_tokens", pipe.longest_answer(_LONGEST_TEXT))
    talk = _Talk(pipe, pipe.load_chat(load) if load else pipe.chat(system), how)
    if sys.stdin.isatty():
        print(f"{pipe.family.name}, {policy}: ask, or /help", file=sys.stderr)
    for line in _lines():
        if not talk.take(line):
            break


def _lines() -> Iterator[str]:
    """Lines of the input until its end; on a terminal Ctrl-C empties the line."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - history and editing of the line
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


class _Talk:
    """A chat, and the media that wait for its next message."""

    def __init__(self, pipe: "Pipeline", chat: Any, how: dict[str, Any]) -> None:
        self.pipe, self.chat, self.how = pipe, chat, how
        self.waiting: dict[str, list[str]] = {"images": [], "videos": [], "audio": []}
        self.commands: dict[str, Callable[[str], None]] = {
            "/image": lambda path: self._show("images", Modality.IMAGE, path),
            "/video": lambda path: self._show("videos", Modality.VIDEO, path),
            "/audio": lambda path: self._show("audio", Modality.AUDIO, path),
            "/drop": lambda _: self._drop(),
            "/segments": lambda _: self._segments(),
            "/forget": self._forget,
            "/undo": lambda _: self._undo(),
            "/memory": lambda _: print(self.chat.memory),
            "/save": self._save,
            "/load": self._load,
            "/help": lambda _: print(_HELP),
        }

    def take(self, line: str) -> bool:
        """Carry out a line; whether the conversation goes on. Errors are shown."""
        name, _, argument = line.strip().partition(" ")
        if name == "/quit":
            return False
        try:
            if name in self.commands:
                self.commands[name](_unquoted(argument))
            elif name.startswith("/"):
                raise InputError(f"{harmless(name)}: no such command; /help lists them")
            elif name:
                self._ask(line.strip())
        except InputError as error:
            _note(f"error: {error}")
        except KeyboardInterrupt:
            _note(_AS_BEFORE)
        except BrokenPipeError:
            raise
        except Exception as error:
            if os.environ.get("OSCAR_MM_DEBUG") == "1":
                traceback.print_exc()
            _note(f"error: {type(error).__name__}: {error}")
        return True

    def _ask(self, prompt: str) -> None:
        shown = {kind: paths or None for kind, paths in self.waiting.items()}
        before = len(self.chat.turns)
        with _ctrl_c() as pressed:
            with terminal.prefill(self.pipe.model), warnings_as_lines():
                stream = self.chat.stream(prompt, **shown, **self.how)
                pieces = stream.with_reasoning()
                first = next(pieces, "")
            pressed.begun = True
            for _ in written(chain([first], pieces)):
                if pressed.once:
                    break
            stream.close()
        print(flush=True)
        counts = len(self.chat.turns) > before
        if counts:
            self._drop()
        if pressed.once:
            _note("stopped; what you read counts as the answer" if counts else _AS_BEFORE)

    def _show(self, kind: str, modality: Modality, path: str) -> None:
        if not path:
            raise InputError(f"/{modality.label} needs the PATH of a file")
        _check_reads(self.pipe, modality)
        remote = is_address(path) and self.pipe.allow_remote and modality is not Modality.VIDEO
        if not remote:
            path = os.path.expanduser(path)
            existing_file(path, path)
            if modality is Modality.IMAGE:
                load_image(path, fit=eighth)  # Tells now what is wrong with it.
        self.waiting[kind].append(path)

    def _drop(self) -> None:
        for paths in self.waiting.values():
            paths.clear()

    def _segments(self) -> None:
        for one in self.chat.segments:
            state = "forgotten" if one.forgotten else f"{one.tokens:,} tokens, {one.bytes:,} bytes"
            print(f"{one.index:3}  {one.modality.label:5}  {state:32}  {harmless(one.label)}")

    def _forget(self, number: str) -> None:
        if not number.isascii() or not number.isdecimal():
            raise InputError("/forget needs the number of a segment; /segments lists them")
        self.chat.forget(int(number))

    def _undo(self) -> None:
        last = self.chat.turns[-1:]
        self.chat.undo()
        _note(f"taken back: {harmless(last[0].prompt)}")

    def _save(self, path: str) -> None:
        if not path:
            raise InputError("/save needs the PATH of a file")
        target = Path(path).expanduser()
        if target.exists() and target.suffix != _SUFFIX:
            raise InputError(f"{target}: is there already; only a {_SUFFIX} file is replaced")
        self.chat.save(target)
        _note(f"saved as {target}, {target.stat().st_size:,} bytes")

    def _load(self, path: str) -> None:
        if not path:
            raise InputError("/load needs the PATH of a saved chat")
        loaded = self.pipe.load_chat(existing_file(str(Path(path).expanduser()), path))
        self.chat.close()
        self.chat = loaded
        for turn in loaded.turns:
            print(f"> {harmless(turn.prompt)}\n{harmless(turn.answer)}")


class _Pressed:
    """Whether an answer has begun, and whether Ctrl-C was pressed since."""

    begun = once = False


@contextmanager
def _ctrl_c() -> Iterator[_Pressed]:
    """Inside, Ctrl-C interrupts until an answer has begun; then it asks for its end, once."""
    pressed = _Pressed()

    def note(*_: Any) -> None:
        if pressed.once or not pressed.begun:
            raise KeyboardInterrupt
        pressed.once = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _check_reads(pipe: "Pipeline", modality: Modality) -> None:
    if modality not in pipe.family.reads:
        known = ", ".join(sorted(one.label for one in pipe.family.reads))
        hint = "; Qwen3-Omni and pocket-omni do" if modality is Modality.AUDIO else ""
        raise InputError(f"{pipe.family.name} reads {known}, no {modality.label}{hint}")


def _unquoted(text: str) -> str:
    """A path as people paste it: with spaces around it, or in quotes."""
    text = text.strip()
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
