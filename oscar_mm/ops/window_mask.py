"""Masks of sliding windows that are independent of the number of stored tokens.

Such a mask has no elements; its shape (0, window) tells the size of the window. Unlike an attribute
of the tensor, the shape survives a move to another device, and attention that needs elements fails.
A CUDA graph of decode steps that is captured with it serves sequences of all lengths: where the
window begins is in the tables of each step.
"""

from __future__ import annotations

import torch


def window_mask(window: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the mask, (0, window) bool, of tokens that attend to themselves and to the
    ``window`` - 1 tokens before them."""
    return torch.empty((0, window), dtype=torch.bool, device=device)


def window_of(mask: torch.Tensor | None) -> int | None:
    """Return the size of the window of a mask from ``window_mask``; None for other masks."""
    return mask.shape[1] if mask is not None and mask.ndim == 2 and not len(mask) else None
