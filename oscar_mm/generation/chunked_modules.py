"""Long inputs in pieces: temporaries of vision towers, MLPs and norms do not grow with the prompt.

The cuts are exact: a patch in a tower sees its own image or pair of frames only, and a token in an
MLP or a norm sees no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

MOST_TOKENS = 1 << 13
"""Most tokens that an MLP or a norm of the decoder sees, and whose media are read, at a time."""
MOST_PATCHES = 4 * MOST_TOKENS
"""Most patches that a tower sees at a time; Qwen's make a token of four."""


_reader: ContextVar[object] = ContextVar("reader", default=None)
"""Marks the thread that reads: hooks leave the forward passes of others alone."""


@contextmanager
def in_pieces(model: Any, tokens: int) -> Iterator[None]:
    """Inside, long inputs of modules are cut; results differ by rounding at most.

    Args:
        model: a model of transformers that generates.
        tokens: that it is about to read, in all rows; few are not cut.
    """
    if tokens <= MOST_TOKENS:
        yield
        return
    hooks: list[Any] = []
    token = _reader.set(hooks)
    try:
        decoder = model.get_decoder()
        for module in (*(layer.mlp for layer in decoder.layers), *_norms(decoder)):
            hooks += _cut_tokens(module, hooks)
        tower = model.get_encoder(modality="image")
        if hasattr(tower, "spatial_merge_size"):  # Qwen's
            hooks += _cut_media(tower, hooks)
        yield
    finally:
        _reader.reset(token)
        for hook in hooks:
            hook.remove()


def layers_of_towers(model: Any) -> Iterator[nn.Module]:
    """The layers of the towers that read a model's media."""
    decoder = model.get_decoder()
    for modality in ("image", "audio"):
        parts = [*model.get_encoder(modality=modality).modules()]
        if decoder not in parts:  # Else it is the model itself, which has no such tower.
            yield from (x for part in parts if isinstance(part, nn.ModuleList) for x in part)


def _norms(decoder: Any) -> list[Any]:
    """Norms of a decoder, which compute in float32 and so need twice the memory of their output."""
    return [module for name, module in decoder.named_modules() if name.endswith("norm")]


def _cut_tokens(module: Any, reader: object) -> tuple[Any, Any]:
    """Let an MLP, dense or of experts, or a norm see (batch, tokens, ...) some tokens at a time."""
    later: list[torch.Tensor] = []

    def first_piece(module: Any, args: tuple) -> tuple | None:
        batch, tokens, *channels = args[0].shape
        if _reader.get() is not reader or batch * tokens <= MOST_TOKENS or not channels:
            return None
        first, *rest = args[0].split(max(1, MOST_TOKENS // batch), dim=1)
        later[:] = [module(part) for part in rest]
        return (first,)

    def all_pieces(_: Any, __: tuple, output: Any) -> Any:
        others = later[:]
        later.clear()
        return torch.cat([output, *others], dim=1) if others and output is not None else None

    return (
        module.register_forward_pre_hook(first_piece),
        module.register_forward_hook(all_pieces, always_call=True),
    )


def _cut_media(tower: Any, reader: object) -> tuple[Any, Any]:
    """Let a tower read frame by frame, as many at a time as ``MOST_PATCHES`` allows.

    Args:
        tower: takes patches (n, channels) and ``grid_thw`` (media, 3), of each image or video the
            pairs of frames, and patches down and across.
    """
    later: list[dict[str, Any]] = []

    def first_piece(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        grid = kwargs.get("grid_thw")
        if _reader.get() is not reader or len(args) != 1 or grid is None:
            return None
        # Tensors that were computed for all patches cannot be taken apart.
        if any(isinstance(one, torch.Tensor) for name, one in kwargs.items() if name != "grid_thw"):
            return None
        grids = list(_grids(grid))
        if len(grids) < 2:
            return None
        parts = args[0].split([int(part.prod(-1).sum()) for part in grids])
        pieces = zip(parts[1:], grids[1:], strict=True)
        later[:] = [dict(module(part, **kwargs | {"grid_thw": own})) for part, own in pieces]
        return (parts[0],), kwargs | {"grid_thw": grids[0]}

    def all_pieces(_: Any, __: tuple, output: Any) -> Any:
        others = later[:]
        later.clear()
        if output is None or not others:
            return None  # an error is under way, or the output is whole
        pieces = [dict(output), *others]
        # One after the other, so that no more than one of the outputs is there twice.
        return type(output)(**{name: _joined([one.pop(name) for one in pieces]) for name in output})

    return (
        tower.register_forward_pre_hook(first_piece, with_kwargs=True),
        tower.register_forward_hook(all_pieces, always_call=True),
    )


def _grids(grid: torch.Tensor) -> Iterator[torch.Tensor]:
    """Grids of the pieces: media in their order, videos cut between pairs of frames."""
    rows: list[tuple[int, int, int]] = []
    free = MOST_PATCHES
    for frames, down, across in grid.tolist():
        while frames:
            taken = min(frames, max(0, free // (down * across)))
            if not (taken or rows):
                taken = 1  # a single image that is larger: it cannot be cut
            if taken:
                rows.append((taken, down, across))
                frames -= taken
                free -= taken * down * across
            if frames:
                yield grid.new_tensor(rows)
                rows, free = [], MOST_PATCHES
    yield grid.new_tensor(rows)


def _joined(parts: list[Any]) -> Any:
    """Tensors one after the other; lists of tensors place by place. Empties the list."""
    if isinstance(parts[0], torch.Tensor):
        whole = torch.cat(parts)
        parts.clear()
        return whole
    kind, places = type(parts[0]), [list(part) for part in parts]
    parts.clear()
    return kind([_joined([place.pop(0) for place in places]) for _ in range(len(places[0]))])
