"""The training of the pocket voice: its units, its sound and what the talker is shown."""

import math
import random

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeTalkerForConditionalGeneration,
)

from examples.train_pocket import voice_sound, voice_talker
from examples.train_pocket.configs import initialize
from examples.train_pocket.voice import script_of, voiced
from examples.train_pocket.voice_units import CODES, FRAME, GROUPS, Units, find_codes, words_of
from oscar_mm.models import bundled

FOLDER = bundled("pocket-omni")


@pytest.fixture(scope="module")
def config() -> Qwen3OmniMoeConfig:
    return voiced(Qwen3OmniMoeConfig.from_pretrained(FOLDER))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def units() -> Units:
    """Silence, and 300 units of noise with one or two frames; ids say the unit of their number."""
    torch.manual_seed(0)
    frames = torch.tensor([1, 2, *([1, 2] * 149)])
    waves = (
        torch.randn(300, 2, FRAME) * torch.rand(300, 1, 1) * (torch.arange(300) > 1)[:, None, None]
    )
    waves[torch.arange(2) >= frames[:, None]] = 0
    return Units(waves, frames, torch.arange(384) % 300, find_codes(waves, frames))


def test_what_is_said_for_each_token(tokenizer) -> None:
    words = words_of(tokenizer, 384)
    said = {
        text: words[tokenizer.encode(text)[0]] for text in ("7", "K", "k", "top ", "apple", " ")
    }
    assert said == {"7": "seven", "K": "k", "k": "k", "top ": "top", "apple": "apple", " ": None}
    assert len(words) == 384 and words[tokenizer.eos_token_id] is None


def test_frames_say_where_they_are(units) -> None:
    codes, waves = units.said([3, 4, 3])
    assert codes[:, 2:].tolist() == [[0, 2, 0], [0, 1, 1], [1, 1, 2], [2, 2, 3], [2, 1, 4]]
    torch.testing.assert_close(
        waves, torch.cat([units.waves[3], units.waves[4, :1], units.waves[3]])
    )
    assert codes.min() >= 0 and codes.max() < CODES
    many, _ = units.said([4] * 300)
    assert many[299].tolist()[2:] == [299 - CODES, 1, 299 - CODES]


def test_the_last_layers_make_a_wave_of_coefficients(config) -> None:
    """Against the definition of an inverse MDCT, in numpy."""
    torch.manual_seed(0)
    model = Qwen3OmniMoeCode2Wav._from_config(config.code2wav_config).float().eval()
    voice_sound.build(model)
    codes = torch.randint(CODES, (1, GROUPS, 6))
    with torch.no_grad():
        wave = model(codes)[0, 0].numpy()
        found = voice_sound.predicted(model, codes[:, :2])[0].numpy()
    hop, bins = voice_sound.HOP, voice_sound.BINS
    places = np.arange(2 * hop) + 0.5
    expected = np.zeros((found.shape[1] + 1) * hop)
    for step in range(found.shape[1]):
        waves = np.cos(np.pi / hop * (np.arange(bins)[:, None] + 0.5) * (places + hop / 2))
        window = math.sqrt(2 / hop) * np.sin(np.pi * places / (2 * hop))
        expected[step * hop :][: 2 * hop] += (found[:, step] @ waves) * window
    expected = expected[hop:-hop].clip(-1, 1)
    assert len(wave) == len(expected) == 6 * FRAME - 768
    assert np.abs(wave - expected).max() < 1e-5 and np.abs(wave).max() > 1e-4


def test_coefficients_of_low_sounds_give_them_back() -> None:
    sound = torch.sin(torch.arange(4800) * 2 * math.pi * 440 / 24_000)[None]
    found = voice_sound.coefficients(sound)
    back = torch.nn.functional.conv_transpose1d(found, voice_sound.basis()[:, None], stride=48)
    inner = back[:, 0, 48:-48][:, 480:-480]  # A sound that begins at once is not low.
    torch.testing.assert_close(inner, sound[:, 480:-480], atol=3e-3, rtol=0)


@pytest.mark.slow
def test_both_parts_learn(config, tokenizer, units) -> None:
    torch.manual_seed(0)
    random.seed(0)
    model = Qwen3OmniMoeCode2Wav._from_config(config.code2wav_config).float()
    voice_sound.build(model)
    before = {name: weight.clone() for name, weight in model.decoder[-3:].named_parameters()}
    said: list[str] = []
    voice_sound.train(model, units, torch.tensor([3, 4]), 2, said.append)
    for name, weight in model.decoder[-3:].named_parameters():
        assert torch.equal(weight, before[name]), "the inverse MDCT is not trained"
    talker = Qwen3OmniMoeTalkerForConditionalGeneration._from_config(config.talker_config).float()
    initialize(talker, 0)
    voice_talker.build(talker)
    embedding = torch.randn(384, 256)
    course = voice_talker.Course(talker, embedding, units, script_of(config, tokenizer))
    rows = [[3, 4, 5, 6]] * 2
    first = sum(x.item() for x in course.losses(rows)[:2])
    course.train(8, said.append)
    assert sum(x.item() for x in course.losses(rows)[:2]) < first


def test_the_rate_of_the_talker() -> None:
    rates = [voice_talker.rate_at(step, 1000) for step in (0, 99, 500, 850, 925, 999)]
    assert rates == pytest.approx([0.01, 1, 1, 1, 0.5, 1 / 150])
