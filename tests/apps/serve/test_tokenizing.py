"""/tokenize and /detokenize, as vLLM has them."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.apps.serve.conftest import image, png, sound, text, user, wav
from tests.apps.serve.test_openai_types import sent
from tests.apps.serve.test_server import ask

SHOWN = user(sound(wav()), text("Here is"), image(png()), text("What is it?"))
SAID = {"role": "assistant", "content": "It is"}


def tokenized(address: str, **body: Any) -> dict[str, Any]:
    status, found = sent(address, "/tokenize", body)
    assert status == 200, found
    answer = json.loads(found)
    assert answer["count"] == len(answer["tokens"])
    return answer


def test_a_text(omni, address) -> None:
    tokenizer = omni.processor.tokenizer
    prompt = "What is <|im_start|> \u00e9\U0001f600?"
    found = tokenized(address, prompt=prompt, model="tiny")
    assert found["tokens"] == tokenizer(prompt)["input_ids"]
    assert found["max_model_len"] == omni.max_context
    assert found["token_strs"] is None
    named = tokenized(address, prompt=prompt, return_token_strs=True)
    assert named["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    _, back = sent(address, "/detokenize", {"tokens": found["tokens"]})
    assert json.loads(back) == {"prompt": prompt}
    assert tokenized(address, prompt="")["tokens"] == []
    assert json.loads(sent(address, "/detokenize", {"tokens": []})[1]) == {"prompt": ""}


def test_special_tokens(llava_next_vicuna_folder) -> None:
    from oscar_mm import OscarVLPipeline
    from tests.apps.serve.conftest import served

    pipe = OscarVLPipeline(llava_next_vicuna_folder, policy="compact", device="cpu")
    with served(pipe) as address:
        first, *rest = tokenized(address, prompt="Why?")["tokens"]
        assert first == pipe.processor.tokenizer.bos_token_id
        assert tokenized(address, prompt="Why?", add_special_tokens=False)["tokens"] == rest


def test_a_conversation(omni, client, address) -> None:
    """Media count as the model reads them."""
    answer = ask(client, SHOWN, SAID, user("Sure?"))
    found = tokenized(address, messages=[SHOWN, SAID, user("Sure?")])
    assert found["count"] == answer.usage.prompt_tokens
    [kind] = {omni.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")}
    assert found["tokens"].count(kind) > 1


@pytest.mark.parametrize(
    "options", [{"add_generation_prompt": False}, {"continue_final_message": True}]
)
def test_options_of_the_template(omni, address, options: dict[str, Any]) -> None:
    messages = [user("Why?"), SAID]
    given = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    template = omni.processor.apply_chat_template(given, tokenize=False, **options)
    expected = omni.processor.tokenizer(template)["input_ids"]
    assert tokenized(address, messages=messages, **options)["tokens"] == expected


def test_tools(tool_address, tool_pipe) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    plain = tokenized(tool_address, messages=[user("Why?")])
    offered = tokenized(tool_address, messages=[user("Why?")], tools=tools)
    assert offered["count"] > plain["count"]
    assert "weather" in tool_pipe.processor.tokenizer.decode(offered["tokens"])


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/tokenize", {}, 400, "messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "7!" * 90_000}, 400, "messages"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [SAID]}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": [user("a")], "add_special_tokens": True}, 400, None),
        (
            "/tokenize",
            {
                "messages": [user("a"), SAID],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            400,
            "continue_final_message",
        ),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**12]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_what_is_refused(address, path: str, body: Any, status: int, field: str | None) -> None:
    found, answer = sent(address, path, body)
    assert found == status, answer
    error = json.loads(answer)["error"]
    assert field is None or error["param"] == field, error


def test_too_many_tokens_and_no_key(omni, address) -> None:
    status, answer = sent(address, "/detokenize", {"tokens": [1] * (omni.max_context + 1)})
    assert status == 400 and "context" in json.loads(answer)["error"]["message"]
    for path in ("/tokenize", "/detokenize", "/v1/completions"):
        request = urllib.request.Request(
            address + path, b"{}", {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        assert caught.value.code == 401
