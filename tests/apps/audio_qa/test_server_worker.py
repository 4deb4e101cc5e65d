"""A run that asks a server: the rows of a local run, and what goes wrong on the way."""

import base64
import io
import json
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from oscar_mm import InputError, OscarOmniPipeline
from oscar_mm.apps.audio_qa import audio_qa, chat_client, cluster, server_worker
from oscar_mm.apps.audio_qa.chat_client import ServerLost
from oscar_mm.apps.audio_qa.engine import AnswerSettings
from oscar_mm.apps.audio_qa.rows import Row, by_recording, named_choice, read_rows
from oscar_mm.apps.audio_qa.server_worker import ServerSettings
from oscar_mm.apps.options import KEY_VARIABLE
from oscar_mm.cli import run
from oscar_mm.media.resample import Audio
from tests.apps.audio_qa.conftest import read_lines, write_lines
from tests.apps.serve.conftest import served
from tests.processes import Forked, command
from tests.prompts import noise, tone
from tests.recordings import write_sound

MEDIA = Path(__file__).parents[3] / "examples" / "media"
NAME = "tiny"
Reply = tuple[int, dict[str, str], Any]
"""Status, headers and JSON of a scripted server's response; a status of 0 breaks the connection."""
ANSWERED: Reply = (
    200,
    {},
    {
        "choices": [{"message": {"content": "seven"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    },
)


@pytest.fixture(autouse=True)
def hasty(monkeypatch) -> None:
    """Requests are sent again soon, without the proxies of this machine."""
    monkeypatch.setattr(chat_client, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(chat_client, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def pocket() -> OscarOmniPipeline:
    return OscarOmniPipeline("pocket-omni", policy="bf16", device="cpu")


def clips(count: int, **fields: Any) -> list[dict[str, Any]]:
    """A question about each of so many clips."""
    return [
        {
            "id": f"{number}",
            "audio": str(MEDIA / "clips" / f"{number:02}.wav"),
            "question": "What was said?",
            **fields,
        }
        for number in range(1, count + 1)
    ]


class Scripted(ThreadingHTTPServer):
    """A server that answers as it is told.

    Attributes:
        reply: its response to the body of a request.
        bodies: those that came.
        most: most requests at once.
    """

    daemon_threads = True
    request_queue_size = 64  # Of more connections at once some would try again after a second.

    def __init__(self, reply: Callable[[dict[str, Any]], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.names: list[str] | None = [NAME]
        self.most, self.running, self.lock = 0, 0, threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """A client that leaves is none."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        names = self.server.names
        if names is None:
            self.respond((404, {}, {"detail": "Not Found"}))
        else:
            self.respond((200, {}, {"data": [{"id": name} for name in names]}))

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            server.running += 1
            server.most = max(server.most, server.running)
        try:
            reply = server.reply(body)
        finally:
            with server.lock:
                server.running -= 1
        self.respond(reply)

    def respond(self, reply: Reply) -> None:
        status, headers, content = reply
        if not status:
            self.close_connection = True
            self.connection.close()
            return
        data = json.dumps(content).encode() if not isinstance(content, bytes) else content
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def scripted(reply: Callable[[dict[str, Any]], Reply] = lambda _: ANSWERED) -> Iterator[Scripted]:
    with Scripted(reply) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def question_of(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"][-1]["text"]


def asked(records: list[dict[str, Any]], folder: Path, url: str, **options: Any) -> Any:
    """The rows of a run, and its summary."""
    file, out = write_lines(folder / "q.jsonl", records), folder / "a.jsonl"
    summary = audio_qa(file, out, server=url, **options)
    return read_lines(out), summary


def test_the_rows_of_a_local_run(pocket, tmp_path) -> None:
    """Answers, tokens, what is right and errors, in the order of the questions; also once more."""
    movie = {"id": "movie", "video": "a.mp4", "question": "What is it?"}
    records = [
        *clips(4, answer="4729"),
        {"id": "gone", "audio": "gone.wav", "question": "What was said?"},
        {"id": "text", "question": "What was said?"},
        {"id": "card", "image": str(MEDIA / "cards" / "01.png"), "question": "What is the code?"},
        {**clips(1)[0], "id": "again", "question": "What is it?"},
        {"id": "empty", "question": ""},
        {**clips(2)[1], "id": "which", "choices": ["4729", "80315"], "answer": "80315"},
    ]
    file = write_lines(tmp_path / "q.jsonl", records)
    options: dict[str, Any] = {"max_new_tokens": 12, "list_choices": True}
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    local = audio_qa(file, here, "pocket-omni", policy="bf16", device="cpu", **options)
    with served(pocket) as url:
        remote = audio_qa(file, there, server=url, concurrency=3, **options)
        content = there.read_bytes()
        again = audio_qa(file, there, server=f"{url}/v1/", model=NAME, **options)
        assert again["work"]["rows"] == 0 and there.read_bytes() == content
    expected, found = read_lines(here), read_lines(there)
    assert list(found) == [record["id"] for record in records]
    for name in ("1", "2", "3", "4", "gone", "text", "card", "again", "empty"):
        for field in ("id", "answer", "correct", "finish_reason", "tokens", "error", "digest"):
            assert found[name][field] == expected[name][field], (name, field)
    assert found["1"]["correct"] is True and found["2"]["correct"] is False
    assert "gone.wav: no such file" in found["gone"]["error"]
    assert found["which"]["finish_reason"] == "choice" and found["which"]["scores"] is None
    assert found.keys() == expected.keys() and found["1"].keys() == expected["1"].keys()
    assert remote["work"]["audio_seconds"] == pytest.approx(local["work"]["audio_seconds"])
    assert (remote["rows"], remote["failed"]) == (10, 2) and remote["accuracy"] is not None
    with served(pocket) as url:
        rows, _ = asked([movie], tmp_path, url)
    assert rows["movie"]["error"] == "a server accepts recordings and images, not videos"


def test_what_a_server_is_sent(tmp_path) -> None:
    write_sound(tmp_path / "0.wav", tone(1.0), rate=44_100)
    Image.fromarray(noise(32, 48, 0)).save(tmp_path / "0.png")
    record = {"audio": "0.wav", "image": "0.png", "question": "What?"}
    with scripted() as server:
        rows, _ = asked(
            [record], tmp_path, server.url, system="Be brief.", max_new_tokens=9, api_key="secret"
        )
    [body], [headers] = server.bodies, server.headers
    system, message = body.pop("messages")
    assert body == {"model": NAME, "temperature": 0, "max_tokens": 9}
    assert system == {"role": "system", "content": "Be brief."}
    image, sound, text = message["content"]
    assert text == {"type": "text", "text": "What?"}
    head, _, data = image["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == (tmp_path / "0.png").read_bytes()
    assert sound["input_audio"]["format"] == "wav"
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(sound["input_audio"]["data"])))
    assert (rate, samples.shape) == (16_000, (16_000,)), "one channel, resampled"
    assert headers["Authorization"] == "Bearer secret"
    assert (rows["1"]["answer"], rows["1"]["tokens"]) == ("seven", 7)
    assert (rows["1"]["kv_bytes"], rows["1"]["kv_ratio"], rows["1"]["error"]) == (0, None, None)


def test_sound_in_16_bit_does_not_change() -> None:
    codes = np.array([-(2**15), -1, 0, 1, 2**15 - 1], np.int16)
    data = server_worker.wav(Audio((codes / 2**15).astype(np.float32), 16_000, 1))
    assert soundfile.read(io.BytesIO(data), dtype="int16")[0].tolist() == codes.tolist()
    loud = server_worker.wav(Audio(np.array([2.0, -2.0], np.float32), 16_000, 1))
    assert soundfile.read(io.BytesIO(loud), dtype="int16")[0].tolist() == [2**15 - 1, -(2**15)]


def test_requests_at_once_are_bounded(tmp_path) -> None:
    def slow(_: dict[str, Any]) -> Reply:
        time.sleep(0.05)
        return ANSWERED

    with scripted(slow) as server:
        records = [{**record, "id": f"{record['id']} {n}"} for n in range(4) for record in clips(3)]
        rows, summary = asked(records, tmp_path, server.url, concurrency=4)
        assert len(rows) == 12 and 2 <= server.most <= 4
        assert list(rows) == [record["id"] for record in records]
        assert summary["failed"] == 0 and summary["work"]["kv_peak_bytes"] == 0
        seconds = sum(soundfile.info(record["audio"]).duration for record in clips(3))
        assert summary["work"]["audio_seconds"] == pytest.approx(seconds), "each recording once"


def test_media_in_memory_are_bounded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(server_worker, "_MAX_BYTES", 1)

    def slow(_: dict[str, Any]) -> Reply:
        time.sleep(0.02)
        return ANSWERED

    with scripted(slow) as server:
        rows, _ = asked(clips(4), tmp_path, server.url, concurrency=4)
        assert len(rows) == 4 and server.most == 1


def test_failures_that_pass(tmp_path) -> None:
    """Each row is asked again, after a lost connection, a full queue or a failed worker."""
    failures: dict[str, list[Reply]] = {
        "a": [(429, {"Retry-After": "0"}, {"error": {"message": "slow down"}})],
        "b": [(0, {}, None), (503, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, b"busy")],
        "c": [(500, {}, {"error": "oh"})] * 3,
    }

    def reply(body: dict[str, Any]) -> Reply:
        left = failures[question_of(body)]
        return left.pop() if left else ANSWERED

    with scripted(reply) as server:
        rows, _ = asked([{"id": id, "question": id} for id in failures], tmp_path, server.url)
    assert [row["answer"] for row in rows.values()] == ["seven"] * 3
    assert len(server.bodies) == 3 + 1 + 2 + 3


def test_failures_that_stay_with_their_row(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(chat_client, "TRIES", 3)
    monkeypatch.setattr(chat_client, "_PATIENCE_S", 0.5)
    replies: dict[str, Reply] = {
        "fine": ANSWERED,
        "long": (400, {}, {"error": {"message": "the conversation\nneeds 9 tokens"}}),
        "model": (404, {}, {"error": {"message": "The model `x` does not exist."}}),
        "large": (413, {}, b"too large"),
        "flagged": (403, {}, {"error": {"message": "moderation"}}),
        "down": (500, {}, {"error": "CUDA error"}),
        "full": (429, {}, {"error": {"message": "slow down"}}),
        "broken": (0, {}, None),
        "strange": (200, {}, {"choices": []}),
        "no JSON": (200, {}, b"<html>"),
        "null": (200, {}, {"choices": [{"message": {"content": None}}], "usage": None}),
    }
    with scripted(lambda body: replies[question_of(body)]) as server:
        rows, summary = asked([{"id": id, "question": id} for id in replies], tmp_path, server.url)
        assert list(rows) == list(replies)
        for name, expected in {
            "long": "the server answered 400: the conversation needs 9 tokens",
            "model": "the server answered 404: The model `x` does not exist.",
            "large": "the server answered 413: too large",
            "flagged": "the server answered 403: moderation",
            "strange": "the server's response is not a chat completion; check its log",
            "no JSON": "the server's response is not a chat completion; check its log",
        }.items():
            assert rows[name]["error"] == expected
        assert "500: CUDA error; tried 3 times in " in rows["down"]["error"]
        tries = re.fullmatch(
            "the server answered 429: slow down; tried ([0-9]+) times in [0-9]+ s",
            rows["full"]["error"],
        )
        assert tries and int(tries[1]) > 3
        assert "the connection failed (RemoteProtocolError" in rows["broken"]["error"]
        assert (rows["null"]["answer"], rows["null"]["error"]) == ("", None)
        assert summary["failed"] == 9
        replies.update(dict.fromkeys(replies, ANSWERED))
        rows, summary = asked(
            [{"id": id, "question": id} for id in replies], tmp_path, server.url, retry_failed=True
        )
        assert summary["failed"] == 0 and summary["work"]["rows"] == 9


@pytest.mark.parametrize("denied", [False, True], ids=["gone", "key revoked"])
def test_a_server_that_goes_away(denied: bool, tmp_path, monkeypatch) -> None:
    """Rows without an answer get no error: the same run goes on with them."""
    monkeypatch.setattr(chat_client, "TRIES", 2)
    gone = threading.Event()

    def reply(body: dict[str, Any]) -> Reply:
        if not gone.is_set() and question_of(body) != "6":
            return ANSWERED
        gone.set()
        if denied:
            return 401, {}, {"error": {"message": "a valid API key is needed"}}
        server.server_close()
        server.socket.close()
        return 0, {}, None

    records = [{"id": f"{n}", "question": f"{n}"} for n in range(20)]
    with scripted(reply) as server, pytest.raises(ServerLost) as lost:
        asked(records, tmp_path, server.url, concurrency=2)
    expected = "401: a valid API key" if denied else "stopped responding: the connection fail"
    assert f"{server.url}/v1: " in str(lost.value) and expected in str(lost.value)
    done = read_lines(tmp_path / "a.jsonl")
    assert 5 <= len(done) <= 7 and all(row["error"] is None for row in done.values())
    with scripted() as server:
        rows, summary = asked(records, tmp_path, server.url)
    assert len(rows) == 20 and summary["work"]["rows"] == 20 - len(done)
    assert list(rows) == [record["id"] for record in records] and summary["failed"] == 0


def test_the_model_of_a_server(tmp_path) -> None:
    record = [{"id": "1", "question": "?"}]
    with scripted() as server:
        asked(record, tmp_path, server.url)
        with pytest.raises(InputError, match="--model other is not one of tiny"):
            asked(record, tmp_path, server.url, model="other", overwrite=True)
        server.names = ["a", "b"]
        with pytest.raises(InputError, match="--model must name one of a, b"):
            asked(record, tmp_path, server.url, overwrite=True)
        asked(record, tmp_path, server.url, model="b", overwrite=True)
        server.names = ["c"]
        with pytest.raises(InputError, match="belongs to another run: model was 'b' and is 'c'"):
            asked(record, tmp_path, server.url)
        server.names = None
        asked(record, tmp_path, server.url, model="any", overwrite=True)
        with pytest.raises(InputError, match="the server answered 404: "):
            asked(record, tmp_path, server.url, overwrite=True)
        assert [body["model"] for body in server.bodies] == [NAME, "b", "any"]


def test_refused(tmp_path, pocket) -> None:
    record = [{"id": "1", "question": "?"}]
    choice = [{"id": "1", "question": "?", "choices": ["a", "b"]}]
    nobody = "http://127.0.0.1:9"
    for records, url, options, expected in (
        (record, nobody, {}, "http://127.0.0.1:9/v1: cannot be reached"),
        (record, "127.0.0.1:8000", {}, "--server 127.0.0.1:8000: must be a URL such as"),
        (record, "http://[", {}, "must be a URL such as"),
        (record, nobody, {"concurrency": 0}, "concurrency=0"),
        (record, nobody, {"policy": "compact"}, "server: policy: only supported without a server"),
        (record, nobody, {"kv_budget": "1GB", "dtype": "float16"}, "server: kv_budget, dtype: "),
        (choice, nobody, {}, "1 rows have choices, which a server does not score"),
    ):
        with pytest.raises(InputError) as refused:
            asked(records, tmp_path, url, overwrite=True, **options)
        assert expected in str(refused.value)
    with served(pocket, api_key="right") as url, pytest.raises(InputError, match="answered 401"):
        asked(record, tmp_path, url, overwrite=True, api_key="wrong")


CHOICES = ("brown", "white", "two dogs")
NAMES_WHITE = [
    *("B", "b.", "b)", "[B]", "(B)", "(B) white", "White.", "**B**", "_B_", "`B`", "“B”", "'B'"),
    *("B)", "- B", "> B.", "B: white", "B - white", "B.white", "B, as the speaker says so."),
    *("B\n\nThe speaker says white.", "The speaker says white.\n\nB", "B, I think.", "B. A bird."),
    *("The answer is B.", "The answer is B", "Answer: B", "**Answer:**\n\nB", "<answer>B</answer>"),
    *("The correct answer is: **B**", "The correct answer is (B) white.", "I would choose B."),
    *("It's B.", "My answer is option B", "Option B", "Option (b)", "Option B is correct."),
    *("B is correct.", "B because it is white", "\\boxed{B}", "\\boxed{\\text{B}}"),
    *("Option A is wrong. The answer is B.", "B. The others, A and C, are wrong."),
    "A. brown\nB. white\nC. two dogs\nThe answer is B.",
    *("（Ｂ）", "Ｂ：white", "【B】", "「B」", "B、白", "B.白色", "答案是B。", "答案：Ｂ"),  # noqa: RUF001
    *("选B", "我选择 B，因为", "正确答案为B"),  # noqa: RUF001
]
NAMES_NONE = [
    *(
        "",
        "Z",
        "Bob",
        "Because",
        "I do not know",
        "A bird",
        "A dog",
        "A's voice",
        "A-flat",
        "A flat",
    ),
    *("A.M. radio", "It is a dog.", "The answer is a dog", "The answer is A dog", "Both"),
    *("What is the answer? A bird.", "The answer is not B.", "Both A and B", "Neither A nor B"),
    *(
        "A or B",
        "A, B",
        "A/B",
        "A & B",
        "A\nB",
        "(A) or (B)",
        "(a) or (b)",
        "A. or B.",
        "A, B and C",
    ),
    *("**A** and **B**", "A. brown or B. white", "The answer is A or B.", "The answer is A, B"),
    *("Option A and option B", "Options A and B", "Answer: A, C", "A、B", "A和B", "答案是A或B"),
    "A. brown\nB. white\nC. two dogs",
    "B\n\nThe answer is C.",
    "The answer is A. No, the answer is B.",
]


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        (NAMES_WHITE, 1),
        (NAMES_NONE, None),
        (["A", "a.", "A: brown", "The answer is A."], 0),
        ([" C: two dogs", "two dogs", "C"], 2),
    ],
)
def test_choices_that_replies_name(replies: list[str], expected: int | None) -> None:
    row = Row("1", "?", choices=CHOICES)
    assert {reply: named_choice(row, reply) for reply in replies} == dict.fromkeys(
        replies, expected
    )


@pytest.mark.parametrize("part", ["\n", "(", "A, ", "A or ", "answer ", "answer the "])
def test_long_replies_are_read_in_time(part: str) -> None:
    start = time.perf_counter()
    assert named_choice(Row("1", "?", choices=CHOICES), part * 20_000) is None
    assert time.perf_counter() - start < 5


def test_choices_and_samples(tmp_path) -> None:
    """A reply that names no choice is wrong."""
    replies = {"good": "B. white", "bad": "I do not know"}

    def reply(body: dict[str, Any]) -> Reply:
        name, *listed = question_of(body).splitlines()
        assert listed == ["A. brown", "B. white", "Answer with the letter."]
        choice = {"message": {"content": replies[name]}, "finish_reason": "stop"}
        return 200, {}, {"choices": [choice]}

    records = [
        {"id": name, "question": name, "choices": ["brown", "white"], "answer": "white"}
        for name in replies
    ]
    samples = tmp_path / "samples.jsonl"
    with scripted(reply) as server:
        rows, summary = asked(
            records, tmp_path, server.url, list_choices=True, samples=samples, concurrency=1
        )
    assert [(row["answer"], row["choice"], row["correct"]) for row in rows.values()] == [
        ("white", 1, True),
        ("I do not know", None, False),
    ]
    assert (summary["choice_accuracy"], summary["exact_match"]) == (0.5, None)
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [(line["acc"], line["filtered_resps"]) for line in lines] == [
        (1.0, ["white"]),
        (0.0, ["I do not know"]),
    ]


def test_a_worker_of_a_cluster(tmp_path) -> None:
    """The plan travels, the worker takes CPUs, and groups come back as they are."""
    records = [*clips(2), {"id": "gone", "audio": "gone.wav", "question": "?"}]
    groups = by_recording(read_rows(write_lines(tmp_path / "q.jsonl", records)))
    with scripted() as server:
        plan = ServerSettings(server.url, AnswerSettings(None), api_key="secret")
        assert "secret" not in repr(plan)
        worker = cluster.ClusterWorker(pickle.loads(pickle.dumps(plan)), cluster.Attempts().begin)
        batch = {"rows": [json.dumps([asdict(row) for row in group]) for group in groups]}
        outputs = list(worker(batch))
    rows = [json.loads(output["result"][0]) for output in outputs]
    assert [row["answer"] for row in rows] == ["seven", "seven", None]
    assert json.loads(outputs[0]["about"][0])["fingerprint"]["model"] == NAME
    resources = {"CPU": 6.0, "GPU": 8.0}
    assert cluster._share_cluster(resources, plan, None, 2) == (3, {"num_cpus": 2})


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_cluster_of_workers(tmp_path) -> None:
    pytest.importorskip("ray", reason="needs ray: run pip install '.[batch]'")
    with scripted() as server:
        rows, summary = asked(clips(4), tmp_path, server.url, ray="local", workers=2)
    assert [row["answer"] for row in rows.values()] == ["seven"] * 4
    assert summary["work"]["audio_seconds"] > 1


def test_command(tmp_path, capsys, monkeypatch) -> None:
    file, out = write_lines(tmp_path / "q.jsonl", clips(2)), tmp_path / "a.jsonl"
    key = tmp_path / "key"
    key.write_text("secret\n")
    with scripted() as server:
        words = ["audio-qa", str(file), "--out", str(out), "--server", server.url]
        assert run([*words, "--concurrency", "2", "--api-key-file", str(key)]) == 0
        shown = capsys.readouterr()
        assert "2 rows in" in shown.out and shown.err == "", "no model is chosen here"
        assert server.headers[0]["Authorization"] == "Bearer secret"
        assert run([*words, "--model", "other", "--overwrite"]) == 2
        assert "--model other is not one" in capsys.readouterr().err
        assert run([*words, "--kv-budget", "1GB"]) == 2
        assert "kv_budget: only supported without a server" in capsys.readouterr().err
    monkeypatch.setattr(chat_client, "TRIES", 1)
    assert run([*words, "--overwrite"]) == 2
    assert "cannot be reached (ConnectError" in capsys.readouterr().err


def test_a_running_loop_does_not_matter(tmp_path) -> None:
    """As in a notebook."""
    import asyncio

    async def cell(url: str) -> Any:
        return asked([{"id": "1", "question": "?"}], tmp_path, url)

    with scripted() as server:
        rows, _ = asyncio.run(cell(server.url))
    assert rows["1"]["answer"] == "seven"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_ended_and_resumed(sent: signal.Signals, tmp_path) -> None:
    def slow(_: dict[str, Any]) -> Reply:
        time.sleep(0.2)
        return ANSWERED

    records = [{"id": f"{n}", "question": "?"} for n in range(40)]
    file, out = write_lines(tmp_path / "q.jsonl", records), tmp_path / "a.jsonl"
    with scripted(slow) as server:
        words = ["audio-qa", str(file), "--out", str(out), "--server", server.url]
        with Forked(command, *words, "--concurrency", "2") as process:
            deadline = time.monotonic() + 100
            while not out.exists() or out.read_bytes().count(b"\n") < 3:
                assert process.runs() and time.monotonic() < deadline
                time.sleep(0.01)
            os.kill(process.pid, sent)
            start = time.monotonic()
            code, _, errors = process.end()
        assert time.monotonic() - start < 10 and b"Traceback" not in errors
        assert code == (-signal.SIGKILL if sent is signal.SIGKILL else 130)
        left = out.read_bytes()
        assert left.endswith(b"\n") and 3 <= left.count(b"\n") < 40
        server.reply = lambda _: ANSWERED
        rows, summary = asked(records, tmp_path, server.url)
    assert summary["work"]["rows"] == 40 - left.count(b"\n") and summary["failed"] == 0
    assert list(rows) == [record["id"] for record in records]


@pytest.mark.slow
def test_limits_of_our_server(pocket, tmp_path) -> None:
    """A full queue passes; a request that is too large is refused before it is sent as a whole."""
    write_sound(tmp_path / "long.wav", tone(300.0), rate=16_000, layout="mono")
    records = [*clips(6), {"id": "long", "audio": "long.wav", "question": "?"}]
    with served(pocket, running=1, waiting=0, max_request_bytes=1_000_000) as url:
        rows, summary = asked(records, tmp_path, url, concurrency=3, max_new_tokens=12)
    assert summary["failed"] == 1 and rows["3"]["answer"] == "tiger"
    assert rows["long"]["error"].startswith("the server answered 413: ")
