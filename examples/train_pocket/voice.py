"""Give pocket-omni a voice: record units, train code2wav and the talker, and export.

python -m examples.train_pocket.voice oscar_mm/models/pocket-omni --out runs/voice

It needs the program espeak-ng (GPL-3), of which only the sound is used, and a CPU core. Parts that
are in the output folder already are kept, so that ``--part sound`` and ``--part talker`` can run at
the same time; then the command without them writes the model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerForConditionalGeneration as Qwen3OmniMoeTalker,
)

from examples.train_pocket import voice_sound, voice_talker
from examples.train_pocket.configs import initialize
from examples.train_pocket.voice_units import CODES, GROUPS, RATE, Units, record, words_of
from oscar_mm import OscarOmniPipeline

SPEAKER, VOICE = "espeak", "en-us"
CONTROL = 1024  # codes at the end of the talker's vocabulary that stand for no sound
TTS = ("pad", "bos", "eos")  # the last of the thinker's ids, for which it has no tokens
ASKED = 20
HEADING = "## Voice"
WIDTH = 192


def voiced(config: Qwen3OmniMoeConfig) -> Qwen3OmniMoeConfig:
    """Return a thinker's config with a talker and code2wav."""
    found = config.to_dict()
    thinker = found["thinker_config"]
    text = thinker["text_config"]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    talker = {
        "text_config": {
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            **heads,
            "head_dim": 64,
            "max_position_embeddings": 65536,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 256,
            "intermediate_size": 256,
            "vocab_size": CODES + CONTROL,
        },
        "code_predictor_config": {
            "hidden_size": WIDTH,
            "num_hidden_layers": 1,
            **heads,
            "head_dim": 32,
            "intermediate_size": 256,
            "vocab_size": CODES,
            "num_code_groups": GROUPS,
        },
        "num_code_groups": GROUPS,
        "thinker_hidden_size": text["hidden_size"],
        "accept_hidden_layer": 2,
        "codec_eos_token_id": CODES,
        "codec_nothink_id": CODES + 1,
        "codec_think_bos_id": CODES + 2,
        "codec_think_eos_id": CODES + 3,
        "codec_pad_id": CODES + 4,
        "codec_bos_id": CODES + 5,
        "speaker_id": {SPEAKER: CODES + 6},
        "spatial_merge_size": 2,
    }
    talker |= {name: thinker[name] for name in thinker if name.endswith("_token_id")}
    talker["position_id_per_seconds"] = thinker["position_id_per_seconds"]
    code2wav = {
        "codebook_size": CODES,
        "num_quantizers": GROUPS,
        "hidden_size": 160,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "sliding_window": 16,
        "layer_scale_initial_scale": 0.3,
        "upsampling_ratios": [2, 2],
        "upsample_rates": [2, 5, voice_sound.HOP],
        "decoder_dim": 128,
    }
    first = text["vocab_size"] - len(TTS)
    marks = {f"tts_{name}_token_id": first + place for place, name in enumerate(TTS)}
    found |= {"talker_config": talker, "code2wav_config": code2wav, "enable_audio_output": True}
    return Qwen3OmniMoeConfig(**found | marks)


def units_of(path: Path, tokenizer: Any, size: int) -> Units:
    """Read the units from a file, or record them and write the file."""
    if not path.is_file():
        torch.save(vars(record(tokenizer, size, VOICE)), path)
    return Units(**torch.load(path))


def script_of(config: Qwen3OmniMoeConfig, tokenizer: Any) -> voice_talker.Script:
    """Return the ids with a meaning for the talker."""
    size = config.thinker_config.text_config.vocab_size
    speakable = [number for number, word in enumerate(words_of(tokenizer, size)) if word]
    pauses = [tokenizer.encode(mark)[0] for mark in (" ", ",", ".")]
    head = tokenizer.encode("<|im_start|>assistant\n")
    return voice_talker.Script(config, SPEAKER, speakable, pauses, head, tokenizer.eos_token_id)


def heard(folder: Path, asked: int = ASKED) -> dict[str, float]:
    """Let the model speak random digits and listen to them.

    Returns:
        The shares of answers, and of their digits, that it hears as they were written, in a
        16-bit and a packed cache.
    """
    dice, found = random.Random(0), dict[str, float]()
    for preset in ("bf16", "compact"):
        omni = OscarOmniPipeline(folder, policy=preset, device="cpu")
        answers = digits = right = 0
        for place in range(asked):
            text = "".join(dice.choice("0123456789") for _ in range(dice.randint(2, 5)))
            answer = omni.read_aloud(text, seed=place).complete()
            sound = soxr.resample(answer.speech, RATE, 16_000).astype(np.float32)
            said = omni(prompt="What was said?", audio=(sound, 16_000), max_new_tokens=12).text
            answers += said.strip() == text
            digits += len(text)
            right += sum(one == other for one, other in zip(said.strip(), text, strict=False))
        found |= {f"answers, {preset}": answers / asked, f"digits, {preset}": right / digits}
    return found


def record_in(folder: Path, model: Any, facts: dict[str, Any]) -> None:
    """Write what is known about the voice into a model's card and training.json."""
    path = folder / "training.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"voice": facts}, indent=1) + "\n")
    card, size = folder / "README.md", sum(x.numel() for x in model.parameters()) / 1e6
    own = sum(x.numel() for part in (model.talker, model.code2wav) for x in part.parameters()) / 1e6
    text = card.read_text().split(f"\n{HEADING}\n")[0]
    text = re.sub(
        r"of [\d.]+ million parameters", f"of {size:.2f} million parameters", text, count=1
    )
    lines = [
        HEADING,
        "",
        f"Its talker and code decoder ({own:.2f} of {size:.2f} million parameters) imitate the",
        f"voice {VOICE} of espeak-ng at a constant pitch. They read the thinker's tokens aloud:",
        "digits, letters by their names, and the words of its language. They were trained",
        "without the thinker, whose weights did not change.",
        "",
        f"Training: {facts['sound_steps']} steps for the sound and {facts['talker_steps']} for the",
        "talker on a CPU core, by examples/train_pocket/voice.py.",
        "",
        "Random numbers that it said, and the share that the thinker heard as written:",
        "",
        "| | share |",
        "| --- | --- |",
        *(f"| {name} | {share:.3f} |" for name, share in facts["heard"].items()),
    ]
    card.write_text("\n".join([text, *lines]) + "\n")


class Training:
    """The training of a voice's parts, each of which is a file in a folder.

    Args:
        source: folder of a model with a thinker.
        out: folder of the parts.
        seed: seed of weights and data.
    """

    def __init__(self, source: Path, out: Path, seed: int) -> None:
        self.source, self.out, self.seed = source, out, seed
        self.config = voiced(Qwen3OmniMoeConfig.from_pretrained(source))
        whole = Qwen3OmniMoeForConditionalGeneration.from_pretrained(source)
        self.thinker, self.tokenizer = whole.thinker, AutoTokenizer.from_pretrained(source)
        out.mkdir(parents=True, exist_ok=True)
        self.units = units_of(out / "units.pt", self.tokenizer, len(self._embedding))

    @property
    def _embedding(self) -> torch.Tensor:
        return self.thinker.get_input_embeddings().weight.detach().float()

    def sound(self, steps: int) -> dict[str, torch.Tensor]:
        """Return the weights of code2wav, after training them if they are not in a file."""
        self._begin()
        model = Qwen3OmniMoeCode2Wav._from_config(self.config.code2wav_config).float()
        voice_sound.build(model)
        digits = self.tokenizer.convert_tokens_to_ids([*string.digits])
        often = self.units.unit_of[torch.tensor(digits)]
        return self._part(
            model, "sound.pt", lambda: voice_sound.train(model, self.units, often, steps)
        )

    def talker(self, steps: int) -> dict[str, torch.Tensor]:
        """Return the weights of the talker, after training them if they are not in a file."""
        self._begin()
        model = Qwen3OmniMoeTalker._from_config(self.config.talker_config).float()
        initialize(model, self.seed)
        voice_talker.build(model)
        script = script_of(self.config, self.tokenizer)
        course = voice_talker.Course(model, self._embedding, self.units, script)
        return self._part(model, "talker.pt", lambda: course.train(steps))

    def _begin(self) -> None:
        torch.manual_seed(self.seed)
        random.seed(self.seed)

    def _part(
        self, model: nn.Module, name: str, train: Callable[[], None]
    ) -> dict[str, torch.Tensor]:
        path = self.out / name
        if not path.is_file():
            train()
            torch.save(model.state_dict(), path)
        return torch.load(path)

    def export(self, facts: dict[str, int]) -> Path:
        """Write the model with its voice; return its folder."""
        model = Qwen3OmniMoeForConditionalGeneration(self.config).to(torch.bfloat16)
        model.thinker.load_state_dict(self.thinker.state_dict())
        model.code2wav.load_state_dict(self.sound(facts["sound_steps"]))
        model.talker.load_state_dict(self.talker(facts["talker_steps"]))
        folder, partial = self.out / "model", self.out / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self.source, partial)
        model.save_pretrained(partial)
        shutil.copy(self.source / "generation_config.json", partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
        record_in(folder, model, facts | {"heard": heard(folder)})
        return folder


def main() -> None:
    """Train and export as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sound-steps", type=int, default=6000)
    parser.add_argument("--talker-steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=("sound", "talker"), help="train this part only")
    options = parser.parse_args()
    training = Training(options.model, options.out, options.seed)
    if options.part == "sound":
        training.sound(options.sound_steps)
    elif options.part == "talker":
        training.talker(options.talker_steps)
    else:
        names = "sound_steps", "talker_steps", "seed"
        print(training.export({name: getattr(options, name) for name in names}))


if __name__ == "__main__":
    main()
