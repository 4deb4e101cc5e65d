"""The Python of README, docs/, docstrings and notebooks runs as it is written."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import snippets
from tests.languages import CHATML, build_language_model
from tests.tool_template import TOOL_TEMPLATE

MODULES = [f"{module}.{name}" for name, module in snippets.DOCUMENTED.items()]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str | None]]:
    """The error of each program, or None, from a process whose hub cache is ours."""
    folder = tmp_path_factory.mktemp("snippets")
    hub, results = folder / "hub", folder / "results.json"
    text_model = build_language_model("qwen3", folder / "text", template=CHATML)
    snippets.make_hub(hub, text_model, TOOL_TEMPLATE)
    (folder / "work").mkdir()
    environment = os.environ | {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    environment["MPLBACKEND"] = "Agg"
    line = [sys.executable, "-m", "tests.snippets", str(folder / "work"), str(results)]
    done = subprocess.run(
        line, cwd=snippets.ROOT, env=environment, capture_output=True, text=True, timeout=550
    )
    assert results.exists(), done.stderr
    yield json.loads(results.read_text())


# All programs run before the first test, on busy machines for minutes.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*snippets.pages(), *MODULES, *snippets.notebooks()])
def test_snippets_run(errors: dict[str, str | None], name: str) -> None:
    assert errors[name] is None


def test_programs_are_all_python_of_a_page() -> None:
    page = "Text\n\n```python\na = 1\n```\n\n```\nnot this\n```\n\n```python\nprint(a)\n```\n"
    assert snippets.python_of(page) == "a = 1\n\nprint(a)\n"
    assert len(snippets.pages()) > 5
