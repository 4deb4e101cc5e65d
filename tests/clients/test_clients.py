"""Clients of other people, as they are released, against a server of ours.

The model has random weights: what a client can make of its answers is told by schemas and by calls
that must be. Install the clients beside the package::

    pip install openai-agents instructor langchain-openai litellm "pydantic-ai-slim[openai]" \
        smolagents llama-index-llms-openai-like
    pytest -m clients tests/clients
"""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from oscar_mm import OscarVLPipeline
from tests.apps.serve.conftest import image, png, served, text, user
from tests.tool_template import TOOL_TEMPLATE

pytestmark = pytest.mark.clients
MODEL, CITIES = "tiny", ("Oslo", "Rome")


class City(BaseModel):
    """What the clients have the model write."""

    name: Literal["Oslo", "Rome"]
    warm: bool


@pytest.fixture(scope="module")
def address(qwen3_vl_folder) -> Iterator[str]:
    pipe = OscarVLPipeline(qwen3_vl_folder, policy="compact", device="cpu", prefix_cache="1MB")
    pipe.processor.chat_template = TOOL_TEMPLATE
    with served(pipe) as address:
        yield f"{address}/v1"


@pytest.fixture(autouse=True)
def environment(address, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": address, "no_proxy": "127.0.0.1"}
    for name, value in (settings | {"OPENAI_AGENTS_DISABLE_TRACING": "1"}).items():
        monkeypatch.setenv(name, value)


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    return f"4 degrees in {city}"


class TestOpenAI:
    @pytest.fixture
    def client(self) -> Any:
        return pytest.importorskip("openai").OpenAI()

    def test_text_and_pictures(self, client) -> None:
        messages = [user(text("First:"), image(png()), text("second:"), image(png(1)))]
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
        assert answer.choices[0].finish_reason and answer.usage.prompt_tokens > 20

    def test_structured_output(self, client) -> None:
        messages = [{"role": "user", "content": "Where?"}]
        how = {"model": MODEL, "messages": messages, "max_tokens": 900, "temperature": 0.3}
        answer = client.chat.completions.parse(response_format=City, **how)
        assert answer.choices[0].message.parsed.name in CITIES
        how = {"model": MODEL, "input": "Where?", "max_output_tokens": 900, "temperature": 0.3}
        assert client.responses.parse(text_format=City, **how).output_parsed.name in CITIES


class TestAgents:
    @pytest.fixture
    def agents(self) -> Any:
        return pytest.importorskip("agents")

    def agent(self, agents: Any, **how: Any) -> Any:
        settings = agents.ModelSettings(max_tokens=900, **how.pop("settings", {}))
        how |= {"model": MODEL, "model_settings": settings}
        return agents.Agent(name="a", instructions="Be brief.", **how)

    def test_text(self, agents) -> None:
        assert agents.Runner.run_sync(self.agent(agents), "hi").final_output

    def test_tools(self, agents) -> None:
        tool = agents.function_tool(weather)
        agent = self.agent(agents, tools=[tool], settings={"tool_choice": "required"})
        items = agents.Runner.run_sync(agent, "hi", max_turns=3).new_items
        kinds = [item.type for item in items]
        assert "tool_call_item" in kinds and "tool_call_output_item" in kinds

    def test_structured_output(self, agents) -> None:
        agent = self.agent(agents, output_type=City)
        assert agents.Runner.run_sync(agent, "hi").final_output.name in CITIES

    def test_streaming(self, agents) -> None:
        async def go() -> tuple[int, Any]:
            run = agents.Runner.run_streamed(self.agent(agents, output_type=City), "hi")
            return len([event async for event in run.stream_events()]), run.final_output

        events, city = asyncio.run(go())
        assert events > 10 and city.name in CITIES


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor(mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    client = instructor.from_openai(openai.OpenAI(), mode=getattr(instructor.Mode, mode))
    city = client.chat.completions.create(
        model=MODEL,
        response_model=City,
        messages=[{"role": "user", "content": "Where?"}],
        max_tokens=900,
        max_retries=1,
        temperature=0.3,
    )
    assert city.name in CITIES


class TestLangChain:
    @pytest.fixture
    def model(self) -> Any:
        chat = pytest.importorskip("langchain_openai").ChatOpenAI
        return lambda **how: chat(model=MODEL, **{"max_tokens": 900, "temperature": 0.3} | how)

    def test_text(self, model) -> None:
        assert model(max_tokens=10).invoke("hi").content
        assert len(list(model(max_tokens=10).stream("hi"))) > 5
        assert model(max_tokens=20, use_responses_api=True).invoke("hi").content

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_output(self, model, method: str) -> None:
        assert model().with_structured_output(City, method=method).invoke("Where?").name in CITIES

    def test_tools(self, model) -> None:
        bound = model().bind_tools([weather], tool_choice="weather", strict=True)
        [call] = bound.invoke("hi").tool_calls
        assert call["name"] == "weather" and call["args"]["city"] in CITIES


class TestPydanticAI:
    @pytest.fixture
    def model(self, address) -> Any:
        models = pytest.importorskip("pydantic_ai.models.openai")
        providers = pytest.importorskip("pydantic_ai.providers.openai")
        provider = providers.OpenAIProvider(base_url=address, api_key="none")
        return lambda kind: getattr(models, kind)(MODEL, provider=provider)

    @pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
    @pytest.mark.parametrize("native", [True, False])
    def test_structured_output(self, model, kind: str, native: bool) -> None:
        pydantic_ai = pytest.importorskip("pydantic_ai")
        output = pydantic_ai.NativeOutput(City) if native else City
        settings = {"max_tokens": 900, "temperature": 0.3}
        agent = pydantic_ai.Agent(model(kind), output_type=output, model_settings=settings)
        assert agent.run_sync("Where?").output.name in CITIES


def test_litellm(address) -> None:
    litellm = pytest.importorskip("litellm")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    answer = litellm.completion(
        model=f"openai/{MODEL}",
        api_base=address,
        api_key="none",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=10,
        tools=[tool],
    )
    assert answer.choices[0].message.content


def test_smolagents(address) -> None:
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIServerModel(MODEL, api_base=address, api_key="none", max_tokens=900)
    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(weather)], model=model, max_steps=1, verbosity_level=0
    )
    agent.run("hi")
    assert agent.memory.steps[1].tool_calls


def test_llama_index(address) -> None:
    llms = pytest.importorskip("llama_index.llms.openai_like")
    how = {"api_base": address, "api_key": "none", "max_tokens": 10}
    assert llms.OpenAILike(model=MODEL, is_chat_model=True, **how).complete("hi").text
