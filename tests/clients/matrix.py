"""Clients, features and expected results: the cells of the table in docs/serving.md.

A cell uses one feature of the server through one client, and returns the client's result. The model
gives the scripted answers of the feature, or its answer is constrained by a grammar.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from oscar_mm.modality import Modality
from tests.apps.serve.conftest import png, wav
from tests.clients.served import Served, as_json
from tests.thinking import ids_of, saying

CITIES = ("Oslo", "Rome")
QUESTION = "How warm is it?"
SAID = "It is 4 degrees in Oslo."
RESULT = "4 degrees in Oslo"
OSLO = '{"name": "Oslo", "warm": false}'
PICTURE, RECORDING = png(), wav()
NODE_FOLDER = "CLIENTS_NODE"
"""Environment variable with the folder where npm has installed clients."""
_SECONDS = 60


def call_of(name: str, **arguments: str) -> str:
    """Return a tool call in the model's format."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


CALL = call_of("weather", city="Oslo")


class City(BaseModel):
    """Structured output that clients request."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Oslo", "Rome"]
    warm: bool


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    return f"4 degrees in {city}"


def _is_said(got: Any, _: Served) -> None:
    assert got == SAID, f"the text is {got!r}"


def _comes_in_pieces(got: Any, served: Served) -> None:
    """A list of pieces, or the text that a program printed."""
    assert served.requests[-1].stream, "it asked for no stream"
    assert "".join(got) == SAID and len(got) > 1, f"the pieces are {got!r}"


def _is_seen(got: Any, served: Served) -> None:
    assert served.media(Modality.IMAGE), "no picture has come"
    _is_said(got, served)


def _is_heard(got: Any, served: Served) -> None:
    assert served.media(Modality.AUDIO) == [RECORDING], "another recording has come, or none"
    _is_said(got, served)


def _is_called(got: Any, served: Served) -> None:
    assert RESULT in served.told, f"the model was told {served.told!r}"
    _is_said(got, served)


def _must_be_called(got: Any, _: Served) -> None:
    name, arguments = got
    assert name == "weather" and as_json(arguments)["city"] in CITIES, f"the call is {got!r}"


def _has_the_shape(got: Any, _: Served) -> None:
    City.model_validate(got)


def _is_called_first(got: Any, served: Served) -> None:
    assert RESULT in served.told, f"the model was told {served.told!r}"
    assert City.model_validate(got) == City.model_validate_json(OSLO)


def _has_logprobs(got: Any, _: Served) -> None:
    tokens = "".join(token for token, _ in got)
    assert tokens.startswith(SAID), f"the tokens are {tokens!r}"
    assert all(logprob <= 0 for _, logprob in got)


def _came_by_responses(got: Any, served: Served) -> None:
    assert served.answered("/v1/responses"), f"it asked {served.lines}"
    _is_said(got, served)


@dataclass(frozen=True)
class Feature:
    """A feature of clients.

    Attributes:
        name: heading of its column.
        says: scripted answers of the model, one for each request; () leaves them to a grammar.
        check: raises AssertionError if the result of a cell is wrong.
    """

    name: str
    says: Sequence[str]
    check: Callable[[Any, Served], None]


FEATURES = [
    Feature("text", [SAID], _is_said),
    Feature("stream", [SAID], _comes_in_pieces),
    Feature("image", [SAID], _is_seen),
    Feature("audio", [SAID], _is_heard),
    Feature("tools", [CALL, SAID], _is_called),
    Feature("forced tool", [], _must_be_called),
    Feature("structured output", [], _has_the_shape),
    Feature("tools, then structured", [CALL, OSLO], _is_called_first),
    Feature("logprobs", [SAID], _has_logprobs),
    Feature("Responses", [SAID], _came_by_responses),
    Feature("transcription", [SAID], _is_heard),
]


@dataclass(frozen=True)
class Client:
    """A third-party client.

    Attributes:
        name: name of its row.
        installer: "pip" or "npm".
        packages: the client, then what it needs beside it.
        program: its command, where it is a program for people.
    """

    name: str
    installer: str
    packages: Sequence[str]
    program: str | None = None

    @property
    def install(self) -> str:
        """Command that installs it."""
        return f"{self.installer} install {' '.join(self.packages)}"

    @property
    def version(self) -> str | None:
        """Its version; None if it is not installed."""
        package = self.packages[0].partition("[")[0]
        if self.installer == "npm":
            file = node_modules() / package / "package.json"
            return json.loads(file.read_text())["version"] if file.exists() else None
        if self.program is None:
            with suppress(PackageNotFoundError):
                return version(package)
            return None
        if shutil.which(self.program) is None:
            return None
        return ran([self.program, "--version"]).split()[-1]


def node_modules() -> Path:
    """Return the folder where npm has installed clients."""
    return Path(os.environ.get(NODE_FOLDER, ".")).absolute() / "node_modules"


def ran(command: list[str], *, given: str = "", folder: Path | None = None, **more: str) -> str:
    """Standard output of a program; it has the Python packages of its own environment only.

    Raises:
        AssertionError: it failed; the message has the end of what it wrote.
    """
    done = subprocess.run(
        command,
        input=given,
        cwd=folder,
        env=os.environ | more | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    return done.stdout


CLIENTS = [
    Client("openai (Python)", "pip", ["openai"]),
    Client("openai (node)", "npm", ["openai", "zod"]),
    Client("anthropic", "pip", ["anthropic"]),
    Client("Agents SDK", "pip", ["openai-agents"]),
    Client("LangChain", "pip", ["langchain-openai"]),
    Client("LlamaIndex", "pip", ["llama-index-llms-openai-like"]),
    Client("LiteLLM", "pip", ["litellm"]),
    Client("instructor", "pip", ["instructor"]),
    Client("pydantic-ai", "pip", ["pydantic-ai-slim[openai]"]),
    Client("smolagents", "pip", ["smolagents"]),
    Client("AI SDK, compatible", "npm", ["@ai-sdk/openai-compatible", "ai", "zod"]),
    Client("AI SDK, openai", "npm", ["@ai-sdk/openai", "ai", "zod"]),
    Client("llm", "pip", ["llm"], "llm"),
    Client("aider", "pip", ["aider-chat"], "aider"),
    Client("Continue", "npm", ["@continuedev/cli"]),
]
Ask = Callable[[Served], Any]


class Cell(NamedTuple):
    """How a client uses a feature, and scripted answers that replace those of the feature."""

    ask: Ask
    says: Sequence[str] | None


CELLS: dict[tuple[str, str], Cell] = {}


def cell(client: str, *features: str, says: Sequence[str] | None = None) -> Callable[[Ask], Ask]:
    """Register the function by which a client uses one feature or several."""

    def add(ask: Ask) -> Ask:
        assert client in {one.name for one in CLIENTS}, client
        for feature in features:
            assert feature in {one.name for one in FEATURES}, feature
            assert (client, feature) not in CELLS, (client, feature)
            CELLS[client, feature] = Cell(ask, says)
        return ask

    return add


def fill(client: str, feature: str, served: Served) -> None:
    """Ask for a cell.

    Raises:
        Exception: of the client, or an AssertionError that says what came instead.
    """
    [wanted] = [one for one in FEATURES if one.name == feature]
    served.requests, served.lines = [], []
    ask, says = CELLS[client, feature]
    rows = [ids_of(served.pipe, text) for text in (wanted.says if says is None else says)]
    with saying(served.pipe, *rows) if rows else nullcontext():
        got = ask(served)
    wanted.check(got, served)
