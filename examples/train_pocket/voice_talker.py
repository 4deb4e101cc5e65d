"""Training of the voice's talker and code predictor: the thinker's words to codes.

For each frame the talker reads the codes of the last frame, which say where it is, and finds its
word among those that it has read. It must do so also if keys and values are packed in 2 bits, and
after thousands of tokens of questions, so training adds noise to them and weight to media.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from examples.train_pocket.voice_units import (
    CODES,
    COUNT,
    DETAIL,
    LEFT,
    PLACE,
    Units,
)

RATE = 2e-3  # learning rate
NOISE = 0.25  # of the size of keys and values
OPENING = 9  # tokens of an answer before its first frame
BUDGET = 250  # frames in a step
LONGEST = 250  # words of an answer
WARMUP, DECAY = 100, 0.15  # steps, and the share of the steps in which the rate falls


class Script:
    """Ids with a meaning for the talker.

    Args:
        config: config of the whole model.
        speaker: name of the voice.
        speakable: ids that answers consist of.
        pauses: ids of what is read as a pause.
        head: the three ids before the first word of an answer.
        end: id of the end of an answer.
    """

    def __init__(
        self,
        config: Any,
        speaker: str,
        speakable: list[int],
        pauses: list[int],
        head: list[int],
        end: int,
    ) -> None:
        talker = config.talker_config
        self.pad, self.begin, self.eos = (
            getattr(config, f"tts_{name}_token_id") for name in ("pad", "bos", "eos")
        )
        self.texts = [*head, *[self.pad] * 4, self.begin]
        codes = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
        codes += [talker.speaker_id[speaker], talker.codec_pad_id, talker.codec_bos_id]
        self.codes, self.stop = codes, talker.codec_eos_token_id
        self.speakable, self.pauses, self.end = speakable, pauses, end

    def words(self, count: int) -> list[int]:
        """Return the ids of a random answer of ``count`` words."""
        often = random.choice((0.0, 0.1, 0.5))
        few = random.sample(self.speakable, random.choice((1, 2, 10, len(self.speakable))))
        found = [
            random.choice(self.pauses) if random.random() < often else random.choice(few)
            for _ in range(count)
        ]
        return [*found, self.end] if random.random() < 0.7 else found


def rate_at(step: int, steps: int) -> float:
    """Return the share of RATE in a step: it rises, stays at 1, and falls at the end."""
    return min(1.0, (step + 1) / WARMUP, (steps - step) / (DECAY * steps))


@torch.no_grad()
def build(talker: Any) -> None:
    """Give numbers that are counted embeddings of waves, so that the next one is a rotation, and
    let all media be read as the same constant."""
    generator = torch.Generator().manual_seed(0)
    predictor, width = talker.code_predictor, talker.config.text_config.hidden_size
    for group in (PLACE, COUNT):
        frequencies = torch.randperm(CODES // 2, generator=generator)[:32] + 1
        angles = torch.arange(CODES)[:, None] * frequencies * (2 * math.pi / CODES)
        waves = torch.cat([angles.cos(), angles.sin()], dim=1)
        frame = torch.randn(width, 64, generator=generator) / 8
        predictor.model.codec_embedding[group - 1].weight.copy_(waves @ frame.T)
        predictor.lm_head[group - 1].weight.copy_(waves @ frame.T * width**-0.5)
    for group in (DETAIL, LEFT):
        predictor.model.codec_embedding[group - 1].weight.normal_(std=0.5, generator=generator)
    talker.get_input_embeddings().weight.normal_(std=0.5, generator=generator)
    for projection in (talker.text_projection, talker.hidden_projection):
        projection.linear_fc1.weight.normal_(std=0.1, generator=generator)
        projection.linear_fc2.weight.normal_(std=0.1, generator=generator)
    talker.hidden_projection.linear_fc2.weight.zero_()
    talker.hidden_projection.linear_fc2.bias.normal_(std=0.5, generator=generator)


class Course:
    """Trains a talker.

    Args:
        talker: transformers' talker, after ``build``.
        embedding: (ids, size) of the thinker.
        units: units of the voice.
        script: ids with a meaning.
    """

    def __init__(self, talker: Any, embedding: torch.Tensor, units: Units, script: Script) -> None:
        self.talker, self.embedding, self.units, self.script = talker, embedding, units, script
        for layer in talker.model.layers:
            for part in (layer.self_attn.k_norm, layer.self_attn.v_proj):
                part.register_forward_hook(self._shake)

    def _shake(self, module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        size = output.detach().square().mean(-1, keepdim=True).sqrt()
        return output + NOISE * random.random() * size * torch.randn_like(output)

    def text(self, ids: list[int]) -> torch.Tensor:
        """Return what the talker reads of ids, (tokens, hidden size)."""
        return self.talker.text_projection(self.embedding[torch.tensor(ids)])

    def row(self, words: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Return the talker's inputs, (tokens, hidden size); the weights of the inputs as logs,
        (tokens,); the codes of the frames, (frames, GROUPS); and the number of tokens before."""
        codes, _ = self.units.said(words)
        script, talker = self.script, self.talker
        asked = [random.randrange(len(self.embedding)) for _ in range(random.randrange(2, 16))]
        question = self.text(asked)
        weights = torch.zeros(len(asked))
        if random.random() < 0.5:  # a medium, whose tokens are all the same
            question[-1] = talker.hidden_projection.linear_fc2.bias
            weights[-1] = random.random() * math.log(8000)
        opening = self.text([*script.texts, words[0]])
        special = talker.get_input_embeddings()(torch.tensor(script.codes))
        opening = torch.cat([opening[:3], opening[3:] + special])
        read = [*words[1:], script.eos]
        read = (read + [script.pad] * len(codes))[: len(codes)]
        frames = self.embedded(codes) + self.text(read)
        inputs = torch.cat([question, opening, frames])
        weights = torch.cat([weights, torch.zeros(len(inputs) - len(weights))])
        return inputs, weights, codes, len(asked) + OPENING

    def embedded(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the sum of the embeddings of (frames, GROUPS) codes."""
        tables = [
            self.talker.get_input_embeddings(),
            *self.talker.code_predictor.model.codec_embedding,
        ]
        return sum(table(codes[:, group]) for group, table in enumerate(tables))  # type: ignore[return-value]

    def losses(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the losses of the talker and of its predictor, and the share of right codes."""
        made = [self.row(words) for words in rows]
        longest = max(len(inputs) for inputs, *_ in made)
        inputs = torch.stack([F.pad(x, (0, 0, 0, longest - len(x))) for x, *_ in made])
        weights = torch.stack([F.pad(x, (0, longest - len(x))) for _, x, *_ in made])
        future = torch.full((longest, longest), -torch.inf).triu(1)
        hidden = self.talker.model(
            inputs_embeds=inputs, attention_mask=future + weights[:, None, None]
        ).last_hidden_state
        spoken = torch.cat(
            [
                x[first - 1 : first + len(codes)]
                for x, (_, _, codes, first) in zip(hidden, made, strict=True)
            ]
        )
        stop = torch.tensor([self.script.stop])
        targets = torch.cat([torch.cat([codes[:, 0], stop]) for _, _, codes, _ in made])
        logits = self.talker.codec_head(spoken)
        first_loss = F.cross_entropy(logits, targets)
        codes = torch.cat([F.pad(codes, (0, 0, 0, 1), value=-1) for _, _, codes, _ in made])
        chosen = (codes[:, 0] >= 0).nonzero()[:, 0]
        chosen = chosen[torch.randperm(len(chosen))[: BUDGET // 3]]
        rest_loss, right = self.residual(spoken[chosen], codes[chosen])
        right = right & (logits[chosen].argmax(-1) == targets[chosen])
        return first_loss, rest_loss, right.float().mean()

    def residual(
        self, hidden: torch.Tensor, codes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of the predictor, and which of (frames, GROUPS) codes are right."""
        predictor = self.talker.code_predictor
        tables = [self.talker.get_input_embeddings(), *predictor.model.codec_embedding[:-1]]
        embedded = [table(codes[:, group]) for group, table in enumerate(tables)]
        output = predictor.model(inputs_embeds=torch.stack([hidden, *embedded], dim=1))
        states = output.last_hidden_state[:, 1:].unbind(1)
        logits = torch.stack(
            [head(x) for head, x in zip(predictor.lm_head, states, strict=True)], 1
        )
        loss = F.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())
        return loss, (logits.argmax(-1) == codes[:, 1:]).all(1)

    def answers(self) -> list[list[int]]:
        """Return the words of some random answers with about BUDGET frames."""
        longest = LONGEST if random.random() < 0.04 else random.choice((1, 4, 8, 16, 40))
        rows, frames = [], 0
        while frames < BUDGET:
            words = self.script.words(random.randint(max(1, longest // 2), longest))
            rows.append(words)
            frames += int(self.units.frames[self.units.unit_of[words]].sum())
        return rows

    def train(self, steps: int, log: Callable[[str], None] = print) -> None:
        """Train for a number of steps."""
        self.talker.train()
        learnt = [x for name, x in self.talker.named_parameters() if "hidden_proj" not in name]
        adam = torch.optim.AdamW(learnt, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        begin, running = time.monotonic(), [0.0, 0.0, 0.0]
        for step in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                found = self.losses(self.answers())
            (found[0] + found[1]).backward()
            nn.utils.clip_grad_norm_(learnt, 1.0)
            adam.param_groups[0]["lr"] = RATE * rate_at(step, steps)
            adam.step()
            adam.zero_grad()
            keep = 0.0 if step == 0 else 0.95
            running = [
                keep * x + (1 - keep) * y.item() for x, y in zip(running, found, strict=True)
            ]
            if (step + 1) % 50 == 0:
                shown = ", ".join(f"{value:.4f}" for value in running)
                seconds = time.monotonic() - begin
                log(f"talker: step {step + 1}, {seconds:.0f} s, losses and right: {shown}")
        self.talker.eval()
