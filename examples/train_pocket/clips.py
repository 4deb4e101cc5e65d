"""Spoken clips: digits and words from the speech atlas, changed in speed, with noise; log-mel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import WhisperFeatureExtractor

from examples.train_pocket.drawing import Look
from examples.train_pocket.speech import PAIR, RATE, SINGLE, WORD, SpeechAtlas, expand
from examples.train_pocket.words import SPOKEN

HOP = 160  # samples a mel frame
DIGITS = 6  # of the longest clip
# Mel frames of a clip, 100 a second, one for a step; not only whole seconds.
FRAMES = (80, 100, 115, 130, 150, 180, 200, 230, 260, 290, 320, 350)


@dataclass
class Speech:
    """What N clips say.

    Attributes:
        digits: (N, DIGITS) int64, -1 for none.
        words: (N,) int64, -1 where digits are spoken.
    """

    digits: Tensor
    words: Tensor


class Recorder:
    """Makes random facts and waveforms.

    Args:
        atlas: speech atlas on the device to work on.
        extractor: the model's feature extractor; its filters and lengths are used.
    """

    def __init__(self, atlas: SpeechAtlas, extractor: WhisperFeatureExtractor) -> None:
        self.atlas, self.device = atlas, atlas.samples.device
        filters = torch.from_numpy(extractor.mel_filters).float()
        self.filters = filters.T.contiguous().to(self.device)
        self.window = torch.hann_window(extractor.n_fft, device=self.device)

    def record(self, count: int, frames: int, look: Look) -> tuple[Speech, Tensor]:
        """Facts and waveforms (count, frames * HOP) float32; a clip has as many units as fit."""
        atlas, device, hard = self.atlas, self.device, look.difficulty

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(count, *(shape or (1,)), device=device)

        voices, trained = len(atlas.starts), len(atlas.starts) - atlas.held_out
        low, high = (trained, voices) if look.held_out else (0, trained)
        voice = torch.randint(low, high, (count, 1), device=device)
        digits, units = self._units(count, look)
        # No words while digits alone are hard enough.
        with_words = hard > 0.3 and not look.letters
        spoken = (uniform(0, 1) < 0.2) & torch.full_like(voice, with_words).bool()
        word = torch.randint(0, len(SPOKEN), (count, 1), device=device)
        only = F.pad(WORD + word, (0, DIGITS - 1), value=-1)
        units = torch.where(spoken, only, units)

        rate = uniform(1 - 0.15 * hard, 1 + 0.2 * hard)
        chosen = units.clamp(min=0)
        lengths = atlas.lengths[voice, chosen] / rate
        gaps = uniform(0.02, 0.04 + 0.1 * hard, DIGITS) * RATE
        lengths_and_gaps = torch.where(units < 0, 0.0, lengths + gaps)
        ends = lengths_and_gaps.cumsum(-1)
        total = frames * HOP
        in_time = (ends <= total - 0.02 * RATE) | (torch.arange(DIGITS, device=device) == 0)
        fits = in_time & (units >= 0)
        used = torch.where(fits, ends, 0).amax(-1, keepdim=True)
        begin = uniform(0, 1) * (total - used).clamp(min=0)
        starts = torch.where(in_time, ends - lengths_and_gaps + begin, 2.0 * total)
        wave = self._mix(voice, chosen, starts, lengths, fits, rate, total)

        wave = wave * uniform(1 - 0.8 * hard, 1)
        white = torch.randn(count, total, device=device)
        dull = F.avg_pool1d(white[:, None], 9, 1, 4)[:, 0] * 3
        noise = torch.where(uniform(0, 1) < 0.5, white, dull)
        level = wave.square().mean(-1, keepdim=True).sqrt()
        ratio = 10 ** (-uniform(40 - 25 * hard, 45) / 20)
        wave = (wave + noise * level * ratio).clamp(-1, 1)
        kept = self._kept(digits, units, fits)
        digits = torch.where(spoken, -1, kept)
        return Speech(digits, torch.where(spoken, word, -1)[:, 0]), wave

    def _units(self, count: int, look: Look) -> tuple[Tensor, Tensor]:
        """Digits (count, DIGITS) and the units that say them: alone, or two in one breath.

        A unit of two digits is at the even place, with -1 at the odd place.
        """
        device = self.device
        digits = torch.randint(0, 10, (count, DIGITS), device=device)
        low, most = 1 + round(2 * look.difficulty), 1 + round((DIGITS - 1) * look.difficulty)
        if look.letters:
            low, most = 1, look.letters
        number = torch.randint(low, most + 1, (count, 1), device=device)
        digits = torch.where(torch.arange(DIGITS, device=device) < number, digits, -1)
        pairs = digits.view(count, -1, 2)
        joined = (pairs >= 0).all(-1) & (torch.rand(count, DIGITS // 2, device=device) < 0.6)
        first = torch.where(joined, PAIR + pairs[..., 0] * 10 + pairs[..., 1], pairs[..., 0])
        second = torch.where(joined, -1, pairs[..., 1])
        return digits, torch.stack((first, second), -1).flatten(1)

    @staticmethod
    def _kept(digits: Tensor, units: Tensor, fits: Tensor) -> Tensor:
        """The digits whose unit fits into the clip."""
        after_pair = F.pad(fits & (units >= PAIR), (1, -1))
        return torch.where(fits & (units >= SINGLE) | after_pair, digits, -1)

    def _mix(
        self,
        voice: Tensor,
        units: Tensor,
        starts: Tensor,
        lengths: Tensor,
        fits: Tensor,
        rate: Tensor,
        total: int,
    ) -> Tensor:
        """Every sample finds the unit that it lies in and interpolates two samples of the atlas."""
        times = torch.arange(total, device=self.device, dtype=torch.float)
        times = times.expand(len(voice), total).contiguous()
        place = torch.searchsorted(starts.contiguous(), times, right=True) - 1
        inside = place >= 0
        place = place.clamp(min=0)
        since = (times - starts.gather(-1, place)).clamp(min=0)
        inside &= (since < lengths.gather(-1, place) - 2) & fits.gather(-1, place)
        first = self.atlas.starts[voice, units].gather(-1, place)
        along = torch.where(inside, since * rate, 0.0)
        left = along.floor()
        index = first + left.long()
        before, after = expand(self.atlas.samples[index]), expand(self.atlas.samples[index + 1])
        return torch.where(inside, before + (after - before) * (along - left), 0.0)

    def mel(self, waves: Tensor) -> Tensor:
        """(N, samples) float32 to log-mel (N, bins, frames), as WhisperFeatureExtractor does."""
        n_fft = len(self.window)
        spectrum = torch.stft(waves, n_fft, HOP, window=self.window, return_complex=True)
        power = spectrum[..., :-1].abs().square()
        log = torch.clamp(self.filters @ power, min=1e-10).log10()
        log = torch.maximum(log, log.amax((1, 2), keepdim=True) - 8.0)
        return (log + 4.0) / 4.0
