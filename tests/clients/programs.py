"""Cells of Node clients and command-line programs, each in its own process."""

import json
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.apps.serve.conftest import encoded, image
from tests.clients.matrix import (
    PICTURE,
    QUESTION,
    RECORDING,
    RESULT,
    SAID,
    City,
    call_of,
    cell,
    node_modules,
    ran,
)
from tests.clients.python_clients import TOOL, VARIED
from tests.clients.served import MODEL, Served

_SCRIPTS = Path(__file__).parent / "node"
READ = call_of("Read", filepath="weather.txt")
"""A call of one of Continue's built-in tools."""
_WEATHER = """
def weather(city: str) -> str:
    "The weather of a city."
    return f"4 degrees in {city}"
"""


def by_node(client: str, script: str, feature: str, served: Served) -> Any:
    """Return the output of a Node script, which runs where Node finds the installed packages."""
    asked = {
        "client": client,
        "feature": feature,
        "model": MODEL,
        "base": served.base,
        "question": QUESTION,
        "picture": image(PICTURE)["image_url"]["url"],
        "recording": encoded(RECORDING),
        "tool": TOOL,
        "varied": VARIED,
    }
    code = (_SCRIPTS / script).read_text()
    command, folder = ["node", "--input-type=module", "-"], node_modules().parent
    return json.loads(ran(command, given=code, folder=folder, CELL=json.dumps(asked)))


_CHAT = ("text", "stream", "image", "audio", "tools", "forced tool", "structured output")
_BOTH, _OTHER = "tools, then structured", ("Responses", "transcription")
for _client, _script, _features in (
    ("openai (node)", "openai.mjs", (*_CHAT, _BOTH, "logprobs", *_OTHER)),
    ("AI SDK, compatible", "ai_sdk.mjs", (*_CHAT, _BOTH)),
    ("AI SDK, openai", "ai_sdk.mjs", (*_CHAT, _BOTH, "logprobs", *_OTHER)),
):
    for _feature in _features:
        cell(_client, _feature)(partial(by_node, _client, _script, _feature))


def by_llm(served: Served, *arguments: str, files: dict[str, bytes] | None = None) -> str:
    """Return the output of the program ``llm``."""
    known = {
        "model_id": MODEL,
        "model_name": MODEL,
        "api_base": served.base,
        **dict.fromkeys(("vision", "audio", "supports_schema", "supports_tools"), True),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "extra-openai-models.yaml").write_text(json.dumps([known]))
        for file, data in (files or {}).items():
            (folder / file).write_bytes(data)
        command = ["llm", "-m", MODEL, QUESTION, *arguments]
        return ran(command, folder=folder, LLM_USER_PATH=name).strip()


@cell("llm", "text", "stream")
def llm_text(served: Served) -> str:
    return by_llm(served)


@cell("llm", "image")
def llm_image(served: Served) -> str:
    return by_llm(served, "-a", "a.png", files={"a.png": PICTURE})


@cell("llm", "audio")
def llm_audio(served: Served) -> str:
    return by_llm(served, "-a", "a.wav", files={"a.wav": RECORDING})


@cell("llm", "tools")
def llm_tools(served: Served) -> str:
    return by_llm(served, "--functions", _WEATHER)


@cell("llm", "structured output")
def llm_structured(served: Served) -> Any:
    schema = json.dumps(City.model_json_schema())
    options = [x for name, value in VARIED.items() for x in ("-o", name, str(value))]
    return json.loads(by_llm(served, "--schema", schema, *options))


def by_aider(served: Served, *arguments: str) -> str:
    """Return aider's answer to a question, without its banner lines."""
    quiet = ("--no-git", "--no-check-update", "--no-show-model-warnings", "--no-pretty")
    quiet += ("--yes-always", "--no-analytics", "--no-auto-lint", "--map-tokens", "0")
    with tempfile.TemporaryDirectory() as home:
        Path(home, "a.png").write_bytes(PICTURE)
        known = {"max_input_tokens": 60_000, "supports_vision": True, "litellm_provider": "openai"}
        Path(home, ".aider.model.metadata.json").write_text(json.dumps({f"openai/{MODEL}": known}))
        model = ("--model", f"openai/{MODEL}", "--openai-api-base", served.base)
        command = ["aider", *model, *quiet, *arguments, "--message", QUESTION]
        printed = ran(command, folder=Path(home), HOME=home)
    [said] = re.findall(r"\n\n(.+?)\n+Tokens: ", printed, re.DOTALL)
    return said.rpartition("\n\n")[2]


@cell("aider", "text")
def aider_text(served: Served) -> str:
    return by_aider(served, "--no-stream")


@cell("aider", "stream")
def aider_stream(served: Served) -> str:
    return by_aider(served)


@cell("aider", "image")
def aider_image(served: Served) -> str:
    return by_aider(served, "a.png")


def by_continue(served: Served, *arguments: str) -> str:
    """Return the output of Continue's command line."""
    model = {
        "name": MODEL,
        "provider": "openai",
        "model": MODEL,
        "apiBase": served.base,
        "apiKey": "none",
        "roles": ["chat"],
        "capabilities": ["tool_use", "image_input"],
    }
    config = {"name": "a", "version": "1.0.0", "schema": "v1", "models": [model]}
    program = node_modules() / "@continuedev/cli/dist/cn.js"
    with tempfile.TemporaryDirectory() as home:
        file = Path(home, "config.yaml")
        file.write_text(json.dumps(config))
        Path(home, "weather.txt").write_text(RESULT)
        command = ["node", str(program), "--config", str(file), "-p", *arguments, QUESTION]
        return ran(command, folder=Path(home), HOME=home, CONTINUE_TELEMETRY_ENABLED="0").strip()


@cell("Continue", "text", "stream")
def continue_text(served: Served) -> str:
    return by_continue(served)


@cell("Continue", "tools", says=(READ, SAID))
def continue_tools(served: Served) -> str:
    return by_continue(served, "--auto")
