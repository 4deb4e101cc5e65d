"""The transcript shows text as text, whatever it says; previews by content and name, bounded."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from oscar_mm.apps.demo import transcript as module
from oscar_mm.apps.demo.memory_panel import mark_differences, segment_table
from oscar_mm.apps.demo.transcript import (
    Exchange,
    Preview,
    PreviewStore,
    as_markdown,
    history,
    live,
    load_previews,
)
from oscar_mm.apps.demo.visitor_input import LIMITS
from oscar_mm.chat.conversation import Segment, Turn
from oscar_mm.engine.message import Message
from oscar_mm.errors import InputError
from oscar_mm.modality import MediumSpan, Modality

EVIL = '<img src=x onerror="alert(1)"><script>alert(2)</script>&amp;'


class Page(HTMLParser):
    """Tags and text of some HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def exchange(**fields: object) -> Exchange:
    return Exchange(**({"question": "What?"} | fields))


def test_nothing_that_was_said_becomes_html() -> None:
    evil = exchange(
        question=EVIL,
        answer=EVIL,
        reasoning=EVIL,
        note=EVIL,
        hint=EVIL,
        error=EVIL,
        previews=[
            Preview("picture", EVIL, Path(f"/folder/{EVIL}"), "<b></b>"),
            Preview("clip", EVIL),
        ],
    )
    evil_segment = Segment(1, Modality.IMAGE, 18, 100, EVIL, 0)
    htmls = [history([evil]), live(evil), segment_table([evil_segment], [[]])]
    htmls.append(mark_differences(EVIL, "other")[0])
    for html in htmls:
        page = Page(html)
        assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img"})
        assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
        assert EVIL in page.text


def test_media_are_numbered_over_the_whole_conversation() -> None:
    first = [Preview("picture", "a.png"), Preview("picture", "b.png"), Preview("clip", "c.wav")]
    refused = exchange(previews=[Preview("picture", "refused.png")], error="no")
    last = exchange(previews=[Preview("picture", "d.png")])
    html = history([exchange(previews=first, counts=True), refused, last], last)
    captions = re.findall("<figcaption>([^<]*)</figcaption>", html)
    assert captions == ["picture 1", "picture 2", "clip 1", "not seen", "picture 3"]


def test_files_are_linked_and_sounds_can_be_played() -> None:
    shown = [
        Preview("picture", "a b.png", Path("/up/a b.png"), '<img alt="a b.png">'),
        Preview("clip", "c.wav", Path("/up/c.wav"), "<svg></svg>"),
    ]
    tags = Page(history([exchange(previews=shown)])).tags
    [link] = [attrs for tag, attrs in tags if tag == "a"]
    assert link["href"] == "gradio_api/file=/up/a%20b.png"
    [sound] = [attrs for tag, attrs in tags if "data-sound" in attrs]
    assert sound["data-sound"] == "gradio_api/file=/up/c.wav"
    assert sound["aria-label"] == "Play c.wav"


def test_it_says_how_to_begin_until_there_is_a_question() -> None:
    refusal = Exchange("", error="there is nothing to undo")
    refused = history([refusal])
    assert 'class="welcome"' in history([]) and 'class="welcome"' in refused
    assert "nothing to undo" in refused
    assert 'class="welcome"' not in history([refusal, exchange(error="too long")])


def test_each_block_of_code_can_be_copied() -> None:
    code = 'print("<a> & b")\n'
    tags = Page(
        history([exchange(answer=f"Run\n\n```python\n{code}```\n\nor\n\n```\nls\n```")])
    ).tags
    copied = {item["aria-label"]: item["data-text"] for _, item in tags if "data-text" in item}
    texts = [item["data-text"] for tag, item in tags if item.get("aria-label") == "Copy the code"]
    assert texts == [code, "ls\n"]
    assert copied["Copy the answer"].startswith("Run\n\n```python\n")


def test_each_question_has_a_menu_once_it_is_answered() -> None:
    first, lost = exchange(answer="one"), exchange(previews=[Preview("picture", "a.png")])
    refusal, now = Exchange("", error="there is nothing to undo"), exchange()
    tags = Page(history([first, refusal, lost, now], now)).tags
    menus = [item for _, item in tags if item.get("class") == "more"]
    assert [item["data-key"] for item in menus] == [first.key, lost.key]
    assert ["data-lost" in item for item in menus] == [False, True]
    assert menus[1]["aria-label"] == "Actions for question 2"


def test_the_answer_that_is_written_is_apart() -> None:
    done, now = exchange(answer="one"), exchange(question="And?", answer="two")
    past = history([done, now], now)
    assert "one" in past and "And?" in past and "two" not in past
    assert "two" in live(now) and "two" in history([done, now])
    assert live(None) == "" and "reading" in live(exchange())


def test_reasoning_is_folded_once_there_is_an_answer() -> None:
    def details(html: str) -> list[dict]:
        return [attrs for tag, attrs in Page(html).tags if tag == "details"]

    thinking = exchange(reasoning="It is a sign.")
    assert "open" in details(live(thinking))[0] and "thinking" in Page(live(thinking)).text
    thinking.answer = "A sign."
    for html in (live(thinking), history([thinking])):
        assert [attrs for attrs in details(html) if "open" in attrs] == []
        assert "It is a sign.A sign." in Page(html).text
    assert details(history([exchange(answer="A sign.")])) == []


def test_thumbnails(uploads, tmp_path) -> None:
    Image.fromarray(np.zeros((3000, 4000, 3), np.uint8)).save(uploads / "big.png")
    media = {
        "images": [uploads / "big.png"],
        "videos": [uploads / "clip.mp4"],
        "audio": [uploads / "tone.wav"],
    }
    picture, video, clip = load_previews(media, LIMITS)
    assert (picture.kind, video.kind, clip.kind) == ("picture", "video", "clip")
    assert all(one.html.startswith("<img src=") for one in (picture, video))
    assert 'alt="big.png"' in picture.html and len(picture.html) < 10_000
    assert 'aria-label="waveform of tone.wav"' in clip.html and clip.html.count("<rect") == 28
    broken = {"images": [uploads / "broken.png"], "videos": [], "audio": []}
    with pytest.raises(InputError, match=r"^broken\.png: "):  # Without its folder.
        load_previews(broken, LIMITS)


def test_the_transcript_as_text_numbers_media_as_the_page_does() -> None:
    shown = [Preview("picture", "a.png"), Preview("picture", "b.png")]
    first = exchange(previews=shown, answer="A sign.", note="stopped")
    text = as_markdown([first, exchange(question="And?", previews=shown[:1], answer="Red.")])
    assert "- picture 1: a.png\n- picture 2: b.png\n" in text and "- picture 3: a.png\n" in text
    assert text.index("What?") < text.index("A sign.") < text.index("And?") < text.index("Red.")
    assert "(stopped)" in text


def test_a_loaded_question_shows_texts_and_media_in_their_order() -> None:
    parts = ["Before:", spanned := span("b.png", "1"), "after:", span("a.png", "2", 4), "Which?"]
    earlier = Message("tool", ("4 degrees",))
    turn = Turn(
        (earlier, Message("user", tuple(parts))), "Red.", "stop", (False, False), 0, 9, 0, ()
    )
    previews = [Preview.named(one.modality, one.label) for one in turn.media]
    loaded = Exchange.loaded(turn, previews)
    assert turn.media[0] is spanned
    for text in (as_markdown([loaded]), Page(history([loaded])).text):
        places = [text.index(one) for one in ("4 degrees", "Before:", "after:", "Which?", "Red.")]
        pictures = [text.index(f"picture {number}") for number in (1, 2)]
        assert sorted(places) == places
        assert places[1] < pictures[0] < places[2] < pictures[1] < places[3]


def span(name: str, digest: str, start: int = 0) -> MediumSpan:
    return MediumSpan(Modality.IMAGE, name, start, start + 4, digest)


def test_content_and_name_have_to_agree() -> None:
    store = PreviewStore()
    store.add([span("a.png", "1")], ["<img>"])
    assert store.preview(span("a.png", "1")).html == "<img>"
    assert store.html(span("a.png", "2")) == store.html(span("b.png", "1")) == ""


def test_the_oldest_go(monkeypatch) -> None:
    monkeypatch.setattr(module, "_MAX_CHARACTERS", 100)
    store, spans = PreviewStore(), [span("a.png", str(index)) for index in range(20)]
    for one in spans:
        store.add([one], ["x" * 10])
        store.add([one], ["x" * 10])
    assert [bool(store.html(one)) for one in spans] == [False] * 10 + [True] * 10
