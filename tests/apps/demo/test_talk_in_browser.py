"""Talk in a browser, on a page of its own.

Not with the other browser tests: a second page in their process disturbs the first one.
"""

import time
from contextlib import closing

import pytest

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.demo.server import serve_page
from oscar_mm.apps.server_process import bind
from oscar_mm.pipelines.families.qwen3_omni_talker import Qwen3OmniTalker
from tests.apps.demo.conftest import COMPACT
from tests.pipelines.conftest import NEVER

pytest.importorskip("selenium")
pytest.importorskip("selenium_axe_python")

from tests.apps.demo.browser import Browser, browsers
from tests.apps.demo.test_browser import click_when_there, held, newest, set_length

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(browsers() is None, reason="no chromium and chromedriver here"),
]


def test_a_spoken_question_is_answered_aloud(qwen3_omni_talker_folder, monkeypatch) -> None:
    """The answer is played, its text is shown, and the memory of both questions."""
    monkeypatch.setattr(Qwen3OmniTalker, "max_frames", 12)
    pipe = OscarOmniPipeline(qwen3_omni_talker_folder, policy=COMPACT.policy, device="cpu")
    pipe.model.generation_config.eos_token_id = NEVER
    with (
        serve_page(pipe, COMPACT, bind("127.0.0.1", 0)) as served,
        closing(Browser(served.address)) as browser,
    ):
        set_length(browser, 9)
        browser.press("Talk")
        for turn in (1, 2):
            click_when_there(browser, "#microphone .record-button")
            time.sleep(1.2)
            click_when_there(browser, "#microphone .stop-button")
            browser.wait(lambda n=turn: len(browser.all("#history .said")) == n, "the answer")
            browser.wait(lambda: browser.all("#spoken audio"), "the player")
        player = "const player = document.querySelector('#spoken audio'); return player."
        assert browser.run(player + "src").startswith(served.address)
        browser.wait(lambda: browser.run(player + "ended"), "the end of the speech")
        session = newest(served)
        rate, samples = session.conversation.speech
        assert browser.run(player + "duration") == pytest.approx(len(samples) / rate)
        assert [len(one.previews) for one in session.turns] == [1, 1]
        assert session.conversation.memory.tokens["speech"] > 26
        assert held(browser) != "0 B"
        # gradio's recorder reads a value that svelte has already dropped.
        assert all("derived_inert" in complaint for complaint in browser.complaints())
