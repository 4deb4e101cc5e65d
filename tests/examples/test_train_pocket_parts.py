import json

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from examples.train_pocket import language, speech
from examples.train_pocket.clips import Recorder
from examples.train_pocket.conversation import Plan
from examples.train_pocket.curriculum import FIND_ONLY, RECIPES, Curriculum
from examples.train_pocket.drawing import Look
from examples.train_pocket.evaluate import tasks
from examples.train_pocket.optimizer import WEIGHT_DECAY, Master, schedule
from examples.train_pocket.speech import WORD
from examples.train_pocket.studio import Step, load_atlases
from examples.train_pocket.words import SPOKEN
from tests.examples.pocket_atlases import speech_atlas

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=128, return_attention_mask=True)


def test_log_mel_equals_the_feature_extractor(extractor):
    recorder = Recorder(speech_atlas(), extractor)
    torch.manual_seed(0)
    _, waves = recorder.record(3, 230, Look(1.0))
    assert waves.shape == (3, 36800)
    assert waves.abs().amax(-1).min() > 0.01
    theirs = extractor(list(waves.numpy()), sampling_rate=16000, padding=True, return_tensors="pt")
    torch.testing.assert_close(recorder.mel(waves), theirs.input_features, atol=1e-5, rtol=1e-4)


def test_clips_hold_the_units_that_their_facts_name(extractor):
    """Units without noise, gain or change of speed can be found in the wave."""
    atlas = speech_atlas()
    recorder = Recorder(atlas, extractor)
    torch.manual_seed(1)
    facts, waves = recorder.record(6, 100, Look(0.0))
    voices = speech.expand(atlas.samples)
    starts = atlas.starts[:-1, :10].flatten().tolist()
    probes = torch.stack([voices[start + 100 : start + 400] for start in starts])[:, None]
    for digits, wave in zip(facts.digits, waves, strict=True):
        (said,) = digits[digits >= 0].tolist()
        matches = torch.nn.functional.conv1d(wave[None, None], probes).amax(-1)
        assert matches.argmax() % 10 == said
    assert (facts.words < 0).all()
    hard, _ = recorder.record(100, 200, Look(1.0))
    spoken = hard.words >= 0
    assert 0.05 < spoken.float().mean() < 0.4
    assert ((hard.digits >= 0).sum(-1)[~spoken] >= 2).all()
    assert (hard.digits[spoken] < 0).all()
    assert WORD + len(SPOKEN) == len(speech.units())


@pytest.mark.parametrize("llava", [False, True])
def test_the_tokenizer_keeps_text_and_knows_its_words(llava):
    tokenizer = language.build_tokenizer(llava)
    for text in ("Héllo, 17 Wörlds!\n  ok?", *language.fixed_text()):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
    speller = language.Speller(tokenizer, CPU)
    for way in language.QUESTIONS["count_shape"] + language.QUESTIONS["place"]:
        text = way.format(label=17, shape="star", colour="red")
        words = text.replace("17", "1 7").replace("?", " ?").split()
        assert len(speller.ids(text)) == len(words)


def test_muon_moves_every_matrix_of_a_stack():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ParameterDict({"up": torch.randn(3, 8, 4)})
            self.conv = torch.nn.Conv2d(2, 4, 3)
            self.embed_tokens = torch.nn.Embedding(5, 4)

    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    model_experts = torch.nn.Module()
    model_experts.mlp = model
    master = Master(model_experts, rate=0.05)
    stacks = sorted(tuple(group.stack.shape) for _, group in master.groups)
    assert stacks == [(1, 4, 18), (3, 8, 4)]
    for step in range(2):
        before = [weight.detach().clone() for weight in model_experts.parameters()]
        for weight in model_experts.parameters():
            # In the second step nothing went through the convolution.
            if step == 0 or weight.shape[0] != 4:
                weight.grad = torch.randn_like(weight)
        master.step(1.0)
        for old, new, copy in zip(before, master.weights, master.copies, strict=True):
            moved = (new - old).abs().flatten(-min(new.ndim, 2)).amax(-1)
            assert (moved > 0).all() if step == 0 or len(new) != 4 else (moved == 0).all()
            assert torch.equal(new, copy.to(torch.bfloat16))
            assert new.grad is None


def test_stacked_muon_equals_the_one_of_torch():
    torch.manual_seed(3)
    theirs = [torch.nn.Parameter(torch.randn(*shape)) for shape in [(6, 10), (6, 10), (12, 5)]]
    model = torch.nn.ParameterDict({str(n): one.detach().clone() for n, one in enumerate(theirs)})
    maps = list(model.values())
    model["bias"] = torch.zeros(3)  # for AdamW
    master = Master(model, rate=0.02)
    assert sorted(len(group.stack) for _, group in master.groups) == [1, 2]
    settings = {"weight_decay": WEIGHT_DECAY, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(theirs, lr=0.02, **settings)
    for _ in range(3):
        grads = [torch.randn_like(one) for one in theirs]
        norm = torch.nn.utils.get_total_norm(grads)
        for mine, other, grad in zip(maps, theirs, grads, strict=True):
            mine.grad, other.grad = grad.clone(), grad / norm
        master.step(1.0)
        muon.step()
    for mine, other in zip(maps, theirs, strict=True):
        # Both iterate in bfloat16; three steps move a weight by 0.01.
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=0)


def test_the_schedule_warms_up_holds_and_falls():
    assert schedule(0, 0.0) < 0.01
    assert schedule(1000, 0.4) == 1.0
    assert schedule(1000, 1.0) == pytest.approx(0.03)
    assert schedule(1000, 1.5) == pytest.approx(0.03)


def test_the_curriculum_gets_harder_only_when_it_reads_well():
    curriculum = Curriculum(RECIPES["pocket-omni"], seed=0)
    one = Step(Plan(1, 0), 4, 1)
    curriculum.score([(one, 0.5)])
    assert curriculum.image.difficulty == 0.1
    for _ in range(20):
        curriculum.score([(one, 1.0)])
    assert curriculum.image.difficulty == pytest.approx(0.7)
    assert curriculum.image.newest() > 1
    assert curriculum.clip.difficulty == 0.1
    for ladder in (curriculum.image, curriculum.clip):
        ladder.reached, ladder.difficulty = len(ladder.steps), 1.0
    find = Step(Plan(2, 0), 4, 2, letters=1, kinds=FIND_ONLY)
    for _ in range(3):
        curriculum.score([(find, 1.0)])
    # The second stage is of two letters, about which nothing is known yet.
    assert (curriculum.image.stages, curriculum.clip.stages) == (2, 1)
    for _ in range(3):
        curriculum.score([(find, 1.0)])
    assert curriculum.image.stages == 2
    state = json.loads(json.dumps(curriculum.state()))
    other = Curriculum(RECIPES["pocket-omni"], seed=1)
    other.load(state)
    assert other.state() == curriculum.state()
    steps = [curriculum.next() for _ in range(400)]
    assert {step.plan.images > 0 and step.plan.clips > 0 for step in steps} == {True, False}
    assert {theme for step in steps for theme in step.themes} == {"codes", "receipts", "shapes"}
    assert max(step.plan.clips for step in steps) == 240
    assert all(step.asked == 1 for step in steps if step.copy)
    assert any(step.copy for step in steps)
    assert {(step.plan.images, step.letters) for step in steps if step.letters} >= {(2, 1), (2, 2)}


def test_evaluation_covers_what_the_models_promise():
    cells = tasks("pocket-omni")
    for cell in (
        "read a code, 1 images",
        "read a code, 30 images",
        "hear one, 10 clips",
        "copy 30 codes",
    ):
        assert cell in cells
    assert "hear one, 10 clips" not in tasks("pocket-vl")


def test_a_missing_atlas_is_named_with_its_command(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"glyphs\.npz is missing.*train_pocket\.glyphs"):
        load_atlases(tmp_path, CPU, audio=False)


def test_a_missing_espeak_is_named(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(FileNotFoundError, match="espeak-ng is not installed"):
        speech.speak("one", "en-us", 150, 50)


def test_mu_law_and_resampling_keep_the_sound():
    times = np.arange(22050) / 22050
    tone = (0.5 * np.sin(2 * np.pi * 440 * times)).astype(np.float32)
    there = speech.resample(tone, 22050)
    assert len(there) == 16000
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert np.abs(there - expected)[200:-200].max() < 0.01
    back = speech.expand(torch.from_numpy(speech.compress(there)))
    assert (back - torch.from_numpy(there)).square().mean().sqrt() < 0.01
