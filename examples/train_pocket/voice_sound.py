"""Training of the voice's code2wav: codes to samples.

The last layers are not trained. They are an inverse MDCT, which turns 32 coefficients into 48
samples, so that training compares coefficients, at 500 Hz instead of 24,000 Hz: minutes on a CPU
core.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from examples.train_pocket.optimizer import schedule
from examples.train_pocket.voice_units import CODES, FRAME, SOUNDS, Units

HOP, BINS = 48, 32  # samples, and coefficients of them: 0 to 8 kHz
NONE = 20.0  # the logarithm of a Snake's divisor that makes it the identity
RATE = 2e-3  # learning rate
WINDOWS = (240, 600, 1200)  # samples of the spectra that are compared
FLOOR = 1e-3  # of them: the thinker hears noise that is 50 dB below the voice


def basis() -> torch.Tensor:
    """Return (BINS, 2 * HOP), the windowed functions of an MDCT; their overlapping sums invert
    it."""
    time_ = torch.arange(2 * HOP, dtype=torch.float64) + 0.5
    bins = torch.arange(BINS, dtype=torch.float64) + 0.5
    waves = torch.cos(math.pi / HOP * bins[:, None] * (time_ + HOP / 2))
    window = torch.sin(math.pi * time_ / (2 * HOP))
    return (math.sqrt(2 / HOP) * waves * window).float()


def coefficients(samples: torch.Tensor) -> torch.Tensor:
    """Return the (rows, BINS, hops) MDCT of (rows, samples); the first window begins HOP before
    the first sample, and the last one ends HOP behind the last."""
    padded = F.pad(samples, (HOP, HOP))
    return F.conv1d(padded[:, None], basis()[:, None].to(samples), stride=HOP)


def samples(found: torch.Tensor) -> torch.Tensor:
    """Return the (rows, samples) of (rows, BINS, hops) coefficients: an inverse MDCT."""
    made = F.conv_transpose1d(found, basis()[:, None].to(found), stride=HOP)
    return made[:, 0, HOP:-HOP]


@torch.no_grad()
def build(model: Qwen3OmniMoeCode2Wav) -> None:
    """Make the last layers an inverse MDCT, and clear the embeddings of codes without sound."""
    model.code_embedding.weight[SOUNDS * CODES :].zero_()
    for _, block in model.upsample:
        block.gamma.fill_(0.3)
    synthesis, snake, output = model.decoder[-3:]
    for part in (synthesis, snake, output):
        part.requires_grad_(False)
    first, transposed, *units = synthesis.block
    for one in (first, snake):
        one.beta.fill_(NONE)
    transposed.conv.weight.zero_()
    transposed.conv.weight[:, 0] = basis()
    transposed.conv.bias.zero_()
    for unit in units:
        unit.conv2.conv.weight.zero_()
        unit.conv2.conv.bias.zero_()
    output.conv.weight.zero_()
    output.conv.weight[0, 0, -1] = 1
    output.conv.bias.zero_()


def predicted(model: Qwen3OmniMoeCode2Wav, codes: torch.Tensor) -> torch.Tensor:
    """Return the (rows, BINS, hops) coefficients of (rows, SOUNDS, frames) codes.

    The codes that are not of the sound are left out: their embeddings are zero.
    """
    offsets = model.code_offset[:, : codes.shape[1]]
    hidden = model.code_embedding(codes + offsets).sum(1) / model.config.num_quantizers
    hidden = model.pre_transformer(inputs_embeds=hidden).last_hidden_state.mT
    for block in (*(x for blocks in model.upsample for x in blocks), *model.decoder[:-3]):
        hidden = block(hidden)
    return hidden


def train(
    model: Qwen3OmniMoeCode2Wav,
    units: Units,
    often: torch.Tensor,
    steps: int,
    log: Callable[[str], None] = print,
) -> None:
    """Train for a number of steps.

    Args:
        model: model with random weights, after ``build``.
        units: units of the voice.
        often: (n,) numbers of units that make up half of what is said.
        steps: number of steps.
        log: receives a line from time to time.
    """
    learnt = [weight for weight in model.parameters() if weight.requires_grad]
    adam = torch.optim.AdamW(learnt, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    scale = coefficients(units.waves.flatten(1)).std((0, 2), keepdim=True).pow(0.7)
    begin, running = time.monotonic(), 0.0
    for step in range(steps):
        codes, target = batch(units, often)
        found = predicted(model, codes)
        loss = difference(found, target[..., : found.shape[-1]], scale)
        loss.backward()
        nn.utils.clip_grad_norm_(learnt, 1.0)
        adam.param_groups[0]["lr"] = RATE * schedule(step, step / steps)
        adam.step()
        adam.zero_grad()
        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        if (step + 1) % 200 == 0:
            seconds = time.monotonic() - begin
            log(f"sound: step {step + 1}, {seconds:.0f} s, loss {running:.4f}")


def batch(
    units: Units, often: torch.Tensor, rows: int = 4, said: int = 6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows, SOUNDS, frames) codes and (rows, BINS, hops) coefficients of random units."""
    chosen = torch.randint(len(units.frames), (rows, said))
    usual = often[torch.randint(len(often), (rows, said))]
    chosen = torch.where(torch.rand(rows, said) < 0.5, usual, chosen)
    codes, waves = [], []
    for row in chosen:
        real = torch.arange(units.waves.shape[1]) < units.frames[row, None]
        codes.append(units.codes[row][real])
        waves.append(units.waves[row][real].flatten())
    frames = min(map(len, codes))
    sound = torch.stack([code[:frames].mT for code in codes])
    target = coefficients(torch.stack([wave[: frames * FRAME] for wave in waves]))
    return sound, target


def difference(found: torch.Tensor, target: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return how different coefficients, of (rows, BINS, hops), sound: they and their spectra.

    Errors that are small in every coefficient can be loud together, where the overlapping windows
    no longer cancel each other's aliases. Spectra of the samples show them.

    Args:
        found, target: coefficients to compare.
        scale: (1, BINS, 1), the sizes of the coefficients.
    """
    total = ((found - target) / scale).abs().mean()
    for window in WINDOWS:
        here, there = (_spectra(samples(x), window) for x in (found, target))
        total = total + ((here + FLOOR).log() - (there + FLOOR).log()).abs().mean()
        total = total + (here - there).norm() / there.norm()
    return total


def _spectra(waves: torch.Tensor, window: int) -> torch.Tensor:
    """Return (rows, bands, times) magnitudes up to 8 kHz."""
    shape = torch.hann_window(window, device=waves.device)
    found = torch.stft(waves, window, window // 4, window=shape, return_complex=True)
    return (found[:, : window // 3].abs().square() + 1e-12).sqrt() / window**0.5
