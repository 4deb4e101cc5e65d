"""The page in a real browser: python -m pytest -m browser (Debian: chromium, chromium-driver)."""

import base64
import json
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.demo.server import RunningPage, serve_page
from oscar_mm.apps.demo.session import Session
from oscar_mm.apps.server_process import bind
from tests.apps.demo.conftest import COMPACT
from tests.prompts import noise
from tests.recordings import write_movie

pytest.importorskip("selenium")
pytest.importorskip("selenium_axe_python")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.alert import Alert
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.expected_conditions import alert_is_present
from selenium.webdriver.support.ui import WebDriverWait

from tests.apps.demo.browser import PATIENCE_S, Browser, browsers

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browsers() is None, reason="no chromium and chromedriver here"),
]
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>${1+1}"
OPAQUE = """
let element = document.querySelector(arguments[0]);
const there = Boolean(element);
for (; element; element = element.parentElement) {
  if (getComputedStyle(element).opacity !== '1') return false;
}
return there;
"""
LISTEN = """
const Sound = window.Audio;
window.Audio = function (source) { return window.heard = new Sound(source); };
"""
"""Script that keeps the sound that plays next as ``heard``."""
TOKENS = 160
"""Tokens of each answer, enough to watch it grow."""


@pytest.fixture(scope="module")
def served(pipe) -> Iterator[RunningPage]:
    with serve_page(pipe, COMPACT, bind("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def window(served: RunningPage, downloads: Path) -> Iterator[Browser]:
    with closing(Browser(served.address, downloads=downloads)) as made:
        yield made


@pytest.fixture
def browser(served: RunningPage, window: Browser) -> Browser:
    """A new visitor in a window of the usual size; its console must stay silent."""
    window.open(served.address)
    set_length(window, TOKENS)
    yield window
    assert window.complaints() == []


def set_length(browser: Browser, tokens: int) -> None:
    browser.press("Settings")
    [field] = browser.all("input[type=number][aria-label*='Maximum tokens of an answer']")
    field.clear()
    field.send_keys(f"{tokens}\t")
    browser.press("Memory")


def newest(served: RunningPage) -> Session:
    """The session of the visitor who came last; those before may not be gone yet."""
    return served.sessions.session(list(served.sessions._visits)[-1])


def click_when_there(browser: Browser, selector: str) -> None:
    browser.wait(lambda: browser.all(selector), selector)
    browser.run("arguments[0].click()", browser.all(selector)[0])


def is_dark(browser: Browser) -> bool:
    """By the colour behind the conversation."""
    script = "return getComputedStyle(document.querySelector('#transcript')).backgroundColor"
    return int(re.search(r"\d+", browser.run(script))[0]) < 60


def held(browser: Browser) -> str:
    """What the tile says."""
    return browser.text("#memory .tile:nth-child(1) dd")


def area(browser: Browser) -> str:
    return browser.run("return document.querySelector('#memory .area').getAttribute('d')")


def test_an_answer_is_streamed_and_the_chart_moves(browser, uploads) -> None:
    assert held(browser) == "0 B"
    browser.show(uploads / "0.png", uploads / "1.png")
    browser.say("What is it?")
    seen, charts, tops = [], set(), set()

    def look() -> bool:
        text = browser.text("#live article")
        if text and text != "reading" and (not seen or seen[-1] != text):
            seen.append(text)
            charts.add(area(browser))
            tops.add(browser.run("return document.querySelector('#message').offsetTop"))
        return bool(browser.all("#history .said"))

    browser.wait(look, "the whole answer")
    assert len(seen) >= 4 and len(charts) >= 4
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))
    assert len(tops) == 1, "the layout jumps"
    assert browser.text("#history .said p").startswith(seen[-1])
    browser.wait(lambda: held(browser) != "0 B", "the tile")
    assert len(browser.all("#history .asked img[alt='0.png']")) == 1
    browser.wait(lambda: len(browser.all("#segments tbody tr")) == 3, "the segments")
    loaded = browser.run("return [...document.images].every(one => one.naturalWidth > 0)")
    assert loaded


def test_a_question_to_click(browser) -> None:
    assert "M parameters" in browser.text("#head .chip")
    assert (
        browser.run("return document.querySelector('#examples').getBoundingClientRect().bottom")
        < 900
    )
    browser.press("What is the code in picture 1?")
    browser.wait(lambda: browser.all("#history .said"), "the answer")
    assert len(browser.all("#history .asked img")) == 1
    assert not browser.run("return document.querySelector('#examples').checkVisibility()")


def test_a_file_with_sound_and_a_recording_of_the_microphone(browser, served, uploads) -> None:
    browser.ask("What do you hear?", uploads / "tone.wav")
    assert len(browser.all("#history .clip .play")) == 1
    [play] = browser.all("#history .clip .play")
    browser.run(LISTEN)
    browser.run("arguments[0].click()", play)
    assert play.get_attribute("aria-pressed") == "true"
    browser.wait(lambda: play.get_attribute("aria-pressed") == "false", "the end of the sound")
    assert browser.run("return heard.currentTime") == pytest.approx(1.0, abs=0.05)
    assert "waveform of tone.wav" in browser.run(
        "return document.querySelector('#segments').innerHTML"
    )
    [microphone] = browser.all("#message [data-testid='microphone-button']")
    microphone.click()
    click_when_there(browser, "#message [aria-label='Start recording']")
    time.sleep(1.2)
    click_when_there(browser, "#message [aria-label='Stop recording']")
    click_when_there(browser, "#message [aria-label='Attach audio']")
    browser.wait(lambda: browser.all("#message .thumbnail-item"), "the recording in the message")
    browser.say("And now?")
    browser.wait(lambda: len(browser.all("#history .clip .play")) == 2, "the recording")
    browser.wait_for_the_end()
    session = newest(served)
    assert [one.kind for one in session.exchanges[1].previews] == ["clip"]
    assert session.exchanges[1].counts


def test_videos_play_or_are_offered_as_files(browser, uploads, tmp_path) -> None:
    """Browsers play H.264 and VP9, but not MPEG-4 Part 2, which a model sees all the same."""
    pictures = noise(48, 64)[None].repeat(12, 0)
    written = write_movie(tmp_path / "vp9.webm", pictures, None, codec="libvpx-vp9")
    browser.ask("What is it?", written, uploads / "clip.mp4")
    assert len(browser.all("#history video")) == 2
    for place in range(2):
        script = "document.querySelectorAll('#history video')[arguments[0]].play().catch(() => {})"
        browser.run(script, place)
    browser.wait(lambda: browser.all("#history .unplayable img[alt='clip.mp4']"), "the offer")
    [video] = browser.all("#history video")
    browser.wait(lambda: browser.run("return arguments[0].ended", video), "the end of the video")
    assert browser.run("return arguments[0].currentTime", video) == pytest.approx(1.5, abs=0.05)
    [link] = browser.all("#history .unplayable")
    fetched = "return fetch(arguments[0].href).then(one => one.blob()).then(one => one.size)"
    assert browser.run(fetched, link) == (uploads / "clip.mp4").stat().st_size
    assert browser.accessibility_violations() == [] and browser.faint_texts() == []


def test_a_sound_that_cannot_be_played_is_offered_as_a_file(browser, uploads) -> None:
    browser.ask("What do you hear?", uploads / "tone.wav")
    [play] = browser.all("#history .clip .play")
    browser.run("arguments[0].dataset.sound = 'data:audio/aiff;base64,Rk9STQ=='", play)
    browser.run("arguments[0].click()", play)
    browser.wait(lambda: browser.all("#history .clip .unplayable .waveform"), "the offer")


def test_all_tabs_leave_the_page_as_wide(browser) -> None:
    set_length(browser, 6)
    browser.ask("What is it?")
    width = "return document.querySelector('#columns').getBoundingClientRect().width"
    found = set()
    for tab in ("Chats", "Compare", "Why", "Settings", "Memory"):
        browser.press(tab)
        found.add(browser.run(width))
    assert len(found) == 1 and min(found) > 1200


def test_forget(browser, uploads) -> None:
    browser.ask("What is it?", uploads / "0.png", uploads / "1.png")
    tokens = browser.text("#memory .tile:nth-child(1) small")
    buttons = browser.all("#segments button")
    assert [one.get_attribute("aria-label") for one in buttons] == ["Forget 0.png", "Forget 1.png"]
    browser.run("arguments[0].scrollIntoView({block: 'center'})", buttons[0])
    buttons[0].click()
    browser.wait(lambda: "forgotten" in browser.text("#segments"), "the segment to go")
    assert len(browser.all("#segments button")) == 1
    assert browser.text("#memory .tile:nth-child(1) small") != tokens
    browser.ask("And now?")
    assert len(browser.all("#history .said")) == 2


def test_compare(browser, served, uploads) -> None:
    browser.ask("What is it?", uploads / "0.png")
    browser.press("Compare")
    [switch] = browser.all("#side input[type=checkbox]")
    switch.click()
    browser.wait(lambda: len(browser.all("#compared section")) == 2, "both answers")
    cards = [one.text for one in browser.all("#compared h2")]
    assert cards == ["compact", "16-bit"]
    browser.wait(lambda: "of 1 answers" in browser.text("#compared .verdict"), "the verdict")
    assert "tokens/s" in browser.text("#compared footer")
    browser.wait(lambda: not newest(served)._turn.locked(), "the end of the comparison")
    browser.ask("And now?")
    browser.wait(lambda: "of 2 answers" in browser.text("#compared .verdict"), "the next verdict")
    assert [one.text for one in browser.all("#compared .asked")] == ["And now?", "What is it?"]
    browser.press("Undo")
    browser.wait(lambda: "of 1 answers" in browser.text("#compared .verdict"), "the first verdict")
    assert len(browser.all("#compared .line.c-other")) == 1
    browser.press("Memory")
    assert len(browser.all("#memory .line.c-other")) == 1


def test_reload_goes_on(browser, served, uploads) -> None:
    browser.ask("What is it?", uploads / "0.png")
    address, used = browser.driver.current_url, held(browser)
    assert address.endswith(f"#{newest(served).id}")
    browser.reload()
    browser.wait(lambda: "What is it?" in browser.text("#history"), "the conversation")
    assert held(browser) == used and len(browser.all("#history .asked img")) == 1
    assert browser.driver.current_url == address
    browser.ask("And now?")
    assert len(newest(served).turns) == 2


def test_reload_while_an_answer_is_written(browser, served) -> None:
    set_length(browser, 1000)
    browser.say("Tell me more.")
    browser.wait(lambda: len(browser.text("#live article")) > 30, "some words")
    browser.reload()
    set_length(browser, 20)
    browser.wait(lambda: not newest(served)._turn.locked(), "the end of the answer")
    browser.ask("And now?")
    first, second = newest(served).turns
    assert first.answer and "stopped" in first.note and second.answer


def test_an_address_of_nobody_is_a_new_conversation(browser, served) -> None:
    chosen = "A" * 32
    browser.run("location.hash = arguments[0]", chosen)
    browser.wait(lambda: chosen not in browser.driver.current_url, "an address of its own")
    browser.wait(lambda: browser.text("#history .welcome"), "nothing")
    assert browser.driver.current_url.endswith(newest(served).id)


def test_retry_edit_and_fork(browser, served, uploads) -> None:
    set_length(browser, 20)
    browser.ask("What is it?", uploads / "0.png")
    original = browser.driver.current_url
    [copy] = browser.all("#history .copy")
    copy.click()
    browser.wait(lambda: browser.all("#history .copied"), "the text in the clipboard")
    browser.press("Retry")
    browser.wait_for_the_end()
    [exchange] = newest(served).exchanges
    assert exchange.counts and exchange.previews[0].name == "0.png"
    browser.press("Fork")
    browser.wait(lambda: browser.driver.current_url != original, "the copy")
    browser.press("Edit")
    [box] = browser.all("#message textarea")
    browser.wait(lambda: box.get_property("value") == "What is it?", "the question")
    assert browser.all("#message .thumbnail-item") and not newest(served).exchanges
    box.clear()
    browser.say("Which is it?")
    browser.wait(lambda: "Which is it?" in browser.text("#history"), "the question")
    browser.wait_for_the_end()
    browser.driver.back()
    browser.wait(lambda: "What is it?" in browser.text("#history"), "the original")
    assert browser.driver.current_url == original


def open_menu(browser: Browser, place: int) -> None:
    """Open the menu of a question."""
    browser.run("document.querySelectorAll('#history .more')[arguments[0]].click()", place)
    browser.wait(lambda: browser.all("#message-menu:popover-open"), "the menu")


def choose(browser: Browser, place: int, action: str) -> None:
    """Choose an action in the menu of a question."""
    open_menu(browser, place)
    [item] = [one for one in browser.all("#message-menu button") if one.text == action]
    item.click()


def confirm(browser: Browser) -> Alert:
    return WebDriverWait(browser.driver, PATIENCE_S, 0.05).until(alert_is_present())


def questions(browser: Browser) -> list[str]:
    script = "return [...document.querySelectorAll('#history .asked p')].map(p => p.textContent)"
    return browser.run(script)


def test_actions_on_earlier_questions(browser, served, uploads) -> None:
    set_length(browser, 6)
    browser.ask("First?", uploads / "0.png")
    browser.ask("Second?")
    browser.ask("Third?")
    everything = ["First?", "Second?", "Third?"]
    original = browser.driver.current_url
    choose(browser, 1, "Continue in a copy")
    browser.wait(lambda: questions(browser) == everything[:2], "the copy")
    assert browser.driver.current_url != original and len(newest(served).turns) == 2
    browser.driver.back()
    browser.wait(lambda: questions(browser) == everything, "the original")
    browser.wait(lambda: browser.run("return Boolean(window.onhashchange)"), "its address")
    browser.driver.get_log("browser")  # What the copy's page said when it was left.
    choose(browser, 1, "Ask again")
    alert = confirm(browser)
    assert alert.text == "This also deletes the question after it. Continue?"
    alert.dismiss()
    assert questions(browser) == everything
    choose(browser, 1, "Ask again")
    confirm(browser).accept()
    browser.wait(lambda: questions(browser) == everything[:2], "one question less")
    browser.wait_for_the_end()
    assert [one.question for one in newest(served).turns] == everything[:2]
    choose(browser, 1, "Delete from here")
    browser.wait(lambda: questions(browser) == ["First?"], "the first question")
    browser.ask("Second?")
    choose(browser, 0, "Edit and ask again")
    confirm(browser).accept()
    [box] = browser.all("#message textarea")
    browser.wait(lambda: box.get_property("value") == "First?", "the question")
    assert browser.all("#message .thumbnail-item") and not newest(served).exchanges


def test_an_earlier_question_is_asked_again_while_an_answer_is_written(browser, served) -> None:
    set_length(browser, 6)
    browser.ask("First?")
    browser.ask("Second?")
    set_length(browser, 1000)
    for expected in (2, 1):
        browser.wait(lambda n=expected: len(browser.all("#history .more")) >= n, "menus")
        choose(browser, expected - 1, "Ask again")
        if expected == 1:
            confirm(browser).accept()
        browser.wait(lambda n=expected: len(questions(browser)) == n, "the question")
        browser.wait(lambda: len(browser.text("#live article")) > 30, "some words")
        if expected == 2:
            browser.say("Third?")
            browser.wait(lambda: "generated" in browser.text(".toast-body"), "the refusal")
    browser.run("document.querySelector('#stop').click()")
    browser.wait_for_the_end()
    assert [one.question for one in newest(served).turns] == ["First?"]


def test_the_menu_of_a_question_by_keyboard(browser) -> None:
    set_length(browser, 6)
    browser.ask("First?\nLine")
    browser.ask("Second?")
    script = "navigator.clipboard.writeText = async (text) => { window.copied = text; }"
    browser.run(script)
    button = browser.all("#history .more")[0]
    browser.run("arguments[0].focus()", button)

    def press(*keys: str) -> str:
        ActionChains(browser.driver).send_keys(*keys).perform()
        return browser.driver.switch_to.active_element.text

    press(Keys.ENTER)
    browser.wait(lambda: browser.all("#message-menu:popover-open"), "the menu")
    assert button.get_attribute("aria-expanded") == "true"
    assert browser.accessibility_violations() == [] and browser.faint_texts() == []
    assert press(Keys.ARROW_DOWN) == "Edit and ask again"
    assert press(Keys.END) == "Delete from here"
    assert press(Keys.ARROW_DOWN) == "Copy the question"
    assert press(Keys.ARROW_UP, Keys.HOME) == "Copy the question"
    press(Keys.ESCAPE)
    browser.wait(lambda: not browser.all("#message-menu:popover-open"), "the conversation")
    assert browser.driver.switch_to.active_element == button
    browser.wait(lambda: button.get_attribute("aria-expanded") == "false", "the button")
    press(Keys.ENTER)
    browser.wait(lambda: browser.all("#message-menu:popover-open"), "the menu")
    press(Keys.ENTER)
    assert browser.run("return window.copied") == browser.text("#history .asked p")
    assert len(questions(browser)) == 2


FORMULAS = r"""By \(a^2\) of $5 and $6:

\[
\frac{1}{2} + \frac{1}{2} + \frac{1}{2} + \frac{1}{2} + \frac{1}{2} + \frac{1}{2} + \frac{1}{2}
- \href{javascript:alert(1)}{x}
\]

and \(\frac{1}\):

```python
def f():
    return "x"
```

"""


@pytest.mark.parametrize("dark", [False, True])
def test_formulas_and_colours(served, dark) -> None:
    with closing(Browser(served.address, (390, 844), dark=dark)) as browser:
        set_length(browser, 400)
        with answering(served.sessions.pipe, FORMULAS):
            browser.say("Say it.")
            browser.wait(lambda: browser.all("#live .katex"), "a formula of a growing answer")
            browser.wait_for_the_end()
        text = "#history .said"
        browser.wait(lambda: len(browser.all(f"{text} .katex")) == 2, "formulas")
        assert len(browser.all(f"{text} math")) == 2 and not browser.all(f"{text} .katex a")
        for kept in ("$5 and $6", r"\(\frac{1}\)"):
            assert kept in browser.text(text)
        color = "return getComputedStyle(document.querySelector(arguments[0])).color"
        kinds = ("pre", ".code-k", ".code-nf", ".code-s2")
        assert len({browser.run(color, f"{text} {kind}") for kind in kinds}) == 4
        assert browser.run("return document.documentElement.scrollWidth") == 390
        wide = "const one = document.querySelector('.formula.display'); return one.scrollWidth > "
        assert browser.run(f"{wide} one.clientWidth && one.tabIndex === 0")
        loaded = "return performance.getEntriesByType('resource').map((one) => one.name)"
        assert all(name.startswith((served.address, "data:")) for name in browser.run(loaded))
        assert browser.run("return document.fonts.check('16px KaTeX_Main')")
        assert browser.accessibility_violations() == [] and browser.faint_texts() == []
        assert browser.complaints() == []


def test_two_browsers_at_once(browser, served, uploads) -> None:
    with closing(Browser(served.address)) as other:
        set_length(other, TOKENS)
        browser.show(uploads / "0.png")
        other.show(uploads / "1.png")
        browser.say("The first question?")
        other.say("The second question?")
        both = [False]

        def look() -> bool:
            both[0] |= bool(browser.all("#live article") and other.all("#live article"))
            return bool(browser.all("#history .said") and other.all("#history .said"))

        browser.wait(look, "both answers")
        assert both[0], "one waited for the other"
        assert "second" not in browser.text("#history") and "first" not in other.text("#history")
        assert other.complaints() == []


@contextmanager
def answering(pipe: OscarOmniPipeline, text: str) -> Iterator[None]:
    """The next answer begins with a text."""
    wanted = iter(pipe.processor.tokenizer(text)["input_ids"])

    def force(_: object, __: object, logits: torch.Tensor) -> torch.Tensor:
        token = next(wanted, None)
        if token is not None:
            logits = torch.full_like(logits, -100.0)
            logits[..., token] = 0
        return logits

    hook = pipe.model.lm_head.register_forward_hook(force)
    try:
        yield
    finally:
        hook.remove()


def test_no_html_of_an_answer_is_rendered(browser, served) -> None:
    with answering(served.sessions.pipe, EVIL):
        browser.ask("Say it.")
    assert EVIL in browser.text("#history .said p")
    assert not browser.all("#history .said img, #history .said script, #live script")
    assert browser.driver.title == "oscar_mm"


def test_code_and_lists_stay_in_their_answer(served) -> None:
    text = f"1. one\n\n```\n{40 * 'wide '}\n```\n\n"
    with closing(Browser(served.address, (390, 844))) as browser:
        set_length(browser, TOKENS)
        with answering(served.sessions.pipe, text):
            browser.ask("Say it.")
        assert len(browser.all("#history .code .copy")) == 1
        assert browser.run("return document.documentElement.scrollWidth") == 390
        inside = "return document.querySelector(arguments[0]).getBoundingClientRect().left"
        # Markers of a list stand to the left of its items.
        marker = browser.run(inside, "#history .said li") - 16
        assert marker > browser.run(inside, "#history .said")


def test_errors_are_messages_and_the_chat_goes_on(browser, uploads) -> None:
    browser.show(uploads / "broken.png")
    browser.say("What is it?")
    browser.wait(lambda: "broken.png" in browser.text("#history [role=alert]"), "the error")
    [box] = browser.all("#message textarea")
    browser.wait(lambda: box.get_property("value") == "What is it?", "the message to come back")
    [remove] = browser.all("#message .delete-button")
    browser.run("arguments[0].click()", remove)
    browser.say(" ")
    browser.wait_for_the_end()
    assert len(browser.all("#history .said:not(.error)")) == 1


def test_pictures_of_a_refused_message_are_not_counted(browser, uploads) -> None:
    browser.show(uploads / "0.png", uploads / "broken.png")
    browser.say("What is it?")
    browser.wait(lambda: "broken.png" in browser.text("#history [role=alert]"), "the error")
    [box] = browser.all("#message textarea")
    browser.wait(lambda: box.get_property("value") == "What is it?", "the message to come back")
    for left in (1, 0):
        browser.run("document.querySelector('#message .delete-button').click()")
        browser.wait(lambda left=left: len(browser.all("#message .delete-button")) == left, "less")
    browser.ask("What is it?", uploads / "0.png", uploads / "1.png")
    captions = [one.text for one in browser.all("#history figcaption")]
    assert captions[-2:] == ["picture 1", "picture 2"]


def test_a_long_text(browser, served) -> None:
    set_length(browser, 5)
    context = served.sessions.pipe.admission.max_context
    assert f"can have {context:,} tokens" in browser.text("#model-limits")

    def ask(words: int) -> None:
        [box] = browser.all("#message textarea")
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
        browser.run(script, box, "word " * words)
        browser.say("?")

    ask(4000)
    browser.wait(lambda: browser.all("#history .said:not(.error)"), "the answer")
    assert len(browser.text("#history .asked")) > 20_000
    browser.wait_for_the_end()
    ask(21_000)
    browser.wait(lambda: browser.text("#history [role=alert]"), "the refusal")
    assert "more than the 100,000 allowed" in browser.text("#history [role=alert]")


def test_stop_undo_and_a_new_conversation(browser, served) -> None:
    set_length(browser, 1000)
    browser.say("Tell me more.")
    browser.wait(lambda: len(browser.text("#live article")) > 30, "some words")
    browser.press("Stop")
    browser.wait(lambda: "stopped" in browser.text("#history .said small"), "the end")
    session = newest(served)
    assert len(session.conversation.chat.turns) == 1
    browser.press("Undo")
    browser.wait(lambda: browser.text("#history .welcome"), "nothing")
    set_length(browser, 5)
    browser.ask("Again?")
    browser.press("New chat")
    browser.wait(lambda: browser.text("#history .welcome"), "nothing")
    assert held(browser) == "0 B"


def test_a_new_conversation_while_an_answer_is_written(browser, served) -> None:
    """The end of the answer is not shown in it."""
    set_length(browser, 1000)
    browser.say("Tell me more.")
    browser.wait(lambda: len(browser.text("#live article")) > 30, "some words")
    first, session = browser.driver.current_url, newest(served)
    browser.press("New chat")
    browser.wait(lambda: browser.driver.current_url != first, "its address")
    browser.wait(lambda: not session._turn.locked(), "the end of the answer")
    time.sleep(2)
    assert browser.text("#history .welcome") and not browser.all("#transcript article")
    browser.driver.back()
    browser.wait(lambda: "stopped" in browser.text("#history .said small"), "the answer")


def test_save_load_and_report(browser, served, uploads, downloads) -> None:
    browser.ask("What is it?", uploads / "0.png")
    browser.press("JSON report")
    browser.wait(lambda: list(downloads.glob("*.json")), "the report")
    [report] = downloads.glob("*.json")
    session = newest(served)
    assert json.loads(report.read_text())["memory"] == session.conversation.chat.memory.to_dict()
    browser.press("Save")
    browser.wait(lambda: list(downloads.glob("*.safetensors")), "the conversation")
    browser.press("Transcript")
    browser.wait(lambda: list(downloads.glob("*.md")), "the transcript")
    [transcript] = downloads.glob("*.md")
    assert "- picture 1: 0.png" in transcript.read_text()
    [saved] = downloads.glob("*.safetensors")
    browser.press("New chat")
    browser.wait(lambda: browser.text("#history .welcome"), "nothing")
    [field] = browser.all("input[type=file][accept*=safetensors], #load input[type=file]")[:1]
    field.send_keys(str(saved))
    browser.wait(lambda: "What is it?" in browser.text("#history"), "the conversation")
    assert len(browser.all("#history .asked img[alt='0.png']")) == 1
    # The file of the loaded question is missing, so it cannot be asked again.
    browser.wait(lambda: enabled(browser) == {"undo", "fork", "clear"}, "what can be done")
    open_menu(browser, 0)
    offered = [one.text for one in browser.all("#message-menu button:enabled")]
    assert offered == ["Copy the question", "Continue in a copy", "Delete from here"]
    browser.ask("And?")
    assert len(browser.all("#history .said")) == 2


def test_settings_and_why(browser, served, uploads) -> None:
    browser.press("Settings")
    click_when_there(browser, "#side input[type=radio][value=oscar]")
    browser.press("Start a conversation")
    browser.wait(lambda: browser.text("#status b") == "oscar", "the policy")
    browser.ask("What is it?", uploads / "0.png", uploads / "1.png")
    session = newest(served)
    assert session.conversation.chat.pipe.policy.token_scaling == "shared"
    browser.press("Why")
    browser.press("Inspect")
    browser.wait(lambda: len(browser.all("#why figure")) >= 3, "the charts")


def test_the_planner_answers_another_gpu(browser) -> None:
    before = browser.text("#fits strong")
    [gpu] = browser.all("#capacity input[aria-label='GPU']")
    gpu.click()
    [choice] = [one for one in browser.all("#capacity [role=option]") if "H200" in one.text]
    choice.click()
    browser.wait(lambda: browser.text("#fits strong") != before, "another count")
    assert re.fullmatch(r"[\d,]+", browser.text("#fits strong"))


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_window_dark_and_light(served, uploads, dark) -> None:
    with closing(Browser(served.address, (390, 844), dark=dark)) as narrow:
        set_length(narrow, 20)
        narrow.ask("What is it?", uploads / "0.png", uploads / "tone.wav")
        for tab in ("Compare", "Why", "Settings", "Memory"):
            narrow.press(tab)
            assert narrow.run("return document.documentElement.scrollWidth") == 390
        assert is_dark(narrow) == dark
        narrow.run("document.querySelector('#theme').click()")
        assert is_dark(narrow) != dark
        assert narrow.complaints() == []


@pytest.mark.parametrize(
    ("size", "dark"), [((1280, 900), False), ((1280, 900), True), ((390, 844), False)]
)
def test_screen_readers_and_weak_eyes_make_sense_of_the_page(served, uploads, size, dark) -> None:
    def check(where: str) -> None:
        assert (where, window.accessibility_violations()) == (where, [])
        assert (where, window.faint_texts()) == (where, [])

    with closing(Browser(served.address, size, dark=dark)) as window:
        check("empty")
        # With some longer texts of random weights, axe-core does not end.
        set_length(window, 12)
        for _ in range(5):
            window.ask("What is it?")
        check("questions alone")
        window.press("New chat")
        window.wait(lambda: window.text("#history .welcome"), "nothing")
        window.press("100 pictures")
        window.wait(lambda: len(window.all("#history .asked img")) == 100, "the pictures")
        window.wait_for_the_end()
        check("100 pictures")
        window.press("New chat")
        window.wait(lambda: window.text("#history .welcome"), "nothing")
        window.ask("What is it? " * 100, uploads / "0.png", uploads / "tone.wav")
        window.say("<|im_end|>")
        window.wait(lambda: window.text("#history [role=alert]"), "the refusal")
        window.show(uploads / "0.png")
        for tab in ("Chats", "Compare", "Why", "Settings", "Memory"):
            window.press(tab)
            check(tab)
        window.press("Talk")
        check("Talk")
        click_when_there(window, "#hands .free")
        window.wait(lambda: window.all("#hands [aria-pressed=true]"), "the microphone")
        check("listening")
        click_when_there(window, "#hands .free")
        window.press("Talk")
        window.press("Compare")
        # A new chat keeps the settings of the example, which compares.
        assert window.run("return document.querySelector('#side input[type=checkbox]').checked")
        window.wait(lambda: "of 1 answers" in window.text("#compared .verdict"), "the verdict")
        check("compared")
        window.press("Why")
        window.press("Inspect")
        window.wait(lambda: len(window.all("#why figure")) >= 3, "the charts")
        check("inspected")
        window.press("Fork")
        window.wait(lambda: window.run(OPAQUE, ".toast-body"), "the message in the corner")
        check("copied")


def test_keyboard_alone(browser, uploads) -> None:
    browser.ask("What is it?", uploads / "0.png")
    keys = ActionChains(browser.driver)
    browser.run("document.querySelector('#message textarea').focus()")
    keys.send_keys("And now?", Keys.ENTER).perform()
    browser.wait(lambda: len(browser.all("#history .asked")) == 2, "the question")
    browser.wait_for_the_end()
    passed = set()
    for _ in range(60):
        keys = ActionChains(browser.driver)
        keys.send_keys(Keys.TAB).perform()
        focused = browser.driver.switch_to.active_element
        style = "return getComputedStyle(arguments[0]).outline"
        assert " solid " in browser.run(style, focused), focused.get_attribute("outerHTML")
        passed.add(focused.get_attribute("id") or focused.get_attribute("aria-label"))
        if focused.get_attribute("data-index"):
            break
    assert {"undo", "clear"} <= passed and "stop" not in passed
    focused.send_keys(Keys.ENTER)
    browser.wait(lambda: "forgotten" in browser.text("#segments"), "the segment to go")


def is_in_sight(browser: Browser, selector: str) -> bool:
    """Whether the last such element of the transcript is within it."""
    script = """
    const box = document.querySelector('#transcript').getBoundingClientRect();
    const one = [...document.querySelectorAll(arguments[0])].at(-1).getBoundingClientRect();
    return one.top < box.bottom && one.bottom > box.top;
    """
    return browser.run(script, selector)


def titles(browser: Browser) -> list[str]:
    script = "return [...document.querySelectorAll('.conversations a')].map(a => a.textContent)"
    return browser.run(script)


def press_listed(browser: Browser, action: str, place: int) -> Alert:
    """Click a button of the list, which may be written anew at any moment; return its dialog."""
    browser.run(
        "const selector = `.conversations [data-action=${arguments[0]}]`;"
        "const place = arguments[1];"
        "setTimeout(() => document.querySelectorAll(selector)[place].click())",
        action,
        place,
    )
    return WebDriverWait(browser.driver, PATIENCE_S, 0.05).until(alert_is_present())


def test_a_new_chat_keeps_the_old_one(browser, uploads) -> None:
    set_length(browser, 6)
    browser.run("localStorage.removeItem('oscar-mm-conversations')")
    browser.ask("First of all?", uploads / "0.png")
    first = browser.run("return location.hash")
    browser.press("New chat")
    browser.wait(lambda: browser.all("#history .welcome"), "an empty conversation")
    browser.wait(lambda: browser.run("return location.hash") != first, "its address")
    browser.ask("Second of all?")
    browser.press("Chats")
    browser.wait(lambda: titles(browser) == ["Second of all?"], "the list")
    browser.driver.back()
    browser.wait(lambda: browser.text("#history .asked p") == "First of all?", "the old one")
    assert browser.run("return location.hash") == first
    browser.press("Chats")
    both = ["First of all?", "Second of all?"]
    browser.wait(lambda: titles(browser) == both, "both")
    assert "1 picture" in browser.text(".conversations small")
    prompt = press_listed(browser, "rename", 0)
    prompt.send_keys("A picture")
    prompt.accept()
    browser.wait(lambda: titles(browser)[0] == "A picture", "the title")
    press_listed(browser, "delete", 1).accept()
    browser.wait(lambda: titles(browser) == ["A picture"], "one less")
    press_listed(browser, "delete", 0).accept()
    browser.wait(lambda: browser.run("return location.hash") != first, "a new address")
    browser.wait(lambda: browser.all("#history .welcome"), "an empty conversation")


def test_search_in_conversations(browser, served) -> None:
    set_length(browser, 6)
    browser.run("localStorage.setItem('oscar-mm-conversations', location.hash.slice(1))")
    browser.press("Chats")
    [field] = browser.all("#search input")
    assert not field.is_displayed(), "nothing to search"
    browser.ask("Which fruit is red?")
    newest(served).exchanges[0].answer = "A <b>cherry</b> is."
    browser.press("New chat")
    browser.wait(lambda: browser.all("#history .welcome"), "an empty conversation")
    browser.ask("Which bird is blue?")
    browser.press("Memory")
    browser.press("Chats")
    browser.wait(lambda: len(titles(browser)) == 2, "the list")
    for words, expected in (
        ("RED which", ["Which fruit is red?"]),
        ("which <B>cherry", ["Which fruit is red?"]),
        ("", ["Which bird is blue?", "Which fruit is red?"]),
        ("horse", []),
    ):
        field.send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.DELETE, words)
        browser.wait(lambda expected=expected: titles(browser) == expected, words)
        if "cherry" in words:
            browser.wait(lambda: "cherry" in browser.text(".conversations .found"), "an excerpt")
            assert browser.text(".conversations .found") == "A <b>cherry</b> is."
            assert browser.text(".conversations mark") == "<b>cherry"
            assert browser.accessibility_violations() == [] and browser.faint_texts() == []
            browser.run("document.querySelector('#theme').click()")
            # The colours of buttons change slowly.
            assert not [one for one in browser.faint_texts() if "cherry" in one]
            browser.run("document.querySelector('#theme').click()")
    status = "#search [role=status]"
    browser.wait(lambda: browser.text(status) == "No conversation has these words.", "the reason")
    assert browser.accessibility_violations() == []


def test_shortcuts(browser) -> None:
    browser.say("Tell a long story.")
    browser.wait(lambda: "stop" in enabled(browser), "an answer")
    browser.run("document.activeElement.blur()")
    ActionChains(browser.driver).send_keys(Keys.ESCAPE).perform()
    browser.wait_for_the_end()
    assert "stopped" in browser.text("#history .said small")
    [field] = browser.all("#message textarea")
    keys = ActionChains(browser.driver).key_down(Keys.SHIFT).send_keys(Keys.ESCAPE)
    keys.key_up(Keys.SHIFT).perform()
    assert browser.run("return document.activeElement") == field
    first = browser.run("return location.hash")
    keys = ActionChains(browser.driver).key_down(Keys.CONTROL).key_down(Keys.SHIFT).send_keys("o")
    keys.key_up(Keys.SHIFT).key_up(Keys.CONTROL).perform()
    browser.wait(lambda: browser.all("#history .welcome"), "an empty conversation")
    browser.wait(lambda: browser.run("return location.hash") != first, "its address")
    assert browser.all("#clear")[0].get_attribute("aria-keyshortcuts") == "Control+Shift+O"


DROP = """
const [kind, selector, name, bytes] = arguments;
const data = new DataTransfer(), file = Uint8Array.from(atob(bytes), (one) => one.charCodeAt(0));
data.items.add(new File([file], name, {type: 'image/png'}));
const options = {bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data};
const event = kind === 'paste' ? new ClipboardEvent(kind, options) : new DragEvent(kind, options);
document.querySelector(selector).dispatchEvent(event);
return event.defaultPrevented;
"""


def test_files_are_dropped_or_pasted_anywhere(browser, served, uploads) -> None:
    def send(kind: str, selector: str, name: str) -> bool:
        data = base64.b64encode((uploads / name).read_bytes()).decode()
        return browser.run(DROP, kind, selector, name, data)

    marked = "return document.body.hasAttribute('data-dropping')"
    assert send("dragover", "#segments", "0.png") and browser.run(marked)
    assert send("drop", "#segments", "0.png") and not browser.run(marked)
    thumbnails = "#message .thumbnail-item"
    browser.wait(lambda: len(browser.all(thumbnails)) == 1, "the dropped file")
    send("drop", "#message textarea", "1.png")
    browser.wait(lambda: len(browser.all(thumbnails)) == 2, "the file dropped on the message")
    assert send("paste", "#transcript", "2.png")
    browser.wait(lambda: len(browser.all(thumbnails)) == 3, "the pasted file")
    set_length(browser, 6)
    browser.say("What is it?")
    browser.wait(lambda: len(browser.all("#history .asked img")) == 3, "the question")
    browser.wait_for_the_end()
    names = [preview.name for preview in newest(served).exchanges[0].previews]
    assert names == ["0.png", "1.png", "2.png"]


def test_names_of_pictures_lead_to_them(browser, served, uploads) -> None:
    set_length(browser, TOKENS)
    for names in (["0.png"], ["1.png", "2.png"]):
        browser.ask("What is it?", *(uploads / name for name in names))
    with answering(served.sessions.pipe, "Picture 3, unlike picture 9 or `picture 1`.\n\n"):
        browser.ask("Which is unlike picture 1?")
    links = browser.all("#history [data-show]")
    assert [link.text for link in links] == ["picture 1", "Picture 3"]
    assert {link.value_of_css_property("text-decoration-line") for link in links} == {"underline"}
    third = "#history figure[data-name='picture 3']"
    for link in (links[0], browser.all("#segments [data-show='picture 1']")[0]):
        browser.run("document.querySelector('#transcript').scrollTop = 1e6")
        browser.wait(lambda: not is_in_sight(browser, "#history figure[data-name='picture 1']"), "")
        browser.run("arguments[0].click()", link)
        browser.wait(lambda: is_in_sight(browser, "#history figure[data-name='picture 1']"), "it")
        focused = browser.driver.switch_to.active_element
        assert focused.get_attribute("title") == "0.png"
    links[1].send_keys(Keys.ENTER)
    browser.wait(lambda: is_in_sight(browser, third), "picture 3")
    assert browser.driver.switch_to.active_element.get_attribute("title") == "2.png"
    assert newest(served).id in browser.driver.current_url
    assert browser.accessibility_violations() == [] and browser.faint_texts() == []


def test_pages_of_one_address_stay_in_step(browser, served, uploads) -> None:
    """Without a look at the other page, and without a second stream of a page's own answers."""
    set_length(browser, 6)
    browser.ask("What is it?", uploads / "0.png")
    with closing(Browser(browser.driver.current_url)) as other:
        other.wait(lambda: len(other.all("#history .asked")) == 1, "the conversation")
        other.wait(lambda: other.run("return Boolean(window.onhashchange)"), "its address")
        [box] = other.all("#message textarea")
        box.send_keys("A question of its own")
        set_length(browser, TOKENS)
        browser.say("And now?")
        other.wait(lambda: len(other.text("#live article")) > 30, "the answer as it grows")
        assert browser.all("#live article"), "the answer has ended"
        browser.wait_for_the_end()
        last = "#history .said:last-child p"
        other.wait(lambda: other.text(last) == browser.text(last), "the answer")
        assert box.get_property("value") == "A question of its own"
        browser.press("Undo")
        other.wait(lambda: len(other.all("#history .asked")) == 1, "one question less")
        other.run("document.querySelector('#segments button').click()")
        browser.wait(lambda: "forgotten" in browser.text("#segments"), "the segment to go")
        browser.press("Chats")
        browser.wait(lambda: browser.all(".conversations a"), "the list")
        old = other.driver.current_url
        press_listed(browser, "delete", 0).accept()
        other.wait(lambda: other.text("#history .welcome"), "an empty conversation")
        other.wait(lambda: other.driver.current_url != old, "an address of its own")
        assert other.complaints() == []


def test_windows_of_one_browser_stay_in_step(browser) -> None:
    """Browsers allow six connections to one server, so the windows share one that is idle."""
    set_length(browser, 6)
    browser.ask("First?")
    first, address = browser.driver.current_window_handle, browser.driver.current_url
    others = []
    for _ in range(3):
        browser.driver.switch_to.new_window("window")
        browser.open(address)
        browser.wait(lambda: questions(browser) == ["First?"], "the conversation")
        others.append(browser.driver.current_window_handle)
    browser.driver.switch_to.window(first)
    browser.ask("Second?")
    for handle in others:
        browser.driver.switch_to.window(handle)
        browser.wait(lambda: questions(browser) == ["First?", "Second?"], "what was asked")
        browser.driver.close()
    browser.driver.switch_to.window(first)


def test_a_tab_out_of_sight_catches_up(browser, served) -> None:
    set_length(browser, 6)
    browser.ask("First?")
    first = browser.driver.current_window_handle
    address = browser.driver.current_url
    browser.driver.switch_to.new_window("tab")
    browser.open(address)
    browser.wait(lambda: questions(browser) == ["First?"], "the conversation")
    browser.ask("Second?")
    second = browser.driver.current_window_handle
    browser.driver.switch_to.window(first)
    browser.wait(lambda: questions(browser) == ["First?", "Second?"], "what the tab missed")
    browser.driver.switch_to.window(second)
    browser.driver.close()
    browser.driver.switch_to.window(first)


def test_a_question_is_shown_wherever_one_was_reading(browser, uploads) -> None:
    for _ in range(3):
        browser.ask("What is it?", uploads / "0.png", uploads / "1.png")
    transcript = "document.querySelector('#transcript')"
    browser.run(f"{transcript}.scrollTop = 0")
    browser.wait(lambda: browser.run(f"return {transcript}.dataset.away") == "yes", "scrolling")
    assert not is_in_sight(browser, "#history .asked")
    browser.say("And now?")
    browser.wait(lambda: len(browser.all("#history .asked")) == 4, "the question")
    browser.wait(lambda: is_in_sight(browser, "#history .asked"), "the question in sight")
    browser.wait_for_the_end()
    [button] = browser.all("#to-end")
    assert not button.is_displayed()
    browser.run(f"{transcript}.scrollTop = 0")
    browser.wait(button.is_displayed, "the button that leads to the end")
    button.click()
    browser.wait(lambda: is_in_sight(browser, "#history .asked"), "the end")
    browser.wait(lambda: not button.is_displayed(), "nothing to press")


def test_a_picture_in_full_size(browser, tmp_path) -> None:
    Image.fromarray(noise(300, 600, 0)).save(tmp_path / "large.png")
    browser.ask("What is it?", tmp_path / "large.png")
    [link] = browser.all("#history .media a")
    link.click()
    shown = "return document.querySelector('#large[open] img')?.naturalWidth"
    browser.wait(lambda: browser.run(shown) == 600, "the picture")
    assert browser.accessibility_violations() == []
    browser.all("#large button")[0].send_keys(Keys.ESCAPE)
    browser.wait(lambda: not browser.all("#large[open]"), "the conversation")
    assert browser.run("return document.activeElement") == link
    assert len(browser.driver.window_handles) == 1


def enabled(browser: Browser) -> set[str]:
    script = "return [...document.querySelectorAll('#actions button:enabled')].map(one => one.id)"
    return set(browser.run(script))


def test_actions_that_do_something(browser, uploads) -> None:
    browser.wait(lambda: enabled(browser) == set(), "nothing to do")
    browser.show(uploads / "0.png", uploads / "1.png")
    names = (
        "return [...document.querySelectorAll('#message .thumbnail-item')]"
        ".map(one => one.dataset.name)"
    )
    browser.wait(lambda: browser.run(names) == ["0.png", "1.png"], "names of the pictures")
    [field] = browser.all("#message textarea")
    field.send_keys("Before ")
    browser.all("#message .thumbnail-item img")[1].click()
    browser.wait(lambda: field.get_attribute("value") == "Before [1.png]", "the picture's name")
    browser.say(" what is it?")
    browser.wait(lambda: "stop" in enabled(browser), "an answer to stop")
    browser.wait_for_the_end()
    shown = [one.get_attribute("class") for one in browser.all("#history .asked > :not(.more)")]
    assert shown == ["media", "", "media", ""]
    everything = {"undo", "retry", "edit", "fork", "clear"}
    browser.wait(lambda: enabled(browser) == everything, "all but stop")
