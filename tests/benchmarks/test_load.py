"""The load benchmark against small servers, and against one that speaks as vLLM does."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="needs the openai package")
pytest.importorskip("fastapi", reason="needs fastapi")

from benchmarks import load
from benchmarks.client_loop import Loop
from benchmarks.load import KINDS, answered_kinds, figures, measure, prompts
from benchmarks.openai_server import Exchange, Load, Server, traffic
from benchmarks.random_model import make_endless, random_pipeline
from benchmarks.record import Record
from oscar_mm.pipelines.pipeline import Pipeline
from tests.apps.serve.conftest import served


@pytest.fixture(scope="module")
def endless() -> Pipeline:
    return make_endless(random_pipeline("qwen3-omni-30b-a3b", tiny=True, device="cpu"))


def completion_tokens(address: str) -> int:
    page = urllib.request.urlopen(f"{address}/metrics").read().decode()
    [line] = [x for x in page.splitlines() if 'oscar_mm_tokens_total{kind="completion"}' in x]
    return int(float(line.split()[-1]))


@pytest.mark.slow
def test_each_token_of_an_endless_answer_arrives(endless: Pipeline) -> None:
    with served(endless) as address:
        one = Load(f"{address}/v1", "none", "tiny", {"temperature": 0}, prompts(KINDS, 20), 9, 1.0)
        one.clients = 2
        other = Load(**vars(one) | {"first": 2, "clients": 1, "seed": 1})
        exchanges = traffic([one, other]).exchanges
        assert completion_tokens(address) == sum(exchange.tokens for exchange in exchanges)
    assert {exchange.client for exchange in exchanges} == {0, 1, 2}
    assert {exchange.kind for exchange in exchanges} == set(KINDS)
    for exchange in exchanges:
        assert exchange.status == "200"
        # The server joins pieces that wait.
        assert 1 <= len(exchange.pieces) <= exchange.tokens == exchange.asked
        moments = [0.0, exchange.sent, *exchange.pieces, exchange.ended]
        assert moments == sorted(moments)


@pytest.mark.slow
def test_a_closed_loop_and_arrivals_with_clients_that_leave(endless: Pipeline) -> None:
    with served(endless) as address:
        server = Server(f"{address}/v1/")
        assert answered_kinds(server, KINDS) == [*KINDS]
        sizes = {"new_tokens": 12, "seconds": 1.5}
        row = measure(server, prompts(KINDS, 20), clients=3, processes=2, **sizes)
        assert row["run"] == "3 clients" and row["requests"] >= 3
        assert row["by status"] == {"200": row["requests"]} and row["ended early"] == 0
        assert row["tokens/s"] > 0 and 0 <= row["least share"] <= 1
        for name in ("first token", "between tokens"):
            assert 0 < row[f"{name} p50 ms"] <= row[f"{name} p99 ms"]
        assert row["longest wait s"] * 1000 >= row["between tokens p50 ms"]
        assert 1 <= row["running peak"] <= 3 and row["running end"] == row["waiting end"] == 0
        assert all(row["KV bytes peak"][kind] > 0 for kind in ("text", "image", "audio"))
        assert row["server's means ms"]["first token"] > 0 and "RSS MB peak" not in row
        sizes["new_tokens"] = 48
        row = measure(server, prompts(["text"], 20), rate=8.0, leave=1.0, **sizes)
        assert row["run"] == "8 requests/s, 100% leave"
        # Who is to leave at a piece that was joined with the last one does not.
        assert row["by status"]["left"] >= 0.7 * row["requests"] and row["running end"] == 0


@pytest.mark.slow
def test_a_greedy_user_does_not_count(endless: Pipeline) -> None:
    with served(endless, running=1) as address:
        server = Server(address)
        sizes = {"new_tokens": 12, "seconds": 1.5, "clients": 2, "greedy": 6}
        row = measure(server, prompts(["text"], 20), **sizes)
    assert row["run"] == "2 clients, 6 requests of another user"
    assert row["waiting peak"] >= 5 and row["by status"] == {"200": row["requests"]}
    assert row["tokens/s"] > 0 and 0 <= row["least share"] <= 1


@pytest.mark.slow
def test_refused_requests_are_counted(endless: Pipeline) -> None:
    with served(endless, running=1, waiting=0) as address:
        server = Server(address)
        row = measure(server, prompts(["text"], 20), clients=3, new_tokens=40, seconds=1.0)
    assert set(row["by status"]) == {"200", "429"}
    assert sum(row["by status"].values()) == row["requests"]


def test_prompts_of_about_so_many_tokens(endless: Pipeline) -> None:
    with served(endless) as address:
        server = Server(address)
        count = load.words_of_tokens(server, 900)
        assert server.prompt_tokens(prompts(["text"], count)[1]) == pytest.approx(900, rel=0.1)


def test_figures_are_of_the_steady_window() -> None:
    exchanges = [
        Exchange(0, "text", 4, 1.0, [2.0, 3.0, 4.0, 6.0], 6.0, 4, "200"),
        # Two tokens a piece; fewer than asked for.
        Exchange(1, "text", 9, 3.0, [5.0, 5.5], 6.0, 4, "200"),
        # After the end.
        Exchange(0, "text", 4, 6.5, [9.0], 9.0, 1, "left"),
        Exchange(1, "text", 4, 6.5, [], 6.5, 0, "503"),
    ]
    row = figures(exchanges, 8.0, 2)
    assert row["by status"] == {"200": 2, "503": 1, "left": 1} and row["ended early"] == 1
    assert row["tokens/s"] == round((4 + 4) / 6.0, 1) and row["least share"] == 1.0
    assert row["first token p50 ms"] == 1500.0
    assert row["between tokens p50 ms"] == 1000.0 and row["longest wait s"] == 2.5
    assert "least share" not in figures(exchanges, 8.0, 0)
    assert figures([], 8.0, 1)["first token p50 ms"] is None


class _LikeVllm(BaseHTTPRequestHandler):
    """Answers with four tokens in two pieces, and refuses recordings."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._reply(
                'vllm:num_requests_running{engine="0"} 0.0\n'
                'vllm:num_requests_waiting{engine="0"} 2.0\n'
                'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
            )
        else:
            card = {"id": "other", "object": "model", "created": 0, "owned_by": "vllm"}
            self._reply(json.dumps({"object": "list", "data": [card]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["ignore_eos"] is True and body["model"] == "other"
        usage = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
        head = {"id": "x", "created": 0, "model": "other"}
        if any(part["type"] == "input_audio" for part in body["messages"][0]["content"]):
            self._reply('{"error": {"message": "At most 0 audio(s)"}}', status=400)
        elif not body.get("stream"):
            message = {"role": "assistant", "content": "a b c d"}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            kind = {"object": "chat.completion"}
            self._reply(json.dumps(head | kind | {"choices": [choice], "usage": usage}))
        else:
            deltas = [{"role": "assistant", "content": ""}, {"content": "a b"}, {"content": "c d"}]
            events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
            kind = {"object": "chat.completion.chunk"}
            lines = [head | kind | event for event in [*events, {"choices": [], "usage": usage}]]
            text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines)
            self._reply(f"{text}data: [DONE]\n\n", "text/event-stream")

    def _reply(self, text: str, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def like_vllm() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _LikeVllm)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_the_same_load_against_another_server(
    like_vllm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--against", like_vllm, "--device", "cpu", "--seconds", "1"]
    arguments += ["--new-tokens", "4", "--out", str(tmp_path)]
    assert load.main([*arguments, "--clients", "1,2", "--processes", "1"]) == 0
    assert load.main([*arguments, "--rate", "20", "--processes", "1", "--add"]) == 0
    [path] = tmp_path.iterdir()
    rows = Record.load(path).rows
    assert [row["run"] for row in rows] == ["1 client", "2 clients", "20 requests/s"]
    assert rows[1]["speedup"] == pytest.approx(rows[1]["tokens/s"] / rows[0]["tokens/s"], abs=0.01)
    for row in rows:
        assert (row["server"], row["model"], row["prompts"]) == ("vllm", "other", "text,pictures")
        assert row["by status"] == {"200": row["requests"]} and row["tokens/s"] > 0
        assert (row["running peak"], row["waiting end"]) == (0, 2)
        assert "KV bytes peak" not in row and "RSS MB peak" not in row
    assert "no recordings: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_of_its_own_with_a_random_model(tmp_path: Path) -> None:
    arguments = ["--model", "qwen3-vl-8b", "--tiny", "--device", "cpu", "--clients", "2"]
    arguments += ["--seconds", "1", "--new-tokens", "8", "--prompts", "text,pictures"]
    serve = ["--serve-options", "--policy compact --running 2", "--out", str(tmp_path)]
    assert load.main([*arguments, *serve]) == 0
    [path] = tmp_path.iterdir()
    [row] = Record.load(path).rows
    assert (row["server"], row["model"]) == ("oscar_mm", "qwen3-vl-8b, tiny")
    assert row["by status"] == {"200": row["requests"]} and row["ended early"] == 0
    assert row["RSS MB peak"] > 0 and row["KV bytes end"]["audio"] == 0


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, message in (
        (["--prompts", "text,films"], "unknown prompts: films; choose from text"),
        (["--leave", "2"], "--leave must be from 0 to 1"),
        (["--clients", "0"], "must be above 0"),
        (["--rate", "1", "--greedy", "9"], "--greedy must not be negative, and requires --clients"),
    ):
        with pytest.raises(SystemExit):
            load.main(wrong)
        assert message in capsys.readouterr().err


def test_the_engine_alone(endless: Pipeline) -> None:
    loop = Loop("tiny", prompt=10, new_tokens=8, seconds=0.5, clients=3)
    row = load.engine_alone(endless, ["What?", "Why?"], loop)
    assert row.keys() == {"run", "tokens/s"}
    assert row["run"] == "3 answers, engine alone" and row["tokens/s"] > 0
