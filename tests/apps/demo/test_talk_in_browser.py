"""Talk in a browser: push to talk, and hands-free."""

import time
import wave
from collections.abc import Iterator
from contextlib import closing

import pytest

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.demo import hands_free
from oscar_mm.apps.demo.server import RunningPage, serve_page
from oscar_mm.apps.server_process import bind
from oscar_mm.models import SAMPLES
from oscar_mm.pipelines.families.qwen3_omni_talker import Qwen3OmniTalker
from tests.apps.demo.conftest import COMPACT
from tests.pipelines.conftest import NEVER

pytest.importorskip("selenium")
pytest.importorskip("selenium_axe_python")

from selenium.webdriver import ActionChains

from tests.apps.demo.browser import Browser, browsers
from tests.apps.demo.test_browser import click_when_there, held, newest, set_length

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(browsers() is None, reason="no chromium and chromedriver here"),
]


SILENCE = """document.querySelector('#voice .voice').parentElement
  .dispatchEvent(new CustomEvent('quiet'))"""
STATE = "return document.querySelector('#hands output').textContent"
VOICE = "return document.querySelector('#voice .voice')."


def hold(browser: Browser, seconds: float) -> None:
    """Push to talk, by mouse."""
    click_when_there(browser, "#hands .hands")
    [push] = browser.all("#hands .push")
    ActionChains(browser.driver).click_and_hold(push).perform()
    browser.wait(lambda: browser.run(STATE) == "You speak …", "the microphone")
    time.sleep(seconds)
    ActionChains(browser.driver).release(push).perform()
    browser.wait(lambda: push.get_attribute("aria-pressed") == "false", "the end")


def check(browser: Browser, where: str) -> None:
    assert (where, browser.accessibility_violations()) == (where, [])
    assert (where, browser.faint_texts()) == (where, [])


@pytest.fixture
def served(qwen3_omni_talker_folder, monkeypatch) -> Iterator[RunningPage]:
    monkeypatch.setattr(Qwen3OmniTalker, "max_frames", 12)
    pipe = OscarOmniPipeline(qwen3_omni_talker_folder, policy=COMPACT.policy, device="cpu")
    pipe.model.generation_config.eos_token_id = NEVER
    # Without a seed, one answer in 30 would end before its first sound.
    pipe.family.talker.end_code = -1
    with serve_page(pipe, COMPACT, bind("127.0.0.1", 0)) as made:
        yield made


def test_a_spoken_question_is_answered_aloud(served) -> None:
    """The answer is played, its text is shown, and the memory of both questions."""
    with closing(Browser(served.address)) as browser:
        set_length(browser, 9)
        browser.press("Talk")
        browser.wait(lambda: browser.all("#spoken"), "the player")
        assert not browser.all("#spoken")[0].is_displayed()
        check(browser, "Talk")
        for turn in (1, 2):
            hold(browser, 1.2)
            browser.wait(lambda n=turn: len(browser.all("#history .said")) == n, "the answer")
            browser.wait(lambda: browser.run(VOICE + "dataset.state") == "ended", "the speech")
            session = newest(served)
            assert browser.run(VOICE + "textContent") == session.turns[-1].answer
            browser.wait(lambda: browser.all("#spoken audio"), "the player")
            browser.run(VOICE + "dataset.state = ''")
        player = "const player = document.querySelector('#spoken audio'); return player."
        assert browser.run(player + "src").startswith(served.address)
        rate, samples = session.conversation.speech
        assert browser.run(player + "duration") == pytest.approx(len(samples) / rate)
        browser.run(player.replace("return player.", "player.play()"))
        browser.wait(lambda: browser.run(player + "ended"), "the end of the speech")
        check(browser, "spoken")
        assert [len(one.previews) for one in session.turns] == [1, 1]
        assert session.conversation.memory.tokens["speech"] > 26
        assert held(browser) != "0 B"
        browser.press("New chat")
        browser.wait(lambda: not browser.all("#spoken")[0].is_displayed(), "an empty player")
        assert browser.run(VOICE + "textContent") == ""
        assert not browser.complaints()


def test_what_is_not_heard_is_not_part_of_the_answer() -> None:
    """Stop is pressed while the bundled model says what it has heard."""
    pipe = OscarOmniPipeline("pocket-omni", policy=COMPACT.policy, device="cpu")
    clip = SAMPLES / "clips" / "01.wav"
    with (
        serve_page(pipe, COMPACT, bind("127.0.0.1", 0)) as page,
        closing(Browser(page.address, heard=clip)) as browser,
    ):
        browser.press("Talk")
        hold(browser, 2.5)
        browser.wait(lambda: browser.run(VOICE + "dataset.state") == "playing", "the speech")
        browser.run(SILENCE)  # At once: it says only a few digits.
        session = newest(page)
        browser.wait(lambda: session.turns and "stopped" in session.turns[-1].note, "the cut")
        turn, whole = session.turns[-1], session.aloud._text
        assert whole.startswith(turn.answer) and turn.answer != whole
        browser.wait(lambda: turn.note in browser.all("#history")[0].text, "the note")


def test_a_question_is_asked_hands_free(served, tmp_path) -> None:
    """The server finds two questions in what the microphone hears, and their answers are played."""
    heard = tmp_path / "heard.wav"
    with wave.open(str(SAMPLES / "clips" / "01.wav")) as clip, wave.open(str(heard), "wb") as file:
        file.setparams(clip.getparams())
        question, rate = clip.readframes(clip.getnframes()), clip.getframerate()
        for pause_s in (1, 12):
            file.writeframes(bytes(2 * rate * pause_s))
            file.writeframes(question)
        file.writeframes(bytes(2 * rate * 4))
    with closing(Browser(served.address, heard=heard)) as browser:
        set_length(browser, 9)
        browser.press("Talk")
        click_when_there(browser, "#hands .free")
        level = "return document.querySelector('#hands meter').value"
        browser.wait(lambda: browser.run(STATE) == "You speak …", "the visitor's voice")
        assert browser.run(level) > 0.02
        browser.wait(lambda: len(browser.all("#history .said")) == 1, "the first answer")
        browser.wait(lambda: browser.run(VOICE + "textContent"), "the captions")
        browser.wait(lambda: len(browser.all("#history .said")) == 2, "the second answer")
        session = newest(served)
        assert [len(one.previews) for one in session.turns] == [1, 1]
        assert session.conversation.memory.tokens["speech"] > 26
        browser.press("Hands-free")
        assert browser.run(level) == 0
        browser.wait(lambda: browser.run(STATE) == "", "the end")
        assert not browser.complaints()


def test_the_panel_moves_while_a_visitor_speaks(served, tmp_path) -> None:
    """Sound is in the cache, and in the panel, before the question ends; on a phone, by a finger
    that stays on the button."""
    heard = tmp_path / "heard.wav"
    with wave.open(str(SAMPLES / "clips" / "01.wav")) as clip, wave.open(str(heard), "wb") as file:
        file.setparams(clip.getparams())
        file.writeframes(clip.readframes(clip.getnframes()) * 8)
    with closing(Browser(served.address, (390, 844), dark=True, heard=heard)) as browser:
        set_length(browser, 9)
        browser.press("Talk")
        check(browser, "a phone")
        click_when_there(browser, "#hands .hands")
        [push] = browser.all("#hands .push")
        ActionChains(browser.driver).click_and_hold(push).perform()
        browser.wait(lambda: held(browser) != "0 B", "sound in the panel")
        session = newest(served)
        assert not session.exchanges and session.conversation.curve.last.by_modality["audio"] == 104
        check(browser, "speaking")
        ActionChains(browser.driver).release(push).perform()
        browser.wait(lambda: browser.run(VOICE + "textContent"), "the captions")
        browser.wait(lambda: len(browser.all("#history .said")) == 1, "the answer")
        assert session.conversation.memory.tokens["audio"] > 104
        assert not browser.complaints()


def test_an_error_ends_the_listening(served, monkeypatch) -> None:
    """Not only in the corner: the button shows that nobody listens any more."""
    monkeypatch.setattr(hands_free, "MAX_STORED_BYTES", -1)
    with closing(Browser(served.address, heard=SAMPLES / "clips" / "01.wav")) as browser:
        browser.press("Talk")
        click_when_there(browser, "#hands .free")
        button = "return document.querySelector('#hands .free').ariaPressed"
        browser.wait(lambda: browser.run(button) == "false", "the end")
        assert "press the button" in browser.run(STATE)


def test_a_button_pressed_again_turns_the_microphone_off(served) -> None:
    """Also if the browser has not yet granted the microphone."""
    grant = """
      window.granted = [];
      const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
      navigator.mediaDevices.getUserMedia = async (wanted) => {
        await new Promise((done) => { window.grant = done; });
        const stream = await ask(wanted);
        window.granted.push(...stream.getTracks());
        return stream;
      };"""
    live = "return window.granted.map((track) => track.readyState)"
    with closing(Browser(served.address, heard=SAMPLES / "clips" / "01.wav")) as browser:
        browser.press("Talk")
        browser.run(grant)
        click_when_there(browser, "#hands .free")
        click_when_there(browser, "#hands .free")
        assert browser.run("return document.querySelector('#hands .free').ariaPressed") == "false"
        browser.run("window.grant()")
        browser.wait(lambda: browser.run(live) == ["ended"], "the end of the microphone")
        click_when_there(browser, "#hands .free")
        browser.run("window.grant()")
        browser.wait(lambda: browser.run(STATE) == "You speak …", "the visitor's voice")
        assert browser.run(live) == ["ended", "live"]
        browser.press("Hands-free")
        browser.wait(lambda: browser.run(live) == ["ended", "ended"], "the end of the microphone")
        assert not browser.complaints()
