"""The talker of Qwen3-Omni: turns the thinker's words into speech, in frames of 80 ms.

For each frame, the talker reads one more word of the answer and chooses the first code;
``code_predictor`` chooses the frame's other codes, and ``code2wav`` turns codes into samples.
Random choices are those of transformers' ``generate`` with the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from oscar_mm.cache.cache import OscarCache, as_argument, cache_of
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.speech import Talker, Voice
from oscar_mm.errors import InputError
from oscar_mm.modality import Modality

_USUAL_SPEAKER = "ethan"
_CONTROL_CODES = 1024
"""Number of codes at the end of the talker's vocabulary that stand for no sound."""
_HEAD = 3
"""Tokens of an answer before its first word: <|im_start|>, assistant and a line break."""
_CHUNK = 1 << 13
"""Maximum number of tokens of one pass over what the talker reads before it speaks."""


class _Choices:
    """The random choices of transformers' ``generate``, of several voices at once.

    Args:
        config: configuration of the talker.
    """

    def __init__(self, config: Any) -> None:
        vocabulary, end = config.text_config.vocab_size, config.codec_eos_token_id
        controls = range(vocabulary - _CONTROL_CODES, vocabulary)
        self._penalty = RepetitionPenaltyLogitsProcessor(1.05)
        self._codes = LogitsProcessorList(
            [
                SuppressTokensLogitsProcessor([code for code in controls if code != end]),
                TemperatureLogitsWarper(0.9),
                TopKLogitsWarper(50),
            ]
        )
        self._residual = LogitsProcessorList([TopKLogitsWarper(50), TopPLogitsWarper(0.8)])

    def codes(self, voices: Sequence[OmniVoice], logits: torch.Tensor) -> torch.Tensor:
        """Draw the talker's next codes, (rows, 1), from (rows, vocabulary) logits."""
        rows = zip(voices, logits.float().split(1), strict=True)
        scores = torch.cat([self._penalized(voice, row) for voice, row in rows])
        return self._drawn(voices, self._codes, scores)

    def _penalized(self, voice: OmniVoice, logits: torch.Tensor) -> torch.Tensor:
        said = torch.tensor([voice.first_codes], dtype=torch.long, device=logits.device)
        return self._penalty(cast(torch.LongTensor, said), cast(torch.FloatTensor, logits))

    def residual(self, voices: Sequence[OmniVoice], logits: torch.Tensor) -> torch.Tensor:
        """Draw codes of the predictor, (rows, 1), from (rows, vocabulary) logits."""
        return self._drawn(voices, self._residual, logits.float())

    def _drawn(
        self, voices: Sequence[OmniVoice], rules: LogitsProcessorList, scores: torch.Tensor
    ) -> torch.Tensor:
        unused = cast(torch.LongTensor, torch.empty(0, dtype=torch.long))
        chances = rules(unused, cast(torch.FloatTensor, scores)).softmax(-1).split(1)
        return torch.cat(
            [
                torch.multinomial(row, 1, generator=voice.generator)
                for voice, row in zip(voices, chances, strict=True)
            ]
        )


class OmniVoice(Voice):
    """The speech of one answer, see ``Voice``.

    Args:
        talker: talker that speaks the answer.
        prompt: prompt of a single row, which begins an answer.
        speaker: name of the voice in lower case.
        seed: see ``Talker.voice``.

    Attributes:
        first_codes: codes that the talker has chosen; the last one is not in a frame yet.
        hidden: (1, 1, hidden size) output of the talker for its latest input.
        position: RoPE position of the next frame.
        generator: source of random choices.
    """

    def __init__(
        self, talker: Qwen3OmniTalker, prompt: Prompt, speaker: str, seed: int | None
    ) -> None:
        self._talker, self._speaker = talker, speaker
        self._ids = prompt.inputs["input_ids"][0].cpu()
        self._questions, self._answer = talker.segments(self._ids)
        if self._answer is None or len(self._ids) < self._answer + _HEAD:
            raise InputError(
                "speak=True: the prompt does not begin an answer, so there is nothing to speak: "
                "leave out add_generation_prompt"
            )
        super().__init__(prompt, self._ids[self._answer + _HEAD :].tolist())
        self._is_medium = prompt.modalities[0] > Modality.TEXT
        self._states: list[torch.Tensor] = []
        self._read = 0
        self.first_codes: list[int] = []
        self.hidden: torch.Tensor | None = None
        self.position = 0
        self.generator = torch.Generator(talker.model.device)
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)
        self._codes: list[torch.Tensor] = []
        self._sound = _Sound(talker.code2wav)

    @property
    def needs_states(self) -> bool:
        """See ``Voice.needs_states``; the talker reads hidden states of media only."""
        return bool((self._is_medium & self._questions).any())

    @property
    def prompt_tokens(self) -> int:
        """See ``Voice.prompt_tokens``; the beginning of the answer takes nine tokens."""
        return int(self._questions.sum()) + _HEAD + 6

    @property
    def is_said(self) -> bool:
        """See ``Voice.is_said``."""
        codes = self.first_codes
        ends = bool(codes) and codes[-1] == self._talker.end_code
        return ends or len(codes) > self._talker.max_frames

    @contextmanager
    def listening(self, cache: OscarCache) -> Iterator[None]:
        """See ``Voice.listening``."""
        if not self.needs_states:
            yield
            return

        def collect(_: Any, __: tuple, kwargs: dict[str, Any], states: torch.Tensor) -> None:
            if cache_of(kwargs) is cache:
                self._collect(states[0])

        layer = self._talker.listened_layer
        hook = layer.register_forward_hook(collect, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _collect(self, states: torch.Tensor) -> None:
        """Keep what the talker needs of the next (tokens, hidden size) states of the prompt."""
        part = slice(self._read, self._read + len(states))
        chosen = (self._is_medium & self._questions)[part].to(states.device)
        self._read = part.stop
        self._states.append(self._talker.model.hidden_projection(states[chosen]))

    def read(self, cache: OscarCache) -> Iterator[None]:
        """See ``Voice.read``."""
        inputs = self._opening()
        positions = self._positions(inputs.shape[1])
        self.position = int(positions.max()) + 1
        for start in range(0, inputs.shape[1], _CHUNK):
            part = slice(start, start + _CHUNK)
            self.hidden = self._talker.hidden(inputs[:, part], positions[..., part], cache)[:, -1:]
            yield
        assert self.hidden is not None
        [code] = self._talker.next_codes([self], self.hidden)
        self.first_codes.append(code)

    def _opening(self) -> torch.Tensor:
        """Return (1, tokens, hidden size): the questions, and the answer up to its first word."""
        talker, media = self._talker, self._is_medium[self._questions]
        texts = talker.text(self._ids[self._questions][~media])
        questions = texts.new_empty(len(media), texts.shape[-1])
        questions[~media.to(texts.device)] = texts
        if self._states:
            questions[media.to(texts.device)] = torch.cat(self._states)
            self._states.clear()
        head = self._ids[self._answer :][:_HEAD].tolist()
        return torch.cat([questions, talker.opening(head, self.words[0], self._speaker)])[None]

    def _positions(self, tokens: int) -> torch.Tensor:
        """Return (3, 1, tokens) positions: those of the questions, moved up to each other, then
        one more for each token."""
        positions = self.prompt.positions[-3:, 0].cpu()
        chosen = self._questions.nonzero()[:, 0]
        parts, place = [], torch.zeros(())
        for run in torch.tensor_split(chosen, (chosen.diff() > 1).nonzero()[:, 0] + 1):
            if len(run):
                parts.append(positions[:, run] - positions[0, run[0]] + place)
                place = parts[-1].max() + 1
        rest = tokens - len(chosen)
        parts.append((place + torch.arange(rest)).expand(3, -1))
        return torch.cat([part.float() for part in parts], dim=1)[:, None].to(self.generator.device)

    def next_word(self) -> int:
        """Return the id of the word that the talker reads with the next frame."""
        ids, place = self._talker.tts_ids, self.frames + 1
        if place < len(self.words):
            return self.words[place]
        return ids["eos"] if place == len(self.words) else ids["pad"]

    def add(self, frame: torch.Tensor, hidden: torch.Tensor, code: int) -> None:
        """Add a frame, (groups,) codes, and the output and the code that follow it."""
        self._codes.append(frame)
        self.frames += 1
        self.position += 1
        self.hidden = hidden
        self.first_codes.append(code)

    def sound(self) -> np.ndarray:
        """See ``Voice.sound``."""
        if not self._codes:
            return np.zeros(0, np.float32)
        codes = torch.stack(self._codes, dim=1)[None]
        self._codes.clear()
        return self._sound(codes)


class _Sound:
    """Turns the codes of one answer into samples, piece by piece, as if all came at once.

    Args:
        code2wav: transformers' module.
    """

    def __init__(self, code2wav: Any) -> None:
        self._model = code2wav
        self._past = DynamicCache(config=code2wav.config)
        self._context: torch.Tensor | None = None
        self._frames = self._samples = 0

    @torch.inference_mode()
    def __call__(self, codes: torch.Tensor) -> np.ndarray:
        """Return the next samples for (1, groups, frames) codes.

        The samples end a little before the last frame does: they depend on the next one.
        """
        model = self._model
        hidden = model.code_embedding(codes + model.code_offset).mean(1)
        hidden = model.pre_transformer(
            inputs_embeds=hidden, **as_argument(self._past), use_cache=True
        ).last_hidden_state
        if self._context is not None:
            hidden = torch.cat([self._context, hidden], dim=1)
        self._frames += codes.shape[-1]
        begin = (self._frames - hidden.shape[1]) * int(model.total_upsample)
        samples = self._wave(hidden)[self._samples - begin :]
        self._samples += len(samples)
        self._context = hidden[:, -_context_frames(model.config) :]
        return samples.float().cpu().numpy()

    def _wave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return (samples,) for (1, frames, hidden size)."""
        wave = hidden.permute(0, 2, 1)
        for blocks in self._model.upsample:
            for block in blocks:
                wave = block(wave)
        for block in self._model.decoder:
            wave = block(wave)
        return wave[0, 0].clamp(min=-1, max=1)


def _context_frames(config: Any) -> int:
    """Return the number of earlier frames that the convolutions of code2wav read, rounded up."""
    rate, frames = 1, 1.0  # The last frame is only partly turned into samples.
    for factor in config.upsampling_ratios:
        rate *= factor
        frames += 6 / rate  # A ConvNeXt block, whose kernel has 7 steps.
    frames += 6 / rate
    for factor in config.upsample_rates:
        frames += 1 / rate
        rate *= factor
        frames += 6 * (1 + 3 + 9) / rate  # Three units with dilated kernels of 7 steps.
    return math.ceil(frames + 6 / rate)


class Qwen3OmniTalker(Talker):
    """The talker of a checkpoint, see ``Talker``.

    Args:
        outer: the checkpoint's full model, which has a talker.
    """

    sample_rate = 24_000
    max_frames = 4095
    """As with transformers' ``generate``: 328 s."""

    def __init__(self, outer: Any) -> None:
        self._outer, self.model, self.code2wav = outer, outer.talker, outer.code2wav
        self._config = config = outer.config.talker_config
        names = [name.lower() for name in config.speaker_id or {}]
        first = [_USUAL_SPEAKER] if _USUAL_SPEAKER in names else []
        self.speakers = tuple(dict.fromkeys([*first, *names]))
        self.end_code = config.codec_eos_token_id
        self.tts_ids = {
            name: getattr(outer.config, f"tts_{name}_token_id") for name in ("pad", "bos", "eos")
        }
        self._choices = _Choices(config)

    @property
    def listened_layer(self) -> torch.nn.Module:
        """Module of the thinker whose output the talker reads at media."""
        decoder, number = self._outer.thinker.get_decoder(), self._config.accept_hidden_layer
        return decoder.norm if number == len(decoder.layers) else decoder.layers[number - 1]

    def voice(self, prompt: Prompt, speaker: str, seed: int | None) -> OmniVoice:
        """See ``Talker.voice``."""
        return OmniVoice(self, prompt, speaker, seed)

    def segments(self, ids: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Return (tokens,) bool, whether a token is part of a question, and where the last answer
        begins, for (tokens,) ids."""
        config = self._outer.config
        starts = (ids[:-1] == config.im_start_token_id).nonzero()[:, 0].tolist()
        questions, answer = torch.zeros(len(ids), dtype=torch.bool), None
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            role = int(ids[start + 1])
            questions[start:stop] = role == config.user_token_id
            answer = start if role == config.assistant_token_id else answer
        return questions, answer

    def text(self, ids: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Return what the talker reads of (tokens,) thinker's ids: (tokens, hidden size)."""
        embedding, model = self._outer.thinker.get_input_embeddings(), self.model
        found = embedding(torch.as_tensor(ids, device=embedding.weight.device))
        return model.text_projection(found.to(model.device))

    def opening(self, head: Sequence[int], word: int, speaker: str) -> torch.Tensor:
        """Return (9, hidden size): the beginning of an answer and the voice.

        Args:
            head: ids before the first word.
            word: id of the first word.
            speaker: name of the voice.
        """
        config, tts = self._config, self.tts_ids
        texts = self.text([*head, *[tts["pad"]] * 4, tts["bos"], word])
        speakers = {name.lower(): code for name, code in config.speaker_id.items()}
        codes = [config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id]
        codes += [speakers[speaker], config.codec_pad_id, config.codec_bos_id]
        embedding = self.model.get_input_embeddings()
        texts[_HEAD:] += embedding(torch.tensor(codes, device=embedding.weight.device))
        return texts

    def hidden(
        self, inputs: torch.Tensor, positions: torch.Tensor, cache: OscarCache
    ) -> torch.Tensor:
        """Run the talker over (rows, tokens, hidden size) inputs; the output has their shape."""
        output = self.model.model(
            inputs_embeds=inputs, position_ids=positions, **as_argument(cache), use_cache=True
        )
        return output.last_hidden_state

    def next_codes(self, voices: Sequence[OmniVoice], hidden: torch.Tensor) -> list[int]:
        """Choose the next code of each voice from (rows, 1, hidden size) outputs."""
        logits = self.model.codec_head(hidden[:, -1])
        return self._choices.codes(voices, logits)[:, 0].tolist()

    def say(self, voices: Sequence[OmniVoice], cache: OscarCache) -> None:
        """See ``Talker.say``."""
        frames, codes = self._frames(voices)
        inputs = codes.sum(1, keepdim=True)
        inputs = inputs + self.text([voice.next_word() for voice in voices])[:, None]
        positions = torch.tensor([voice.position for voice in voices], device=inputs.device)
        hidden = self.hidden(inputs, positions.expand(3, -1)[..., None], cache)
        for row, (voice, code) in enumerate(
            zip(voices, self.next_codes(voices, hidden), strict=True)
        ):
            voice.add(frames[row], hidden[row : row + 1], code)

    def _frames(self, voices: Sequence[OmniVoice]) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict the other codes of the frame that each voice's latest code begins.

        Returns:
            (rows, groups) codes and (rows, groups, hidden size), their embeddings.
        """
        predictor, past = self.model.code_predictor, DynamicCache()
        hidden = torch.cat([voice.hidden for voice in voices if voice.hidden is not None])
        codes = torch.tensor([x.first_codes[-1:] for x in voices], device=hidden.device)
        embedded = [self.model.get_input_embeddings()(codes)]
        found, inputs = [codes], torch.cat([hidden, embedded[0]], dim=1)
        for head, embedding in zip(
            predictor.lm_head, predictor.get_input_embeddings(), strict=True
        ):
            output = predictor.model(inputs_embeds=inputs, **as_argument(past), use_cache=True)
            logits = head(output.last_hidden_state[:, -1])
            found.append(self._choices.residual(voices, logits))
            inputs = embedding(found[-1])
            embedded.append(inputs)
        return torch.cat(found, dim=1), torch.cat(embedded, dim=1)
