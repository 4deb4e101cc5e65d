"""Announcements: what the coming tokens are, as callers and attention announce it."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from oscar_mm.errors import InputError
from oscar_mm.modality import PADDING, Modality


class Announcements:
    """Modality ids of tokens to come, taken in pieces as they come."""

    def __init__(self) -> None:
        self._packed = False
        self._ids: np.ndarray | None = None
        self._padding: np.ndarray | None = None

    def announce(
        self, modalities: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> None:
        """Expect these tokens instead of those announced before; ``OscarCache.expect`` has the
        arguments and errors."""
        if modalities is None:
            if attention_mask is None:
                raise InputError("expect: give modalities, attention_mask or both")
            modalities = torch.zeros_like(attention_mask, dtype=torch.int8)
        ids = modalities.detach().to("cpu").numpy()
        if ids.ndim != 2 or not set(np.unique(ids).tolist()) <= {PADDING, *Modality}:
            raise InputError(
                "expect: modalities must be (batch, tokens) of 0 text, 1 image, 2 video, 3 audio, "
                f"-1 padding, not {tuple(ids.shape)} of {np.unique(ids).tolist()[:8]}"
            )
        ids = ids.astype(np.int8)
        if attention_mask is not None:
            if attention_mask.shape != modalities.shape:
                raise InputError(
                    f"expect: attention_mask {tuple(attention_mask.shape)} and modalities "
                    f"{tuple(ids.shape)} must have one shape: that of the new tokens"
                )
            ids[attention_mask.to("cpu").numpy() == 0] = PADDING
        self._ids = ids

    def attention(self, *, packed: bool, padding: torch.Tensor | None = None) -> None:
        """Attention "oscar" (``packed``) or another one runs the coming forward pass.

        Args:
            packed: whether the past is read from its pages.
            padding: (batch, tokens), False or 0 for padding; None if nothing is known of it.
        """
        self._packed = packed
        self._padding = None if padding is None else padding.to("cpu").numpy().astype(bool)

    def take(self, batch: int, tokens: int) -> np.ndarray:
        """(batch, tokens) int8 modality ids of the coming forward pass; -1 for padding."""
        ids = self._announced(batch, tokens)
        if ids is None:
            ids = np.zeros((batch, tokens), dtype=np.int8)
            if self._padding is None and not self._packed and batch > 1 and tokens > 1:
                warnings.warn(
                    "OscarCache: a batch without expect(attention_mask=...): if it has padding, "
                    "that is stored too. Call cache.expect, or use attention 'oscar'",
                    stacklevel=4,  # who called OscarCache.update
                )
        padding, self._padding = self._padding, None
        if padding is not None:
            ids[~padding] = PADDING
        return ids

    def take_packed(self) -> bool:
        """Whether attention "oscar" runs the forward pass that has begun.

        The next pass has to announce itself again: one with a mask of four dimensions does not,
        and it gets past and new tokens, whatever its attention is.
        """
        packed, self._packed = self._packed, False
        return packed

    def _announced(self, batch: int, tokens: int) -> np.ndarray | None:
        if self._ids is None:
            return None
        rows, known = self._ids.shape
        if known < tokens or batch % rows:
            raise InputError(
                f"expect() announced ({rows}, {known}) tokens, but ({batch}, {tokens}) came"
            )
        # Beam search repeats each prompt.
        taken = np.repeat(self._ids[:, :tokens], batch // rows, axis=0)
        self._ids = self._ids[:, tokens:] if known > tokens else None
        return taken
