"""Draft modules for tiny checkpoints, and drafts that are right or wrong on purpose."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from oscar_mm.engine.decode_runner import DecodeRunner, RequestState
from oscar_mm.fast_decode.decoder import FastDecoder
from oscar_mm.fast_decode.drafts import Drafts


def with_drafts(source: Path, folder: Path, *, seed: int = 0, experts_apart: bool = False) -> Path:
    """Copy a checkpoint and add random weights ``mtp.*``.

    Args:
        experts_apart: whether each expert has weights of its own, as in released checkpoints.
    """
    shutil.copytree(source, folder)
    decoder = AutoModelForImageTextToText.from_pretrained(source).get_decoder()
    drafts = Drafts(decoder)
    generator = torch.Generator().manual_seed(seed)
    own = {
        f"mtp.{name}": 0.1 * torch.randn(weight.shape, generator=generator)
        for name, weight in drafts.state_dict().items()
    }
    for name in [name for name in own if experts_apart and ".experts." in name]:
        rows = own.pop(name)
        before, kinds = name.rsplit(".", 1)[0], ("gate_proj", "up_proj")
        for number, weight in enumerate(rows):
            parts = (
                zip(kinds, weight.chunk(2), strict=True)
                if "gate_up" in name
                else [("down_proj", weight)]
            )
            own |= {f"{before}.{number}.{kind}.weight": part.contiguous() for kind, part in parts}
    file = folder / "model.safetensors"
    save_file(load_file(file) | own, file, metadata={"format": "pt"})
    return folder


class Oracle:
    """Makes drafts those of a known answer, except at some of its tokens.

    Args:
        answer: ids of the answer without drafts.
        wrong: indices of tokens whose drafts are to be wrong.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, answer: Sequence[int], wrong: Sequence[int] = ()
    ) -> None:
        self.passes = 0
        padded = [*answer, *[0] * 8]
        drafts = [abs(x - 1) if place in wrong else x for place, x in enumerate(padded)]
        known: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        positions = torch.zeros(0)
        place = 0

        def step(
            runner: Any, row: RequestState, *, ahead: bool, run: Any = DecodeRunner._step_drafted
        ) -> bool:
            device = runner._device
            if device not in known:
                known[device] = torch.tensor(drafts, device=device), torch.tensor(0, device=device)
            known[device][1].fill_(row.position - len(row.tokens) + 1)
            self.passes += 1
            return run(runner, row, ahead=ahead)

        def verified(decoder: Any, ids: Any, where: torch.Tensor, *given: Any) -> Any:
            nonlocal place, positions
            place, positions = 0, where.flatten(0, -3)[-1] if where.ndim > 2 else where
            return run_verified(decoder, ids, where, *given)

        def draft(decoder: Any, rows: torch.Tensor, drafts: Any) -> torch.Tensor:
            nonlocal place
            tokens, first = known[rows.device]
            place += 1
            return tokens[positions[place - 1] + 1 - first]

        run_verified = FastDecoder.verified
        monkeypatch.setattr(DecodeRunner, "_step_drafted", step)
        monkeypatch.setattr(FastDecoder, "verified", verified)
        monkeypatch.setattr(FastDecoder, "draft", draft)
