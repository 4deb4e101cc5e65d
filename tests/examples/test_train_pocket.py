import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen3OmniMoeForConditionalGeneration,
)

from examples.train_pocket.configs import NAMES, TILE, Pocket, build
from examples.train_pocket.conversation import IGNORE, Plan
from examples.train_pocket.curriculum import RECIPES, Curriculum
from examples.train_pocket.drawing import Look
from examples.train_pocket.evaluate import evaluate
from examples.train_pocket.export import export
from examples.train_pocket.optimizer import Master
from examples.train_pocket.pages import PAGE, WIDE
from examples.train_pocket.studio import Step, Studio, exact
from examples.train_pocket.train import Options, Run
from tests.examples.pocket_atlases import atlases

CPU = torch.device("cpu")
FOLDER = Path(__file__).parents[2] / "examples" / "train_pocket"
# Of each model: pictures with one label style, pictures in order with words between, and clips.
STEPS = {
    "pocket-vl": [
        Step(Plan(4, 0, digits=2), 2, 3, ("codes", "receipts", "shapes")),
        Step(Plan(2, 0, PAGE, fillers=1), 2, 4, ("receipts",)),
        Step(Plan(5, 0, WIDE), 2, 1, ("codes",), copy=True),
    ],
    "pocket-llava": [
        Step(Plan(2, 0, digits=3), 2, 4, ("shapes",)),
        Step(Plan(2, 0, PAGE, fillers=1), 2, 4, ("codes",)),
    ],
    "pocket-omni": [
        Step(Plan(0, 4, frames=230, digits=1, fillers=2), 2, 4),
        Step(Plan(2, 2, frames=130), 2, 4, ("codes",)),
    ],
}


@pytest.fixture(scope="module")
def pockets() -> dict[str, Pocket]:
    return {name: build(name, seed=1) for name in NAMES}


def turns(text: str, llava: bool) -> list[tuple[str, str]]:
    """Role and text of each turn."""
    if not llava:
        return re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", text, re.DOTALL)
    system, _, rest = text.removeprefix("<s>").partition("[INST]")
    found = [("system", system.removesuffix("\n"))] if system else []
    for turn in ("[INST]" + rest).split("[INST]")[1:]:
        asked, _, answer = turn.partition("[/INST]")
        found += [("user", asked), ("assistant", answer.removesuffix("</s>"))]
    return found


def content(text: str, labelled: bool) -> list[dict]:
    """What stands in a turn as parts of a message."""
    parts = []
    for piece in re.split(r"((?:Picture|Clip) \d+:(?:<[^>]+>)+)", text):
        medium = re.match(r"(Picture|Clip) (\d+):<", piece)
        if medium:
            label = {"label": medium[2]} if labelled else {}
            parts.append({"type": "image" if medium[1] == "Picture" else "audio"} | label)
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def rebuild(pocket: Pocket, sample, plan: Plan, row: int) -> tuple[str, torch.Tensor, dict]:
    """A row as a user would say it: messages to the chat template, media to the processor."""
    tokenizer, batch = pocket.processor.tokenizer, sample.batch
    ids = batch.ids[row]
    ids = ids[: int((ids != tokenizer.pad_token_id).nonzero().max()) + 1]
    pads = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<image>", "<|audio_pad|>"])
    # The first place of each medium stays, as the template writes one.
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[1:] = (ids[1:] == ids[:-1]) & torch.isin(ids[1:], torch.tensor([p for p in pads if p]))
    said = turns(tokenizer.decode(ids[~again]), pocket.name == "pocket-llava")
    talk = [
        {"role": role, "content": content(text, labelled=plan.digits > 0)} for role, text in said
    ]
    text = pocket.processor.apply_chat_template(talk, tokenize=False)
    media = {}
    if plan.images:
        pixels = sample.images[row].permute(0, 2, 3, 1).numpy()
        media["images"] = [Image.fromarray(one) for one in pixels]
    if plan.clips:
        media["audio"] = list(
            sample.waves.view(-1, plan.clips, sample.waves.shape[-1])[row].numpy()
        )
    return text, ids, pocket.processor(text=[text], **media, return_tensors="pt")


@pytest.mark.daily("pocket-vl", "pocket-omni")
@pytest.mark.parametrize("name", NAMES)
def test_batches_are_what_the_processor_makes_and_the_model_gets_the_same(name, pockets):
    pocket = pockets[name]
    studio = Studio(pocket, *atlases(name))
    torch.manual_seed(3)
    for step in STEPS[name]:
        sample = studio.sample(step, Look(1.0), Look(1.0))
        with torch.no_grad():
            fast, _ = studio.logits(sample, step.plan)
        for row in range(step.rows):
            text, ids, inputs = rebuild(pocket, sample, step.plan, row)
            end = len(inputs.input_ids[0])
            assert inputs.input_ids[0].tolist() == ids[:end].tolist(), text
            # The last newline of the chat format may stand in the batch and not in the text.
            assert len(ids) - end <= 1
            if row:
                continue
            with torch.no_grad():
                slow = pocket.generator(**inputs).logits[0]
            mine = fast[row][: end - sample.batch.start]
            theirs = slow[sample.batch.start - 1 : end - 1]
            # LLaVA's processor shrinks pictures in 8-bit arithmetic; see the next test.
            bound = 0.2 if name == "pocket-llava" else 1e-4
            assert (mine - theirs).abs().max() < bound
            assert theirs.abs().max() > 0.5


def test_llava_tiles_equal_the_models_own(pockets):
    pocket = pockets["pocket-llava"]
    studio = Studio(pocket, *atlases("pocket-llava"))
    sample = studio.sample(Step(Plan(1, 0), 2, 1), Look(1.0), Look(1.0))
    pixels = [Image.fromarray(one[0].permute(1, 2, 0).numpy()) for one in sample.images]
    inputs = pocket.processor.image_processor(pixels, return_tensors="pt")
    with torch.no_grad():
        mine = studio.towers.llava_tiles(inputs.pixel_values, 1, 192 // TILE)
        theirs = pocket.model.model.get_image_features(
            inputs.pixel_values,
            inputs.image_sizes,
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
        ).pooler_output
    torch.testing.assert_close(mine, torch.stack(list(theirs)), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_few_steps_learn_and_the_export_loads(name, tmp_path, monkeypatch):
    pocket = build(name, seed=2)
    studio = Studio(pocket, *atlases(name))
    master = Master(pocket.model, rate=3e-3, muon=False)
    clips = RECIPES[name].clips > 0
    step = Step(Plan(0, 2, frames=90) if clips else Plan(2, 0), 2, 2)
    torch.manual_seed(0)
    sample = studio.sample(step, Look(0.1), Look(0.1))
    losses = []
    for _ in range(5):
        logits, balance = studio.logits(sample, step.plan)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), sample.batch.targets.flatten(), ignore_index=IGNORE
        )
        (loss + 0.01 * balance).backward()
        master.step(1.0)
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
    results = evaluate(pocket, atlases(name), prompts=2, max_media=1)
    assert all(0 <= row["held out"] <= 1 for row in results.values())
    facts, curriculum = {"steps": 5, "seconds": 1}, Curriculum(RECIPES[name], 0)
    export(pocket, tmp_path / "model", results, facts, curriculum.state())
    assert not (tmp_path / "model.partial").exists()
    weights = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert weights < 12e6
    for cell in results:
        assert cell in (tmp_path / "model" / "README.md").read_text()
    auto = Qwen3OmniMoeForConditionalGeneration if clips else AutoModelForImageTextToText
    loaded = auto.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.bfloat16
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    talk = [{"role": "user", "content": [{"type": "text", "text": "What is the code?"}]}]
    text = processor.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], return_tensors="pt")
    lm = getattr(loaded, "thinker", loaded)
    for part in (loaded, lm):
        assert part.generation_config.eos_token_id == processor.tokenizer.eos_token_id
    out = lm.generate(**inputs, max_new_tokens=3)
    assert out.shape[1] <= inputs.input_ids.shape[1] + 3
    # Training can continue it.
    monkeypatch.setattr("examples.train_pocket.train.load_atlases", lambda *_: atlases(name))
    options = Options(name, tmp_path / "run", device="cpu", adam=True, start=tmp_path / "model")
    again = Run(options).pocket.model
    for trained, restarted in zip(pocket.model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(restarted, trained.to(torch.bfloat16).float())


def test_all_three_models_fit_the_package(pockets):
    sizes = [2 * sum(w.numel() for w in one.model.parameters()) for one in pockets.values()]
    assert max(sizes) < 12e6
    assert sum(sizes) < 30e6


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("examples.train_pocket.train.load_atlases", lambda *_: atlases("pocket-vl"))
    options = Options(
        "pocket-vl", tmp_path, device="cpu", seconds=5.0, call_seconds=0.01, scale=0.002, adam=True
    )
    first = Run(options)
    first.train()
    assert first.step == 1
    assert not first.finished
    (tmp_path / "checkpoint.partial").write_bytes(b"a kill while saving")
    second = Run(options)
    assert (second.step, second.trained) == (first.step, first.trained)
    for old, new in zip(first.master.copies, second.master.copies, strict=True):
        assert torch.equal(old, new)
    second.train()
    assert second.step > first.step
    lines = (tmp_path / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_exact_match_wants_every_token_of_an_answer(pockets):
    studio = Studio(pockets["pocket-vl"], *atlases("pocket-vl"), plain=True)
    sample = studio.sample(Step(Plan(2, 0), 3, 2), Look(1.0), Look(1.0))
    targets = sample.batch.targets
    logits = torch.nn.functional.one_hot(targets.clamp(min=0), 384).float()
    assert exact(logits, sample.batch) == 1.0
    row, place = (targets != IGNORE).nonzero()[0].tolist()
    logits[row, place] = -logits[row, place]
    assert exact(logits, sample.batch) == pytest.approx(5 / 6)


def test_the_script_for_all_models_is_valid_shell():
    subprocess.run(["sh", "-n", FOLDER / "run_all.sh"], check=True)
