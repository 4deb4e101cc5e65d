"""Options of the command, and the same settings in Python."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import typer

from oscar_mm import InputError
from oscar_mm.apps.audio_qa import audio_qa, command
from oscar_mm.apps.audio_qa import job as job_module
from oscar_mm.apps.audio_qa.settings import JobSettings
from oscar_mm.cli import app, run
from oscar_mm.policy import KVPolicy

OPTIONS = {
    "--out": None,
    "--model": None,
    "--engine": "oscar",
    "--policy": "standard",
    "--question": None,
    "--system": None,
    "--max-new-tokens": 64,
    "--list-choices": False,
    "--group-by": "group",
    "--batch-size": 32,
    "--kv-budget": None,
    "--retry-failed": False,
    "--samples": None,
    "--audio-in-video": False,
    "--max-audio-seconds": None,
    "--device": None,
    "--dtype": None,
    "--allow-remote": False,
    "--server": None,
    "--concurrency": 32,
    "--api-key-file": None,
    "--ray": None,
    "--workers": None,
    "--cpus-per-worker": 1,
}
SWITCH = ["--overwrite", "--resume"]


def test_options_and_defaults_of_the_command() -> None:
    parameters = typer.main.get_command(app).commands["audio-qa"].params
    found, switches = {}, []
    for one in parameters[1:]:
        name = max(one.opts, key=len)
        if one.secondary_opts:
            switches += [name, *one.secondary_opts]
            assert one.default is False, "a run is resumed unless it says otherwise"
        elif name != "--help":
            found[name] = one.default
    assert found == OPTIONS and switches == SWITCH
    assert parameters[0].name == "questions" and {"-o", "-m", "-q"} < {
        short for one in parameters for short in one.opts
    }


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[JobSettings]:
    """Settings of the jobs that would have run."""
    found: list[JobSettings] = []

    def run_job(questions: Any, out: Any, settings: JobSettings) -> dict[str, Any]:
        found.append(settings)
        return {"failed": 1}

    monkeypatch.setattr(job_module, "run_job", run_job)
    monkeypatch.setattr("oscar_mm.apps.audio_qa.results.print_summary", lambda summary: None)
    return found


def test_the_command_and_python_have_the_same_settings(given, recordings, monkeypatch) -> None:
    line = ["-m", "pocket-omni", "-q", "What?", "--policy", "compact", "--kv-budget", "8GB"]
    line += [
        "--overwrite",
        "--audio-in-video",
        "--workers",
        "2",
        "--ray",
        "local",
        "--list-choices",
    ]
    line += ["--max-audio-seconds", "60", "--samples", "s.jsonl", "--batch-size", "3"]
    assert run(["audio-qa", str(recordings), "-o", "a.jsonl", *line]) == 1, "a row failed"
    [from_line] = given
    assert from_line.limits.max_audio_seconds == 60
    audio_qa(
        *(recordings, "a.jsonl", "pocket-omni"),
        question="What?",
        policy="compact",
        kv_budget="8GB",
        overwrite=True,
        use_audio_in_video=True,
        workers=2,
        ray="local",
        list_choices=True,
        samples="s.jsonl",
        batch_size=3,
        limits=from_line.limits,
    )
    assert given[1] == from_line
    monkeypatch.setenv("OSCAR_MM_API_KEY", "secret")
    line = ["--server", "http://127.0.0.1:1", "--resume", "-q", "What?"]
    assert run(["audio-qa", str(recordings), "-o", "a.jsonl", *line]) == 1
    assert given[2].api_key == "secret" and not given[2].overwrite and given[2].model is None
    assert "secret" not in repr(given[2])


def test_settings_are_written_once() -> None:
    """The command has only what differs from the settings of Python."""
    own = inspect.signature(inspect.unwrap(command.audio_qa_command)).parameters
    names = {one.name for one in fields(JobSettings)}
    assert len(names) == 25 and not names & set(own)
    assert not names & set(inspect.signature(job_module.run_job).parameters)


def test_refused() -> None:
    for options, expected in (
        ({"batch_size": 0}, "batch_size=0"),
        ({"engine": "other"}, "engine='other': must be oscar or vllm"),
        ({"engine": "vllm", "server": "http://a"}, "server with engine vllm"),
    ):
        with pytest.raises(InputError, match=expected):
            JobSettings(**options)
    with pytest.raises(TypeError, match="batch_sise"):
        audio_qa("q.jsonl", "a.jsonl", "pocket-omni", batch_sise=3)
    assert JobSettings(policy=KVPolicy()).changed(["policy", "device"]) == ["policy"]
