"""lmms-eval runs a local task on our pipelines; skipped where it is not installed."""

import json
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("lmms_eval", reason="lmms-eval is not installed")

from lmms_eval.evaluator import simple_evaluate
from lmms_eval.models import MODEL_REGISTRY_V2
from lmms_eval.tasks import TaskManager

from oscar_mm.apps.lmms_eval import OscarMM, _medium, manifest
from oscar_mm.apps.verify import lmms_tasks
from oscar_mm.cli import run
from oscar_mm.errors import InputError

ROOT = Path(__file__).parents[2]
MEDIA = ROOT / "examples" / "media"
CONTENTS = json.loads((MEDIA / "contents.json").read_text())
QUESTIONS = {"cards": "What is the code in picture {}?", "clips": "What was said in clip {}?"}
ASKED = {"cards": ("03", "08", "12"), "clips": ("01", "05", "08")}
"""Codes of digits, which the models read surely, by task."""
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_visual: !function functions.{name}
doc_to_text: !function functions.question
doc_to_target: answer
generation_kwargs:
  max_new_tokens: 12
  until: ["\\n"]
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
FUNCTIONS = """
import soundfile
from PIL import Image


def cards(doc):
    return [Image.open(path).convert("RGB") for path in doc["media"]]


def clips(doc):
    read = [soundfile.read(path, dtype="float32") for path in doc["media"]]
    return [{"array": samples, "sampling_rate": rate} for samples, rate in read]


def question(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskManager:
    """A task of pictures and one of clips, in files."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    for name, question in QUESTIONS.items():
        shown = [str(path) for path in sorted((MEDIA / name).iterdir())[:14]]
        rows = [
            {
                "media": shown,
                "question": question.format(int(asked)),
                "answer": CONTENTS[name][asked],
            }
            for asked in ASKED[name]
        ]
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


@pytest.mark.parametrize(("task", "model"), [("cards", "pocket-vl"), ("clips", "pocket-omni")])
def test_a_local_task(tasks: TaskManager, task: str, model: str) -> None:
    MODEL_REGISTRY_V2.register_manifest(manifest(), overwrite=True)
    found = simple_evaluate(
        model="oscar_mm",
        model_args=f"pretrained={model},policy=compact,device=cpu",
        tasks=[task],
        task_manager=tasks,
        batch_size=2,
    )
    answers = [sample["filtered_resps"][0] for sample in found["samples"][task]]
    assert answers == [CONTENTS[task][asked] for asked in ASKED[task]]
    [score] = [
        value
        for name, value in found["results"][task].items()
        if name.startswith("exact_match") and "stderr" not in name
    ]
    assert score == 1


def test_verify_runs_tasks_with_each_format(
    tasks: TaskManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """In one process and with one loaded model, although lmms-eval loads models itself."""
    monkeypatch.setattr(lmms_tasks, "_manager", lambda: tasks)
    out = tmp_path / "out.json"
    arguments = ["verify", "--model", "pocket-vl", "--device", "cpu", "--out", str(out)]
    arguments += ["--formats", "compact", "--repeats", "1", "--limit", "2", "--max-new-tokens", "8"]
    assert run([*arguments, "--tasks", "card"]) == 2
    assert "has no such task; did you mean cards?" in capsys.readouterr().err
    assert run([*arguments, "--tasks", "cards"]) == 0
    assert "cards, exact_match,none: 16 bit 1, compact 1" in capsys.readouterr().out
    found = json.loads(out.read_text())["tasks"]
    assert found["limit"] == 2 and list(found["results"]) == ["16 bit", "compact"]
    assert found["results"]["compact"]["cards"]["exact_match,none"] == 1


def test_the_entry_point_names_the_manifest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["lmms_eval.models"]["oscar_mm"].split(":")
    made = getattr(import_module(module), name)()
    assert made.model_id == "oscar_mm"
    module, _, name = made.simple_class_path.rpartition(".")
    assert getattr(import_module(module), name) is OscarMM


def test_arguments_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="does not support attn"):
        OscarMM(attn="sdpa")


def test_recordings_that_torchcodec_decodes() -> None:
    """Its own library is not there, which needs FFmpeg of the system."""
    samples = torch.arange(6.0).reshape(2, 3)
    decoder = SimpleNamespace(
        get_all_samples=lambda: SimpleNamespace(data=samples, sample_rate=8_000.0)
    )
    name, (found, rate) = _medium(decoder)
    assert name == "audio" and rate == 8_000
    assert np.array_equal(found, samples.numpy())
