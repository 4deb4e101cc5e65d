"""`oscar-mm serve --engine vllm`: vLLM's arguments, what is refused, and the process it becomes."""

import json
import os
import signal
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from oscar_mm.apps.options import KEY_VARIABLE
from oscar_mm.apps.serve import vllm_server
from oscar_mm.apps.serve.command import serve
from oscar_mm.apps.serve.vllm_server import vllm_arguments
from oscar_mm.cli import run
from oscar_mm.errors import InputError
from oscar_mm.models import bundled
from oscar_mm.pages.layout import PAGE_TOKENS

ROOT = Path(__file__).parents[3]
SERVER = """
import json, os, signal, sys
shown = {"arguments": sys.argv[1:], "pid": os.getpid(), "key": os.environ.get("VLLM_API_KEY")}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(json.dumps(shown), flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.25, where vLLM is installed and where it is not."""
    monkeypatch.setattr(vllm_server, "version", lambda _: "0.25.0")


def arguments(*passed: str, model: str = "org/model", policy: str = "standard", **options) -> list:
    return vllm_arguments(model, policy, "127.0.0.1", 8000, options, passed)


def value(found: list[str], option: str) -> str:
    assert found.count(option) == 1
    return found[found.index(option) + 1]


def test_arguments_of_the_defaults() -> None:
    found = arguments()
    assert value(found, "--model") == "org/model" and "--served-model-name" not in found
    assert (value(found, "--host"), value(found, "--port")) == ("127.0.0.1", "8000")
    assert value(found, "--attention-backend") == "CUSTOM"
    assert value(found, "--block-size") == str(PAGE_TOKENS)
    assert json.loads(value(found, "--additional-config")) == {"oscar_mm": {"policy": "standard"}}
    assert value(found, "--allowed-media-domains").endswith(".invalid")
    assert value(found, "--allowed-origins") == "[]"
    assert len(found) == 16, "all else is vLLM's default"


def test_arguments_of_options() -> None:
    given = {
        "kv_budget": 8 * 10**9,
        "max_context": 4096,
        "max_new_tokens": 50,
        "running": 3,
        "grace": 1.5,
        "dtype": "bfloat16",
        "prefix_cache": "off",
        "allow_remote": True,
        "engine": "vllm",
    }
    found = arguments("--seed", "1", model="pocket-vl", policy="standard:bits=4/2", **given)
    assert value(found, "--model") == str(bundled("pocket-vl"))
    assert value(found, "--served-model-name") == "pocket-vl"
    assert json.loads(value(found, "--additional-config"))["oscar_mm"]["policy"].endswith("4/2")
    for option, expected in {
        "--kv-cache-memory-bytes": "8000000000",
        "--max-model-len": "4096",
        "--override-generation-config": '{"max_new_tokens": 50}',
        "--max-num-seqs": "3",
        "--shutdown-timeout": "2",
        "--dtype": "bfloat16",
    }.items():
        assert value(found, option) == expected
    assert "--no-enable-prefix-caching" in found and "--allowed-media-domains" not in found
    assert found[-2:] == ["--seed", "1"], "later arguments win"


def test_names_origins_and_levels() -> None:
    origins = ["http://localhost:3000"]
    given: dict[str, Any] = {
        "lora": ["c=./c", "d=./d"],
        "served_model_name": ["a", "b"],
        "allow_origin": origins,
        "log_level": "warning",
    }
    found = arguments(model="pocket-vl", **given)
    assert found[found.index("--served-model-name") :][1:3] == ["a", "b"]
    assert found[found.index("--enable-lora") :][1:4] == ["--lora-modules", "c=./c", "d=./d"]
    assert json.loads(value(found, "--allowed-origins")) == origins
    assert value(found, "--uvicorn-log-level") == "warning"


def test_layers_with_windows_stay_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer vLLM lets kinds of layers have different attention; what users choose stays."""
    assert "--attention-config" not in arguments()
    monkeypatch.setattr(vllm_server, "version", lambda _: "0.33.1rc2")
    kinds = json.loads(value(arguments(), "--attention-config"))
    assert kinds == {"backend_per_kind": {"sliding_window": "FLASH_ATTN"}}
    for chosen in (
        *(["--attention-config", "{}"], ["-ac={}"], ["--attention-config.backend", "X"]),
        *(["--attention_config={}"], ["--attention_config.backend", "X"]),
    ):
        found = arguments(*chosen)
        assert found[-len(chosen) :] == chosen and len(found) == 16 + len(chosen)


OWN = {"attention_backend": "CUSTOM"}


@pytest.mark.parametrize(
    ("passed", "expected"),
    [
        (["--speculative-config", '{"method": "mtp"}'], OWN | {"method": "mtp"}),
        (["-sc", '{"method": "mtp"}', "--seed", "1"], OWN | {"method": "mtp"}),
        (["--speculative-config", '{"attention_backend": "auto"}'], {"attention_backend": "auto"}),
        (["--spec-method", "mtp", "--spec-tokens", "2"], OWN),
    ],
)
def test_drafts_have_our_attention(passed: list[str], expected: dict) -> None:
    """Unless the user chooses another."""
    found = arguments(*passed)
    option = "-sc" if "-sc" in passed else "--speculative-config"
    assert json.loads(value(found, option)) == expected
    assert {x for x in passed if x.startswith("--")} <= set(found)


def test_drafts_in_other_notations() -> None:
    assert arguments('-sc={"method": "mtp"}')[-1] == "-sc=" + json.dumps(OWN | {"method": "mtp"})
    for words in (["--speculative-config.method", "mtp"], ["--speculative_config.method=mtp"]):
        found = arguments(*words)[-2 - len(words) :]
        assert found == ["--speculative-config.attention_backend", "CUSTOM", *words]
    assert json.loads(arguments("--speculative_config", "{}")[-1]) == OWN
    assert json.loads(value(arguments("--spec_method=mtp"), "--speculative-config")) == OWN
    for wrong in (["-sc", "{"], ["-sc", "[]"], ["-sc"], ["-sc="]):  # vLLM says what is wrong.
        assert arguments(*wrong)[-len(wrong) :] == wrong


@pytest.mark.parametrize("policy", ["quarot", "standard:bits=2", "standard:window=0"])
def test_policies_of_stream_pages(policy: str) -> None:
    assert policy in value(arguments(policy=policy), "--additional-config")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"policy": "channel"}, "policy channel has key_axis='channel'"),
        ({"policy": "bf16"}, "has key_axis='channel', which the vLLM plugin does not support"),
        ({"policy": "standard:bits=16"}, "has 16 bits, or bits that"),
        ({"policy": "standrd"}, "did you mean standard"),
        ({"waiting": 64}, "--waiting with --engine vllm: vLLM does not limit its queue"),
        ({"queue_timeout": 9.0}, "--queue-timeout with --engine vllm: vLLM does not limit"),
        ({"trusted_proxy": ["::1"]}, "--trusted-proxy with --engine vllm: vLLM does not tell"),
        ({"max_request": "1GB"}, "--max-request with --engine vllm"),
        ({"realtime": 0}, "--realtime with --engine vllm: vLLM does not limit realtime"),
        ({"weights": "int8"}, "--weights with --engine vllm: use -- --quantization fp8"),
        ({"drafts": True}, "--drafts with --engine vllm: use -- --speculative-config JSON"),
        ({"conversations": 2}, "--conversations with --engine vllm"),
        ({"device": "cuda:1"}, "set CUDA_VISIBLE_DEVICES to choose"),
        ({"device_map": "auto"}, "use -- --tensor-parallel-size N"),
        ({"prefill_chunk": 512}, "-- --max-num-batched-tokens N"),
        ({"prefix_cache": "1GB"}, "--prefix-cache 1GB with --engine vllm"),
    ],
)
def test_refused(options: dict, expected: str) -> None:
    with pytest.raises(InputError) as refused:
        arguments(**options)
    assert expected in str(refused.value)


def test_no_option_is_ignored() -> None:
    read = {"context", "passed", "model", "engine", "policy", "host", "port", "api_key_file"}
    read |= {"prefix_cache", "allow_remote", "allowed_media_domains"}
    known = read | vllm_server._ARGUMENTS.keys() | vllm_server._REFUSED.keys()
    assert set(signature(serve).parameters) == known


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--engine", "vllm", "--waiting", "64"], "--waiting with --engine vllm"),
        (["--engine", "vllm", "pocket-vl"], "'pocket-vl' is unexpected: --model names the model"),
        (["--engine", "sglang"], "--engine sglang: must be oscar or vllm"),
        (["--", "--seed", "1"], "'--seed' is unexpected: only --engine vllm accepts such"),
        (
            ["--engine", "vllm"],
            "--engine vllm requires the vllm package: run pip install",
        ),
    ],
)
def test_refused_by_the_command(words: list[str], expected: str, monkeypatch, capsys) -> None:
    """An option counts as given also with its default."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert run(["serve", "--model", "pocket-vl", *words]) == 2
    shown = capsys.readouterr().err
    assert expected in shown and shown.count("\n") == 1


def test_the_process_becomes_vllm(tmp_path) -> None:
    folder = tmp_path / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parents[1]):
        (package / "__init__.py").touch()
    (folder / "api_server.py").write_text(SERVER)
    words = ["serve", "--engine", "vllm", "--model", "pocket-omni", "--host", "0.0.0.0"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", KEY_VARIABLE: "secret"}
    with subprocess.Popen(
        [sys.executable, "-m", "oscar_mm.cli", *words, "--", "--tensor-parallel-size", "2"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        shown = json.loads(process.stdout.readline())
        assert (shown["pid"], shown["key"]) == (process.pid, "secret")
        assert value(shown["arguments"], "--host") == "0.0.0.0"
        assert "secret" not in shown["arguments"] and "--allowed-origins" not in shown["arguments"]
        assert shown["arguments"][-2:] == ["--tensor-parallel-size", "2"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 7
