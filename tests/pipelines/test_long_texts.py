"""Texts that are longer than any context are refused at once, whoever else is answering."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.engine.message import user_message
from oscar_mm.errors import RequestTooLarge
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.pipelines.shared_media import SharedMedia
from tests.engine.engine_waits import engine_waits

HUGE = "x" * 30_000_000
LONG = "What is this? " * 50_000
"""Within what the longest tokens could hold, but over the context."""


@pytest.fixture(scope="module")
def pipe(qwen: OscarVLPipeline) -> OscarVLPipeline:
    return OscarVLPipeline(qwen.model, processor=qwen.processor)


@contextmanager
def busy(pipe: Pipeline) -> Iterator[None]:
    """Somebody else has the pipeline's lock; fails if anybody waits for it."""
    taken, leave, in_time = threading.Event(), threading.Event(), []

    def hold() -> None:
        with engine_waits(pipe):
            taken.set()
            in_time.append(leave.wait(10))

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()
    assert in_time == [True]


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each text that is tokenized."""
    seen: list[int] = []
    call = PreTrainedTokenizerFast.__call__

    def counted(self: Any, text: Any, **options: Any) -> Any:
        seen.append(sum(map(len, [text] if isinstance(text, str) else text)))
        return call(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counted)
    return seen


ENTRIES: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "call": ("prompt", lambda pipe, text: pipe(None, text)),
    "stream": ("prompt", lambda pipe, text: pipe.stream(None, text)),
    "system": ("system", lambda pipe, text: pipe(None, "What?", system=text)),
    "chat": ("prompt", lambda pipe, text: pipe.chat().ask(text)),
    "chat's system": ("system", lambda pipe, text: pipe.chat(text)),
    "tell": ("prompt", lambda pipe, text: pipe.chat().tell(text, "This.")),
    "told": ("answer", lambda pipe, text: pipe.chat().tell("What?", text)),
    "reading": ("system", lambda pipe, text: SharedMedia(pipe, pipe.read_media(), text)),
    "question": (
        "prompt",
        lambda pipe, text: SharedMedia(pipe, pipe.read_media()).new_request(
            text, pipe.sampling({}, ())
        ),
    ),
    "choice": (
        r"choices\[1\]",
        lambda pipe, text: SharedMedia(pipe, pipe.read_media()).question("Who?", ["A", text]),
    ),
    "asked choice": (
        "prompt",
        lambda pipe, text: SharedMedia(pipe, pipe.read_media()).question(text, ["A", "B"]),
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("text", [HUGE, LONG], ids=["huge", "long"])
def test_refused_without_the_lock(
    pipe: OscarVLPipeline, entry: str, text: str, tokenized: list[int]
) -> None:
    name, ask = ENTRIES[entry]
    with (
        busy(pipe),
        pytest.raises(RequestTooLarge, match=rf"^{name}: .*{len(text):,} characters") as found,
    ):
        ask(pipe, text)
    assert len(str(found.value)) < 200
    assert found.value.fits == pipe.max_context < found.value.asked
    # What does not fit anyway is not tokenized to the end.
    assert sum(tokenized) < len(LONG) - 100_000


def test_rows_of_a_batch(pipe: OscarVLPipeline, tokenized: list[int]) -> None:
    rows = [{"prompt": HUGE}, {"prompt": LONG}, {"prompt": "What?", "system": HUGE}]
    with busy(pipe):
        results = pipe.batch(rows)
    assert [type(result.error) for result in results] == [RequestTooLarge] * 3
    assert sum(tokenized) < len(LONG) - 100_000


def test_several_texts_that_are_too_long_together(pipe: OscarVLPipeline) -> None:
    """As all that was said since the last answer."""
    half = "What is this? " * (pipe.max_context // 6)
    pipe.check_text("prompt", half)
    with busy(pipe), pytest.raises(RequestTooLarge, match=r"^messages: [\d,]+ characters"):
        pipe.chat().stream(messages=[user_message(half)] * 4)


@pytest.mark.slow
def test_what_fits_passes(pipe: OscarVLPipeline) -> None:
    """Up to the last token: blocks are no reason to refuse a text."""
    text = "What is this? " * (pipe.max_context // 5)
    tokens = pipe.family.tokenize(text).shape[1]
    assert len(text) > 1 << 16
    for room in (0, 1):
        tight = OscarVLPipeline(pipe.model, processor=pipe.processor)
        tight.admission.max_context = tokens - 1 + room
        tight.check_text("prompt", text)
        with pytest.raises(
            RequestTooLarge, match=r"text [\d,]+, max_new_tokens 1; use a shorter prompt"
        ):
            tight(None, text, max_new_tokens=1)
    with pytest.raises(RequestTooLarge) as found:
        pipe.check_text("prompt", LONG)
    fit = int(str(found.value).split(" about ")[1].split()[0].replace(",", ""))
    pipe.check_text("prompt", LONG[: fit - 1000])
    assert pipe.family.tokenize(LONG[: fit + 10_000]).shape[1] > pipe.max_context


@pytest.mark.parametrize("family", ["llava", "qwen", "omni"])
def test_no_text_has_fewer_tokens(family: str, request: pytest.FixtureRequest) -> None:
    family = request.getfixturevalue(family).family
    vocabulary = family.processor.tokenizer.get_vocab()
    ids = sorted(set(range(len(vocabulary))) & set(vocabulary.values()))
    for one in ids:
        text = family.processor.tokenizer.decode([one])
        assert len(text) <= family.longest_token
    for text in ("a" * 5000, " " * 5000, "What is this? " * 500, "ệ" * 999, "\n=" * 999):
        assert len(text) <= family.longest_token * family.tokenize(text).shape[1]


def test_texts_are_counted_in_parallel(qwen: OscarVLPipeline, omni: OscarOmniPipeline) -> None:
    texts = [f"What is {number}? " * (50 + number) for number in range(24)]
    for family in (qwen.family, omni.family):
        alone = [family.tokenize(text).tolist() for text in texts]
        found: list[Any] = [None] * len(texts)

        def count(first: int, family: Any = family, found: list[Any] = found) -> None:
            for index in range(first, len(texts), 4):
                found[index] = family.tokenize(texts[index]).tolist()

        threads = [threading.Thread(target=count, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == alone


def test_no_text_of_a_user(pipe: OscarVLPipeline) -> None:
    for name, text in (("prompt", "a\ud800"), ("system", "\udfff")):
        with (
            busy(pipe),
            pytest.raises(InputError, match=f"^{name} contains text that is not valid UTF-8"),
        ):
            pipe.check_text(name, text)
    pipe.check_text("answer", "", may_be_empty=True)
    with pytest.raises(InputError, match="answer must be text, not NoneType"):
        pipe.chat().tell("What?", None)
