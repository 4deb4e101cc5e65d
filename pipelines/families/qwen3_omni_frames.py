"""Frames of Qwen3-Omni's speech: the codes of one frame of several voices, in one CUDA graph.

A frame takes 15 steps of ``code_predictor`` and one of the talker, with random choices in between.
All of them are one step of a ``GraphRunner``, so the host launches them at once and waits once.
Random numbers are drawn before the step, in the order of transformers' ``generate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import as_argument
from oscar_mm.engine.sampling import NAN
from oscar_mm.engine.speech import SIZES, Frames
from oscar_mm.fast_decode.decoder import FastLayer, has_full_attention, has_known_layers
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.fast_decode.linear import linear
from oscar_mm.fast_decode.linear_torch import Norm
from oscar_mm.modules import run_as_written
from oscar_mm.ops.decode_tables import upload
from oscar_mm.pipelines.families.qwen3_omni_sound import Waves

if TYPE_CHECKING:
    from oscar_mm.pipelines.families.qwen3_omni_talker import OmniVoice, Qwen3OmniTalker

_CONTROL_CODES = 1024
"""Number of codes at the end of the talker's vocabulary that stand for no sound."""
_PENALTY = 1.05
"""Repetition penalty of the talker's codes."""
_LAYERS = frozenset(
    {"Qwen3OmniMoeTalkerDecoderLayer", "Qwen3OmniMoeTalkerCodePredictorDecoderLayer"}
)
"""Classes of layers with the arithmetic of ``FastLayer``."""


class Choices:
    """The random choices of transformers' ``generate``, of several voices at once.

    ``torch.multinomial`` chooses the largest quotient of a probability and an exponentially
    distributed number. Here these numbers are arguments, because CUDA graphs cannot use a generator
    for each voice.

    Args:
        config: configuration of the talker.
        device: device of the talker.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        vocabulary = config.text_config.vocab_size
        self._silent = torch.arange(vocabulary, device=device) >= vocabulary - _CONTROL_CODES
        self._silent[config.codec_eos_token_id] = False
        self._codes = LogitsProcessorList([TemperatureLogitsWarper(0.9), TopKLogitsWarper(50)])
        self._residual = LogitsProcessorList([TopKLogitsWarper(50), TopPLogitsWarper(0.8)])

    def codes(
        self, logits: torch.Tensor, said: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the talker's next codes.

        Args:
            logits: (rows, vocabulary).
            said: (rows, vocabulary) bool: codes that a row has chosen before.
            noise: (rows, vocabulary) exponentially distributed numbers.

        Returns:
            (rows, 1) codes, and (rows, 1) bool: whether a row's logits are NaN.
        """
        scores = logits.float()
        penalized = torch.where(scores < 0, scores * _PENALTY, scores / _PENALTY)
        scores = torch.where(said, penalized, scores)
        return _chosen(self._codes, scores.masked_fill(self._silent, -torch.inf), noise)

    def residual(
        self, logits: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose codes of the predictor, see ``codes``."""
        return _chosen(self._residual, logits.float(), noise)


def _chosen(
    rules: LogitsProcessorList, scores: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    unused = cast(torch.LongTensor, torch.empty(0, dtype=torch.long))
    chances = rules(unused, cast(torch.FloatTensor, scores)).softmax(-1)
    return (chances / noise).argmax(-1, keepdim=True), chances[:, :1].isnan()


def fast_layers(model: Any) -> list[FastLayer]:
    """Return the layers of the talker or of its code predictor for few launches; none if they do
    not run as they were written.

    Args:
        model: model with the decoder ``model.model``.
    """
    known = has_known_layers(model.model, _LAYERS) and has_full_attention(model)
    return [FastLayer.of(layer) for layer in model.model.layers] if known else []


def norm_of(decoder: Any) -> Norm:
    """Return the norm after the last layer."""
    return Norm(decoder.norm.weight, decoder.norm.variance_epsilon)


class _Past:
    """Keys and values of the tokens of a frame."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens to a layer, and return all its keys and values."""
        if layer in self._layers:
            keys, values = self._layers[layer]
            key, value = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
        self._layers[layer] = key, value
        return key, value


class _Predictor:
    """Predicts the codes of a frame after its first one, all in one call.

    Args:
        talker: transformers' talker.
        choices: random choices.
    """

    def __init__(self, talker: Any, choices: Choices) -> None:
        predictor = talker.code_predictor
        self._model, self._heads, self._choices = predictor.model, predictor.lm_head, choices
        self._embeddings = [talker.get_input_embeddings(), *predictor.get_input_embeddings()]
        self._layers = fast_layers(predictor) if run_as_written([*self._heads]) else []

    def __call__(
        self, hidden: torch.Tensor, codes: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Predict the codes of a frame.

        Args:
            hidden: (rows, 1, hidden size) latest output of the talker.
            codes: (rows, 1) first code of the frame.
            noise: (rows, groups - 1, vocabulary), see ``Choices``.

        Returns:
            (rows, groups) codes; (rows, groups, hidden size), their embeddings; for each choice,
            whether it failed, see ``Choices``.
        """
        embedded, found, failed = [self._embeddings[0](codes)], [codes], list[torch.Tensor]()
        places = torch.arange(len(self._embeddings), device=hidden.device)[None]
        angles = self._model.rotary_emb(hidden, places)
        past: Any = _Past() if self._layers else DynamicCache()
        inputs = torch.cat([hidden, embedded[0]], dim=1)
        for step, (head, embedding) in enumerate(
            zip(self._heads, self._embeddings[1:], strict=True)
        ):
            first = 0 if step == 0 else step + 1
            here = [x[0, first : step + 2] for x in angles]
            code, is_nan = self._choices.residual(
                self._logits(inputs, here, head, past), noise[:, step]
            )
            inputs = embedding(code)
            found.append(code)
            embedded.append(inputs)
            failed.append(is_nan)
        return torch.cat(found, dim=1), torch.cat(embedded, dim=1), failed

    def _logits(
        self, inputs: torch.Tensor, angles: Sequence[torch.Tensor], head: Any, past: Any
    ) -> torch.Tensor:
        """Return (rows, vocabulary) logits after (rows, tokens, hidden size) inputs."""
        if not self._layers:
            output = self._model(inputs_embeds=inputs, **as_argument(past), use_cache=True)
            return head(output.last_hidden_state[:, -1])
        rows = inputs.flatten(0, 1)
        cosine, sine = (x.repeat(len(inputs), 1) for x in angles)
        for layer in self._layers:
            rows = layer.feed_forward(layer.attended(rows, len(inputs), cosine, sine, past))
        last = rows.view(inputs.shape)[:, -1].contiguous()
        return linear(last, [head.weight], norm=norm_of(self._model))


class FrameSteps(GraphRunner):
    """Steps that add a frame to each of up to ``rows`` voices.

    Args:
        talker: talker of the voices.
        cache: cache of the voices' rows.
        rows: number of rows.
    """

    def __init__(self, talker: Qwen3OmniTalker, cache: BatchView, rows: int) -> None:
        model, config = talker.model, talker.model.config
        super().__init__(model, cache, rows, (3,), model.device, capture=talker.capture)
        self._talker, self._predictor = talker, _Predictor(model, talker.choices)
        vocabulary, residual = (
            config.text_config.vocab_size,
            config.code_predictor_config.vocab_size,
        )
        self._groups, device = config.num_code_groups, model.device
        width = config.text_config.hidden_size
        self._hidden = torch.zeros(rows, 1, width, dtype=model.dtype, device=device)
        self._codes = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._said = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
        self._noise = torch.ones(rows, vocabulary, device=device)
        self._residual_noise = torch.ones(rows, self._groups - 1, residual, device=device)

    def say(self, voices: Sequence[OmniVoice]) -> None:
        """Add a frame to each voice; the voices are the first rows of the cache.

        Raises:
            FloatingPointError: if the logits of a voice are NaN.
        """
        rows, count = len(self._codes), len(voices)
        for row, voice in enumerate(voices):
            for noise in (*self._residual_noise[row], self._noise[row]):
                noise.exponential_(generator=voice.generator)
        self._hidden[:count] = torch.cat([x.hidden for x in voices if x.hidden is not None])
        self._said[:count] = upload(np.stack([x.said for x in voices]), self._said.device)
        given = [[voice.first_codes[-1], voice.next_word()] for voice in voices]
        table = np.array(given + [[0, 0]] * (rows - count), dtype=np.int64)
        codes, words = upload(table, self._codes.device).T
        self._codes.copy_(codes[:, None])
        self.place([voice.position for voice in voices] + [0] * (rows - count))
        found = self(words, torch.arange(rows) >= count)[:count].cpu()
        if found[:, -1].any():
            raise FloatingPointError(NAN)
        hidden = self._hidden[:count].clone()  # The next step overwrites it.
        for row, voice in enumerate(voices):
            frame, code = found[row, : self._groups], int(found[row, self._groups])
            voice.add(frame, hidden[row : row + 1], code)

    def _repeatable(self) -> torch.Tensor:
        """Run a step on tensors at fixed addresses.

        Returns:
            (rows, groups + 2): the codes of the frame, the first code of the next one, and whether
            any choice failed.
        """
        talker = self._talker
        frame, embedded, failed = self._predictor(self._hidden, self._codes, self._residual_noise)
        inputs = embedded.sum(1, keepdim=True) + talker.text(self._ids)
        hidden = talker.hidden(inputs, self._expanded_positions(), self.cache)
        self.cache.end_step()
        logits = talker.model.codec_head(hidden[:, -1])
        code, is_nan = talker.choices.codes(logits, self._said, self._noise)
        self._hidden.copy_(hidden)
        failed = torch.cat([*failed, is_nan], dim=1).any(1, keepdim=True)
        return torch.cat([frame, code, failed], dim=1)


class OmniFrames(Frames):
    """See ``Frames``; steps are captured for each of ``SIZES``.

    Args:
        talker: talker of the voices.
        cache: cache whose rows are the voices' caches.
    """

    def __init__(self, talker: Qwen3OmniTalker, cache: BatchView) -> None:
        self._talker, self._cache = talker, cache
        self._weights: object = None
        self.refresh()

    def refresh(self) -> None:
        """See ``Frames.refresh``."""
        weights = self._talker.refresh()
        if weights != self._weights:
            self._weights = weights
            self.forget()

    def forget(self) -> None:
        """See ``Frames.forget``."""
        self._by_size: dict[int, FrameSteps] = {}
        self._waves = Waves(self._talker.code2wav)

    def size_for(self, voices: int) -> int:
        """See ``Frames.size_for``."""
        if self._talker.capture is None:
            return voices
        return next(size for size in SIZES if size >= voices)

    def say(self, voices: Sequence[OmniVoice]) -> None:
        """See ``Frames.say``."""
        size = self.size_for(len(voices))
        if size not in self._by_size:
            self._by_size[size] = FrameSteps(self._talker, self._cache, size)
        self._by_size[size].say(voices)

    def sound(self, voices: Sequence[OmniVoice]) -> list[np.ndarray]:
        """See ``Frames.sound``."""
        return self._waves([voice.sound for voice in voices])
