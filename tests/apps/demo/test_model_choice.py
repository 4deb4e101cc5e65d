"""Another model for the page: which, who may choose it, and that the earlier one is freed."""

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("selenium")
from selenium.webdriver.common.keys import Keys

from oscar_mm.apps.demo import server
from oscar_mm.apps.demo.model_choice import ModelChoice, local_models
from oscar_mm.apps.demo.sessions import Sessions
from oscar_mm.cli import run
from oscar_mm.errors import InputError
from oscar_mm.models import BUNDLED
from tests.apps.demo.browser import Browser, browsers
from tests.apps.demo.conftest import COMPACT, asked
from tests.apps.demo.test_server import free_port


def test_one_of_the_list_is_chosen_once() -> None:
    choice = ModelChoice("a", ["b", "a", "c"])
    assert choice.models == ["a", "b", "c"] and not choice.made.is_set()
    for model, why in (("/etc", "not on the list"), ("a", "is the model of this page")):
        with pytest.raises(InputError, match=why):
            choice.choose(model)
    choice.choose("b")
    assert choice.chosen == "b" and choice.made.is_set()
    with pytest.raises(InputError, match="is being loaded"):
        choice.choose("c")
    assert choice.chosen == "b"


def write_cached(cache: Path, name: str, model_type: object, weights: bool = True) -> None:
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / "0"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0")
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": model_type}))
    if weights:
        (snapshot / "model.safetensors").touch()


def test_models_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path))
    assert local_models("127.0.0.1") == [*BUNDLED]
    write_cached(tmp_path, "own/vl", "qwen3_vl")
    write_cached(tmp_path, "own/other", "no_such_type")
    write_cached(tmp_path, "own/strange", ["qwen3_vl"])
    write_cached(tmp_path, "own/half", "qwen3_vl", weights=False)
    assert local_models("localhost") == [*BUNDLED, "own/vl"]
    assert local_models("0.0.0.0") == [], "strangers choose no model"


@pytest.fixture
def frozen_again() -> Iterator[None]:
    """The server unfreezes all objects; collections of later tests need not look through them."""
    yield
    gc.freeze()


@pytest.mark.usefixtures("frozen_again")
def test_the_next_page_has_the_other_model_and_the_first_is_freed(
    qwen3_omni_folder: Path, qwen3_vl_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The second choice cannot be loaded, so the earlier model comes back and the page says so."""
    port, load, seen = free_port(), server.pipeline_for, list[tuple[str, bool, bool]]()
    models: list[weakref.ref] = []
    others = [str(qwen3_vl_folder), "/nowhere"]
    choices: list[ModelChoice] = []

    def loaded(name: str) -> Any:
        def make(*arguments: Any, **named: Any) -> Any:
            assert all(one() is None for one in models), "one model at a time"
            pipe = load(name)(*arguments, **named)
            models.append(weakref.ref(pipe.model))
            return pipe

        return make

    def kept(*arguments: Any, **named: Any) -> ModelChoice:
        choices.append(ModelChoice(*arguments, **named))
        return choices[-1]

    def look(_: object) -> None:
        page = httpx.get(f"http://127.0.0.1:{port}/config", timeout=30)
        choice = [one for one in choices if len(one.models) > 1][-1]
        texts = page.text
        seen.append((choice.current, "Load this model" in texts, "could not be loaded" in texts))
        if len(seen) < 3:
            choice.choose(others[len(seen) - 1])

    monkeypatch.setattr(server, "pipeline_for", loaded)
    monkeypatch.setattr(server, "ModelChoice", kept)
    monkeypatch.setattr(server, "local_models", lambda host: others)
    monkeypatch.setattr(server, "wait_for_ctrl_c", look)
    monkeypatch.setattr(server, "_LAST_WORDS_S", 0)
    options = ["-m", str(qwen3_omni_folder), "--port", str(port), "--device", "cpu"]
    assert run(["demo", *options]) == 0
    assert seen == [
        (str(qwen3_omni_folder), True, False),
        (others[0], True, False),
        (others[0], True, True),
    ]
    said = capsys.readouterr().err
    assert said.count("(Ctrl-C stops it)") == 3 and "model /nowhere: no such folder" in said


def test_a_stored_conversation_names_its_model(pipe, uploads, tmp_path, monkeypatch) -> None:
    """Its files stay until that model is loaded again."""
    first = Sessions(pipe, COMPACT, (uploads,), tmp_path)
    session = first.session("a")
    asked(session, "What?", uploads / "0.png")
    first.close()
    assert first.model_of(session.id) == first.card.name
    assert first.model_of("0" * 22) == first.model_of("../x") == ""


@pytest.mark.browser
@pytest.mark.skipif(browsers() is None, reason="no chromium and chromedriver here")
def test_a_page_reloads_with_the_model_that_was_chosen() -> None:
    port = free_port()
    line = [sys.executable, "-m", "oscar_mm.cli", "demo", "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("Ctrl-C stops it" in said for said in process.stderr)
        with closing(Browser(f"http://127.0.0.1:{port}/")) as browser:
            browser.press("Settings")
            [field] = [one for one in browser.all("input[aria-label=Model]") if one.is_displayed()]
            field.click()
            field.send_keys(Keys.CONTROL, "a", Keys.NULL, "pocket-vl", Keys.ENTER)
            browser.press("Load this model")
            browser.wait(lambda: "pocket-vl" in browser.text("#head .chip"), "the other model")
    finally:
        process.terminate()
        process.communicate()
