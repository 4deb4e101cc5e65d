"""The accuracy benchmark on small sizes measures what the pocket models do."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import accuracy, accuracy_report
from benchmarks.accuracy import generate, greedy_answers
from benchmarks.accuracy_report import Bound, verdict
from benchmarks.record import Record
from benchmarks.tasks import FACTORS, TASKS, Task, conversations, load, outlier_channels
from examples.train_pocket.configs import NAMES
from examples.train_pocket.glyphs import draw
from examples.train_pocket.studio import Studio
from oscar_mm import KVPolicy, models
from oscar_mm.compare.methods import DEFAULT, PUBLISHED, REFERENCE, main_methods
from oscar_mm.compare.teacher_forcing import IGNORE, answer_logits, as_recorded
from tests.examples.pocket_atlases import atlases

CPU = torch.device("cpu")
SMALL = {
    "pocket-vl": Task("list", images=12),
    "pocket-llava": Task("copy", images=4),
    "pocket-omni": Task("read", images=2, clips=6),
}
BUNDLED = models.bundled("pocket-vl")


@pytest.fixture(scope="module", params=NAMES)
def studio(request: pytest.FixtureRequest) -> Studio:
    torch.manual_seed(0)
    return Studio(load(request.param, None, CPU), *atlases(request.param), plain=True)


@pytest.mark.daily("pocket-vl")
def test_stress_leaves_the_model_as_it_was(studio: Studio) -> None:
    pocket = studio.writer.pocket
    model = pocket.generator
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    talks = next(conversations(studio, SMALL[pocket.name], 2))
    logits, keys = [], []
    for stressed in (False, True):
        if stressed:
            with outlier_channels(model, 3):
                layers = talks.record(model).layers
                past = as_recorded(layers)
                logits.append(answer_logits(model, past, len(talks.ids), talks.forced))
        else:
            layers = talks.record(model).layers
            past = as_recorded(layers)
            logits.append(answer_logits(model, past, len(talks.ids), talks.forced))
        keys.append(layers[1].keys.float())
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)
    # Powers of two, in both channels of two rotary pairs.
    ratio = (keys[1] / keys[0]).nanmedian(dim=2).values.round()
    counts = {factor: int((ratio == factor).sum()) for factor in (1.0, *FACTORS)}
    heads = ratio[..., 0].numel()
    assert counts == {1.0: 124 * heads, 8.0: 2 * heads, 16.0: 2 * heads}
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])


@pytest.mark.daily("pocket-vl")
def test_conversations_are_those_of_the_studio(studio: Studio) -> None:
    """Recorded and forced, the answers are those of the training's forward pass."""
    pocket = studio.writer.pocket
    task = SMALL[pocket.name]
    for talks in conversations(studio, task, 2):
        expected, _ = studio.logits(talks.sample, task.step(2).plan)
        layers = talks.record(pocket.generator).layers
        exact = [layer.keys.shape[2] for layer in layers]
        assert set(exact) == {len(talks.ids)}
        logits = answer_logits(pocket.generator, as_recorded(layers), len(talks.ids), talks.forced)
        right = expected.detach()[:, 1:][talks.forced.targets != IGNORE]
        # Keys and values were rounded to bfloat16.
        assert (logits - right).norm() < 0.02 * right.norm()
        kinds = {int(kind) for kind in talks.ids.unique()}
        assert kinds == {0, *[1] * (task.images > 0), *[3] * (task.clips > 0)}


@pytest.mark.slow
def test_measured_rows(studio: Studio) -> None:
    name = studio.writer.pocket.name
    methods = [
        method for method in main_methods() if method.name in (REFERENCE, DEFAULT, PUBLISHED)
    ]
    rows = list(
        accuracy.measure(
            studio, studio.writer.pocket.generator, [SMALL[name]], methods, [], prompts=3
        )
    )
    assert len(rows) == 6
    for row in rows:
        assert row["task"] == SMALL[name].name and row["prompts"] >= 3
        assert row["logit_shift"] < 1e-5
        if row["method"] == REFERENCE:
            assert row["kl"] == 0 and row["agreement"] == 1 and row["page_bits"] == 16
        elif row["packed_share"]:
            assert row["kl"] > 0 and 2.3 < row["page_bits"] < 3.2 < row["held_bits"]
    shares = {row["method"]: row["packed_share"] for row in rows if row["method"] != REFERENCE}
    # Stream pages take tokens that whole pages leave.
    assert 1 > shares[DEFAULT] >= shares[PUBLISHED]
    assert name == "pocket-omni" or shares[PUBLISHED] > 0
    if name == "pocket-omni":
        # One question about the images and one about the clips.
        assert rows[0]["answers"] == 2 * rows[0]["prompts"]


@pytest.mark.daily("pocket-vl")
def test_free_answers_are_those_of_teacher_forcing(studio: Studio) -> None:
    """Greedy answers through the packed cache, read back, are the likeliest tokens."""
    pocket = studio.writer.pocket
    task = Task("read", clips=8) if pocket.name == "pocket-omni" else Task("read", images=8)
    [talks] = conversations(studio, task, 2)
    greedy = greedy_answers(pocket, talks, KVPolicy.preset("bf16"), frozenset([-1]))
    layers = talks.record(pocket.generator).layers
    logits = answer_logits(pocket.generator, as_recorded(layers), len(talks.ids), talks.forced)
    first = torch.zeros(2, dtype=torch.long)
    rows = (talks.forced.targets != IGNORE).nonzero()[:, 0]
    for row in range(2):
        first[row] = logits[rows == row][0].argmax()
    assert [answer[0] for answer in greedy] == first.tolist()
    [exact, free] = generate(studio, pocket, [task], 2, seed=0)
    assert exact["as_16_bit"] == 1 and exact["condition"] == free["condition"] == "generated"
    assert free["method"] == DEFAULT and 0 <= free["as_16_bit"] <= 1


def test_every_task_can_be_laid_out(studio: Studio) -> None:
    for task in TASKS[studio.writer.pocket.name]:
        tokens = len(studio.writer.layout(task.step(2).plan).ids)
        assert 300 < tokens < 10_000, task.name


@pytest.mark.parametrize("more", [[], ["--no-ablation"]])
def test_a_text_in_no_name_is_an_error(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = "sinks" if more else "publshed"
    arguments = ["--random", "--methods", "published", "--methods", wrong, *more]
    assert accuracy.main([*arguments, "--out", str(tmp_path)]) == 2
    assert f"--methods {wrong}: matches none of " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_command_line_records_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "load_atlases", lambda *_: atlases("pocket-vl"))
    monkeypatch.setitem(accuracy.TASKS, "pocket-vl", [Task("read", images=12, ablate=True)])
    arguments = [
        *("--random", "--model", "pocket-vl", "--device", "cpu", "--out", str(tmp_path)),
        *("--prompts", "2", "--methods", "published", "--methods", "sinks"),
    ]
    assert accuracy.main(arguments) == 0
    text = capsys.readouterr().out
    assert "pocket-vl, stress: KL x 1000" in text and "free answers" in text
    [path] = tmp_path.glob("accuracy-pocket-vl-*.json")
    record = Record.load(path)
    assert record.extra == {"seed": accuracy.SEED, "prompts": 2, "model": "pocket-vl"}
    assert {row["method"] for row in record.rows} == {
        *(REFERENCE, PUBLISHED, "OScaR, published, mixed pages"),
        *("channel, sinks 0", "channel, sinks 64", DEFAULT),
    }
    [drawn] = tmp_path.glob("accuracy-*.png")
    drawn.unlink()
    monkeypatch.setattr(accuracy_report, "plot", lambda *_: drawn.touch())  # that takes a second
    more = ["--methods", PUBLISHED, "--condition", "plain", "--add", "--generate", "0"]
    assert accuracy.main([*arguments[:7], "--prompts", "5", *more]) == 0
    again = Record.load(path)
    assert [(row["method"], row["condition"]) for row in again.rows] == [
        (row["method"], row["condition"]) for row in record.rows
    ]
    counts = {(row["method"], row["condition"]): row["prompts"] for row in again.rows}
    assert {cell for cell, prompts in counts.items() if prompts >= 5} == {
        (REFERENCE, "plain"),
        (PUBLISHED, "plain"),
    }
    assert again.extra["prompts"] == 2
    assert accuracy.main([*arguments[:7], "--prompts", "2", *more]) == 0
    assert Record.load(path).rows == again.rows
    drawn.unlink()
    assert accuracy.main(["--report", "--out", str(tmp_path)]) == 0
    assert drawn.exists()
    assert accuracy_report.main(tmp_path / "nothing", NAMES) == 2


def row(method: str, condition: str, kl: float, exact: float, task: str = "ask") -> dict:
    names = {"model": "m", "task": task, "family": task, "condition": condition}
    bits = {"prompts": 512, "page_bits": 2.3125, "packed_share": 0.5}
    return names | bits | {"method": method, "kl": kl, "kl_error": kl / 10, "exact": exact}


def test_the_verdict_states_each_bound() -> None:
    rows = [
        *(row(REFERENCE, condition, 0, 0.99) for condition in ("plain", "stress")),
        row(REFERENCE, "plain", 0, 0.9, "copy"),
        row(DEFAULT, "plain", 0.010, 0.985),
        row(DEFAULT, "plain", 0.050, 0.7, "copy"),
        row(DEFAULT, "stress", 0.010, 0.97),
        row(PUBLISHED, "plain", 0.020, 0.9),
        row(PUBLISHED, "plain", 0.020, 0.9, "copy"),
        row(PUBLISHED, "stress", 0.030, 0.9),
        row("channel, groups 32", "plain", 0.005, 0.9),
        row("channel, groups 32", "plain", 0.015, 0.9, "copy"),
    ]
    bounds = {bound.what: bound for bound in verdict(rows)}
    assert {what: bound.met for what, bound in bounds.items()} == {
        "prompts in a cell": True,
        "bits per value of a page": True,
        "points of exact match lost, ask, plain": True,
        "points of exact match lost, copy, plain": False,
        "points of exact match lost, ask, stress": False,
        "mean KL of standard to that of OScaR, published, plain": False,
        "mean KL of standard to that of OScaR, published, stress": False,
        "mean KL of channel, groups 32 to that of OScaR, published, plain": True,
    }
    ratio = bounds["mean KL of standard to that of OScaR, published, plain"]
    assert ratio.value == pytest.approx(1.5) and "NOT met" in str(ratio)
    # Means 0.03 and 0.02, their errors hypot(0.001, 0.005) / 2 and hypot(0.002, 0.002) / 2.
    assert ratio.error == pytest.approx(1.5 * (0.085**2 + 0.0707**2) ** 0.5, rel=0.01)
    assert "1.5 ± 0.17 <= 0.5" in str(ratio)
    assert bounds["points of exact match lost, copy, plain"].value == pytest.approx(20)
    assert Bound("m", "x", 500, 500, least=True).met and not Bound("m", "x", 1.1, 1).met


@pytest.mark.slow
@pytest.mark.skipif(not (BUNDLED / "model.safetensors").is_file(), reason="no trained weights")
def test_the_bundled_model_keeps_its_answers_in_few_bits() -> None:
    """A small copy of the harness: real reading, with fonts that matplotlib brings."""
    matplotlib = pytest.importorskip("matplotlib")
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif")
    glyphs = draw([str(fonts / f"{name}.ttf") for name in names], 0)
    torch.manual_seed(0)
    pocket = load("pocket-vl", BUNDLED, CPU)
    studio = Studio(pocket, glyphs, None, plain=True)
    names = (REFERENCE, DEFAULT, PUBLISHED, "INT2 per token")
    methods = [method for method in main_methods() if method.name in names]
    rows = list(
        accuracy.measure(studio, pocket.generator, [Task("copy", images=16)], methods, [], 6)
    )
    json.dumps(rows)
    cells = {(row["method"], row["condition"]): row for row in rows}
    exact = cells[REFERENCE, "plain"]
    assert exact["exact"] > 0.7 and exact["tokens"] > 6 * 80
    for condition in ("plain", "stress"):
        packed = cells[DEFAULT, condition]
        assert packed["page_bits"] < 3.1 and packed["packed_share"] > 0.6
        assert packed["agreement"] > 0.97 and packed["kl"] < 0.005
    stressed = {method: cells[method, "stress"]["kl"] for method in names}
    assert stressed[DEFAULT] < stressed[PUBLISHED] < stressed["INT2 per token"] / 5
