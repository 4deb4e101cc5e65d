"""A real browser on the demo's page, for its tests and its screenshots: Debian's chromium."""

import base64
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from selenium_axe_python import Axe

PATIENCE_S = 60
# Its message in the corner has a button inside a button, and no option that changes this.
_FAULTS_OF_GRADIO = {("nested-interactive", ".toast-header")}
_FAINT_TEXTS = """
const parse = (color) => {
  const [r, g, b, a] = color.match(/[\\d.]+/g).map(Number);
  return [r, g, b, a ?? 1];
};
const luminance = (color) => {
  const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = color.map((c) => linear(c / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const over = (top, below) => [0, 1, 2].map((i) => top[3] * top[i] + (1 - top[3]) * below[i]);
const background = (element) => {
  if (!element) return [255, 255, 255];
  const color = parse(getComputedStyle(element).backgroundColor);
  return color[3] === 1 ? color.slice(0, 3) : over(color, background(element.parentElement));
};
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
  const seen = element.checkVisibility({opacityProperty: true, visibilityProperty: true});
  if (!text || !seen) continue;
  if (element.closest('[disabled], .sr, script, style')) continue;
  const behind = background(element), front = over(parse(getComputedStyle(element).color), behind);
  const [low, high] = [luminance(front), luminance(behind)].sort((a, b) => a - b);
  const contrast = (high + 0.05) / (low + 0.05);
  if (contrast < arguments[0]) faint.push(`${text.slice(0, 30)}: ${contrast.toFixed(2)}`);
}
return faint;
"""
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--force-device-scale-factor=1"),
    # A microphone that beeps, and nobody asked for leave to use it.
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
)


def browsers() -> tuple[str, str] | None:
    """Paths of chromium and its driver, or None where they are not installed."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    return found if all(found) else None


class Browser:
    """A window on a page.

    Args:
        address: of the page.
        size: of the window, in pixels.
        dark: whether the system prefers dark pages.
        downloads: where files go.
        heard: WAV file that the microphone hears once; by default it beeps.
    """

    def __init__(
        self,
        address: str,
        size: tuple[int, int] = (1280, 900),
        *,
        dark: bool = False,
        downloads: Path | None = None,
        heard: Path | None = None,
    ) -> None:
        chromium, driver = browsers()
        options = ChromeOptions()
        options.binary_location = chromium
        for flag in _FLAGS:
            options.add_argument(flag)
        if heard is not None:
            options.add_argument(f"--use-file-for-fake-audio-capture={heard}%noloop")
        if downloads is not None:
            options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = Chrome(options=options, service=ChromeService(driver))
        width, height = size
        self._tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tell("Emulation.setEmulatedMedia", features=[scheme])
        self.open(address)

    def open(self, address: str) -> None:
        """Another page."""
        # An address that differs in its fragment alone would load nothing.
        self.driver.get("about:blank")
        self.driver.get(address)
        self._wait_for_the_page()

    def reload(self) -> None:
        """The same page anew."""
        self.driver.refresh()
        self._wait_for_the_page()

    def _wait_for_the_page(self) -> None:
        self.driver.get_log("browser")  # What the page before said when it was cut off.
        # Handlers are there once the server has said who is here.
        self.wait(lambda: re.search(r"[1-9]\d* visitor", self.text("#status")), "the page")

    def _tell(self, command: str, **arguments: object) -> dict:
        return self.driver.execute_cdp_cmd(command, arguments)

    def all(self, selector: str) -> list[WebElement]:
        """Elements by a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Text of the first element, as it is in the document; "" if there is none."""
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def run(self, script: str, *arguments: object) -> object:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Until it holds; TimeoutException otherwise."""
        WebDriverWait(self.driver, PATIENCE_S, 0.05).until(lambda _: condition(), what)

    def press(self, text: str) -> None:
        """Click the button or tab that is seen and whose text begins so."""
        # Tabs are there twice: gradio measures a row of copies.
        buttons = self.all("button:not([tabindex='-1']), button[role=tab]")
        [button] = [one for one in buttons if one.text.startswith(text) and one.is_displayed()]
        self.run("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()

    def show(self, *files: Path) -> None:
        """Add files to the message."""
        [box] = self.all("#message input[type=file]")
        self.run("arguments[0].value = ''", box)  # Or the driver adds to what was chosen before.
        box.send_keys("\n".join(map(str, files)))
        shown = "#message .thumbnail-item"
        self.wait(lambda: len(self.all(shown)) >= len(files), "the files in the message")

    def say(self, text: str) -> None:
        """Send the message."""
        [box] = self.all("#message textarea")
        box.send_keys(text, Keys.ENTER)

    def ask(self, text: str, *files: Path) -> None:
        """Send a message and wait for the end of the answer."""
        before = len(self.all("#history .asked"))
        if files:
            self.show(*files)
        self.say(text)
        self.wait(lambda: len(self.all("#history .asked")) > before, "the question")
        self.wait_for_the_end()

    def wait_for_the_end(self) -> None:
        """Until no answer is being written."""
        quiet = [0]

        def done() -> bool:
            quiet[0] = 0 if self.all("#live article") else quiet[0] + 1
            return quiet[0] > 20

        self.wait(done, "the end of the answer")

    def faint_texts(self, contrast: float = 4.5) -> list[str]:
        """Texts in sight with less contrast, and theirs."""
        return self.run(_FAINT_TEXTS, contrast)

    def accessibility_violations(self) -> list[str]:
        """What axe-core is sure is wrong; of some contrasts it is not, see ``faint_texts``."""
        axe = Axe(self.driver)
        axe.inject()
        return [
            f"{rule['impact']} {rule['id']}: {node['html'][:400]}"
            for rule in axe.run()["violations"]
            for node in rule["nodes"]
            if (rule["id"], *node["target"]) not in _FAULTS_OF_GRADIO
        ]

    def complaints(self) -> list[str]:
        """Warnings and errors of the console, but for requests that end as the page is left."""
        return [
            one["message"]
            for one in self.driver.get_log("browser")
            if one["level"] in ("SEVERE", "WARNING")
            and "AbortError: signal is aborted" not in one["message"]
        ]

    def picture(self, path: Path, height: int | None = None) -> None:
        """The page as PNG, whole or its upper part."""
        self.run("window.scrollTo(0, 0)")
        time.sleep(0.3)
        width = self.run("return innerWidth")
        whole = self.run("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height or whole, "scale": 1}
        taken = self._tell("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """Close the window."""
        self.driver.quit()
