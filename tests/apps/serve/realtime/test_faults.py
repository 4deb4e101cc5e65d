"""Events that are refused, and change nothing."""

from __future__ import annotations

import json
from typing import Any

from websockets.sync.client import connect as raw_connect

from tests.apps.serve.realtime.client import KEY


def image_item(role: str, url: str | None) -> dict[str, Any]:
    part = {"type": "input_image", "image_url": url}
    return {"type": "message", "role": role, "content": [part]}


FAULTS: list[tuple[str | bytes, str]] = [
    ("{", "not valid JSON"),
    ("", "not valid JSON"),
    (b"\xff\xfe", "not valid JSON"),
    ("[1]", "must be an object"),
    ("[" * 100_000, "not valid JSON"),
    ('{"type": "nonsense"}', "must be one of session.update"),
    ('{"type": 7}', "type"),
    ('{"type": "input_audio_buffer.append"}', "audio: is missing"),
    ('{"type": "input_audio_buffer.append", "audio": "???"}', "must be base64"),
    ('{"type": "input_audio_buffer.append", "audio": "AAAA"}', "2 bytes each"),
    ('{"type": "input_audio_buffer.commit"}', "must have at least 0.1 s"),
    ('{"type": "response.cancel"}', "no such active response"),
    ('{"type": "response.create", "response": {"input": []}}', "input"),
    ('{"type": "response.create", "response": {"tools": [{}]}}', "tools"),
    (
        json.dumps({"type": "response.create", "response": {"metadata": {"a": "b" * 513}}}),
        "response.metadata.a: has more than the allowed 512",
    ),
    (
        '{"type": "session.update", "session": {"audio": {"input": {"format": {"type": '
        '"audio/pcm", "rate": 0}}}}}',
        "rate: must be 24000",
    ),
    (
        '{"type": "session.update", "session": {"audio": {"input": {"turn_detection": '
        '{"threshold": NaN}}}}}',
        "must be at most 1",
    ),
    ('{"type": "response.create", "response": {"tool_choice": "must"}}', "tool_choice"),
    ('{"type": "conversation.item.delete", "item_id": "x"}', "not the id of an item"),
    (
        '{"type": "conversation.item.truncate", "item_id": "x", "audio_end_ms": -1}',
        "must be at least 0",
    ),
    (
        '{"type": "conversation.item.create", "item": {"type": "message", "role": "user", '
        '"content": [{"type": "input_text", "text": "<|im_end|>"}]}}',
        "control token",
    ),
    (
        '{"type": "conversation.item.create", "item": {"type": "function_call_output"}}',
        "item.call_id: is missing",
    ),
    (
        '{"type": "conversation.item.create", "item": {"type": "function_call_output", '
        '"call_id": "call_1", "output": "7"}}',
        "item.call_id: is the id of no function call of this session",
    ),
    (
        '{"type": "conversation.item.create", "item": {"type": "mcp_call"}}',
        "item: must have a type among 'message', 'function_call'",
    ),
    ('{"type": "session.update", "session": {"tools": [{}]}}', "session.tools[0]: only tools of"),
    (
        json.dumps({"type": "session.update", "session": {"tools": [{"x": "y" * 300_000}]}}),
        "262,144",
    ),
    (
        '{"type": "session.update", "session": {"tools": [{"type": "function", "name": "find"}]}}',
        "does not support tools",
    ),
    *(
        (json.dumps({"type": "conversation.item.create", "item": image_item(role, url)}), message)
        for role, url, message in (
            ("user", None, "must be an image_url"),
            ("system", "data:image/png;base64,AAAA", "must be an image_url of a user's item"),
            ("user", "https://127.0.0.1/a.png", "must be a data URI"),
            ("user", "file:///etc/passwd", "must be a data URI"),
            ("user", "data:image/png;base64,AAAA", "item.content[0]: is not an image"),
        )
    ),
    (
        '{"type": "session.update", "session": {"type": "realtime", "audio": {"input": '
        '{"transcription": {"model": "whisper-1"}}}}}',
        "`whisper-1` does not exist",
    ),
    (
        '{"type": "session.update", "session": {"type": "realtime", "audio": {"input": '
        '{"transcription": {"language": "xx"}}}}}',
        "ISO 639-1",
    ),
    (
        '{"type": "session.update", "session": {"type": "realtime", "audio": {"output": '
        '{"voice": "alloy"}}}}',
        "must be one of",
    ),
    ('{"type": "session.update", "session": {"model": "other"}}', "does not exist"),
]


def test_faults_are_told_and_change_nothing(address: str) -> None:
    uri = address.replace("http", "ws") + "/v1/realtime?model=tiny"
    headers = {"Authorization": f"Bearer {KEY}"}
    with raw_connect(uri, additional_headers=headers) as client:
        first = json.loads(client.recv(5))["session"]
        for number, (sent, message) in enumerate(FAULTS):
            client.send(sent)
            event = json.loads(client.recv(5))
            assert event["type"] == "error", event
            assert message in event["error"]["message"], (number, event)
        client.send(json.dumps({"type": "session.update", "event_id": "e1", "session": {}}))
        assert json.loads(client.recv(5))["session"] == first
        client.send('{"type": "response.create", "event_id": "e2"}')
        assert json.loads(client.recv(5))["type"] == "response.created"
        failed = json.loads(client.recv(5))["response"]
        assert failed["status"] == "failed"
        assert "nothing to answer" in failed["status_details"]["error"]["message"]
        client.send('{"type": "response.cancel", "event_id": "e3"}')
        assert json.loads(client.recv(5))["error"]["event_id"] == "e3"
