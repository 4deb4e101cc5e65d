"""Cells of Python clients."""

import asyncio
import io
import json
from itertools import pairwise
from typing import Any, Literal

from PIL import Image
from pydantic import BaseModel, ConfigDict, create_model

from tests.apps.serve.conftest import encoded, image, sound, text, user
from tests.clients.matrix import (
    CALL,
    PICTURE,
    QUESTION,
    RECORDING,
    SAID,
    City,
    call_of,
    cell,
    weather,
)
from tests.clients.served import MODEL, Served

ASKED = [user(QUESTION)]
SEEN, HEARD = [user(text(QUESTION), image(PICTURE))], [user(text(QUESTION), sound(RECORDING))]
DATA_URI = image(PICTURE)["image_url"]["url"]
MOST = 900
"""Tokens that suffice for a random model to complete a constrained answer."""
VARIED: Any = {"max_tokens": MOST, "temperature": 0.5}
"""Sampling options: with greedy decoding a random model may write white space without end."""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def complete(messages: Any = ASKED, **options: Any) -> Any:
    import openai

    client = openai.OpenAI(max_retries=0)
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def called(message: Any) -> tuple[str, str]:
    [call] = message.tool_calls
    return call.function.name, call.function.arguments


def answers_calls(ask: Any) -> str:
    """Ask with a tool until an answer has no call, by a function from messages to a message."""
    messages: list[Any] = [*ASKED]
    while (answer := ask(messages)).tool_calls:
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls:
            result = {"role": "tool", "tool_call_id": call.id, "content": weather("Oslo")}
            messages.append(result)
    return answer.content


def logprobs_of(choice: Any) -> list[tuple[str, float]]:
    return [(one.token, one.logprob) for one in choice.logprobs.content]


@cell("openai (Python)", "text")
def openai_text(_: Any) -> str:
    return complete().choices[0].message.content


@cell("openai (Python)", "stream")
def openai_stream(_: Any) -> list[str]:
    pieces = [one.choices[0].delta.content for one in complete(stream=True)]
    return [piece for piece in pieces if piece]


@cell("openai (Python)", "image")
def openai_image(_: Any) -> str:
    return complete(SEEN).choices[0].message.content


@cell("openai (Python)", "audio")
def openai_audio(_: Any) -> str:
    return complete(HEARD).choices[0].message.content


@cell("openai (Python)", "tools")
def openai_tools(_: Any) -> str:
    return answers_calls(lambda messages: complete(messages, tools=[TOOL]).choices[0].message)


@cell("openai (Python)", "forced tool")
def openai_forced(_: Any) -> tuple[str, str]:
    answer = complete(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **VARIED)
    return called(answer.choices[0].message)


@cell("openai (Python)", "structured output")
def openai_structured(_: Any) -> City:
    import openai

    how: Any = {"model": MODEL, "messages": ASKED, "response_format": City} | VARIED
    return openai.OpenAI().chat.completions.parse(**how).choices[0].message.parsed


@cell("openai (Python)", "tools, then structured")
def openai_both(_: Any) -> Any:
    shape = {"name": "city", "schema": City.model_json_schema(), "strict": True}
    how: Any = {"tools": [TOOL], "response_format": {"type": "json_schema", "json_schema": shape}}
    return json.loads(answers_calls(lambda said: complete(said, **how).choices[0].message))


@cell("openai (Python)", "logprobs")
def openai_logprobs(_: Any) -> list[tuple[str, float]]:
    return logprobs_of(complete(logprobs=True).choices[0])


@cell("openai (Python)", "Responses")
def openai_responses(_: Any) -> str:
    import openai

    return openai.OpenAI().responses.create(model=MODEL, input=QUESTION).output_text


@cell("openai (Python)", "transcription")
def openai_transcription(_: Any) -> str:
    import openai

    file = ("a.wav", RECORDING)
    return openai.OpenAI().audio.transcriptions.create(model=MODEL, file=file).text


def message(content: Any = QUESTION, **options: Any) -> Any:
    import anthropic

    given = content if isinstance(content, list) and "role" in content[0] else [user(content)]
    options = OWN | options
    return anthropic.Anthropic(max_retries=0).messages.create(
        model=MODEL, messages=given, **options
    )


OWN: Any = {"max_tokens": MOST, "extra_body": {"temperature": VARIED["temperature"]}}
"""Sampling options: the client's newest version does not accept a temperature."""
WEATHER = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}


@cell("anthropic", "text")
def anthropic_text(_: Any) -> str:
    return message().content[0].text


@cell("anthropic", "stream")
def anthropic_stream(_: Any) -> list[str]:
    import anthropic

    how: Any = {"model": MODEL, "messages": ASKED} | OWN
    with anthropic.Anthropic(max_retries=0).messages.stream(**how) as stream:
        pieces = list(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens > 1
    return pieces


@cell("anthropic", "image")
def anthropic_image(_: Any) -> str:
    source = {"type": "base64", "media_type": "image/png", "data": encoded(PICTURE)}
    return message([text(QUESTION), {"type": "image", "source": source}]).content[0].text


def anthropic_answer(**options: Any) -> str:
    """Ask with a tool until there is no call."""
    messages: list[Any] = [*ASKED]
    while (answer := message(messages, tools=[WEATHER], **options)).stop_reason == "tool_use":
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": answer.content}, user(*results, text("So?"))]
    return answer.content[0].text


@cell("anthropic", "tools")
def anthropic_tools(_: Any) -> str:
    return anthropic_answer()


@cell("anthropic", "forced tool")
def anthropic_forced(_: Any) -> tuple[str, Any]:
    choice = {"type": "tool", "name": "weather"}
    [call] = message(tools=[WEATHER], tool_choice=choice).content
    return call.name, call.input


@cell("anthropic", "structured output")
def anthropic_structured(_: Any) -> City:
    import anthropic

    how: Any = {"model": MODEL, "messages": ASKED, "output_format": City} | OWN
    return anthropic.Anthropic(max_retries=0).messages.parse(**how).parsed_output


@cell("anthropic", "tools, then structured")
def anthropic_both(_: Any) -> Any:
    shape = {"type": "json_schema", "schema": City.model_json_schema()}
    return json.loads(anthropic_answer(output_config={"format": shape}))


def agent(**how: Any) -> Any:
    import agents

    settings = agents.ModelSettings(**VARIED, **how.pop("settings", {}))
    return agents.Agent(name="a", model=MODEL, model_settings=settings, **how)


@cell("Agents SDK", "text", "Responses")
def agents_text(_: Any) -> str:
    import agents

    return agents.Runner.run_sync(agent(), QUESTION).final_output


@cell("Agents SDK", "stream")
def agents_stream(_: Any) -> list[str]:
    import agents

    async def go() -> list[str]:
        run = agents.Runner.run_streamed(agent(), QUESTION)
        events = [one async for one in run.stream_events() if one.type == "raw_response_event"]
        return [one.data.delta for one in events if one.data.type == "response.output_text.delta"]

    return asyncio.run(go())


@cell("Agents SDK", "image")
def agents_image(_: Any) -> str:
    import agents

    shown = {"type": "input_image", "image_url": DATA_URI}
    content: Any = [{"type": "input_text", "text": QUESTION}, shown]
    return agents.Runner.run_sync(agent(), [{"role": "user", "content": content}]).final_output


@cell("Agents SDK", "audio")
def agents_audio(_: Any) -> str:
    import agents

    content: Any = [{"type": "input_text", "text": QUESTION}, sound(RECORDING)]
    return agents.Runner.run_sync(agent(), [{"role": "user", "content": content}]).final_output


@cell("Agents SDK", "tools")
def agents_tools(_: Any) -> str:
    import agents

    asked = agent(tools=[agents.function_tool(weather)])
    return agents.Runner.run_sync(asked, QUESTION).final_output


@cell("Agents SDK", "forced tool")
def agents_forced(_: Any) -> tuple[str, str]:
    import agents

    asked = agent(
        tools=[agents.function_tool(weather)],
        settings={"tool_choice": "required", "parallel_tool_calls": False},
        tool_use_behavior="stop_on_first_tool",
    )
    items = agents.Runner.run_sync(asked, QUESTION).new_items
    [call] = [item.raw_item for item in items if item.type == "tool_call_item"]
    return call.name, call.arguments


@cell("Agents SDK", "structured output")
def agents_structured(_: Any) -> City:
    import agents

    return agents.Runner.run_sync(agent(output_type=City), QUESTION).final_output


@cell("Agents SDK", "tools, then structured")
def agents_both(_: Any) -> City:
    import agents

    asked = agent(tools=[agents.function_tool(weather)], output_type=City)
    return agents.Runner.run_sync(asked, QUESTION).final_output


def lang_chain(**how: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, **VARIED, **how)


@cell("LangChain", "text")
def lang_chain_text(_: Any) -> str:
    return lang_chain().invoke(QUESTION).content


@cell("LangChain", "stream")
def lang_chain_stream(_: Any) -> list[str]:
    return [one.content for one in lang_chain().stream(QUESTION) if one.content]


@cell("LangChain", "image")
def lang_chain_image(_: Any) -> str:
    shown = {"type": "image", "base64": encoded(PICTURE), "mime_type": "image/png"}
    return lang_chain().invoke([user(text(QUESTION), shown)]).content


@cell("LangChain", "audio")
def lang_chain_audio(_: Any) -> str:
    heard = {"type": "audio", "base64": encoded(RECORDING), "mime_type": "audio/wav"}
    return lang_chain().invoke([user(text(QUESTION), heard)]).content


def lang_chain_answer(bound: Any, messages: list[Any]) -> str:
    """Ask with a tool until there is no call."""
    from langchain_core.messages import ToolMessage

    while (answer := bound.invoke(messages)).tool_calls:
        messages.append(answer)
        for call in answer.tool_calls:
            messages.append(ToolMessage(weather(**call["args"]), tool_call_id=call["id"]))
    return answer.content


@cell("LangChain", "tools")
def lang_chain_tools(_: Any) -> str:
    from langchain_core.messages import HumanMessage

    return lang_chain_answer(lang_chain().bind_tools([weather]), [HumanMessage(QUESTION)])


@cell("LangChain", "forced tool")
def lang_chain_forced(_: Any) -> tuple[str, dict[str, Any]]:
    bound = lang_chain().bind_tools([weather], tool_choice="weather", strict=True)
    [call] = bound.invoke(QUESTION).tool_calls
    return call["name"], call["args"]


@cell("LangChain", "structured output")
def lang_chain_structured(_: Any) -> City:
    return lang_chain().with_structured_output(City).invoke(QUESTION)


@cell("LangChain", "tools, then structured")
def lang_chain_both(_: Any) -> Any:
    from langchain_core.messages import HumanMessage

    bound = lang_chain().bind_tools([weather], response_format=City, strict=True)
    return json.loads(lang_chain_answer(bound, [HumanMessage(QUESTION)]))


@cell("LangChain", "logprobs")
def lang_chain_logprobs(_: Any) -> list[tuple[str, float]]:
    found = lang_chain().bind(logprobs=True).invoke(QUESTION).response_metadata["logprobs"]
    return [(one["token"], one["logprob"]) for one in found["content"]]


@cell("LangChain", "Responses")
def lang_chain_responses(_: Any) -> str:
    return lang_chain(use_responses_api=True).invoke(QUESTION).text


def llama_index(**how: Any) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    capable = {"is_chat_model": True, "is_function_calling_model": True}
    return OpenAILike(model=MODEL, **VARIED, **capable, **how)


def llama_message(*blocks: Any) -> Any:
    from llama_index.core.llms import ChatMessage, TextBlock

    return ChatMessage(role="user", blocks=[TextBlock(text=QUESTION), *blocks])


@cell("LlamaIndex", "text")
def llama_text(_: Any) -> str:
    return llama_index().complete(QUESTION).text


@cell("LlamaIndex", "stream")
def llama_stream(_: Any) -> list[str]:
    return [one.delta for one in llama_index().stream_chat([llama_message()]) if one.delta]


@cell("LlamaIndex", "image")
def llama_image(_: Any) -> str:
    from llama_index.core.llms import ImageBlock

    shown = ImageBlock(image=PICTURE, image_mimetype="image/png")
    return llama_index().chat([llama_message(shown)]).message.content


@cell("LlamaIndex", "audio")
def llama_audio(_: Any) -> str:
    from llama_index.core.llms import AudioBlock

    heard = AudioBlock(audio=RECORDING, format="wav")
    return llama_index().chat([llama_message(heard)]).message.content


def llama_tool() -> Any:
    from llama_index.core.tools import FunctionTool

    return FunctionTool.from_defaults(weather)


@cell("LlamaIndex", "tools")
def llama_tools(_: Any) -> str:
    from llama_index.core.agent.workflow import FunctionAgent

    async def go() -> str:
        asked = FunctionAgent(tools=[llama_tool()], llm=llama_index(), streaming=True)
        return str(await asked.run(QUESTION))

    return asyncio.run(go())


@cell("LlamaIndex", "forced tool")
def llama_forced(_: Any) -> tuple[str, dict[str, Any]]:
    model = llama_index()
    answer = model.chat_with_tools([llama_tool()], QUESTION, tool_required=True)
    [call] = model.get_tool_calls_from_response(answer)
    return call.tool_name, call.tool_kwargs


@cell("LlamaIndex", "structured output")
def llama_structured(_: Any) -> City:
    model = llama_index(should_use_structured_outputs=True)
    return model.as_structured_llm(City).chat([llama_message()]).raw


@cell("LlamaIndex", "logprobs")
def llama_logprobs(_: Any) -> list[tuple[str, float]]:
    found = llama_index(logprobs=True, top_logprobs=1).chat([llama_message()]).logprobs
    return [(one[0].token, one[0].logprob) for one in found or ()]


@cell("LlamaIndex", "Responses")
def llama_responses(_: Any) -> str:
    from llama_index.llms.openai import OpenAIResponses

    return OpenAIResponses(model=MODEL, context_window=4096).complete(QUESTION).text


def lite(messages: Any = ASKED, **how: Any) -> Any:
    import litellm

    return litellm.completion(model=f"openai/{MODEL}", messages=messages, **how)


@cell("LiteLLM", "text")
def lite_text(_: Any) -> str:
    return lite().choices[0].message.content


@cell("LiteLLM", "stream")
def lite_stream(_: Any) -> list[str]:
    pieces = [one.choices[0].delta.content for one in lite(stream=True)]
    return [piece for piece in pieces if piece]


@cell("LiteLLM", "image")
def lite_image(_: Any) -> str:
    return lite(SEEN).choices[0].message.content


@cell("LiteLLM", "audio")
def lite_audio(_: Any) -> str:
    return lite(HEARD).choices[0].message.content


@cell("LiteLLM", "tools")
def lite_tools(_: Any) -> str:
    return answers_calls(lambda messages: lite(messages, tools=[TOOL]).choices[0].message)


@cell("LiteLLM", "forced tool")
def lite_forced(_: Any) -> tuple[str, str]:
    named = {"type": "function", "function": {"name": "weather"}}
    return called(lite(tools=[TOOL], tool_choice=named, **VARIED).choices[0].message)


@cell("LiteLLM", "structured output")
def lite_structured(_: Any) -> City:
    content = lite(response_format=City, **VARIED).choices[0].message.content
    return City.model_validate_json(content)


@cell("LiteLLM", "tools, then structured")
def lite_both(_: Any) -> Any:
    how: Any = {"tools": [TOOL], "response_format": City}
    return json.loads(answers_calls(lambda said: lite(said, **how).choices[0].message))


@cell("LiteLLM", "logprobs")
def lite_logprobs(_: Any) -> list[tuple[str, float]]:
    return logprobs_of(lite(logprobs=True).choices[0])


@cell("LiteLLM", "Responses")
def lite_responses(_: Any) -> str:
    import litellm

    answer: Any = litellm.responses(model=f"openai/{MODEL}", input=QUESTION)
    [message] = answer.output
    return message.content[0].text


@cell("LiteLLM", "transcription")
def lite_transcription(served: Served) -> str:
    import litellm

    file = ("a.wav", RECORDING, "audio/wav")
    how: Any = {"model": f"openai/{MODEL}", "api_base": served.base, "api_key": "none"}
    # Of itself it asks for verbose_json.
    return litellm.transcription(file=file, response_format="json", **how).text


class Reply(BaseModel):
    """Response model for a client that supports structured answers only."""

    model_config = ConfigDict(extra="forbid")
    text: str


REPLY = (Reply(text=SAID).model_dump_json(),)


def instructed(kind: Any, mode: str = "JSON_SCHEMA", *parts: Any, **more: Any) -> Any:
    import instructor
    import openai

    client = instructor.from_openai(openai.OpenAI(), mode=getattr(instructor.Mode, mode))
    messages: Any = [{"role": "user", "content": [QUESTION, *parts]}]
    how = {"model": MODEL, "max_retries": 1} | VARIED | more
    return client.chat.completions.create(response_model=kind, messages=messages, **how)


@cell("instructor", "text")
def instructor_text(_: Any) -> str:
    return instructed(None).choices[0].message.content


@cell("instructor", "stream", says=REPLY)
def instructor_stream(_: Any) -> list[str]:
    import instructor

    grown = [one.text or "" for one in instructed(instructor.Partial[Reply], stream=True)]
    return [after[len(before) :] for before, after in pairwise(["", *grown]) if after != before]


@cell("instructor", "image", says=REPLY)
def instructor_image(_: Any) -> str:
    import instructor

    return instructed(Reply, "JSON_SCHEMA", instructor.Image.from_base64(DATA_URI)).text


@cell("instructor", "audio", says=REPLY)
def instructor_audio(_: Any) -> str:
    from instructor.processing.multimodal import Audio

    heard = Audio(source="a.wav", data=encoded(RECORDING), media_type="audio/wav")
    return instructed(Reply, "JSON_SCHEMA", heard).text


@cell("instructor", "forced tool")
def instructor_forced(_: Any) -> tuple[str, dict[str, Any]]:
    kind = create_model(
        "weather", city=(Literal["Oslo", "Rome"], ...), __config__=City.model_config
    )
    return "weather", instructed(kind, "TOOLS").model_dump()


@cell("instructor", "structured output")
def instructor_structured(_: Any) -> City:
    return instructed(City)


@cell("instructor", "Responses", says=(call_of("Reply", text=SAID),))
def instructor_responses(_: Any) -> str:
    return instructed(Reply, "RESPONSES_TOOLS").text


def pydantic_agent(kind: str = "OpenAIChatModel", **how: Any) -> Any:
    import pydantic_ai
    import pydantic_ai.models.openai as models

    return pydantic_ai.Agent(getattr(models, kind)(MODEL), model_settings=VARIED, **how)


@cell("pydantic-ai", "text")
def pydantic_text(_: Any) -> str:
    return pydantic_agent().run_sync(QUESTION).output


@cell("pydantic-ai", "stream")
def pydantic_stream(_: Any) -> list[str]:
    async def go() -> list[str]:
        async with pydantic_agent().run_stream(QUESTION) as run:
            return [one async for one in run.stream_text(delta=True, debounce_by=None)]

    return asyncio.run(go())


def pydantic_medium(data: bytes, kind: str) -> str:
    from pydantic_ai import BinaryContent

    content = BinaryContent(data=data, media_type=kind)
    return pydantic_agent().run_sync([QUESTION, content]).output


@cell("pydantic-ai", "image")
def pydantic_image(_: Any) -> str:
    return pydantic_medium(PICTURE, "image/png")


@cell("pydantic-ai", "audio")
def pydantic_audio(_: Any) -> str:
    return pydantic_medium(RECORDING, "audio/wav")


@cell("pydantic-ai", "tools")
def pydantic_tools(_: Any) -> str:
    return pydantic_agent(tools=[weather]).run_sync(QUESTION).output


@cell("pydantic-ai", "forced tool")
def pydantic_forced(_: Any) -> tuple[str, dict[str, Any]]:
    from pydantic_ai import ToolOutput

    def take(city: Literal["Oslo", "Rome"]) -> dict[str, Any]:
        return {"city": city}

    output = pydantic_agent(output_type=ToolOutput(take, name="weather")).run_sync(QUESTION).output
    return "weather", output


@cell("pydantic-ai", "structured output")
def pydantic_structured(_: Any) -> City:
    from pydantic_ai import NativeOutput

    for kind in ("OpenAIChatModel", "OpenAIResponsesModel"):
        found = pydantic_agent(kind, output_type=NativeOutput(City)).run_sync(QUESTION).output
    return found


@cell("pydantic-ai", "tools, then structured")
def pydantic_both(_: Any) -> City:
    from pydantic_ai import NativeOutput

    asked = pydantic_agent(output_type=NativeOutput(City), tools=[weather])
    return asked.run_sync(QUESTION).output


@cell("pydantic-ai", "logprobs")
def pydantic_logprobs(_: Any) -> list[tuple[str, float]]:
    settings: Any = VARIED | {"openai_logprobs": True}
    answer = pydantic_agent().run_sync(QUESTION, model_settings=settings).all_messages()[-1]
    return [(one["token"], one["logprob"]) for one in answer.provider_details["logprobs"]]


@cell("pydantic-ai", "Responses")
def pydantic_responses(_: Any) -> str:
    return pydantic_agent("OpenAIResponsesModel").run_sync(QUESTION).output


FINAL = call_of("final_answer", answer=SAID)
"""The tool call by which an agent of smolagents gives its answer."""


def smol() -> Any:
    import os

    from smolagents import OpenAIServerModel

    base = os.environ["OPENAI_BASE_URL"]
    return OpenAIServerModel(MODEL, api_base=base, api_key="none", **VARIED)


def smol_messages(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [text(QUESTION), *parts]}]


@cell("smolagents", "text")
def smol_text(_: Any) -> str:
    return smol().generate(smol_messages()).content


@cell("smolagents", "stream")
def smol_stream(_: Any) -> list[str]:
    return [one.content for one in smol().generate_stream(smol_messages()) if one.content]


@cell("smolagents", "image")
def smol_image(_: Any) -> str:
    shown = {"type": "image", "image": Image.open(io.BytesIO(PICTURE))}
    return smol().generate(smol_messages(shown)).content


@cell("smolagents", "tools", says=(CALL, "", FINAL))
def smol_tools(_: Any) -> str:
    """The client rewrites earlier calls as text, so the model reads them again."""
    import smolagents

    tools = [smolagents.tool(weather)]
    agent = smolagents.ToolCallingAgent(tools=tools, model=smol(), max_steps=2, verbosity_level=0)
    return agent.run(QUESTION)


@cell("smolagents", "forced tool")
def smol_forced(_: Any) -> tuple[str, str]:
    import smolagents

    answer = smol().generate(smol_messages(), tools_to_call_from=[smolagents.tool(weather)])
    [call, *_] = answer.tool_calls
    return call.function.name, call.function.arguments


@cell("smolagents", "structured output")
def smol_structured(_: Any) -> City:
    schema = {"name": "city", "schema": City.model_json_schema(), "strict": True}
    shape = {"type": "json_schema", "json_schema": schema}
    answer = smol().generate(smol_messages(), response_format=shape)
    return City.model_validate_json(answer.content)


@cell("smolagents", "logprobs")
def smol_logprobs(_: Any) -> list[tuple[str, float]]:
    return logprobs_of(smol().generate(smol_messages(), logprobs=True).raw.choices[0])
