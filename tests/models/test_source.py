"""Names of models: what they stand for, and what is said of one that cannot be had."""

import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from oscar_mm.errors import InputError
from oscar_mm.models import check_source
from oscar_mm.models.released import RELEASED, released_model

ROOT = Path(__file__).parents[2]
HTTP_ERROR: Any = errors.HfHubHTTPError.__bases__[0]


class ConnectTimeout(HTTP_ERROR):
    """The hub's client has one of this name."""


def answer(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind, "no")
    error.args, error.response = ("no",), type("Response", (), {"status_code": 503})  # pyright: ignore[reportAttributeAccessIssue]
    return error


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (HTTP_ERROR, "the hub cannot be reached (HTTPError)"),
        (ConnectTimeout, "cannot be reached (ConnectTimeout) in 1.5 s; set HF_HUB_ETAG_TIMEOUT=10"),
        (errors.HfHubHTTPError, "the hub returned 503"),
        (errors.RepositoryNotFoundError, "not on the hub or private"),
        (errors.GatedRepoError, "access is restricted"),
        (errors.RemoteEntryNotFoundError, "has no config.json on the hub"),
        (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE"),
    ],
)
def test_what_the_hub_answers(kind, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise answer(kind)

    monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT", raising=False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    with pytest.raises(InputError) as refused:
        check_source("Qwen/Qwen3-VL-8B-Instruc")
    message = str(refused.value)
    assert message.startswith("model Qwen/Qwen3-VL-8B-Instruc: ") and said in message
    assert message.endswith("; did you mean Qwen/Qwen3-VL-8B-Instruct?")


def test_what_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: None)
    (tmp_path / "config.json").touch()
    for name in ("pocket-vl", str(tmp_path), "oscar-mm-tests/of-no-model"):
        check_source(name)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
    assert check_source("oscar-mm-tests/in-the-cache", {"token": "a"}) == {"token": "a"}


@pytest.mark.parametrize("kind", [HTTP_ERROR, errors.OfflineModeIsEnabled, errors.HfHubHTTPError])
def test_without_the_hub_its_cache_is_read(kind, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise answer(kind)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
    given = {"token": "a"}
    assert check_source("owner/model", given) == {"token": "a", "local_files_only": True}
    assert given == {"token": "a"}


def test_a_client_that_does_not_heed_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As during the lookup of the host's name, which has no timeout."""
    over = threading.Event()
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: over.wait(20))
    start = time.monotonic()
    with pytest.raises(InputError, match=r"cannot be reached \(TimeoutError\) in 0.2 s; set HF_"):
        check_source("owner/no-model")
    assert time.monotonic() - start < 5
    over.set()


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that takes requests and never answers; their paths."""
    paths: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as kept:
        port = listening.getsockname()[1]
        url = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(
            constants.ENDPOINT, f"http://127.0.0.1:{port}"
        )
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
        monkeypatch.setenv("no_proxy", "127.0.0.1")

        def note() -> None:
            with suppress(OSError):
                while True:
                    connection = kept.enter_context(listening.accept()[0])
                    paths.append(connection.recv(4096).decode().split()[1])

        threading.Thread(target=note, daemon=True).start()
        yield paths


@pytest.mark.parametrize("name", ["OscarVLPipeline", "OscarOmniPipeline", "reader", "text"])
def test_from_python_too(silent_hub: list[str], tmp_path: Path, name: str) -> None:
    """transformers asks several times, and waits ever longer."""
    import oscar_mm
    from oscar_mm.pipelines.loading import reader
    from oscar_mm.pipelines.text import load_text_model

    load = {"reader": reader, "text": load_text_model}.get(name) or getattr(oscar_mm, name)
    start = time.monotonic()
    with pytest.raises(InputError, match=r"owner/no-model: .* cannot be reached .* in 0.2 s"):
        load("owner/no-model")
    assert time.monotonic() - start < 5
    assert silent_hub == ["/owner/no-model/resolve/main/config.json"]


def test_where_the_files_are_is_heeded(silent_hub: list[str], tmp_path: Path) -> None:
    from oscar_mm.pipelines.loading import config_of

    given = {"revision": "v2", "subfolder": "text", "cache_dir": str(tmp_path)}
    with pytest.raises(InputError, match="cannot be reached"):
        config_of("owner/no-model", given)
    assert silent_hub == ["/owner/no-model/resolve/v2/text/config.json"]
    # transformers looks into the cache alone, at once.
    with pytest.raises(InputError, match=r"owner/no-model: .*cache"):
        config_of("owner/no-model", {**given, "local_files_only": True})
    assert len(silent_hub) == 1
    # In the cache, though the hub is silent.
    snapshot = tmp_path / "models--owner--no-model" / "snapshots" / "abc" / "text"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    refs = tmp_path / "models--owner--no-model" / "refs"
    refs.mkdir()
    (refs / "v2").write_text("abc")
    assert check_source("owner/no-model", given) == {**given, "local_files_only": True}
    assert len(silent_hub) == 2


def test_a_cached_model_without_a_network(silent_hub: list[str], tmp_path: Path) -> None:
    """Whole, it is loaded; without its weights, it is refused; each with one question to the hub,
    where transformers asks for minutes."""
    from oscar_mm import OscarVLPipeline
    from oscar_mm.models import bundled

    repository = tmp_path / "models--owner--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(bundled("pocket-vl"), snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    OscarVLPipeline("owner/model", cache_dir=tmp_path, device="cpu")
    (snapshot / "model.safetensors").unlink()
    start = time.monotonic()
    with pytest.raises(InputError, match=r"owner/model: .*model\.safetensors"):
        OscarVLPipeline("owner/model", cache_dir=tmp_path, device="cpu")
    assert time.monotonic() - start < 5
    assert silent_hub == ["/owner/model/resolve/main/config.json"] * 2


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("pocket-v", "; did you mean pocket-vl?"),
        ("Pocket-Omni", "; did you mean pocket-omni?"),
        ("qwen3-vl-8b", "; did you mean Qwen/Qwen3-VL-8B-Instruct?"),
        ("qwen3-vl-7b", "; did you mean Qwen/Qwen3-VL-8B-Instruct?"),
        ("llava-1.6-vicuna-7b", "; did you mean llava-hf/llava-v1.6-vicuna-7b-hf?"),
        ("zebra", "pocket-omni"),
        ("a b/c d", "pocket-omni"),
    ],
)
def test_what_may_have_been_meant(name: str, meant: str) -> None:
    with pytest.raises(InputError) as refused:
        check_source(name)
    assert str(refused.value).endswith(meant)


def test_a_command_reports_it_without_torch() -> None:
    program = (
        "import sys; from oscar_mm.cli import run\n"
        "code = run(['ask', 'examples/media/receipt.jpg', '-p', 'What?', '-m', 'owner/no-model'])\n"
        "print(code, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "2 []\n"
    assert done.stderr.count("\n") == 1 and "model owner/no-model: not on this" in done.stderr


def test_released_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(RELEASED) == {
        *("qwen3-vl-2b", "qwen3-vl-4b", "qwen3-vl-8b", "qwen3-vl-32b", "qwen3-vl-30b-a3b"),
        *("qwen3-omni-30b-a3b", "llava-v1.6-vicuna-7b", "llava-v1.6-mistral-7b"),
        *("llava-v1.6-vicuna-13b", "llava-v1.6-34b"),
        *("qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen2.5-vl-32b", "qwen2.5-vl-72b"),
    }
    for short, model in RELEASED.items():
        assert released_model(short) is released_model(model.source) is model
    thinking = released_model("Qwen/Qwen3-VL-8B-Thinking")
    assert thinking is released_model("Qwen3-VL-8B") is RELEASED["qwen3-vl-8b"]
    assert released_model("qwen3-vl-7b") is released_model(Path("qwen3-vl-8b")) is None
    monkeypatch.chdir(tmp_path)
    Path("qwen3-vl-8b").mkdir()
    assert released_model("qwen3-vl-8b") is None
