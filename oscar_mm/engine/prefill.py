"""Prefill: short prompts in one pass, long prompts in parts.

For a long prompt, the encoder towers run on one part of the media at a time, and the decoder runs
in one pass or in chunks. Thus only one part's tower features and temporaries exist at a time and,
with chunks, only one chunk's decoder activations. Within a module, a long input is processed in
pieces, so that temporaries of vision towers, MLPs and norms do not grow with the prompt. The cuts
are exact: a patch in a tower attends only to its own image or pair of frames, and MLPs and norms
process each token separately.

Decoder arguments are the arguments with which a model calls its decoder after running its towers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import OscarCache, cache_of
from oscar_mm.engine.input_layout import InputLayout
from oscar_mm.engine.prompt import Prompt, by_frames, forward, segments, up_to_marks
from oscar_mm.engine.prompt_logprobs import PromptLogprobs
from oscar_mm.fast_decode.prompt_layers import MAX_RECORDED
from oscar_mm.modality import two_way_groups
from oscar_mm.ops.decode_tables import upload

MAX_TOKENS = 1 << 13
"""Maximum number of tokens at a time in the decoder's MLPs and norms, and per part of the media."""
MAX_PATCHES = 4 * MAX_TOKENS
"""Maximum number of patches at a time in a tower; towers such as Qwen's merge four per token."""


_reader: ContextVar[object] = ContextVar("reader", default=None)
"""Marker of the thread that runs prefill; hooks ignore forward passes of other threads."""


@contextmanager
def in_pieces(model: Any, tokens: int, layout: InputLayout) -> Iterator[None]:
    """Within the block, process long module inputs in pieces; results differ only by rounding.

    Args:
        model: transformers model for generation.
        tokens: number of tokens of all rows in the next pass; small inputs are not cut.
        layout: input layout, which says whether the tower's input may be cut.
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
        if layout.video_grids is not None:
            hooks += _cut_media(model.get_encoder(modality="image"), hooks)
        yield
    finally:
        _reader.reset(token)
        for hook in hooks:
            hook.remove()


def layers_of_towers(model: Any) -> Iterator[nn.Module]:
    """Yield the layers of a model's towers."""
    decoder = model.get_decoder()
    for modality in ("image", "audio"):
        tower = model.get_encoder(modality=modality)
        parts = [] if tower is None else [*tower.modules()]
        if decoder not in parts:  # Otherwise this is the model itself: there is no such tower.
            yield from (x for part in parts if isinstance(part, nn.ModuleList) for x in part)


def _norms(decoder: Any) -> list[Any]:
    """Return the norms of a decoder, whose float32 temporaries take twice their output's memory."""
    return [module for name, module in decoder.named_modules() if name.endswith("norm")]


def _cut_tokens(module: Any, reader: object) -> tuple[Any, Any]:
    """Make an MLP (dense or with experts) or a norm process its (batch, tokens, ...) input in
    pieces."""
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
    """Make a tower process images and pairs of frames in groups of at most ``MAX_PATCHES``.

    Args:
        tower: module that takes patches (n, channels) and ``grid_thw`` (media, 3): for each image
            or video, the number of pairs of frames and of patches down and across.
        reader: marker of the thread whose passes are cut.
    """
    later: list[dict[str, Any]] = []

    def first_piece(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
        grid = kwargs.get("grid_thw")
        if _reader.get() is not reader or len(args) != 1 or grid is None:
            return None
        # Other tensors belong to all patches and cannot be split here.
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
            return None  # The tower failed, or the output is complete.
        pieces = [dict(output), *others]
        # One output at a time, so that at most one of them exists twice.
        return type(output)(
            **{name: _joined_outputs([one.pop(name) for one in pieces]) for name in output}
        )

    return (
        tower.register_forward_pre_hook(first_piece, with_kwargs=True),
        tower.register_forward_hook(all_pieces, always_call=True),
    )


def _grids(grid: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the grids of the pieces: media in order, videos cut between pairs of frames."""
    rows: list[tuple[int, int, int]] = []
    free = MAX_PATCHES
    for frames, down, across in grid.tolist():
        while frames:
            taken = min(frames, max(0, free // (down * across)))
            if not (taken or rows):
                taken = 1  # A single image above the limit cannot be cut.
            if taken:
                rows.append((taken, down, across))
                frames -= taken
                free -= taken * down * across
            if frames:
                yield grid.new_tensor(rows)
                rows, free = [], MAX_PATCHES
    yield grid.new_tensor(rows)


def _joined_outputs(parts: list[Any]) -> Any:
    """Concatenate tensors, or lists of tensors element by element, and empty the list."""
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
    """Raised in place of the decoder's forward, with its arguments."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class _ReadOnce(list):
    """List whose items are dropped when read, so that features are freed after their layer."""

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        self[index] = None
        return item


def embedded_parts(
    model: nn.Module, prompt: Prompt, cache: OscarCache, most: int
) -> Iterator[dict[str, Any]]:
    """Yield the decoder arguments of each part of a prompt, without running the decoder.

    Towers and the embedding run on one part at a time, and media move to the model's device one
    part at a time. ``segments`` splits the prompt; videos may also be cut between frames.

    Args:
        model: transformers model for generation.
        prompt: prompt to embed.
        cache: cache for the decoder call.
        most: maximum number of tokens per part.
    """
    for part in segments(by_frames(prompt, most), most):
        yield embedded(model, part, cache)


def embedded(model: Any, prompt: Prompt, cache: OscarCache) -> dict[str, Any]:
    """Return the decoder arguments of a prompt, without running the decoder; see
    ``embedded_parts``."""

    # The model itself embeds the prompt and its media, whatever its family; the hook stops it where
    # it calls its decoder. Calls with another cache belong to other threads.
    def stop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if cache_of(kwargs) is not cache:
            return
        if args:
            raise NotImplementedError(
                f"{type(module).__name__} was called with positional arguments"
            )
        raise _DecoderCall(kwargs)

    hook = model.get_decoder().register_forward_pre_hook(stop, with_kwargs=True)
    try:
        forward(model, prompt, cache)
    except _DecoderCall as call:
        arguments = call.arguments
        if isinstance(arguments.get("attention_mask"), dict):
            # Masks by layer type, made for this part alone: the decoder makes them anew.
            arguments["attention_mask"] = prompt.inputs.get("attention_mask")
        if arguments.get("inputs_embeds") is None:  # Language models leave it to their decoder.
            ids = arguments.pop("input_ids")
            arguments["inputs_embeds"] = model.get_input_embeddings()(ids)
        return arguments
    finally:
        hook.remove()
    raise NotImplementedError(f"{type(model).__name__} does not call its decoder")


@dataclass
class _Outputs(MoeModelOutputWithPast):
    """Outputs of any decoder."""

    shared_kv_states: Any = None  # Read by Gemma 4's forward.


class _Known(nn.Module):
    """Stands for a decoder whose outputs are known."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, **_: Any) -> _Outputs:
        return _Outputs(last_hidden_state=cast(torch.FloatTensor, self.states))


def head_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from (tokens, channels) outputs of the decoder to logits.

    A language model computes them itself, since some scale what their head returns (Cohere,
    Granite, Gemma 2).
    """
    place = model.base_model_prefix
    if getattr(model, place, None) is not model.get_decoder():
        return partial(_capped, model, model.get_output_embeddings())

    def logits(states: torch.Tensor) -> torch.Tensor:
        twin = copy.copy(model)
        twin._modules = model._modules | {place: _Known(states[None])}
        return type(model).forward(twin, inputs_embeds=states[None], use_cache=False).logits[0]

    return logits


def _capped(model: Any, head: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Return a head's logits for (tokens, channels) outputs of the decoder, soft-capped if the
    model's config says so: in models such as Gemma 4, forward caps them, not the head."""
    found = head(states)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return found if cap is None else cap * torch.tanh(found / cap)


def length(arguments: dict[str, Any]) -> int:
    """Return the number of tokens per row in decoder arguments."""
    return arguments["inputs_embeds"].shape[1]


def joined(parts: list[dict[str, Any]], layout: InputLayout) -> dict[str, Any]:
    """Join the decoder arguments of consecutive parts of a row, and empty the list.

    The features of the result can be read only once.
    """
    whole, *rest = parts
    for name, mask in layout.features.items() if rest else ():
        if any(part.get(name) for part in parts):
            for part in parts:
                if not part.get(name):
                    ids = part["inputs_embeds"]
                    part[mask] = ids.new_zeros(ids.shape[:2], dtype=torch.bool)
    # One argument at a time, so that at most one of the tensors exists twice.
    for name, dim in layout.per_token.items() if rest else ():
        if isinstance(whole.get(name), torch.Tensor):
            whole[name] = torch.cat([part.pop(name) for part in parts], dim=dim)
    features = {
        name: [list(tensors) for part in parts if (tensors := part.pop(name, None))]
        for name in layout.features
    }
    parts.clear()
    for name, lists in features.items():
        levels = range(len(lists[0]) if lists else 0)
        if levels:
            whole[name] = _ReadOnce(_cat([tensors.pop(0) for tensors in lists]) for _ in levels)
    return whole


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def sliced(arguments: dict[str, Any], start: int, stop: int, layout: InputLayout) -> dict[str, Any]:
    """Return the decoder arguments of tokens ``start`` to ``stop - 1``; for a single row, features
    are views."""
    part = dict(arguments)
    for name, dim in layout.per_token.items():
        if isinstance(value := arguments.get(name), torch.Tensor):
            part[name] = value.narrow(dim, start, stop - start)
    mask = arguments.get("attention_mask")
    if mask is not None:
        past = mask.shape[1] - length(arguments)
        # New tokens only: padding before them is not in the cache.
        part["attention_mask"] = mask[:, past + start : past + stop]
    for name, of in layout.features.items():
        visual, features = arguments.get(of), arguments.get(name)
        if visual is not None and features is not None:
            part[name] = _features_of(features, visual, start, stop)
    return part


def _features_of(
    features: Sequence[torch.Tensor], visual: torch.Tensor, start: int, stop: int
) -> list[torch.Tensor]:
    """Return the features of tokens ``start`` to ``stop - 1``; ``visual``, (batch, tokens), marks
    the tokens that have features."""
    if len(visual) == 1:
        before, count = int(visual[:, :start].sum()), int(visual[:, start:stop].sum())
        return [level[before : before + count] for level in features]
    order = (visual.flatten().cumsum(0) - 1).view_as(visual)
    chosen = order[:, start:stop][visual[:, start:stop]]
    return [level[chosen.to(level.device)] for level in features]


def copied(arguments: dict[str, Any], layout: InputLayout) -> dict[str, Any]:
    """Copy a decoder's arguments into new memory."""
    part = dict(arguments)
    for name in layout.per_token:
        if isinstance(value := arguments.get(name), torch.Tensor):
            part[name] = value.clone()
    for name in layout.features:
        if (features := arguments.get(name)) is not None:
            part[name] = [level.clone() for level in features]
    return part


def prefill(
    model: Any,
    prompt: Prompt,
    cache: OscarCache,
    chunk: int | None = None,
    last: Sequence[int] = (-1,),
) -> torch.Tensor:
    """Prefill a prompt, running the towers on part of the media at a time.

    In a single pass, attention over the prompt is exact. With chunks, activations take memory for
    one chunk instead of the full prompt. In return, later chunks attend to the packed keys and
    values of earlier chunks, so attention over the prompt is slower and, except with policy
    "bf16", no longer exact. Towers run on whole media, except that a video without audio may be
    split between frames; for a batch of several rows, they run on all media at once.

    Args:
        model: transformers model for generation.
        prompt: prompt to prefill.
        cache: cache that expects the prompt's modalities, see ``OscarCache.expect``.
        chunk: tokens per chunk, at least 1; None for a single pass.
        last: indices of the tokens whose logits are returned; anything but the last token requires
            a prompt of one row in a single pass.

    Returns:
        (batch, vocabulary) logits of the last token, or (indices, vocabulary).
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
    """Prefill lazily: yield None after each chunk except the last, then the logits."""
    decoder, head, unread = model.get_decoder(), head_of(model), prompt.tokens
    # Use half a chunk: parts that wait until their chunk is full take memory too.
    most = MAX_TOKENS if chunk is None else min(MAX_TOKENS, max(1, chunk // 2))
    parts = embedded_parts(model, prompt, cache, most)
    lengths = _chunk_lengths(prompt, chunk or prompt.tokens)
    for arguments in _in_chunks(parts, lengths, prompt.layout):
        unread -= length(arguments)
        # With few tokens, it is not worth avoiding the copy of each layer's output.
        is_long = length(arguments) > MAX_RECORDED
        with _in_place(decoder, arguments) if is_long else nullcontext():
            states = decoder(**arguments).last_hidden_state
            if logprobs is not None:
                vocabulary = model.config.get_text_config(decoder=True).vocab_size
                logprobs.read(states, head, vocabulary)
            # A list as index would wait for the device.
            states = states[:, upload(np.array(last), states.device)].flatten(0, 1)
        del arguments  # Free their memory before the towers continue.
        yield None if unread else head(states)


def _last(chunks: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """Run all chunks and return the logits of the last."""
    return next(logits for logits in chunks if logits is not None)


@contextmanager
def _in_place(decoder: Any, arguments: dict[str, Any]) -> Iterator[None]:
    """Within the block, make layers overwrite the embeddings, which are no longer needed, with
    their outputs.

    The decoder would keep its embeddings in memory until it returns anyway.
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


def _chunk_lengths(prompt: Prompt, chunk: int) -> Iterator[int]:
    """Yield the number of tokens of each chunk: ``chunk``, or to the beginning or end of a group of
    media tokens that may not be split."""
    kind = prompt.layout.two_way
    groups = two_way_groups(prompt.modalities[0].tolist(), kind) if kind else []
    start = 0
    while start < prompt.tokens:
        stop = min(start + chunk, prompt.tokens)
        for group in groups:
            if group[0] < stop <= group[-1]:
                stop = group[0] if group[0] > start else group[-1] + 1
        yield stop - start
        start = stop


def _in_chunks(
    parts: Iterable[dict[str, Any]], lengths: Iterator[int], layout: InputLayout
) -> Iterator[dict[str, Any]]:
    """Yield the decoder's arguments in chunks of these lengths."""
    waiting: list[dict[str, Any]] = []
    chunk = next(lengths)
    for part in parts:
        waiting.append(part)
        del part
        while chunk and (tokens := sum(map(length, waiting))) >= chunk:
            whole = joined(waiting, layout)
            if tokens > chunk:
                # A copy lets the joined part be freed, but is too large for a long media item.
                rest = sliced(whole, chunk, tokens, layout)
                waiting.append(copied(rest, layout) if tokens < 2 * chunk else rest)
                whole = sliced(whole, 0, chunk, layout)
                del rest
            yield whole
            del whole
            chunk = next(lengths, 0)


def read_prompt(
    model: nn.Module, prompt: Prompt, cache: OscarCache, prefill_chunk: int | None = None
) -> torch.Tensor:
    """Prefill a prompt into a cache and return the (batch, vocabulary) logits of the last token.

    Args:
        model: transformers model for generation, with attention "oscar" in its decoder.
        prompt: prompt of one or several rows.
        cache: cache to extend; may contain a past, such as earlier turns.
        prefill_chunk: tokens per chunk; None for a single pass.
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
    """Prefill a prompt lazily, one chunk per iteration.

    Between two chunks, model and store are free for other work. If the iterator is abandoned, the
    cache contains complete chunks only.

    Args:
        model, prompt, cache, prefill_chunk: see ``read_prompt``.
        logprobs: collector of the log-probabilities of the prompt, which must have one row.

    Yields:
        None after each chunk except the last, and the logits after the last.
    """
    unread = prompt.tokens
    for part in up_to_marks(prompt):
        unread -= part.tokens
        for logits in _read_part(model, part, cache, prefill_chunk, logprobs):
            if logits is not None and part.marks:
                cache.mark()
            if logits is None or not unread:
                yield logits


def _read_part(
    model: nn.Module,
    prompt: Prompt,
    cache: OscarCache,
    prefill_chunk: int | None,
    logprobs: PromptLogprobs | None,
) -> Iterator[torch.Tensor | None]:
    """Prefill a prompt that has no marks before its end; see ``read_in_chunks``."""
    cache.expect(prompt.modalities)
    at_once = logprobs is None and prompt.tokens <= min(prefill_chunk or MAX_TOKENS, MAX_TOKENS)
    chunks = _prefill_in_chunks(model, prompt, cache, prefill_chunk, logprobs=logprobs)
    logits = None
    while logits is None:
        with in_pieces(model, prompt.modalities.numel(), prompt.layout):
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
    """Prefill short prompts in one pass without padding.

    Args:
        model: see ``read_prompt``.
        prompt: the concatenated prompts, see ``Family.concatenate``.
        lengths: number of tokens of each prompt.
        view: batch view whose rows are the prompts' caches.
        every_token: whether to return the logits of every token.

    Returns:
        (prompts, vocabulary) logits of each prompt's last token, or (tokens, vocabulary).
    """
    ends = np.cumsum(lengths)
    view.begin(np.split(prompt.modalities[0].numpy(), ends[:-1]))
    last = range(prompt.tokens) if every_token else (ends - 1).tolist()
    logits = prefill(model, prompt, view, last=last)
    view.settle()
    return logits
