"""The service: asked by the official client, continued on kept caches, bounded."""

import json
import socket
import threading
import time
import urllib.request
from collections import deque
from typing import Any

import openai
import pytest

from oscar_mm import OscarOmniPipeline, OscarVLPipeline
from oscar_mm.engine.answer import Reasoning
from oscar_mm.errors import RequestTooLarge
from oscar_mm.pages.layout import PAGE_TOKENS
from tests.apps.serve.conftest import encoded, image, png, served, sound, text, user, wav
from tests.engine.engine import counted
from tests.engine.engine_waits import engine_waits
from tests.pipelines.conftest import NEVER
from tests.prompts import clip, tone
from tests.recordings import write_movie
from tests.thinking import ids_of, saying

SHOWN = user(image(png()), sound(wav()), text("What is it?"))


def ask(client: Any, *messages: dict[str, Any], **options: Any) -> Any:
    options = {"model": "tiny", "max_tokens": 6} | options
    return client.chat.completions.create(messages=list(messages), **options)


def client_of(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)


def metrics(address: str, key: str | None = "secret") -> dict[str, float]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/metrics", headers=headers)) as x:
        lines = x.read().decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


def test_answers_are_those_of_the_chat(omni, client) -> None:
    answer = ask(client, {"role": "system", "content": "Be brief."}, SHOWN)
    with omni.chat("Be brief.") as chat:
        expected = chat.ask("What is it?", images=[png()], audio=[wav()], max_new_tokens=6)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "length" and answer.model == "tiny"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, 6)
    assert usage.total_tokens == usage.prompt_tokens + 6
    assert usage.prompt_tokens_details.audio_tokens == 13
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.kv_bytes > usage.kv_bytes_by_modality["audio"] > 0
    assert usage.kv_ratio > 0


def test_texts_and_media_keep_their_order(omni, client) -> None:
    """As few-shot prompts need it; another order is another conversation."""
    shown = [text("First:"), image(png()), text("second:"), image(png(1)), text("Which?")]
    answer = ask(client, user(*shown))
    with omni.chat() as chat:
        expected = chat.ask(parts=shown, max_new_tokens=6)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    past = {"role": "assistant", "content": expected.text}
    for parts, passes in ((shown, 1), ([shown[1], shown[0], *shown[2:]], 2)):
        with counted(omni.model.get_decoder().layers[:1]) as found:
            ask(client, user(*parts), past, user("Sure?"), max_tokens=1)
        assert found == [passes]


def test_a_video(omni, client, tmp_path) -> None:
    path = write_movie(tmp_path / "a.mp4", clip(8), tone(1.0))
    url = f"data:video/mp4;base64,{encoded(path.read_bytes())}"
    shown = {"type": "video_url", "video_url": {"url": url}}
    answer = ask(client, user(text("What happens?"), shown))
    with omni.chat() as chat:
        parts = ["What happens?", {"type": "video", "video": path}]
        expected = chat.ask(parts=parts, max_new_tokens=6)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.kv_bytes_by_modality["video"] > 0


def test_a_conversation_goes_on_from_its_cache(omni, client) -> None:
    messages, read = [SHOWN], []
    hook = omni.model.register_forward_pre_hook(
        lambda _, __, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with omni.chat() as chat:
        expected = chat.ask("What is it?", images=[png()], audio=[wav()], max_new_tokens=6)
        for question in ("And now?", "Why is that?"):
            answer = ask(client, *messages)
            assert answer.choices[0].message.content == expected.text
            messages += [{"role": "assistant", "content": expected.text}, user(question)]
            expected = chat.ask(question, max_new_tokens=6)
        read.clear()
        answer = ask(client, *messages)
        assert answer.choices[0].message.content == expected.text
        known = chat.turns[-1].start // PAGE_TOKENS * PAGE_TOKENS
        assert answer.usage.prompt_tokens_details.cached_tokens == known
        assert max(read) < 30
        # The same again, as a client that wants another try.
        assert ask(client, *messages).choices[0].message.content == expected.text
    hook.remove()


def test_an_unknown_past_is_read(omni, client) -> None:
    past = [SHOWN, {"role": "assistant", "content": "Two dogs."}, user("Which colour?")]
    more = [{"role": "assistant", "content": [text("brown")]}, user("Sure?")]
    with omni.chat() as chat:
        chat.tell("What is it?", "Two dogs.", images=[png()], audio=[wav()])
        chat.tell("Which colour?", "brown")
        held = chat.turns[0].stop
        expected = chat.ask("Sure?", max_new_tokens=6)
    with counted(omni.model.get_decoder().layers[:1]) as passes:
        answer = ask(client, *past, *more)
    assert passes == [3], "a turn with media, the other one and the question"
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.prompt_tokens > held
    # Another picture is another conversation.
    other = ask(client, user(sound(wav()), image(png(1)), text("What is it?")), *past[1:], *more)
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_streamed(client) -> None:
    whole = ask(client, SHOWN, max_tokens=12)
    stream = ask(client, SHOWN, max_tokens=12, stream=True, stream_options={"include_usage": True})
    assert stream.response.headers["x-accel-buffering"] == "no", "nginx sends each part at once"
    parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == (
        whole.choices[0].message.content
    )
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == 12
    assert len({part.id for part in parts}) == 1


def test_sampling(client) -> None:
    def said(**options: Any) -> str:
        return ask(client, user("Why?"), max_tokens=8, **options).choices[0].message.content

    seeded = [said(temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    greedy = said()
    stop = greedy[2:4]
    assert said(stop=stop) == greedy[: greedy.index(stop)]
    kept = said(stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept == greedy[: greedy.index(stop) + 2]


def test_options_of_sampling_are_those_of_the_chat(omni, client) -> None:
    with omni.chat() as chat:
        first = chat.ask("Why?", max_new_tokens=12).token_ids
    ours = {
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "logit_bias": {first[0]: -100, first[1]: 3.5},
        "bad_words": [omni.processor.tokenizer.decode(first[3:4])],
        "min_p": 0.1,
        "stop_token_ids": first[6:7],
        "min_tokens": 9,
    }
    with omni.chat() as chat:
        expected = chat.ask("Why?", max_new_tokens=12, **ours)
    own = {name: ours.pop(name) for name in ("bad_words", "min_p", "stop_token_ids", "min_tokens")}
    answer = ask(client, user("Why?"), max_tokens=12, **ours, extra_body=own)
    assert answer.choices[0].message.content == expected.text
    assert expected.token_ids[:1] != first[:1]


def test_structured_output(client) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer"}},
        "required": ["kind", "legs"],
        "additionalProperties": False,
    }
    format_ = {"name": "animal", "strict": True, "schema": schema}
    options = {"response_format": {"type": "json_schema", "json_schema": format_}}
    for stream in (False, True):
        answer = ask(client, SHOWN, max_tokens=400, stream=stream, temperature=1, **options)
        if stream:
            parts = [part.choices[0] for part in answer]
            said = "".join(part.delta.content or "" for part in parts)
            reason = parts[-1].finish_reason
        else:
            said, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        if reason == "stop":
            assert json.loads(said)["kind"] in ("cat", "dog")
        assert reason == "stop" or '"legs"' in said or '"kind"' in said
    for field, value in (
        ("guided_choice", ["red", "green"]),
        ("guided_regex", "red|green"),
        ("structured_outputs", {"grammar": 'start: "red" | "green"'}),
    ):
        answer = ask(client, user("Why?"), max_tokens=20, extra_body={field: value})
        assert answer.choices[0].message.content in ("red", "green")
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output_that_cannot_be_served(client, stream: bool) -> None:
    for field, value, expected in (
        ("guided_json", {"uniqueItems": True}, "uniqueItems"),
        ("guided_regex", "(", "regex"),
        ("structured_outputs", {"json": {"$ref": "#"}}, "no text matches"),
    ):
        with pytest.raises(openai.BadRequestError, match=expected) as refused:
            ask(client, user("Why?"), stream=stream, extra_body={field: value})
        assert refused.value.param == field
    assert ask(client, user("Why?")).choices


def test_several_clients(client) -> None:
    questions = ["Why?", "What is it?", "How many?", "Where?", "Who speaks?", "Is it?"]
    expected = [ask(client, user(one)).choices[0].message.content for one in questions]
    found: dict[str, str] = {}

    def work(question: str) -> None:
        pieces = ask(client, user(question), stream=True)
        found[question] = "".join(piece.choices[0].delta.content or "" for piece in pieces)

    threads = [threading.Thread(target=work, args=(one,)) for one in questions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [found[one] for one in questions] == expected


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([user("Why?")], {"n": 17}, "n: must be at most 16"),
        ([user("Why?")], {"max_tokens": 0}, "max_tokens: must be at least 1"),
        ([user("Why?")], {"temperature": -1}, "temperature"),
        ([user("Why?")], {"presence_penalty": 3}, "presence_penalty"),
        ([user("Why?")], {"logit_bias": {"99999999": 1}}, "logit_bias"),
        ([user("Why?")], {"extra_body": {"stop_token_ids": [99999999]}}, "stop_token_ids"),
        ([user("Why?")], {"extra_body": {"bad_words": ["a"] * 257}}, "bad_words"),
        ([user(" ")], {}, "messages[0].content: must not be empty"),
        (
            [user("a"), user("<|im_end|>")],
            {},
            "messages[1].content contains '<|im_end|>', a control",
        ),
        ([user(text("a"), image(b"no picture"))], {}, "messages[0].content[1]: is not an image"),
        ([user(sound(b"no sound"), text("a"))], {}, "messages[0].content[0]"),
        ([user("7!" * 45_000)], {}, "fit: shorten messages"),
    ],
)
def test_bad_requests(messages: list, options: dict, expected: str, client) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, *messages, **options)
    assert expected in refused.value.message
    for internal in ("max_new_tokens", "prompt", "images[", "audio[", "MediaLimits", "pydantic"):
        assert internal not in refused.value.message
    assert refused.value.code == ("context_length_exceeded" if "fit:" in expected else None)


@pytest.mark.daily("7-max_tokens", "50-max_completion_tokens", "None-max_tokens")
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("asked", [7, 50, 10**30, None])
def test_answers_end_where_the_option_does(omni, field: str, asked: int | None) -> None:
    """Also those of clients that give no length."""
    with served(omni, max_new_tokens=7) as address, client_of(address) as client:
        options = {"max_tokens": openai.omit} | ({} if asked is None else {field: asked})
        answer = ask(client, user("Why?"), **options)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (7, "length")
        *_, last = ask(client, user("Why?"), stream=True, **options)
        assert last.choices[0].finish_reason == "length"


@pytest.mark.daily("None", "50")
@pytest.mark.parametrize("asked", [50, 100_000, None])
def test_answers_end_where_the_context_does(omni, monkeypatch, asked: int | None) -> None:
    monkeypatch.setattr(omni.admission, "max_context", 60)
    with served(omni) as address, client_of(address) as client:
        past = [user("Why?")]
        for _ in range(3):
            answer = ask(client, *past, max_tokens=asked or openai.omit)
            usage = answer.usage
            assert usage.total_tokens == 60 and answer.choices[0].finish_reason == "length"
            # Told in a few tokens, as the whole answer leaves no room.
            past += [{"role": "assistant", "content": "Hm."}, user("So?")]
        with pytest.raises(openai.BadRequestError, match="but only 60 fit") as refused:
            ask(client, *past, user("Is it? " * 20), max_tokens=asked or openai.omit)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.daily("2000")
@pytest.mark.parametrize("asked", [2000, 100_000])
def test_answers_end_where_the_budget_does(qwen3_omni_folder, asked: int) -> None:
    pipe = OscarOmniPipeline(qwen3_omni_folder, policy="bf16", device="cpu", kv_budget=100_000)
    pipe.model.generation_config.eos_token_id = NEVER
    with served(pipe) as address, client_of(address) as client:
        answer = ask(client, user("Why?"), max_tokens=asked)
        written = answer.usage.completion_tokens
        assert answer.choices[0].finish_reason == "length" and 20 < written < asked
        # The same length fits when it is asked for, and one more does not.
        with pipe.chat() as chat:
            assert len(chat.ask("Why?", max_new_tokens=written).token_ids) == written
        with pipe.chat() as chat, pytest.raises(RequestTooLarge):
            chat.ask("Why?", max_new_tokens=written + 1)


@pytest.mark.daily("4", "1000")
@pytest.mark.parametrize("running", [1, 4, 1000])
def test_clients_that_give_no_length(qwen3_omni_folder, monkeypatch, running: int) -> None:
    """They get what the context has, up to their share of the memory, and others what they ask
    for."""
    from oscar_mm.apps.serve import service as serving

    assert serving._MIN_DEFAULT_ANSWER == 1024
    monkeypatch.setattr(serving, "_MIN_DEFAULT_ANSWER", 20)
    pipe = OscarOmniPipeline(
        qwen3_omni_folder, policy="bf16", device="cpu", kv_budget=600_000, max_context=150
    )
    pipe.model.generation_config.eos_token_id = NEVER
    with served(pipe, running=running) as address, client_of(address) as client:
        usage = ask(client, user("Why?"), max_tokens=openai.omit).usage
        assert ask(client, user("Why?"), max_tokens=30).usage.completion_tokens == 30
    per_token = usage.kv_bytes / (usage.total_tokens - 1)
    share = 600_000 / running
    if running == 1:
        assert usage.total_tokens == 150 and 150 * per_token < share
    elif running == 4:
        written = usage.completion_tokens
        assert 20 < written < 140 and written * per_token == pytest.approx(share, rel=0.15)
    else:
        assert usage.completion_tokens == 20


def test_a_conversation_that_is_too_long(omni, monkeypatch) -> None:
    monkeypatch.setattr(omni.admission, "max_context", 80)
    first = [user(image(png()), text("What?")), {"role": "assistant", "content": "A dog."}]
    with served(omni, max_new_tokens=6) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        assert ask(client, first[0]).choices
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="but only 80 fit") as found:
                ask(client, *first, user(sound(wav(4.0)), text("And?")), stream=stream)
            assert found.value.code == "context_length_exceeded"
        assert ask(client, first[0]).choices, "nothing was lost"


def test_limits_and_key(omni, address, client) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        ask(client, user("a" * 200_001))
    assert refused.value.status_code == 413
    # At once, though the body never comes.
    host, port = address.removeprefix("http://").split(":")
    for size in (10**12, 10**40):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret"
            kind = "Content-Type: application/json"
            connection.sendall(f"{head}\r\n{kind}\r\nContent-Length: {size}\r\n\r\n".encode())
            assert connection.recv(1000).startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))
    for key in ("wrong", "", "sec\u00fc"):
        with pytest.raises(urllib.error.HTTPError) as denied:
            metrics(address, key.encode().decode("latin-1"))
        assert denied.value.code == 401
    with pytest.raises(openai.AuthenticationError):
        ask(client.with_options(api_key="wrong"), user("Why?"))
    with urllib.request.urlopen(f"{address}/health") as answer:
        assert answer.read() == b"ok"
    assert [model.id for model in client.models.list()] == ["tiny"]
    with served(omni, running=1, waiting=0) as other:
        busy = openai.OpenAI(base_url=f"{other}/v1", api_key="none", max_retries=0)
        with ask(busy, user("Why?"), stream=True, max_tokens=1000) as running:
            next(iter(running))
            with pytest.raises(openai.RateLimitError) as refused:
                ask(busy, user("Why?"))
            assert int(refused.value.response.headers["retry-after"]) > 0


def test_a_disconnect_frees_the_place(omni) -> None:
    before = omni.store.memory().used_bytes
    with served(omni, running=1, waiting=1, conversations=2) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        stream = ask(client, user("Why?"), stream=True, max_tokens=1000)
        next(iter(stream))
        stream.close()
        for question in ("What is it?", "How many?", "Where?"):
            assert ask(client, user(question)).usage.completion_tokens == 6
        found = metrics(address, None)
        assert found["oscar_mm_conversations"] == 2 and found["oscar_mm_running"] == 0
        assert found['oscar_mm_requests_total{status="200"}'] == 3
        assert omni.store.memory().used_bytes > before
    deadline = time.monotonic() + 10
    while omni.store.memory().used_bytes > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_metrics(address, client) -> None:
    before = metrics(address)
    ask(client, SHOWN)
    with pytest.raises(openai.BadRequestError):
        ask(client)
    after = metrics(address)

    def rise(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert rise('oscar_mm_requests_total{status="200"}') == 1
    assert rise('oscar_mm_requests_total{status="400"}') == 1
    assert rise('oscar_mm_tokens_total{kind="completion"}') == 6
    assert rise('oscar_mm_tokens_total{kind="prompt"}') > 30
    assert rise("oscar_mm_first_token_seconds_count") == 1
    assert 1 <= rise("oscar_mm_inter_token_seconds_count") <= 5
    assert rise("oscar_mm_queue_seconds_count") == 1
    for modality in ("audio", "image", "text"):
        assert after[f'oscar_mm_kv_bytes{{modality="{modality}"}}'] > 0
    held = sum(value for name, value in after.items() if name.startswith("oscar_mm_kv_bytes"))
    assert held <= after["oscar_mm_kv_pool_bytes"]
    assert after["oscar_mm_waiting"] == after["oscar_mm_running"] == 0
    assert after["oscar_mm_decoding"] == after["oscar_mm_prompts_waiting"] == 0


def test_metrics_of_answers_that_run(omni) -> None:
    with served(omni, max_new_tokens=2000) as where:
        client = openai.OpenAI(base_url=f"{where}/v1", api_key="none", max_retries=0)
        with ask(client, user("Why?"), stream=True, max_tokens=2000) as stream:
            for count, _ in enumerate(stream):
                if count == 5:
                    break
            found = metrics(where, None)
        assert found["oscar_mm_running"] == found["oscar_mm_decoding"] == 1
        assert found['oscar_mm_tokens_total{kind="completion"}'] >= 3
        assert found["oscar_mm_inter_token_seconds_count"] >= 3


def test_the_first_token_counts_the_queue(omni) -> None:
    with served(omni, running=1, max_new_tokens=2000) as where:
        client = openai.OpenAI(base_url=f"{where}/v1", api_key="none", max_retries=0)
        with ask(client, user("Why?"), stream=True, max_tokens=2000) as stream:
            next(iter(stream))
            later = threading.Thread(target=ask, args=(client, user("Who?")))
            later.start()
            time.sleep(0.7)
        later.join(20)
        found = metrics(where, None)
    for name in ("first_token", "queue"):
        assert found[f"oscar_mm_{name}_seconds_count"] == 2
        assert found[f"oscar_mm_{name}_seconds_sum"] > 0.5


def test_metrics_do_not_wait_for_a_long_prompt(omni) -> None:
    """The memory is that of the last time."""
    with served(omni) as where:
        client = openai.OpenAI(base_url=f"{where}/v1", api_key="none", max_retries=0)
        ask(client, SHOWN)
        before = metrics(where, None)
        with engine_waits(omni):
            start = time.monotonic()
            during = metrics(where, None)
            assert time.monotonic() - start < 5
        pages = {name: value for name, value in before.items() if "_kv_" in name}
        assert pages and pages.items() <= during.items()


def test_metrics_of_known_beginnings(qwen3_omni_folder) -> None:
    pipe = OscarOmniPipeline(qwen3_omni_folder, device="cpu", prefix_cache="100MB")
    with served(pipe) as where:
        client = openai.OpenAI(base_url=f"{where}/v1", api_key="none", max_retries=0)
        cached = []
        for question in ("What is it?", "Who is it?"):
            shown = (image(png(seed)) for seed in range(30))
            answer = ask(client, user(*shown, text(question)))
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        found = metrics(where, None)
    assert (found["oscar_mm_prefix_hits_total"], found["oscar_mm_prefix_misses_total"]) == (1, 1)
    saved = int(found["oscar_mm_prefix_tokens_saved_total"])
    assert cached == [0, saved // PAGE_TOKENS * PAGE_TOKENS] and saved > PAGE_TOKENS


def test_pieces_that_wait_are_joined() -> None:
    from oscar_mm.apps.serve.running_answer import joined

    waiting = deque([Reasoning("It"), Reasoning(" is"), "A", " dog", "."])
    found = list(joined(waiting))
    assert found == ["It is", "A dog."] and not waiting
    assert [type(piece) for piece in found] == [Reasoning, str]


def test_reasoning_is_apart_from_the_content(qwen3_vl_thinking_folder) -> None:
    pipe = OscarVLPipeline(qwen3_vl_thinking_folder, policy="compact", device="cpu")
    said = ids_of(pipe, "It is a picture.\n</think>\n\nA sign.")
    question = user(image(png()), text("What is it?"))
    with (
        served(pipe) as where,
        openai.OpenAI(base_url=f"{where}/v1", api_key="any", max_retries=0) as client,
    ):
        with saying(pipe, said):
            message = ask(client, question, max_tokens=40).choices[0].message
        assert message.content == "A sign."
        assert message.reasoning == message.reasoning_content == "It is a picture."
        past = [question, {"role": "assistant", "content": message.content}]
        with saying(pipe, said):
            deltas = [
                one.choices[0].delta
                for one in ask(client, *past, user("Where?"), max_tokens=40, stream=True)
            ]
        assert "".join(one.content or "" for one in deltas) == "A sign."
        for name in ("reasoning", "reasoning_content"):
            reasoning = [getattr(one, name, None) or "" for one in deltas]
            assert (
                "".join(reasoning) == "It is a picture." and len(list(filter(None, reasoning))) > 1
            )
        # The earlier turn is held, but for what it said, which is read without its reasoning.
        assert metrics(where, None)['oscar_mm_tokens_total{kind="cached"}'] > 10
        with saying(pipe, said):
            cut = ask(client, question, max_tokens=3).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("", "length")
    assert "It is a picture.".startswith(cut.message.reasoning_content)
