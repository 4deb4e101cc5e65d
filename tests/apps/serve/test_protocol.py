"""What a request says: which are accepted, and how refusals name what is wrong."""

import json
from typing import Any

import pytest

from oscar_mm.apps.serve.media_parts import NOT_FETCHED, MediaSource
from oscar_mm.apps.serve.protocol import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STRUCTURE,
    ApiRequest,
    Body,
    FieldError,
    parsed,
    read_request,
)
from oscar_mm.engine.grammar import Grammar
from oscar_mm.errors import InputError
from oscar_mm.media import MediaLimits
from oscar_mm.modality import Modality
from tests.apps.serve.conftest import encoded, image, png, sound, text, user, wav
from tests.prompts import clip
from tests.recordings import write_movie

LIMITS = MediaLimits()
SPOKEN = {"modalities": ["text", "audio"]}


def answered(words: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": words}


def showing(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def system(words: Any) -> dict[str, Any]:
    return {"role": "system", "content": words}


def read_bytes(data: bytes, limits: MediaLimits = LIMITS, remote_bytes: int = 0) -> ApiRequest:
    return read_request(parsed(Body, data), MediaSource(limits, remote_bytes))


def read(*messages: dict[str, Any], limits: MediaLimits = LIMITS, **options: Any) -> ApiRequest:
    return read_bytes(json.dumps({"messages": messages, **options}).encode(), limits)


def refusal(*messages: dict[str, Any], **options: Any) -> FieldError:
    with pytest.raises(FieldError) as refused:
        read(*(messages or (user("Why?"),)), **options)
    for jargon in ("pydantic", "input_", "Input", "https:", "type=", "max_new_tokens"):
        assert jargon not in str(refused.value).replace("input_audio", "")
    return refused.value


def test_a_conversation() -> None:
    shown = user(text("What"), image(png()), sound(wav(0.1)), text("is it?"))
    request = read(
        system("Be brief."),
        shown,
        answered([text("A dog.")]),
        user("Sure?"),
        max_tokens=7,
        temperature=0.5,
        top_k=-1,
        seed=-1,
        stop="x",
        stream=True,
        stream_options={"include_usage": True},
    )
    [((asked,), answer)] = request.past
    assert request.system.text == "Be brief." and answer.text == "A dog."
    first, picture, recording, last = asked.parts
    assert (first, last) == ("What", "is it?")
    assert (picture.modality, picture.source) == (Modality.IMAGE, png())
    assert (recording.modality, recording.source) == (Modality.AUDIO, wav(0.1))
    assert picture.label == "messages[1].content[1]"
    assert [said.text for said in request.question] == ["Sure?"]
    assert request.sampling == {
        "max_new_tokens": 7,
        "temperature": 0.5,
        "top_k": 0,
        "stop": ["x"],
    }
    assert request.stream and request.usage and request.cache_salt == ""
    assert read(user("Why?"), cache_salt="a" * 256).cache_salt == "a" * 256
    assert read(user("Why?"), cache_salt=None).cache_salt == ""
    places = [said.place for said in request.messages()]
    assert places == [f"messages[{index}].content" for index in range(4)]


def test_sampling_options() -> None:
    options = {
        "min_p": 0.1,
        "presence_penalty": 1.5,
        "frequency_penalty": -1,
        "bad_words": ["a", "b c"],
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [5, 6],
        "include_stop_str_in_output": True,
    }
    sampling = read(user("Why?"), **options, logit_bias={"7": -100, "8": 2.5}).sampling
    assert sampling == options | {"logit_bias": {7: -100, 8: 2.5}}
    for asked, expected in (
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        ({"logprobs": False, "top_logprobs": 0}, {}),
        ({"logprobs": None, "top_logprobs": None}, {}),
    ):
        assert read(user("Why?"), **asked).sampling == expected


SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}, "guided_json": None}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object("response_format")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar.json_schema(SCHEMA, "response_format"),
        ),
        ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA, "guided_json")),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar.json_schema(SCHEMA, "guided_json")),
        ({"guided_regex": "a+"}, Grammar.regex("a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"], "guided_choice")),
        ({"guided_grammar": 'start: "a"'}, Grammar.cfg('start: "a"', "guided_grammar")),
        *(
            ({"structured_outputs": {kind: value}}, maker(value, "structured_outputs"))
            for kind, value, maker in (
                ("json", SCHEMA, Grammar.json_schema),
                ("regex", "a+", Grammar.regex),
                ("choice", ["a", "b"], Grammar.choice),
                ("grammar", 'start: "a"', Grammar.cfg),
            )
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            Grammar.json_object("structured_outputs"),
        ),
    ],
)
def test_structured_output(options: dict, expected: Grammar | None) -> None:
    assert read(user("Why?"), **options).sampling.get("grammar") == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format: json_schema.schema is"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex: .* with guided_choice"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs: has several"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs: structural_tag"),
        ({"guided_choice": []}, "guided_choice: must be a list of 1 to 1,024"),
        ({"guided_json": "["}, "guided_json: must be a JSON schema"),
        ({"guided_regex": "a" * 70_000}, "guided_regex has 70,000 characters"),
    ],
)
def test_structured_output_that_is_refused(options: dict, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        read(user("Why?"), **options)


def test_messages_need_not_take_turns() -> None:
    request = read(
        answered("Hello."),
        user("a"),
        {"role": "developer", "content": "Be brief."},
        user(image(png()), {"type": "text", "text": None}),
        answered(None),
        user(None),
        system("Now in French."),
        user("b"),
    )
    [(first, answer)] = request.past
    assert request.system is None and answer.text == ""
    assert [(said.role, said.text) for said in first] == [
        ("assistant", "Hello."),
        ("user", "a"),
        ("system", "Be brief."),
        ("user", ""),
    ]
    assert [part.source for part in first[-1].media] == [png()]
    assert [(said.role, said.text) for said in request.question] == [
        ("user", ""),
        ("system", "Now in French."),
        ("user", "b"),
    ]


def test_the_last_message_may_be_of_the_system() -> None:
    alone = read(system("Say hello."))
    assert alone.system is None and [said.text for said in alone.question] == ["Say hello."]
    asked = user("a"), system("Be brief.")
    assert [said.text for said in read(*asked).question] == ["a", "Be brief."]
    [(first, answer)] = read(*asked, answered("b"), user("c")).past
    assert [said.text for said in first] == ["a", "Be brief."] and answer.text == "b"


@pytest.mark.parametrize(
    ("messages", "field", "expected"),
    [
        ([answered("a")], "messages", "must not end with an assistant's message"),
        ([user("a"), answered("b")], "messages", "must not end with an assistant's message"),
        ([system("a"), answered("b")], "messages", "must not end with an assistant's message"),
        ([system(" ")], "messages[0].content", "must not be empty"),
        ([user("a"), system("")], "messages[1].content", "must not be empty"),
        ([user(" ")], "messages[0].content", "must not be empty"),
        ([user(None), answered("a"), user("b")], "messages[0].content", "must not be empty"),
        ([user("a"), {"role": "cat", "content": "b"}], "messages[1].role", "must be 'system'"),
        ([{"content": "a"}], "messages[0].role", "is missing"),
        ([user(7)], "messages[0].content", "must be text or a list of parts"),
        ([user(text("a"), "b")], "messages[0].content[1]", "must be an object"),
        ([showing({"type": "cat"})], "messages[0].content[0].type", "must be 'text', 'image_url'"),
        ([showing(text(["a"]))], "messages[0].content[0].text", "must be text"),
        (
            [system([sound(wav(0.1))]), user("a")],
            "messages[0].content[0]",
            "only messages of role user or",
        ),
        (["a"], "messages[0]", "must be an object"),
        ([user("a")] * (MAX_MESSAGES + 1), "messages", f"at most {MAX_MESSAGES} are"),
        ([user(*[text("")] * (MAX_PARTS + 1))], "messages", "more than 4,096 parts"),
    ],
)
def test_messages_that_are_refused(messages: list, field: str, expected: str) -> None:
    error = refusal(*messages)
    assert error.field == field and expected in str(error) and field in str(error)


@pytest.mark.parametrize("url", ["/etc/passwd", "http://localhost/x.png", "data:,x", "file:///x"])
def test_nothing_is_fetched(url: str) -> None:
    error = refusal(showing({"type": "image_url", "image_url": {"url": url}}))
    assert "must be a data URI" in str(error) and error.field == "messages[0].content[0]"


def test_addresses_are_fetched_where_that_is_allowed(picture_address, caplog) -> None:
    def fetched(*urls: str, remote_bytes: int) -> tuple:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = json.dumps({"messages": [showing(*parts)]}).encode()
        [message] = read_bytes(body, LIMITS, remote_bytes).question
        return tuple(part.source for part in message.media)

    size, twice = len(png()), [picture_address] * 2
    assert fetched(*twice, remote_bytes=2 * size) == (png(), png())
    for urls, most, expected in (
        (twice, 2 * size - 1, f"content[1]: {NOT_FETCHED.format('image')}"),
        (twice, size, "content[1]"),
        (["/etc/passwd"], size, "or an http(s) URL"),
        (["file:///etc/passwd"], size, "or an http(s) URL"),
    ):
        with pytest.raises(FieldError) as refused:
            fetched(*urls, remote_bytes=most)
        assert expected in str(refused.value)
    caplog.clear()
    site = picture_address.rpartition("/")[0]
    for url, logged in (
        (f"{picture_address}.jpg", "returned 404"),
        (f"{site}/page.html", "returned text/html"),
        (f"{site}/notes.bin", "cannot identify image file"),
        ("http://127.0.0.1:1/", "refused"),
    ):
        with pytest.raises(FieldError) as refused:
            fetched(url, remote_bytes=size)
        assert str(refused.value) == f"messages[0].content[0]: {NOT_FETCHED.format('image')}"
        assert url in (record := caplog.records[-1].getMessage()) and logged in record
    assert len(caplog.records) == 4


def uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{encoded(data)}"


def test_media_of_every_kind(tmp_path) -> None:
    movie = write_movie(tmp_path / "a.mp4", clip(4), None).read_bytes()
    parts = [
        {"type": "video_url", "video_url": {"url": uri("video/mp4", movie)}},
        {"type": "audio_url", "audio_url": {"url": uri("audio/wav", wav(0.1))}},
        {"type": "image_url", "image_url": uri("image/png", png())},
        {"type": "file", "file": {"filename": "a.mp4", "file_data": uri("video/mp4", movie)}},
        {"type": "file", "file": {"file_data": uri("audio/wav", wav(0.1))}},
        {"type": "video_url", "video_url": None},
    ]
    [said] = read(showing(*parts)).question
    assert [part.modality.label for part in said.media] == [
        *("video", "audio", "image", "video", "audio"),
    ]
    assert [part.source for part in said.media] == [movie, wav(0.1), png(), movie, wav(0.1)]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "video_url", "video_url": {"url": "a.mp4"}}, "a data URI, data:video/mp4;base64"),
        ({"type": "audio_url", "audio_url": {"url": "a.wav"}}, "a data URI, data:audio/wav;base64"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "a file needs file_data"),
        ({"type": "file"}, "a file needs file_data"),
        (
            {"type": "file", "file": {"file_data": "data:text/plain;base64,YQ=="}},
            "an image, a vi",
        ),
    ],
)
def test_media_that_are_refused(part: dict[str, Any], expected: str) -> None:
    error = refusal(showing(part))
    assert error.field == "messages[0].content[0]" and expected in str(error)


def test_videos_and_recordings_are_fetched_too(picture_address, tmp_path) -> None:
    site = picture_address.rpartition("/")[0]
    movie = write_movie(tmp_path / "a.mp4", clip(4), None).read_bytes()
    (tmp_path / "a.wav").write_bytes(wav(0.1))

    def fetched(kind: str, url: str) -> Any:
        body = json.dumps({"messages": [showing({"type": kind, kind: {"url": url}})]}).encode()
        [message] = read_bytes(body, LIMITS, 10**6).question
        return message.media[0].source

    assert fetched("video_url", f"{site}/a.mp4") == movie
    assert fetched("audio_url", f"{site}/a.wav") == wav(0.1)
    for kind, name in (("video_url", "a.wav"), ("audio_url", "a.mp4"), ("video_url", "a.png")):
        noun = "video" if kind == "video_url" else "recording"
        with pytest.raises(FieldError) as refused:
            fetched(kind, f"{site}/{name}")
        assert str(refused.value) == f"messages[0].content[0]: {NOT_FETCHED.format(noun)}"


@pytest.mark.parametrize("data", ["a", "ab=c", "a b=", "\u00fcber", "YQ==YQ=="])
def test_damaged_base64(data: str) -> None:
    for part in (
        {"type": "input_audio", "input_audio": {"data": data}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ):
        error = refusal(showing(part))
        assert "is not valid base64" in str(error) and error.field == "messages[0].content[0]"


def test_large_media() -> None:
    data = bytes(range(256)) * 40_000
    [said] = read(showing(sound(data))).question
    assert [part.source for part in said.media] == [data]
    with pytest.raises(InputError, match=r"messages\[0\].content\[0\]: .* limit of 1,000"):
        read(showing(sound(data)), limits=MediaLimits(max_file_bytes=1000))
    assert encoded(data) not in str(refusal(showing({"type": "text", "text": [encoded(data)]})))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tool_choice": 5}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": 5}},
            "response_format.json_schema",
        ),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"min_p": "0.1"}, "min_p"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"logit_bias": {"a": 5}}, "logit_bias.a"),
        ({"logit_bias": {"1": "5"}}, "logit_bias.1"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"bad_words": "a"}, "bad_words"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids[0]"),
        ({"min_tokens": 1.5}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"best_of": 2}, "best_of"),
        ({"prompt_logprobs": "1"}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"modalities": ["text", "video"]}, "modalities"),
        ({"modalities": "text"}, "modalities"),
        ({"audio": {"voice": "ethan"}}, "audio"),
        ({**SPOKEN, "audio": {"format": "aac"}}, "audio.format"),
        ({**SPOKEN, "audio": {"voice": "a" * 65}}, "audio.voice"),
        ({**SPOKEN, "audio": {"format": "wav"}, "stream": True}, "audio.format"),
        ({**SPOKEN, "stop": ["a"]}, "stop"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ["a", "b" * 257]}, "stop[1]"),
        ({"stop": ""}, "stop[0]"),
        ({"model": 7}, "model"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"cache_salt": ["a"]}, "cache_salt"),
        ({"cache_salt": "a" * 257}, "cache_salt"),
    ],
)
def test_fields_that_are_refused(options: dict, field: str) -> None:
    error = refusal(**options)
    assert error.field == field and str(error).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("options", "by_vllm"),
    [
        ({"use_beam_search": True}, True),
        ({"chat_template": "x"}, True),
        ({"prompt_logprobs": -1}, True),
        ({"prompt_logprobs": 21}, False),
        ({"truncate_prompt_tokens": 5}, True),
        ({"modalities": ["audio"]}, False),
        ({"functions": [{}]}, False),
    ],
)
def test_what_vllm_has_is_named(options: dict, by_vllm: bool) -> None:
    error = refusal(user("Why?"), **options)
    assert error.field == next(iter(options))
    assert ("--engine vllm" in str(error)) is by_vllm


def test_fields_that_change_nothing() -> None:
    read(
        user("Why?"),
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="auto",
        n=1,
        logprobs=False,
        top_logprobs=None,
        min_p=0.0,
        invented=[1, {"a": 2}],
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b'{"messages": "\xff"}', "is not valid JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "is not valid JSON"),
        (b'{"messages": ' + b"[" * 100_000, "is not valid JSON"),
        (b"[]", "the request must be an object"),
        (b"null", "the request must be an object"),
        (b"{}", "messages: is missing"),
        (b'{"messages": []}', "messages: must not be empty"),
        (b'{"messages": ' + b"[]," * MAX_STRUCTURE, "brackets and commas"),
    ],
)
def test_no_request_at_all(body: bytes, expected: str) -> None:
    with pytest.raises(FieldError, match=expected):
        read_bytes(body, LIMITS)
