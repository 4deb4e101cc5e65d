"""Prefill: prompts through a model, short ones in one pass, long ones by parts.

Of a long prompt towers read a part at a time, the decoder reads at once or in chunks.

So features and temporaries of the towers exist for one part of the media at a time. In chunks, the
activations of the decoder exist for one chunk at a time too. Within a module a long input goes
through in pieces, so that temporaries of vision towers, MLPs and norms do not grow with the prompt.
The cuts are exact: a patch in a tower sees its own image or pair of frames only, and a token in an
MLP or a norm sees no other.

A decoder's inputs are what a model gives its decoder once its towers have read the media.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import OscarCache, cache_of
from oscar_mm.engine.prompt import Prompt, by_frames, forward, segments
from oscar_mm.engine.prompt_logprobs import PromptLogprobs
from oscar_mm.fast_decode.prompt_layers import MAX_RECORDED

MAX_TOKENS = 1 << 13
"""Most tokens that an MLP or a norm of the decoder sees, and whose media are read, at a time."""
MAX_PATCHES = 4 * MAX_TOKENS
"""Most patches that a tower sees at a time; Qwen's make a token of four."""


_reader: ContextVar[object] = ContextVar("reader", default=None)
"""Marks the thread that reads: hooks leave the forward passes of others alone."""
_PER_TOKEN = {"inputs_embeds": 1, "position_ids": -1, "cache_position": 0, "visual_pos_masks": 1}
"""Arguments of a decoder with one entry per token, and the dimension of the tokens."""
_FEATURES = "deepstack_visual_embeds"
"""A list of features that are added after the first layers: tokens of images and videos, in the
order of ``visual_pos_masks``, row after row."""


@contextmanager
def in_pieces(model: Any, tokens: int) -> Iterator[None]:
    """Inside, long inputs of modules are cut; results differ by rounding at most.

    Args:
        model: a model of transformers that generates.
        tokens: that it is about to read, in all rows; few are not cut.
    """
    if tokens <= MAX_TOKENS:
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
        if _reader.get() is not reader or batch * tokens <= MAX_TOKENS or not channels:
            return None
        first, *rest = args[0].split(max(1, MAX_TOKENS // batch), dim=1)
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
    """Let a tower read frame by frame, as many at a time as ``MAX_PATCHES`` allows.

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
        return type(output)(
            **{name: _joined_outputs([one.pop(name) for one in pieces]) for name in output}
        )

    return (
        tower.register_forward_pre_hook(first_piece, with_kwargs=True),
        tower.register_forward_hook(all_pieces, always_call=True),
    )


def _grids(grid: torch.Tensor) -> Iterator[torch.Tensor]:
    """Grids of the pieces: media in their order, videos cut between pairs of frames."""
    rows: list[tuple[int, int, int]] = []
    free = MAX_PATCHES
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
                rows, free = [], MAX_PATCHES
    yield grid.new_tensor(rows)


def _joined_outputs(parts: list[Any]) -> Any:
    """Tensors one after the other; lists of tensors place by place. Empties the list."""
    if isinstance(parts[0], torch.Tensor):
        whole = torch.cat(parts)
        parts.clear()
        return whole
    kind, places = type(parts[0]), [list(part) for part in parts]
    parts.clear()
    return kind(
        [_joined_outputs([place.pop(0) for place in places]) for _ in range(len(places[0]))]
    )


class _DecoderCall(Exception):
    """The decoder has been called with these arguments."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class _ReadOnce(list):
    """A list that drops an item once it is read: features live until their layer is done."""

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        self[index] = None
        return item


def embedded_parts(
    model: nn.Module, prompt: Prompt, cache: OscarCache, most: int
) -> Iterator[dict[str, Any]]:
    """Arguments of the decoder for one part of a prompt after the other; nothing is decoded.

    Towers and embedding run part by part, and media go to the model's device as they are read.
    ``segments`` makes the parts, and cuts between the frames of a video too.

    Args:
        model: a model of transformers that generates.
        prompt: what is to be read.
        cache: that the decoder will be given.
        most: tokens of a part.
    """
    for part in segments(by_frames(prompt, most), most):
        yield _embedded(model, part, cache)


def _embedded(model: Any, prompt: Prompt, cache: OscarCache) -> dict[str, Any]:
    # The model itself embeds the prompt, media included, whatever its family: it is stopped where
    # it calls its decoder. Calls with another cache belong to other threads.
    def stop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if cache_of(kwargs) is not cache:
            return
        if args:
            raise NotImplementedError(f"{type(module).__name__} takes positional arguments")
        raise _DecoderCall(kwargs)

    hook = model.get_decoder().register_forward_pre_hook(stop, with_kwargs=True)
    try:
        forward(model, prompt, cache)
    except _DecoderCall as call:
        return call.arguments
    finally:
        hook.remove()
    raise NotImplementedError(f"{type(model).__name__} does not call its decoder")


def length(arguments: dict[str, Any]) -> int:
    """How many tokens a row has."""
    return arguments["inputs_embeds"].shape[1]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A decoder's arguments for parts of a row that follow each other; empties the list.

    The features of the whole can be read once.
    """
    whole, *rest = parts
    if rest and any(part.get(_FEATURES) for part in parts):
        for part in parts:
            if not part.get(_FEATURES):
                ids = part["inputs_embeds"]
                part["visual_pos_masks"] = ids.new_zeros(ids.shape[:2], dtype=torch.bool)
    # One argument after the other, so that no more than one of the tensors is there twice.
    for name, dim in _PER_TOKEN.items() if rest else ():
        if isinstance(whole.get(name), torch.Tensor):
            whole[name] = torch.cat([part.pop(name) for part in parts], dim=dim)
    features = [list(tensors) for part in parts if (tensors := part.pop(_FEATURES, None))]
    parts.clear()
    if features:
        levels = range(len(features[0]))
        whole[_FEATURES] = _ReadOnce(_cat([tensors.pop(0) for tensors in features]) for _ in levels)
    return whole


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def sliced(arguments: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """A decoder's arguments for some of the tokens; views, where there is one row."""
    part = dict(arguments)
    for name, dim in _PER_TOKEN.items():
        if isinstance(value := arguments.get(name), torch.Tensor):
            part[name] = value.narrow(dim, start, stop - start)
    mask = arguments.get("attention_mask")
    if mask is not None:
        past = mask.shape[1] - length(arguments)
        # Of the new tokens alone: padding before them is not in the cache.
        part["attention_mask"] = mask[:, past + start : past + stop]
    visual, features = arguments.get("visual_pos_masks"), arguments.get(_FEATURES)
    if visual is None or features is None:
        return part
    if len(visual) == 1:
        before, count = int(visual[:, :start].sum()), int(visual[:, start:stop].sum())
        part[_FEATURES] = [level[before : before + count] for level in features]
    else:
        order = (visual.flatten().cumsum(0) - 1).view_as(visual)
        chosen = order[:, start:stop][visual[:, start:stop]]
        part[_FEATURES] = [level[chosen.to(level.device)] for level in features]
    return part


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """A copy of a decoder's arguments in memory of its own."""
    part = dict(arguments)
    for name in _PER_TOKEN:
        if isinstance(value := arguments.get(name), torch.Tensor):
            part[name] = value.clone()
    if (features := arguments.get(_FEATURES)) is not None:
        part[_FEATURES] = [level.clone() for level in features]
    return part


def prefill(
    model: Any,
    prompt: Prompt,
    cache: OscarCache,
    chunk: int | None = None,
    last: Sequence[int] = (-1,),
) -> torch.Tensor:
    """Read a prompt; the towers read its media some at a time.

    In one go, attention over the prompt is exact. In chunks, activations take the room of a chunk
    instead of the prompt's. The price: a later chunk reads the packed history of earlier ones, so
    attention over the prompt is no longer exact (with policy "bf16" it is), and it is slower.
    Towers read a medium whole, but a video without sound some frames at a time; they read all
    media of a batch of several rows at once.

    Args:
        model: a model of transformers that generates.
        prompt: what to read.
        cache: expects the prompt's modalities, see ``OscarCache.expect``.
        chunk: tokens, at least 1; None for one go.
        last: of a prompt of one row that is read in one go, the places of the tokens to give
            logits of.

    Returns:
        (batch, vocabulary) logits of the last token, or (places, vocabulary).
    """
    return _last(_prefill_in_chunks(model, prompt, cache, chunk, last))


def _prefill_in_chunks(
    model: Any,
    prompt: Prompt,
    cache: OscarCache,
    chunk: int | None,
    last: Sequence[int] = (-1,),
    logprobs: PromptLogprobs | None = None,
) -> Iterator[torch.Tensor | None]:
    """``prefill``, chunk by chunk: None after each but the last, then the logits."""
    decoder, head, unread = model.get_decoder(), model.get_output_embeddings(), prompt.tokens
    # Half a chunk: parts that wait for their chunk to fill take room as well.
    most = MAX_TOKENS if chunk is None else min(MAX_TOKENS, max(1, chunk // 2))
    parts = embedded_parts(model, prompt, cache, most)
    for arguments in _in_chunks(parts, prompt.tokens if chunk is None else chunk):
        unread -= length(arguments)
        # A copy of each layer's output, for memory that is of no account where tokens are few.
        is_long = length(arguments) > MAX_RECORDED
        with _in_place(decoder, arguments) if is_long else nullcontext():
            states = decoder(**arguments).last_hidden_state
            if logprobs is not None:
                vocabulary = model.config.get_text_config(decoder=True).vocab_size
                logprobs.read(states, head, vocabulary)
            states = states[:, list(last)].flatten(0, 1)
        del arguments  # before the towers read on
        yield None if unread else head(states)


def _last(chunks: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """The logits at the end of chunks that are read one after the other."""
    return next(logits for logits in chunks if logits is not None)


@contextmanager
def _in_place(decoder: Any, arguments: dict[str, Any]) -> Iterator[None]:
    """Inside, layers write their outputs over the embeddings, which nobody reads again.

    The decoder would keep the memory of its embeddings to its end anyway.
    """
    cache, place = cache_of(arguments), arguments["inputs_embeds"]

    def put(_: Any, __: tuple, kwargs: dict[str, Any], output: Any) -> torch.Tensor | None:
        ours = cache_of(kwargs) is cache and isinstance(output, torch.Tensor)
        alike = ours and (output.device, output.dtype) == (place.device, place.dtype)
        return place.copy_(output) if alike else None

    hooks = [layer.register_forward_hook(put, with_kwargs=True) for layer in decoder.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _in_chunks(parts: Iterable[dict[str, Any]], chunk: int) -> Iterator[dict[str, Any]]:
    """The decoder's arguments, ``chunk`` tokens at a time."""
    waiting: list[dict[str, Any]] = []
    for part in parts:
        waiting.append(part)
        del part
        while (tokens := sum(map(length, waiting))) >= chunk:
            whole = joined(waiting)
            if tokens > chunk:
                # A copy frees the whole, but would be too large for a long medium.
                rest = sliced(whole, chunk, tokens)
                waiting.append(copied(rest) if tokens < 2 * chunk else rest)
                whole = sliced(whole, 0, chunk)
                del rest
            yield whole
            del whole
    if waiting:
        yield joined(waiting)


def read_prompt(
    model: nn.Module, prompt: Prompt, cache: OscarCache, prefill_chunk: int | None = None
) -> torch.Tensor:
    """Read a prompt into a cache; (batch, vocabulary) logits of the last token.

    Args:
        model: a model of transformers that generates, with attention "oscar" in its decoder.
        prompt: of one row or several.
        cache: holds the past, such as earlier turns.
        prefill_chunk: tokens that are read at a time; None for all at once.
    """
    return _last(read_in_chunks(model, prompt, cache, prefill_chunk))


@torch.inference_mode()
def read_in_chunks(
    model: nn.Module,
    prompt: Prompt,
    cache: OscarCache,
    prefill_chunk: int | None = None,
    logprobs: PromptLogprobs | None = None,
) -> Iterator[torch.Tensor | None]:
    """Read a prompt as ``read_prompt`` does, chunk by chunk as the iterator is asked.

    Between two chunks the model and the store are free for others. Of a prompt that is left
    unread the cache has whole chunks.

    Args:
        model, prompt, cache, prefill_chunk: as of ``read_prompt``.
        logprobs: collects the log-probabilities of the prompt, which must have one row.

    Yields:
        None after each chunk but the last; after that the logits.
    """
    cache.expect(prompt.modalities)
    at_once = logprobs is None and prompt.tokens <= min(prefill_chunk or MAX_TOKENS, MAX_TOKENS)
    chunks = _prefill_in_chunks(model, prompt, cache, prefill_chunk, logprobs=logprobs)
    logits = None
    while logits is None:
        with in_pieces(model, prompt.modalities.numel()):
            logits = forward(model, prompt, cache) if at_once else next(chunks)
        yield logits


@torch.inference_mode()
def prefill_varlen(
    model: nn.Module,
    prompt: Prompt,
    lengths: Sequence[int],
    view: BatchView,
    *,
    every_token: bool = False,
) -> torch.Tensor:
    """Read short prompts in one pass, without padding; (prompts, vocabulary) logits of the last
    token of each, or of every token.

    Args:
        model: as of ``read_prompt``.
        prompt: all of them, see ``Family.concatenate``.
        lengths: tokens of each.
        view: its rows are the prompts' caches.
    """
    ends = np.cumsum(lengths)
    view.begin(np.split(prompt.modalities[0].numpy(), ends[:-1]))
    last = range(prompt.tokens) if every_token else (ends - 1).tolist()
    logits = prefill(model, prompt, view, last=last)
    view.settle()
    return logits
