"""Pictures of the demo, taken in a real browser with the bundled model.

python -m tests.apps.demo.screenshots [FOLDER]

Those of the README; in another FOLDER also the other states of the page, to be looked at.
"""

import io
import sys
from contextlib import closing
from pathlib import Path

import torch
from PIL import Image

from oscar_mm import OscarOmniPipeline
from oscar_mm.apps.demo.command import DEFAULT_MODEL
from oscar_mm.apps.demo.examples import FOLDER
from oscar_mm.apps.demo.server import serve_page
from oscar_mm.apps.demo.visitor_input import LIMITS, SessionSettings
from oscar_mm.apps.server_process import bind
from oscar_mm.policy import KVPolicy
from tests.apps.demo.browser import Browser

TARGET = FOLDER / "screenshots"
# File, window in pixels, height of the picture, dark, example, tab.
SHOTS = (
    ("demo.png", (1280, 860), 860, False, "100 pictures", "Memory"),
    ("demo-dark.png", (1280, 860), 860, True, "Pictures and sound", "Compare"),
    ("demo-phone.png", (390, 844), 1400, False, "Recordings", "Memory"),
)
COLOURS = 256


def take(address: str, target: Path) -> None:
    """Those of the README."""
    for name, size, height, dark, example, tab in SHOTS:
        with closing(Browser(address, size, dark=dark)) as browser:
            browser.press(example)
            browser.wait(lambda: browser.all("#history .said"), "the first answer")
            browser.wait_for_the_end()
            browser.press(tab)
            if tab == "Compare":
                compare(browser)
            browser.picture(target / name, height)
            if complaints := browser.complaints():
                raise SystemExit(f"{name}: the console says {complaints}")
        shrink(target / name)


def take_states(address: str, target: Path) -> None:
    """The page empty, after one picture, after an untaught question, an error and a reload."""

    def picture(name: str) -> None:
        browser.picture(target / f"state-{name}.png")

    broken = target / "broken.png"
    broken.write_bytes(b"no picture")
    with closing(Browser(address)) as browser:
        picture("empty")
        browser.press("What is the code in picture 1?")
        browser.wait(lambda: browser.all("#history .said"), "the answer")
        browser.wait_for_the_end()
        picture("one-picture")
        browser.ask("Describe the photo.")
        picture("untaught")
        browser.show(broken)
        browser.say("What is it?")
        browser.wait(lambda: browser.text("#history [role=alert]"), "the error")
        picture("error")
        browser.reload()
        browser.wait(lambda: browser.text("#history [role=alert]"), "the conversation")
        picture("reloaded")
        for tab in ("Why", "Settings"):
            browser.press(tab)
            picture(tab.lower())
    with closing(Browser(address)) as browser:
        browser.press("Recordings")
        browser.wait(lambda: browser.all("#history .said"), "the first answer")
        browser.wait_for_the_end()
        picture("recordings")
    broken.unlink()


def compare(browser: Browser) -> None:
    """Have all questions answered in 16-bit precision too."""
    browser.run("document.querySelector('#side input[type=checkbox]').click()")
    last = browser.all("#history .asked")[-1].text.splitlines()[-1]
    browser.wait(lambda: browser.text("#compared .asked") == last, "the last question")
    browser.wait(lambda: " of " in browser.text("#compared .verdict"), "both answers")


def shrink(path: Path) -> None:
    """Fewer colours, a third of the bytes."""
    image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Command line: the folder."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    pipe = OscarOmniPipeline(DEFAULT_MODEL, dtype="bfloat16", limits=LIMITS, kv_budget="1GB")
    settings = SessionSettings(KVPolicy.preset("compact"), "compact")
    with serve_page(pipe, settings, bind("127.0.0.1", 0)) as served:
        take(served.address, target)
        if target != TARGET:
            take_states(served.address, target)
    for path in sorted(target.glob("*.png")):
        print(path, f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
