"""Sound of Qwen3-Omni's speech: codes to samples, piece by piece, for several voices at once.

Pieces of the same shape run together. The first ones of an answer have less context than later
ones, which all have one shape. All of them are CUDA graphs, except for the last piece of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from oscar_mm.cache.cache import as_argument
from oscar_mm.engine.speech import FIRST_FRAMES, PIECE_FRAMES, SIZES
from oscar_mm.fast_decode.graph_cache import GraphCache
from oscar_mm.fast_decode.graph_runner import graph_capture
from oscar_mm.modules import devices
from oscar_mm.ops.decode_tables import upload

_WORK = "speech is decoded"
_MAX_GRAPHS = 64
"""Maximum number of graphs: one for each number of voices and shape of a piece; there are about 7
shapes."""


class _Inputs(NamedTuple):
    """What a pass reads of each of several voices.

    Attributes:
        codes: (voices, groups, frames).
        starts: (voices, 1) number of earlier frames.
        past: (voices, layers, 2, heads, window - 1, head_dim): keys and values of earlier frames.
        context: (voices, frames, hidden size): the transformer's output for the latest frames.
    """

    codes: torch.Tensor
    starts: torch.Tensor
    past: torch.Tensor
    context: torch.Tensor

    def of_shape(self, frames: int, context: int) -> _Inputs:
        """Return views with fewer frames."""
        return self._replace(codes=self.codes[..., :frames], context=self.context[:, :context])


class _Outputs(NamedTuple):
    """What a pass computes for each voice: (voices, samples), and the next ``past`` and
    ``context``."""

    wave: torch.Tensor
    past: torch.Tensor
    context: torch.Tensor


class Sound:
    """The samples of one answer, as far as they are known.

    Attributes:
        frames: number of frames that became samples.
        samples: number of samples so far.
        past, context: one row of those of ``_Inputs``; None before the first piece.
    """

    def __init__(self) -> None:
        self._codes: list[torch.Tensor] = []
        self.frames = self.samples = 0
        self.past: torch.Tensor | None = None
        self.context: torch.Tensor | None = None

    def add(self, frame: torch.Tensor) -> None:
        """Add the (groups,) codes of a frame, on the CPU."""
        self._codes.append(frame)

    @property
    def waiting(self) -> int:
        """Number of frames that are not samples yet."""
        return len(self._codes)

    def take(self) -> np.ndarray:
        """Remove and return the (groups, frames) codes of the next piece."""
        taken, self._codes = self._codes[:PIECE_FRAMES], self._codes[PIECE_FRAMES:]
        return torch.stack(taken, dim=1).numpy()


class Waves:
    """Turns the codes of answers into samples, as if all codes of an answer came at once.

    Args:
        code2wav: transformers' module.
    """

    def __init__(self, code2wav: Any) -> None:
        self._model, config = code2wav, code2wav.config
        self._context_frames = _context_frames(config)
        heads, own = config.num_key_value_heads, getattr(config, "head_dim", None)
        head_dim = own or config.hidden_size // config.num_attention_heads
        self._window = config.sliding_window
        self._past = config.num_hidden_layers, 2, heads, self._window - 1, head_dim
        places = devices(code2wav)
        capture = graph_capture(places, small=True)
        graphs = (
            None if capture is None else GraphCache(capture, next(iter(places)), _MAX_GRAPHS, _WORK)
        )
        self._graphs = graphs
        self._fixed: dict[int, _Inputs] = {}
        """Inputs at fixed addresses for each number of voices, with the longest context."""

    @torch.inference_mode()
    def __call__(self, sounds: Sequence[Sound]) -> list[np.ndarray]:
        """Return the next samples of each sound, (samples,) float32.

        The samples end a little before the last frame does: they depend on the next one.
        """
        found = [[np.zeros(0, np.float32)] for _ in sounds]
        while waiting := [place for place, sound in enumerate(sounds) if sound.waiting]:
            shape = self._shape(sounds[waiting[0]])
            alike = [place for place in waiting if self._shape(sounds[place]) == shape]
            pieces = self._pieces([sounds[place] for place in alike[: SIZES[-1]]])
            for place, samples in zip(alike, pieces, strict=False):
                found[place].append(samples)
        return [np.concatenate(parts) for parts in found]

    def _shape(self, sound: Sound) -> tuple[int, int]:
        """Return the number of frames of a sound's context and of its next piece."""
        return min(sound.frames, self._context_frames), min(sound.waiting, PIECE_FRAMES)

    def _pieces(self, sounds: Sequence[Sound]) -> list[np.ndarray]:
        """Return the samples of the next piece of each sound; the pieces have the same shapes."""
        recurs = self._shape(sounds[0])[1] == (PIECE_FRAMES if sounds[0].frames else FIRST_FRAMES)
        inputs = self._inputs(sounds)
        outputs = self._replayed(inputs) if recurs else self._computed(inputs)
        waves = outputs.wave.float().cpu().numpy()
        frames, context = inputs.codes.shape[2], inputs.context.shape[1]
        found = []
        for row, sound in enumerate(sounds):
            begin = (sound.frames - context) * int(self._model.total_upsample)
            found.append(waves[row, sound.samples - begin :])
            sound.frames += frames
            sound.samples += len(found[-1])
            sound.past, sound.context = outputs.past[row], outputs.context[row]
        return found

    def _inputs(self, sounds: Sequence[Sound]) -> _Inputs:
        weight = self._model.code_embedding.weight
        codes = upload(np.stack([sound.take() for sound in sounds]), weight.device)
        starts = upload(np.array([[sound.frames] for sound in sounds]), weight.device)
        empty = weight.new_zeros(self._past), weight.new_zeros(0, weight.shape[1])
        past = [empty[0] if sound.past is None else sound.past for sound in sounds]
        context = [empty[1] if sound.context is None else sound.context for sound in sounds]
        return _Inputs(codes, starts, torch.stack(past), torch.stack(context))

    def _computed(self, inputs: _Inputs) -> _Outputs:
        """Run the model on the next frames of several voices."""
        codes, starts, past, context = inputs
        model, frames = self._model, codes.shape[2]
        hidden = model.code_embedding(codes + model.code_offset).mean(1)
        cache = _LatestFrames(past)
        new = model.pre_transformer(
            inputs_embeds=hidden,
            position_ids=starts + torch.arange(frames, device=codes.device),
            attention_mask={"sliding_attention": self._mask(starts, frames)},
            **as_argument(cache),
            use_cache=True,
        ).last_hidden_state
        hidden = torch.cat([context, new], dim=1)
        kept = hidden[:, -self._context_frames :].contiguous()
        return _Outputs(self._wave(hidden), cache.latest(self._window - 1), kept)

    def _mask(self, starts: torch.Tensor, frames: int) -> torch.Tensor:
        """Return (voices, 1, frames, window - 1 + frames) bool: which frames see which others."""
        here = torch.arange(frames, device=starts.device)
        there = torch.arange(1 - self._window, frames, device=starts.device)
        ago = here[:, None] - there
        seen = (ago >= 0) & (ago < self._window)
        return (seen & (starts[..., None] + there >= 0))[:, None]

    def _wave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return (voices, samples) for (voices, frames, hidden size)."""
        wave = hidden.permute(0, 2, 1)
        for blocks in self._model.upsample:
            for block in blocks:
                wave = block(wave)
        for block in self._model.decoder:
            wave = block(wave)
        return wave[:, 0].clamp(min=-1, max=1)

    def _replayed(self, inputs: _Inputs) -> _Outputs:
        """Run the model by a CUDA graph, if they are supported, with padding up to one of
        ``SIZES``."""
        if self._graphs is None or self._graphs.fails:
            return self._computed(inputs)
        count, frames, context = len(inputs.codes), inputs.codes.shape[2], inputs.context.shape[1]
        size = next(size for size in SIZES if size >= count)
        fixed = self._fixed_inputs(inputs, size).of_shape(frames, context)
        for mine, given in zip(fixed, inputs, strict=True):
            mine[:count] = given
        outputs = self._graphs.run((size, frames, context), partial(self._in_place, fixed))
        return _Outputs(*(x[:count].clone() for x in outputs))  # The next replay overwrites them.

    def _in_place(self, fixed: _Inputs) -> _Outputs:
        """Run the model, and overwrite ``past``, so that graphs of all shapes share its memory."""
        outputs = self._computed(fixed)
        return outputs._replace(past=fixed.past.copy_(outputs.past))

    def _fixed_inputs(self, inputs: _Inputs, size: int) -> _Inputs:
        """Return inputs at fixed addresses for a number of voices."""
        if size not in self._fixed:
            codes = inputs.codes.new_zeros(size, inputs.codes.shape[1], PIECE_FRAMES)
            starts, past = (x.new_zeros(size, *x.shape[1:]) for x in (inputs.starts, inputs.past))
            shape = size, self._context_frames, inputs.context.shape[2]
            self._fixed[size] = _Inputs(codes, starts, past, inputs.context.new_zeros(shape))
        return self._fixed[size]


class _LatestFrames:
    """Keys and values of the frames in the window, as the cache of a pass.

    Args:
        past: see ``_Inputs``.
    """

    def __init__(self, past: torch.Tensor) -> None:
        self._past = past
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add (voices, heads, frames, head_dim) to a layer, and return all its keys and values."""
        new, past = (key, value), self._past[:, layer].unbind(1)
        keys, values = (torch.cat(pair, 2) for pair in zip(past, new, strict=True))
        self._layers[layer] = keys, values
        return keys, values

    def latest(self, frames: int) -> torch.Tensor:
        """Return the keys and values of the latest frames of all layers, see ``_Inputs``."""
        layers = [self._layers[layer] for layer in sorted(self._layers)]
        latest = [[x[:, :, -frames:] for x in pair] for pair in layers]
        return torch.stack([torch.stack(pair, 1) for pair in latest], 1)


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
