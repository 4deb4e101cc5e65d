"""A random walk over several chats of one pipeline, which is checked after every step."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_module

from oscar_mm import InputError
from oscar_mm.engine.decode_runner import RequestState
from oscar_mm.engine.engine import Engine
from oscar_mm.engine.request import Request
from oscar_mm.engine.sampling import Sampler, SamplingState
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pipelines.pipeline import Pipeline
from tests.adapters import OwnAdapters
from tests.cache.numbers import check_slots
from tests.chat.plain import ARGUMENTS, KINDS, Plain, Said, Script
from tests.chat.questions import READS, described, options, question
from tests.chat.reports import bytes_of_slots, cache_of, check_report, check_store
from tests.chat.talk import Reader, Talk
from tests.engine.engine_waits import engine_waits
from tests.live_bytes import LiveBytes

CPU = torch.device("cpu")
MAX_CHATS, MAX_TURNS = 4, 5
STEPS = {
    "ask": 5,
    "stream": 3,
    "stay": 3,
    "read_on": 2,
    "forget": 5,
    "undo": 2,
    "fork": 2,
    "save_and_load": 1,
    "refused": 2,
    "fail": 1,
    "other_request": 1,
    "batch": 1,
    "close": 1,
    "begin": 1,
    "trim": 1,
    "offload": 1,
    "adapt": 1,
}
OF_NOBODY = ("other_request", "batch", "begin", "trim", "offload", "adapt")
"""Steps that are not of one chat."""
TOLERANCE = 1e-5
"""Tolerance of logits, as a share of the largest logit."""
SMALL = 1 << 16
"""Bytes of what is no key or value: token ids, positions, one flag for each layer."""
MARKS = 1 << 14
"""Bytes that models, processors and engines keep of the last requests."""


class Walk:
    """Takes steps that a seed chooses; raises AssertionError where a chat is not as it must be.

    Args:
        pipe: used by nobody else meanwhile.
        plain: the same checkpoint in plain transformers.
        media: that questions show, of ``media_of``.
        exact: whether logits must be those of ``plain``; packed pages change them.
        seed: of the steps.
        folder: for saved chats.

    Attributes:
        story: the steps so far.
    """

    def __init__(
        self,
        pipe: Pipeline,
        plain: Plain,
        media: dict[str, list[Any]],
        exact: bool,
        seed: int,
        folder: Path,
    ) -> None:
        self.pipe, self.plain, self.media = pipe, plain, media
        self.exact, self.folder = exact, folder
        self.pick = random.Random(seed)
        self.story: list[str] = []
        self.live = LiveBytes(pipe.engine.thread)
        self.talks: list[Talk] = []
        self.logits = weakref.WeakKeyDictionary[RequestState, list[np.ndarray]]()
        self.submitted: Request | None = None
        self.names = (f"chat_{number}" for number in range(1000))
        self.offloaded = False
        self.adapters: OwnAdapters | None = None
        self.acting: tuple[str, ...] = ()
        compute_page_tables(pipe)

    def run(self, steps: int) -> None:
        """Take so many steps, close everything, and look whether anything is left."""
        try:
            self.begin()
            with self.hearing():
                for _ in range(steps):
                    self.step()
                    self.check()
            self.end()
        except BaseException as error:
            error.add_note("\n".join(["The walk:", *self.story]))
            raise
        finally:
            self.restore()

    def step(self) -> None:
        """One step, on one chat."""
        talk = self.pick.choice(self.talks)
        [name] = self.pick.choices(list(STEPS), STEPS.values())
        if name == "read_on" and talk.reader is None:
            name = "stay"
        if len(talk.script.turns) >= MAX_TURNS and name in ("ask", "stream", "stay"):
            name = "undo"
        if len(self.talks) == MAX_CHATS and name in ("fork", "save_and_load", "begin"):
            name = "close"
        getattr(self, name)(*(() if name in OF_NOBODY else [talk]))

    def note(self, text: str) -> None:
        """For the story."""
        self.story.append(f"{len(self.story):4} {text}")

    def ask(self, talk: Talk) -> None:
        """A whole turn."""
        self.leave(talk)
        said, sampling = self.asked()
        self.note(f"{talk.name}.ask({described(said)}, {sampling})")
        with self.budget_allows() as done, self.heard() as logits:
            answer = talk.chat.ask(said.prompt, **said.arguments, **sampling)
        if done:
            self.complete(talk, said, answer.token_ids, logits)
            budget = self.pipe.budget
            if budget is not None and not any(other.reader for other in self.talks):
                assert budget.used_bytes <= budget.limit

    def stream(self, talk: Talk) -> None:
        """A turn that is read piece by piece, perhaps not to its end."""
        self.stay(talk)
        reader = talk.reader
        if reader is None:
            return
        self.leave(talk)
        how = self.pick.choice(["close", "drop"])
        self.note(f"{talk.name}: {how} the stream")
        with self.live:
            if how == "close":
                reader.stream.close()
            del reader

    def stay(self, talk: Talk) -> None:
        """A turn that is read in part, and may go on."""
        self.leave(talk)
        said, sampling = self.asked()
        self.note(f"{talk.name}.stream({described(said)}, {sampling})")
        with self.live, self.budget_allows():
            talk.reader = Reader(talk.chat.stream(said.prompt, **said.arguments, **sampling), said)
        if talk.reader is not None:
            self.read_on(talk)

    def read_on(self, talk: Talk) -> None:
        """Some more pieces of a stream."""
        count = self.pick.choice([0, 1, 1, 2, 3, 99])
        self.note(f"{talk.name}: read {count} pieces")
        reader = talk.reader
        for _ in range(count):
            talk.reader = None
            self.submitted = None
            with self.budget_allows(), self.live:
                piece = next(reader.stream, None)
                talk.reader = reader
            reader.running_request, self.submitted = self.submitted or reader.running_request, None
            if talk.reader is None:
                return
            if piece is None:
                talk.reader = None
                ids = reader.stream.result.token_ids
                return self.complete(talk, reader.said, ids, self.logits[reader.running_request])

    def leave(self, talk: Talk) -> None:
        """The call that follows ends the stream that is read: what was given out counts."""
        reader, so_far = talk.reader, talk.chat.so_far
        talk.reader = None
        if reader is not None and so_far is not None and so_far.text:
            self.complete(talk, reader.said, so_far.token_ids, self.logits[reader.running_request])

    def leave_all(self) -> None:
        """End all streams."""
        for talk in self.talks:
            reader = talk.reader
            self.leave(talk)
            if reader is not None:
                reader.stream.close()

    def forget(self, talk: Talk) -> None:
        """Take out one medium."""
        self.leave(talk)
        shown = [
            (turn, medium)
            for turn, said in enumerate(talk.script.turns)
            for medium in range(len(said.shown))
        ]
        if not shown:
            return self.refused(talk)
        turn, medium = self.pick.choice(shown)
        index = medium + 1 + sum(1 + len(said.shown) for said in talk.script.turns[:turn])
        self.note(f"{talk.name}.forget({index})")
        if medium in dict(talk.script.turns[turn].forgotten):
            with self.live, pytest.raises(InputError, match=r"already forgotten|kv_budget"):
                talk.chat.forget(index)
            return
        with self.live, self.budget_allows() as done:
            talk.chat.forget(index)
        if done:
            talk.script = talk.script.forgetting(turn, medium, talk.length)

    def undo(self, talk: Talk) -> None:
        """Take back a turn or two."""
        self.leave(talk)
        if not talk.script.turns:
            return self.refused(talk)
        count = self.pick.randint(1, min(2, len(talk.script.turns)))
        self.note(f"{talk.name}.undo({count})")
        with self.live, self.budget_allows() as done:
            talk.chat.undo(count)
        if not done:
            return
        start = talk.chat.turns[-1].stop if len(talk.script.turns) > count else 0
        for _ in range(count):
            talk.script = talk.script.without_last(start)
        talk.layout = self.plain.layout(talk.script) if talk.script.turns else None

    def fork(self, talk: Talk) -> None:
        """A second chat with the same past."""
        self.leave(talk)
        twin = replace(talk, name=next(self.names))
        self.note(f"{twin.name} = {talk.name}.fork()")
        with self.live, self.budget_allows() as done:
            twin.chat = talk.chat.fork()
        if done:
            self.talks.append(twin)
            self.check_alike(talk, twin)

    def save_and_load(self, talk: Talk) -> None:
        """The same by way of a file."""
        self.leave(talk)
        twin = replace(talk, name=next(self.names))
        self.note(f"{talk.name}.save(); {twin.name} = load_chat()")
        path = self.folder / f"{twin.name}.safetensors"
        with self.live, self.budget_allows() as done:
            talk.chat.save(path)
            twin.chat = self.pipe.load_chat(path)
        if done:
            self.talks.append(twin)
            self.check_alike(talk, twin)

    def refused(self, talk: Talk) -> None:
        """A call that cannot be."""
        self.leave(talk)
        calls: list[tuple[str, tuple, dict[str, Any]]] = [
            ("ask", (" ",), {}),
            ("stream", ("\ud800",), {}),
            ("ask", ("What?", ["gone.png"]), {}),
            ("ask", (self.plain.processor.tokenizer.eos_token,), {}),
            ("stream", ("What?",), {"speak": True}),
            ("ask", ("What?",), {"max_new_tokens": 10**6}),
            ("ask", ("What?",), {"temperature": -1}),
            ("forget", (10**6,), {}),
            ("forget", (0,), {}),
            ("save", (self.folder / "no such folder" / "chat",), {}),
        ]
        for kind in (kind for kind in KINDS if kind not in READS[self.plain.family]):
            calls.append(("ask", ("What?",), {ARGUMENTS[kind]: self.media[kind][:1]}))
        if not talk.script.turns:
            calls.append(("undo", (), {}))
        name, args, unusual = self.pick.choice(calls)
        self.note(f"{talk.name}.{name}(*{args}, {list(unusual)}) is refused")
        with self.live, pytest.raises(InputError):
            getattr(talk.chat, name)(*args, **unusual)

    def fail(self, talk: Talk) -> None:
        """An error within a forward pass: some layers have stored their tokens, others not."""
        self.leave_all()  # Answers that decode in the same pass fail with it.
        (said, sampling), number = self.asked(), self.pick.randint(1, 3)
        self.note(f"{talk.name}: pass {number} fails of {described(said)}, {sampling}")
        passes = iter(range(1, 1000))

        def fail(*_: Any) -> None:
            if next(passes) == number:
                raise MemoryError

        hook = self.pipe.model.get_decoder().layers[1].register_forward_pre_hook(fail)
        try:
            with suppress(MemoryError), self.budget_allows() as done, self.heard() as logits:
                answer = talk.chat.ask(said.prompt, **said.arguments, **sampling)
        finally:
            hook.remove()
        if done:
            self.complete(talk, said, answer.token_ids, logits)

    def other_request(self) -> None:
        """A question without a chat."""
        said, sampling = self.asked()
        self.note(f"pipe({described(said)}, {sampling})")
        with self.budget_allows() as done, self.heard() as logits:
            answer = self.pipe(prompt=said.prompt, **{"images": None} | said.arguments, **sampling)
        if done:
            self.complete(Talk("", None, Script()), said, answer.token_ids, logits)

    def batch(self) -> None:
        """Several questions at once, of which some cannot be answered."""
        asked = [self.asked()[0] for _ in range(self.pick.randint(1, 4))]
        requests = [
            {"prompt": said.prompt, "max_new_tokens": self.pick.randint(1, 4), **said.arguments}
            for said in asked
        ]
        broken = self.pick.randrange(2 * len(requests))
        if broken < len(requests):
            requests[broken]["images"] = ["gone.png"]
        self.note(f"pipe.batch({list(map(described, asked))}), broken: {broken}")
        with self.live:
            results = self.pipe.batch(requests, batch_size=3)
            self.submitted = None
        for place, (said, result) in enumerate(zip(asked, results, strict=True)):
            if result.error is not None:
                assert place == broken or "kv_budget" in str(result.error), result.error
            elif self.exact:
                ids = tuple(result.answer.token_ids)
                script = Script().with_turn(replace(said, answer=ids))
                layout = self.plain.layout(script)
                logits = self.plain.logits(layout, script)[layout.prompts[0] - 1 :]
                chosen = logits[torch.arange(len(ids)), torch.tensor(ids, dtype=torch.long)]
                near = logits[: len(ids)].amax(-1) - chosen
                assert (near <= TOLERANCE * logits.abs().max()).all(), (place, near)

    def close(self, talk: Talk) -> None:
        """Give up a chat, or lose it."""
        how = self.pick.choice(["close", "drop"])
        self.note(f"{how} {talk.name}")
        self.talks.remove(talk)
        with self.live:
            if how == "close":
                talk.chat.close()
            talk.chat = talk.reader = None
        if how == "drop":
            gc.collect()
        if not self.talks:
            self.begin()

    def begin(self) -> None:
        """A new chat."""
        name, system = next(self.names), self.pick.choice([None, "Be brief."])
        self.note(f"{name} = chat({system!r})")
        with self.live:
            self.talks.append(Talk(name, self.pipe.chat(system), Script(system)))

    def trim(self) -> None:
        """Slots get other ids."""
        self.note("trim()")
        with self.live, engine_waits(self.pipe):
            self.pipe.store.trim()
        assert self.pipe.store.memory().free_bytes == 0

    def offload(self) -> None:
        """Weights go elsewhere, from where each forward pass brings them, or come back."""
        model, where = self.pipe.model, self.pick.choice(["memory", "disk"])
        self.offloaded = not self.offloaded
        self.note(f"weights go to {where}" if self.offloaded else "weights come back")
        if not self.offloaded:
            remove_hook_from_module(model, recurse=True)
        elif where == "memory":
            cpu_offload(model, CPU)
        else:
            disk_offload(model, self.folder / f"weights_{len(self.story)}", CPU)

    def adapt(self) -> None:
        """Adapters are put in, others act from here on, or none, or they are taken out."""
        self.leave_all()
        if self.adapters is not None and self.pick.random() < 0.3:
            self.note("without adapters")
            return self.take_out()
        self.adapters = self.adapters or OwnAdapters(self.pipe.model)
        others = [names for names in ((), ("a",), ("b",), ("a", "b")) if names != self.acting]
        self.acting = self.pick.choice(others)
        self.note(f"adapters {self.acting}")
        self.adapters.use(*self.acting)

    def take_out(self) -> None:
        """Take the adapters out."""
        if self.adapters is not None:
            self.adapters.take_out()
        self.adapters, self.acting = None, ()

    def restore(self) -> None:
        """The model is as it was."""
        self.take_out()
        remove_hook_from_module(self.pipe.model, recurse=True)

    def end(self) -> None:
        """Close everything: nothing is left."""
        while self.talks:  # No name is left for a talk, whose reader has the last prompt.
            self.talks.pop().chat.close()
        if self.pipe.prefixes is not None:
            self.pipe.prefixes.clear()
        gc.collect()
        assert self.pipe.store.memory().used_bytes == 0
        self.pipe.store.trim()
        assert self.live.now < MARKS
        if self.pipe.budget is not None:
            assert not list(self.pipe.budget.folder.iterdir())

    # What is asked, and what must be

    def asked(self) -> tuple[Said, dict[str, Any]]:
        """The next question, and how to answer it."""
        said = question(self.pick, self.plain.family, self.media)
        return replace(said, adapters=self.acting), options(self.pick)

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Record the logits from which the tokens of each answer are chosen, within the block."""
        # Weak here and below: a sampler has the ids of its prompt, which are to go when its answer
        # ends, while the choices of a batch stay until its rows change.
        latest = weakref.WeakKeyDictionary[SamplingState, np.ndarray]()
        choose, take, submit = Sampler.__call__, RequestState.take, Engine.submit
        init = Sampler.__init__

        def with_samplers(choices: Any, samplers: Any, *rest: Any) -> None:
            init(choices, samplers, *rest)
            rows = ((row, one) for row, one in enumerate(samplers) if one is not None)
            choices.samplers = weakref.WeakValueDictionary(rows)

        def noted(choices: Any, logits: torch.Tensor) -> Any:
            for row, sampler in choices.samplers.items():
                latest[sampler] = logits[row].numpy().copy()
            return choose(choices, logits)

        def taken(row: RequestState, *rest: Any) -> None:
            self.logits.setdefault(row, []).append(latest[row.sampler])
            take(row, *rest)

        def submitted(engine: Engine, running_request: Request) -> None:
            self.submitted = running_request
            submit(engine, running_request)

        with (
            patch.object(Sampler, "__init__", with_samplers),
            patch.object(Sampler, "__call__", noted),
            patch.object(RequestState, "take", taken),
            patch.object(Engine, "submit", submitted),
        ):
            yield

    @contextmanager
    def heard(self) -> Iterator[list[np.ndarray]]:
        """Logits by which the tokens of the answer that begins inside are chosen."""
        logits: list[np.ndarray] = []
        self.submitted = None
        try:
            with self.live:
                yield logits
            if self.submitted is not None:
                logits += self.logits.get(self.submitted, [])
        finally:
            self.submitted = None

    @contextmanager
    def budget_allows(self) -> Iterator[list[bool]]:
        """What is done inside may be refused for lack of room, if there is a budget; what this
        gives is empty then."""
        done: list[bool] = []
        try:
            yield done
            done.append(True)
        except InputError as error:
            if self.pipe.budget is None or "kv_budget" not in str(error):
                raise
            self.note(f"  no room: {error}")

    def complete(self, talk: Talk, said: Said, ids: list[int], logits: list[np.ndarray]) -> None:
        """A turn counts; its tokens were chosen by what plain transformers makes of it all."""
        said = replace(said, answer=tuple(ids), unread=len(ids) + 1 - len(logits))
        assert said.unread in (0, 1)
        talk.script = talk.script.with_turn(said)
        talk.layout = self.plain.layout(talk.script)
        if self.exact:
            first = talk.layout.prompts[-1] - 1
            expected = self.plain.logits(talk.layout, talk.script)[first : first + len(logits)]
            error = _difference(np.stack(logits), expected.numpy())
            assert error < TOLERANCE, f"{talk.name}: logits differ by {error:.1e}"

    def check_alike(self, one: Talk, other: Talk) -> None:
        """Two chats of one past give the same answer, bit for bit."""
        if self.pipe.prefixes is not None and not one.script.turns:
            return  # The second would find what the first one read.
        said, sampling = self.asked()
        found = []
        for talk in (one, other):
            with self.budget_allows(), self.live, talk.chat.fork() as twin, self.heard() as logits:
                twin.ask(said.prompt, **said.arguments, **sampling, deterministic=True)
            if logits:
                found.append(np.stack(logits))
        assert len(found) < 2 or np.array_equal(*found)

    def check(self) -> None:
        """All chats hold what they must, and reports and tensors agree."""
        store = self.pipe.store
        for talk in self.talks:
            self.check_talk(talk)
        stored = check_store(store)
        if any(talk.reader for talk in self.talks):
            return
        caches = [cache for talk in self.talks if (cache := cache_of(talk.chat)) is not None]
        caches += [] if self.pipe.prefixes is None else self.pipe.prefixes.caches
        check_slots(store, [cache.kv_manager for cache in caches])
        assert store.memory().used_bytes == bytes_of_slots(store, *caches)
        assert stored <= self.live.now <= stored + SMALL

    def check_talk(self, talk: Talk) -> None:
        """A chat tells what was said in it, and what that takes."""
        turns, script = talk.chat.turns, talk.script
        assert [turn.prompt for turn in turns] == [said.prompt for said in script.turns]
        segments, cache = talk.chat.segments, cache_of(talk.chat)
        assert [segment.index for segment in segments] == list(range(len(segments)))
        forgotten = [
            flag
            for said in script.turns
            for flag in (False, *(n in dict(said.forgotten) for n in range(len(said.shown))))
        ]
        assert [segment.forgotten for segment in segments] == forgotten
        if turns:
            assert turns[-1].stop == talk.length
            spans = [[(span.start, span.stop) for span in turn.media] for turn in turns]
            assert spans == talk.layout.spans
        memory = talk.chat.memory
        if cache is None:
            assert memory.kv_bytes == 0 and self.pipe.budget is not None
            return
        if turns:
            assert memory.tokens == talk.layout.stored(script)
        assert sum(segment.tokens for segment in segments) == sum(memory.tokens.values())
        check_report(memory, cache, self.pipe.store)


def compute_page_tables(pipe: Pipeline) -> None:
    """Compute the tables by which pages are saved, before bytes are counted.

    A process keeps one for each page format (25 KB here). It would count as left behind by the
    first walk that saves a chat.
    """
    config = pipe.model.get_decoder().config
    for bits in pipe.policy.packed_bits:
        page = PageFormat.of(pipe.policy, bits, config.num_key_value_heads, config.head_dim)
        if page.codec.appends_tokens:
            page.token_bytes(CPU)


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest, as a share of the largest number; infinite where something is NaN."""
    error = np.abs(found - expected).max() / np.abs(expected).max()
    return float(error) if np.isfinite(error) else np.inf
