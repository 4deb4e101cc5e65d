"""`oscar-mm chat`: chat in the terminal; the KV cache is kept between turns."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oscar_mm.apps import options, terminal
from oscar_mm.apps.terminal import (
    no_echo,
    paths_of,
    print_pieces,
    printable,
    typed_lines,
    warnings_as_lines,
)
from oscar_mm.errors import InputError
from oscar_mm.media import load_image
from oscar_mm.media.image import eighth
from oscar_mm.media.source import existing_file, is_address
from oscar_mm.modality import Modality
from oscar_mm.policy import DEFAULT, KVPolicy

if TYPE_CHECKING:
    from oscar_mm.chat.conversation import Turn
    from oscar_mm.pipelines.pipeline import Pipeline

_HELP = """\
/image PATH  /video PATH  /audio PATH   send with the next message; several paths, or *.png
/drop       discard media that wait to be sent
/segments   list the segments of the chat, with numbers
/forget N   free the memory of segment N, an image, video or recording
/undo       remove the last message and its answer
/memory     show the memory of the cache
/save PATH  /load PATH                  save or load the chat
/help       show this list
/quit       quit, as at the end of the input; Ctrl-C stops an answer"""
_SUFFIX = ".safetensors"
_UNCHANGED = "stopped; the chat is unchanged"
_ANSWER_TOKENS = 1024
"""Default of the maximum number of tokens of an answer."""


@options.grouped
def chat(
    *,
    model: options.Model = None,
    policy: options.Policy = DEFAULT,
    system: options.System = None,
    load: Annotated[
        str | None, typer.Option("--load", metavar="FILE", help="Continue a saved chat.")
    ] = None,
    sampling: options.SamplingOptions,
    placement: options.PlacementOptions,
    max_context: options.MaxContext = None,
    audio_in_video: options.AudioInVideo = False,
    allow_remote: options.AllowRemote = False,
) -> None:
    """Chat about images, videos and audio, which stay in context in later turns.

    Each line is a message or a command; /help lists the commands. Answers go to stdout, a thinking
    model's reasoning to stderr.
    """
    KVPolicy.preset(policy)
    if load is not None:
        existing_file(load, load)
        if system is not None:
            raise InputError(
                "--system cannot be used with --load: a saved chat has its own system prompt"
            )
    answer_options = sampling.checked()
    is_default = model is None
    model = options.model_or_bundled(model, supports_audio=audio_in_video)
    terminal.quiet_transformers()
    from oscar_mm.pipelines import (
        pipeline_for,
    )  # Slow to import, because it imports transformers' models.

    pipe = pipeline_for(model)(
        model,
        policy=policy,
        **asdict(placement),
        max_context=max_context,
        allow_remote=allow_remote,
    )
    if audio_in_video:
        _check_reads(pipe, Modality.AUDIO)
        answer_options["use_audio_in_video"] = True
    answer_options.setdefault("max_new_tokens", pipe.longest_answer(_ANSWER_TOKENS))
    talk = _TerminalChat(pipe, pipe.load_chat(load) if load else pipe.chat(system), answer_options)
    if sys.stdin.isatty():
        if not is_default:
            _note(terminal.model_description(model, pipe))
        _note(f"cache: {policy}. Ask, or /help")
    for line in typed_lines([*talk.commands, "/quit"]):
        if not talk.take(line):
            break


class _TerminalChat:
    """Chat in the terminal, with the media for its next message."""

    def __init__(self, pipe: "Pipeline", chat: Any, sampling: dict[str, Any]) -> None:
        self.pipe, self.chat, self.sampling = pipe, chat, sampling
        self.pending: dict[str, list[str]] = {"images": [], "videos": [], "audio": []}
        self.commands: dict[str, Callable[[str], None]] = {
            "/image": lambda path: self._show("images", Modality.IMAGE, path),
            "/video": lambda path: self._show("videos", Modality.VIDEO, path),
            "/audio": lambda path: self._show("audio", Modality.AUDIO, path),
            "/drop": lambda _: self._drop(),
            "/segments": lambda _: self._segments(),
            "/forget": self._forget,
            "/undo": lambda _: self._undo(),
            "/memory": lambda _: print(terminal.memory_text(self.chat.memory)),
            "/save": self._save,
            "/load": self._load,
            "/help": lambda _: print(_HELP),
        }

    def take(self, line: str) -> bool:
        """Process a line of input and print any errors; return whether the chat continues."""
        name, _, argument = line.strip().partition(" ")
        if name == "/quit":
            return False
        try:
            if name in self.commands:
                self.commands[name](argument.strip())
            elif name.startswith("/"):
                raise InputError(f"{printable(name)}: no such command; /help lists them")
            elif name:
                self._ask(line.strip())
        except InputError as error:
            _note(f"error: {error}")
        except KeyboardInterrupt:
            _note(_UNCHANGED)
        except BrokenPipeError:
            raise
        except Exception as error:
            if os.environ.get("OSCAR_MM_DEBUG") == "1":
                traceback.print_exc()
            _note(f"error: {type(error).__name__}: {error}")
        return True

    def _ask(self, prompt: str) -> None:
        media = {kind: paths or None for kind, paths in self.pending.items()}
        before = len(self.chat.turns)
        with no_echo(), _end_on_ctrl_c() as interruption:
            with terminal.prefill_bar(self.pipe.model), warnings_as_lines():
                stream = self.chat.stream(prompt, **media, **self.sampling)
                pieces = stream.with_reasoning()
                first = next(pieces, "")
            interruption.begun = True
            for _ in print_pieces(chain([first], pieces)):
                if interruption.requested:
                    break
            stream.close()
        print(flush=True)
        terminal.print_hint(self.pipe, prompt)
        counts = len(self.chat.turns) > before
        if counts:
            self._drop()
        if interruption.requested:
            _note("stopped; the text so far counts as the answer" if counts else _UNCHANGED)

    def _show(self, kind: str, modality: Modality, line: str) -> None:
        if not line:
            raise InputError(f"/{modality.label} needs a PATH: type the path of a file after it")
        _check_reads(self.pipe, modality)
        self.pending[kind] += [self._checked(path, modality) for path in paths_of(line)]

    def _checked(self, path: str, modality: Modality) -> str:
        """Check that a path or URL can be used as media, and return it."""
        if is_address(path) and self.pipe.allow_remote and modality is not Modality.VIDEO:
            return path
        path = os.path.expanduser(path)
        existing_file(path, path)
        if modality is Modality.IMAGE:
            load_image(path, fit=eighth)  # Raises InputError if the image cannot be decoded.
        return path

    def _drop(self) -> None:
        for paths in self.pending.values():
            paths.clear()

    def _segments(self) -> None:
        for segment in self.chat.segments:
            state = f"{segment.tokens:,} tokens, {segment.bytes:,} bytes"
            state = "forgotten" if segment.forgotten else state
            label = printable(segment.label)
            print(f"{segment.index:3}  {segment.modality.label:5}  {state:32}  {label}")

    def _forget(self, number: str) -> None:
        if not number.isascii() or not number.isdecimal():
            raise InputError("/forget needs the number of a segment; /segments lists them")
        self.chat.forget(int(number))

    def _undo(self) -> None:
        last = self.chat.turns[-1:]
        self.chat.undo()
        _note(f"removed: {printable(last[0].prompt)}")

    def _save(self, line: str) -> None:
        target = _only_path("/save", line, "a file")
        if target.exists() and target.suffix != _SUFFIX:
            raise InputError(f"{target}: already exists; only a {_SUFFIX} file is replaced")
        self.chat.save(target)
        _note(f"saved as {target}, {target.stat().st_size:,} bytes")

    def _load(self, line: str) -> None:
        path = _only_path("/load", line, "a saved chat")
        loaded = self.pipe.load_chat(existing_file(path, str(path)))
        self.chat.close()
        self.chat = loaded
        for turn in loaded.turns:
            print(f"> {printable(_asked(turn))}\n{printable(turn.answer)}")


def _asked(turn: "Turn") -> str:
    """Return the texts of a turn's question and the names of its media, in order."""
    parts = [part for message in turn.messages for part in message.parts]
    return "\n".join(part if isinstance(part, str) else f"[{part.label}]" for part in parts)


class _Interruption:
    """State of an answer: whether it has started, and whether Ctrl-C has requested its end."""

    begun = requested = False


@contextmanager
def _end_on_ctrl_c() -> Iterator[_Interruption]:
    """Within the block, make the first Ctrl-C during an answer request the end of the answer.

    Ctrl-C before the start of the answer, and any further Ctrl-C, raises KeyboardInterrupt.
    """
    interruption = _Interruption()

    def note(*_: Any) -> None:
        if interruption.requested or not interruption.begun:
            raise KeyboardInterrupt
        interruption.requested = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)


def _only_path(command: str, line: str, of: str) -> Path:
    paths = paths_of(line)
    if len(paths) != 1:
        raise InputError(f"{command} needs one PATH of {of}; quote a name with spaces")
    return Path(os.path.expanduser(paths[0]))


def _check_reads(pipe: "Pipeline", modality: Modality) -> None:
    from oscar_mm.pipelines.registry import readers  # Slow to import.

    if modality not in pipe.family.reads:
        labels = ", ".join(sorted(readable.label for readable in pipe.family.reads)) or "text only"
        remedy = f"use {readers(modality)}"
        raise InputError(f"{pipe.family.name} supports {labels}, not {modality.label}; {remedy}")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
