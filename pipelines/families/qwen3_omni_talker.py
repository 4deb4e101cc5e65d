"""The talker of Qwen3-Omni: turns the thinker's words into speech, in frames of 80 ms.

For each frame, the talker reads one more word of the answer and chooses the first code;
``code_predictor`` chooses the frame's other codes (``qwen3_omni_frames.py``), and ``code2wav``
turns codes into samples (``qwen3_omni_sound.py``). Random choices are those of transformers'
``generate`` with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import OscarCache, as_argument, cache_of
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.sampling import NAN
from oscar_mm.engine.speech import (
    NOT_BEGUN,
    Begun,
    End,
    Heard,
    MediaStates,
    Talker,
    Voice,
    VoiceInputs,
)
from oscar_mm.errors import InputError
from oscar_mm.fast_decode.decoder import Capture, FastLayer
from oscar_mm.fast_decode.graph_runner import graph_capture
from oscar_mm.fast_decode.prompt_layers import PrefillGraphs
from oscar_mm.modality import Modality
from oscar_mm.modules import devices, weights_key
from oscar_mm.pipelines.families.qwen3_omni_frames import Choices, OmniFrames, fast_layers, norm_of
from oscar_mm.pipelines.families.qwen3_omni_sound import Sound

_USUAL_SPEAKER = "ethan"
_HEAD = 3
"""Tokens of an answer before its first word: <|im_start|>, assistant and a line break."""
_CHUNK = 1 << 13
"""Maximum number of tokens of one pass over what the talker reads before it speaks."""


class OmniStates(MediaStates):
    """See ``MediaStates``; the states are projected to the talker's size.

    Args:
        talker: talker that reads the states.
        chosen: (tokens,) bool on the CPU, the tokens whose states it reads.
        begun: tokens before the first one that is read, which are in ``chosen`` too.
    """

    def __init__(
        self, talker: Qwen3OmniTalker, chosen: torch.Tensor, begun: Begun = NOT_BEGUN
    ) -> None:
        self._talker, self._chosen = talker, chosen
        self._read, self.kept = begun.tokens, list(begun.states)

    @property
    def are_missing(self) -> bool:
        """See ``MediaStates.are_missing``."""
        return bool(self._chosen[self._read :].any())

    @contextmanager
    def listening(self, cache: OscarCache) -> Iterator[None]:
        """See ``MediaStates.listening``."""
        if not self.are_missing:
            yield
            return

        def collect(_: Any, __: tuple, kwargs: dict[str, Any], states: torch.Tensor) -> None:
            if cache_of(kwargs) is cache:
                self._collect(states[0])

        hook = self._talker.listened_layer.register_forward_hook(collect, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _collect(self, states: torch.Tensor) -> None:
        """Keep what the talker needs of the next (tokens, hidden size) states."""
        part = slice(self._read, self._read + len(states))
        chosen = self._chosen[part].to(states.device)
        self._read = part.stop
        self.kept.append(self._talker.model.hidden_projection(states[chosen]))


class OmniVoice(Voice):
    """The speech of one answer, see ``Voice``.

    Args:
        talker: talker that speaks the inputs.
        answer: the inputs.

    Attributes:
        first_codes: codes that the talker has chosen; the last one is not in a frame yet.
        hidden: (1, 1, hidden size) output of the talker for its latest input.
        position: RoPE position of the next frame.
        said: (vocabulary,) bool: the codes in ``first_codes``.
        generator: source of random choices.
        sound: samples of the frames.
    """

    def __init__(self, talker: Qwen3OmniTalker, inputs: VoiceInputs) -> None:
        self._talker, self._speaker, prompt = talker, inputs.speaker, inputs.prompt
        missed = torch.empty(0, dtype=torch.long) if inputs.missed is None else inputs.missed
        self._ids = torch.cat([missed, prompt.inputs["input_ids"][0].cpu()])
        self._questions, self._answer = talker.segments(self._ids)
        if self._answer is None or len(self._ids) < self._answer + _HEAD:
            raise InputError(
                "speak=True: the prompt does not begin an answer, so there is nothing to speak: "
                "leave out add_generation_prompt"
            )
        is_medium = prompt.modalities[0].cpu() > Modality.TEXT
        self._is_medium = torch.cat([torch.zeros(len(missed), dtype=torch.bool), is_medium])
        begun = inputs.begun._replace(tokens=len(missed) + inputs.begun.tokens)
        states = OmniStates(talker, self._is_medium & self._questions, begun)
        super().__init__(prompt, self._ids[self._answer + _HEAD :].tolist(), states, inputs.past)
        self._positions, self._following = self._question_positions(len(missed))
        self.first_codes: list[int] = []
        self.said = np.zeros(talker.model.config.text_config.vocab_size, dtype=bool)
        self.hidden: torch.Tensor | None = None
        self.position = 0
        self.generator = torch.Generator(talker.model.device)
        if inputs.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(inputs.seed)
        self.sound = Sound()

    @property
    def prompt_tokens(self) -> int:
        """See ``Voice.prompt_tokens``; the beginning of the answer takes nine tokens."""
        unread = () if self.past is None else self.past.unread
        return (
            sum(x.question_tokens for x in (*unread, self) if isinstance(x, OmniVoice)) + _HEAD + 6
        )

    @property
    def question_tokens(self) -> int:
        """Number of tokens of the questions."""
        return self._positions.shape[1]

    def end(self, tokens: int) -> End:
        """See ``Voice.end``."""
        length = (self.past or Heard()).end.length + self.question_tokens
        return End(tokens, length, self._following)

    @property
    def is_said(self) -> bool:
        """See ``Voice.is_said``."""
        codes = self.first_codes
        ends = bool(codes) and codes[-1] == self._talker.end_code
        return ends or len(codes) > self._talker.max_frames

    def read(self, cache: OscarCache) -> Iterator[None]:
        """See ``Voice.read``."""
        past = self.past or Heard()
        voices = [x for x in (*past.unread, self) if isinstance(x, OmniVoice)]
        inputs = torch.cat([*(voice.question() for voice in voices), self._opening()])[None]
        after = (self._following + torch.arange(_HEAD + 6)).expand(3, -1)
        positions = torch.cat([*(voice._positions for voice in voices), after], dim=1)
        self.position = int(positions.max()) + 1
        positions = positions[:, None].to(inputs.device)
        # What was forgotten is read with what follows it, and then forgotten, as in the chat.
        before = sum(x.question_tokens for x in voices[:-1]) if past.forgotten else 0
        starts = [*range(0, before, _CHUNK), *range(before, inputs.shape[1], _CHUNK)]
        for start, stop in pairwise([*starts, inputs.shape[1]]):
            if start:
                yield
            if start == before:
                for span in past.forgotten:
                    cache.forget(*span)
            part = slice(start, stop)
            self.hidden = self._talker.read(inputs[:, part], positions[..., part], cache)
        assert self.hidden is not None
        self.is_read = True
        if self.past is None:  # A chat may have been left before: then it reads the question again.
            self.states.kept.clear()
        self.choose(self._talker.first_code(self, self.hidden))

    def question(self) -> torch.Tensor:
        """Return what the talker reads of the questions, (tokens, hidden size)."""
        media = self._is_medium[self._questions]
        texts = self._talker.text(self._ids[self._questions][~media])
        found = texts.new_empty(len(media), texts.shape[-1])
        found[~media.to(texts.device)] = texts
        if self.states.kept:
            found[media.to(texts.device)] = torch.cat(self.states.kept)
        return found

    def _opening(self) -> torch.Tensor:
        """Return (9, hidden size): the answer up to its first word."""
        head = self._ids[self._answer :][:_HEAD].tolist()
        return self._talker.opening(head, self.words[0], self._speaker)

    def _question_positions(self, missed: int) -> tuple[torch.Tensor, float]:
        """Return (3, tokens) positions of the questions, moved up to each other and to those heard
        before, and the next position.

        Args:
            missed: number of tokens before the prompt.
        """
        own = self.prompt.positions[-3:, 0].cpu().float()
        positions = torch.cat([torch.arange(missed).float().expand(3, -1), own], dim=1)
        chosen = self._questions.nonzero()[:, 0]
        parts = [positions[:, :0]]
        place = (self.past or Heard()).end.position
        for run in torch.tensor_split(chosen, (chosen.diff() > 1).nonzero()[:, 0] + 1):
            if len(run):
                parts.append(positions[:, run] - positions[0, run[0]] + place)
                place = float(parts[-1].max()) + 1
        return torch.cat(parts, dim=1), place

    def next_word(self) -> int:
        """Return the id of the word that the talker reads with the next frame."""
        ids, place = self._talker.tts_ids, self.frames + 1
        if place < len(self.words):
            return self.words[place]
        return ids["eos"] if place == len(self.words) else ids["pad"]

    def add(self, frame: torch.Tensor, hidden: torch.Tensor, code: int) -> None:
        """Add a frame, (groups,) codes on the CPU, and the output and the code that follow it."""
        self.sound.add(frame)
        self.frames += 1
        self.position += 1
        self.hidden = hidden
        self.choose(code)

    def choose(self, code: int) -> None:
        """Add a code that the talker has chosen."""
        self.first_codes.append(code)
        self.said[code] = True


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
        self.choices = Choices(config, self.model.device)
        self._weights: object = None
        self._layers: list[FastLayer] = []
        self._graphs: PrefillGraphs | None = None

    @cached_property
    def capture(self) -> Capture | None:
        """Capture function of steps; None if they run eagerly."""
        places = devices(self.model) | devices(self._outer.thinker.get_input_embeddings())
        return graph_capture(places) if len(places) == 1 else None

    @property
    def listened_layer(self) -> torch.nn.Module:
        """Module of the thinker whose output the talker reads at media."""
        decoder, number = self._outer.thinker.get_decoder(), self._config.accept_hidden_layer
        return decoder.norm if number == len(decoder.layers) else decoder.layers[number - 1]

    def states(self, prompt: Prompt) -> OmniStates:
        """See ``Talker.states``."""
        return OmniStates(self, prompt.modalities[0].cpu() > Modality.TEXT)

    def voice(self, inputs: VoiceInputs) -> OmniVoice:
        """See ``Talker.voice``."""
        return OmniVoice(self, inputs)

    def heard_span(self, ids: torch.Tensor, start: int, stop: int) -> tuple[int, int]:
        """See ``Talker.heard_span``."""
        questions, _ = self.segments(ids)
        return int(questions[:start].sum()), int(questions[:stop].sum())

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
        """Return what the talker reads of thinker's ids of any shape: (..., hidden size)."""
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
        """Run the talker over (rows, tokens, hidden size) inputs; the output has their shape.

        Args:
            inputs: see above.
            positions: (3, rows, tokens).
            cache: cache that stores the tokens' keys and values.
        """
        decoder = self.model.model
        if not self._layers:
            how: dict[str, Any] = as_argument(cache) | {"use_cache": True}
            return decoder(inputs_embeds=inputs, position_ids=positions, **how).last_hidden_state
        angles = decoder.rotary_emb(inputs, positions)
        cosine, sine = (x.flatten(0, 1).contiguous() for x in angles)
        cache.attend_packed(None)
        rows = inputs.flatten(0, 1)
        for layer in self._layers:
            attended = layer.attended(rows, len(inputs), cosine, sine, cache)
            rows = layer.feed_forward(attended)
        return norm_of(decoder).at_once(rows).view(inputs.shape)

    def read(
        self, inputs: torch.Tensor, positions: torch.Tensor, cache: OscarCache
    ) -> torch.Tensor:
        """Prefill (1, tokens, hidden size) inputs; return the (1, 1, hidden size) output of the
        last one.

        Args:
            inputs, positions, cache: see ``hidden``.
        """
        graphs, decoder = self._graphs, self.model.model
        if graphs is not None:
            graphs.begin(inputs, *decoder.rotary_emb(inputs, positions))
        if graphs is None or not graphs.takes_pass:
            return self.hidden(inputs, positions, cache)[:, -1:]
        cache.attend_packed(None)
        for index in range(len(self._layers)):
            inputs = graphs(index, inputs, cache)
        return norm_of(decoder).at_once(inputs[0, -1:])[None]

    def refresh(self) -> object:
        """Use the current weights; return a value that changes with them."""
        weights = weights_key(self.model), weights_key(self.code2wav)
        if weights != self._weights:
            self._weights, self._layers = weights, fast_layers(self.model)
            capture = graph_capture(devices(self.model), small=True)
            self._graphs = None
            if capture is not None and self._layers:
                self._graphs = PrefillGraphs(self._layers, capture)
        return weights

    def first_code(self, voice: OmniVoice, hidden: torch.Tensor) -> int:
        """Choose the first code of a voice from its (1, 1, hidden size) output.

        Raises:
            FloatingPointError: if the logits are NaN.
        """
        logits = self.model.codec_head(hidden[:, -1])
        noise = torch.empty_like(logits, dtype=torch.float32)
        noise.exponential_(generator=voice.generator)
        said = torch.zeros_like(logits, dtype=torch.bool)
        code, failed = self.choices.codes(logits, said, noise)
        if failed:
            raise FloatingPointError(NAN)
        return int(code)

    def frames(self, cache: BatchView) -> OmniFrames:
        """See ``Talker.frames``."""
        return OmniFrames(self, cache)
