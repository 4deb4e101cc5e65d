"""States of layers with linear attention, which take the place of keys and values.

A state is what a layer keeps of all tokens so far, in a fixed number of bytes. A later token
changes it for good, so a cache returns to an earlier token only if it has kept a copy (``Marks``).
A step that is launched before its tokens are certain writes to spare layers (``StateRow``).
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import LinearAttentionLayer

MARK_BYTES = 1 << 30
"""Maximum size of the copies that a cache keeps, in bytes; the latest copy is kept in any case."""
_ALIGNED = 64
"""States in a ``StateChain`` begin at multiples of this number of elements."""


def layers_of_states(config: Any) -> list[str]:
    """Return the types of the layers that keep a state instead of keys and values.

    Args:
        config: transformers configuration, with layer types such as "linear_attention" or "mamba".
    """
    return list(kinds_of_states(config).values())


def kinds_of_states(config: Any) -> dict[int, str]:
    """Return layer index -> type of each layer in ``layers_of_states``."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    found = enumerate(kinds)
    return {index: kind for index, kind in found if "attention" not in kind or "linear" in kind}


class StateShape(NamedTuple):
    """Shapes of a row's state in a layer.

    Attributes:
        convolution: (channels, kernel size) of the state of the convolution.
        recurrent: shape of the recurrent state, which is in float32: (heads, key channels, value
            channels).
        dtype: dtype of the state of the convolution.
    """

    convolution: tuple[int, ...]
    recurrent: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, ranks: int = 1) -> StateShape:
        """Return the shapes of Gated DeltaNet layers (Qwen3-Next, Qwen3.5).

        Args:
            config: transformers configuration.
            dtype: dtype of the model.
            ranks: number of ranks that divide the heads.
        """
        text = config.get_text_config(decoder=True)
        heads, keys, values = (
            *(text.linear_num_value_heads // ranks, text.linear_key_head_dim),
            text.linear_value_head_dim,
        )
        channels = 2 * (text.linear_num_key_heads // ranks) * keys + heads * values
        return cls((channels, text.linear_conv_kernel_dim), (heads, keys, values), dtype)

    @property
    def bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.convolution) * self.dtype.itemsize + 4 * math.prod(self.recurrent)


class LinearLayer(LinearAttentionLayer):
    """transformers' linear-attention layer, which stores a state instead of tokens."""

    @classmethod
    def of(cls, convolution: torch.Tensor, recurrent: torch.Tensor) -> LinearLayer:
        """Return a layer with these tensors as its state, (rows, ...) each."""
        layer = cls()
        layer.lazy_initialization(conv_states=convolution, recurrent_states=recurrent)
        layer.conv_states[0], layer.recurrent_states[0] = convolution, recurrent
        layer.has_previous_state[0] = True
        return layer

    @property
    def states(self) -> list[torch.Tensor]:
        """Tensors of the layer's state, (rows, ...) each; models write to them in place."""
        both = (*self.conv_states.values(), *self.recurrent_states.values())
        return [state for state in both if state is not None]

    def fork(self) -> LinearLayer:
        """Return a layer with copies of the state's tensors."""
        return self._with(torch.clone)

    def on(self, device: torch.device) -> LinearLayer:
        """Return a layer with copies of the state's tensors on a device."""
        twin = self._with(lambda state: state.to(device, copy=True).contiguous())
        twin.device = device
        return twin

    def row(self, index: int) -> LinearLayer:
        """Return a layer whose tensors are those of a row, without a copy."""
        return self._with(lambda state: state[index : index + 1])

    def selected(self, rows: Sequence[int]) -> LinearLayer:
        """Return a layer with copies of these rows, in order."""
        return self._with(lambda state: state[list(rows)])

    def empty(self) -> LinearLayer:
        """Return a layer with new, contiguous tensors of the same shapes, without values."""
        contiguous = torch.contiguous_format
        return self._with(lambda state: torch.empty_like(state, memory_format=contiguous))

    def make_contiguous(self) -> None:
        """Make the state's tensors contiguous, as kernels need them."""
        for by_state in (self.conv_states, self.recurrent_states):
            by_state.update({k: x.contiguous() for k, x in by_state.items() if x is not None})

    @classmethod
    def joined(cls, layers: Sequence[LinearLayer]) -> LinearLayer:
        """Return a layer with the rows of several, in order."""
        parts = zip(*(layer.states for layer in layers), strict=True)
        return layers[0].with_states(map(torch.cat, parts))

    def with_states(self, states: Iterable[torch.Tensor]) -> LinearLayer:
        """Return a layer with these tensors, in the order of ``states``."""
        given = iter(states)
        return self._with(lambda _: next(given))

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LinearLayer:
        """Return a copy whose tensors ``change`` has replaced, in the order of ``states``."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(twin, name, dict(value))
        for by_state in (twin.conv_states, twin.recurrent_states):
            by_state.update({k: change(x) for k, x in by_state.items() if x is not None})
        return twin


class StateRow(NamedTuple):
    """Where the states of a row of a batch are.

    Attributes:
        layers: layers of the cache that has the states.
        spares: layer index -> layer to which a step that may be discarded writes the states after
            it; belongs to the cache, and is empty before the first such step.
        row: row in the tensors of that cache.
    """

    layers: list[Any]
    spares: dict[int, LinearLayer]
    row: int

    def make_spares(self) -> None:
        """Allocate the spare layers unless the cache has them."""
        if not self.spares:
            found = enumerate(self.layers)
            self.spares.update({i: x.empty() for i, x in found if isinstance(x, LinearLayer)})

    def take_spares(self) -> None:
        """Continue from the states in the spare layers; the other layers become spare."""
        for index, spare in self.spares.items():
            self.layers[index], self.spares[index] = spare, self.layers[index]

    def layer(self, index: int, *, spare: bool = False) -> LinearLayer:
        """Return the row's layer at an index, or its spare layer."""
        return (self.spares if spare else self.layers)[index].row(self.row)

    def addresses(self, index: int, *, spare: bool) -> list[int]:
        """Return the addresses of both states of a layer; of its own if there is no spare layer."""
        layer: LinearLayer = self.layers[index]
        if spare:
            layer = self.spares.get(index, layer)
        return [state[self.row].data_ptr() for state in layer.states]


class RowStates(NamedTuple):
    """States of a batch's rows in one layer, each at its own address.

    Attributes:
        layers: the layer with the state of each row, one row each; None for a row without a new
            token, whose state must not change.
        targets: the layers that receive the states after the step: ``layers`` if it updates them
            in place.
        addresses: (4, rows) int64 on the device: addresses of the convolution states, of the
            recurrent states, and of both after the step; 0 for a row without a new token.
        chained: whether the rows are consecutive tokens, see ``StateChain``: each begins with the
            states after the row before it.
    """

    layers: Sequence[LinearLayer | None]
    targets: Sequence[LinearLayer | None]
    addresses: torch.Tensor
    chained: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Convolution state and recurrent state of each row that has a new token."""
        return states_of(self.layers)

    @property
    def results(self) -> list[torch.Tensor]:
        """The tensors that receive ``tensors`` after the step."""
        return states_of(self.targets)


def states_of(layers: Iterable[LinearLayer | None]) -> list[torch.Tensor]:
    """Return the states of all layers; None has none."""
    return [state for layer in layers if layer is not None for state in layer.states]


class StateTable:
    """Addresses of the states of a batch's rows, in tensors that CUDA graphs read.

    States stay in the rows' caches. When rows join or leave, only addresses change: no state is
    copied, and absent rows take no memory. Between two steps, a row's cache can use its states
    (undo, fork, mark) as it does outside of a batch.

    Steps that are launched early write to spare layers, which then take the place of the others.
    While the same layers do so, the host has no addresses to write: the device keeps those of all
    steps between the two layers, and copies the ones of the current step.
    """

    def __init__(self) -> None:
        self._rows: Sequence[StateRow | None] = ()
        self._to_spares = False
        self._places: dict[int, tuple[torch.device, int]] = {}
        self._tables: dict[torch.device, torch.Tensor] = {}
        """``RowStates.addresses`` of the current step, (layers, 4, rows)."""
        self._choices: dict[torch.device, torch.Tensor] = {}
        """``RowStates.addresses`` of all possible steps, (2, 2, layers, 4, rows), by source and
        target: 0 for the layers at the latest ``_write``, 1 for their spare layers."""
        self._written: list[_Identity] = []
        self._chained = False
        self._step: tuple[int, int] | None = None
        """Source and target of the step in ``_tables``."""

    def begin(
        self,
        rows: Sequence[StateRow | None],
        *,
        to_spares: bool = False,
        chained: bool = False,
    ) -> None:
        """Write the addresses of the rows of a step, unless they are still the same.

        Args:
            rows: where the states of each row are; None for a row without a new token. Each call
                has as many rows as the first.
            to_spares: whether the step writes to the spare layers, which exist, and leaves the
                states as they are.
            chained: see ``RowStates``.
        """
        self._rows, self._to_spares, self._chained = rows, to_spares, chained
        if not self._places:
            self._allocate(next(filter(None, rows)).layers, len(rows))
        first = next(iter(self._places))
        now = [_identity(row, first) for row in rows]
        swapped = [None if one is None else (one[1], one[0], one[2]) for one in now]
        if self._written not in (now, swapped):
            self._write()
            self._written, self._step = now, None
        source = int(self._written != now)
        if self._step != (step := (source, source ^ to_spares)):
            self._step = step
            for device, table in self._tables.items():
                table.copy_(self._choices[device][step])

    def of(self, index: int) -> RowStates:
        """Return the states of the rows of the current step in a layer."""
        device, place = self._places[index]
        layers, targets = (
            [None if row is None else row.layer(index, spare=spare) for row in self._rows]
            for spare in (False, self._to_spares)
        )
        return RowStates(layers, targets, self._tables[device][place], self._chained)

    def end(self) -> None:
        """End the step, and keep no state alive."""
        self._rows = ()

    def _allocate(self, layers: Sequence[Any], rows: int) -> None:
        counts: dict[torch.device, int] = {}
        for index, layer in enumerate(layers):
            if isinstance(layer, LinearLayer):
                device = layer.states[0].device
                self._places[index] = device, counts.setdefault(device, 0)
                counts[device] += 1
        for device, count in counts.items():
            self._tables[device] = torch.zeros(count, 4, rows, dtype=torch.long, device=device)
            self._choices[device] = self._tables[device].repeat(2, 2, 1, 1, 1)

    def _write(self) -> None:
        """Write the addresses of the rows' layers and spare layers."""
        for row in filter(None, self._rows):
            for index in self._places:
                row.layers[index].make_contiguous()
        for device, choices in self._choices.items():
            mine = [index for index, place in self._places.items() if place[0] == device]
            both = [torch.tensor([self._addresses(i, spare) for i in mine]) for spare in (0, 1)]
            host = torch.stack([torch.cat(pair, 1) for pair in product(both, both)])
            host = host.view(choices.shape)
            choices.copy_(host.pin_memory() if choices.is_cuda else host, non_blocking=True)

    def _addresses(self, index: int, spare: int) -> list[list[int]]:
        """Return the addresses of the rows' convolution states, and of their recurrent states."""
        absent = [0, 0]
        pairs = [absent if x is None else x.addresses(index, spare=bool(spare)) for x in self._rows]
        return [list(kind) for kind in zip(*pairs, strict=True)]


_Identity = tuple[weakref.ref[LinearLayer], weakref.ref[LinearLayer] | None, int] | None
"""What tells whether addresses of a row still hold: its first layer, its spare layer, its row."""


def _identity(row: StateRow | None, index: int) -> _Identity:
    if row is None:
        return None
    spare = row.spares.get(index)
    return weakref.ref(row.layers[index]), None if spare is None else weakref.ref(spare), row.row


class StateChain:
    """States of a row after each of several tokens, of which some may turn out to be wrong.

    Args:
        count: number of tokens.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._after: list[dict[int, LinearLayer]] = []
        self._blocks: list[_StateBlock] = []
        """The states in ``_after``, one block for each dtype."""

    def rows(self, row: StateRow) -> list[StateRow]:
        """Return a row for each token, which reads the states after the token before and writes
        those after its own.

        Args:
            row: states before the first token, the only row of its cache.
        """
        if not self._after:
            mine = {i: x for i, x in enumerate(row.layers) if isinstance(x, LinearLayer)}
            self._blocks = [_StateBlock(states, self._count) for states in _by_dtype(mine.values())]
            by_dtype = {block.dtype: iter(zip(*block.rows, strict=True)) for block in self._blocks}
            self._after = [{} for _ in range(self._count)]
            for index, layer in mine.items():
                states = [next(by_dtype[state.dtype]) for state in layer.states]
                for after, own in zip(self._after, zip(*states, strict=True), strict=True):
                    after[index] = layer.with_states(own)
        later = [[after.get(index) for index in range(len(row.layers))] for after in self._after]
        layers = [row.layers, *later[:-1]]
        return [StateRow(own, after, 0) for own, after in zip(layers, self._after, strict=True)]

    def targets(self, row: StateRow) -> list[list[torch.Tensor]]:
        """Return the tensors of a row's states, grouped by dtype, for ``take``."""
        return _by_dtype(row.layers[index] for index in self._after[0])

    def take(self, targets: Sequence[list[torch.Tensor]], token: int | torch.Tensor) -> None:
        """Copy the states after a token to those of the row.

        Args:
            targets: see ``targets``.
            token: index of the token, or (1,) int64 on the device.
        """
        for some, block in zip(targets, self._blocks, strict=True):
            # One launch for all layers.
            torch._foreach_copy_(some, block.row(token))  # pyright: ignore[reportPrivateImportUsage]


class _StateBlock:
    """Copies of states of one dtype in one tensor, so that a device can choose among them.

    Args:
        states: states whose shapes the copies have.
        count: number of copies.
    """

    def __init__(self, states: Sequence[torch.Tensor], count: int) -> None:
        self.dtype = states[0].dtype
        # Kernels read several elements at once, so each state is aligned.
        sizes = [-(-state.numel() // _ALIGNED) * _ALIGNED for state in states]
        shapes = [state.shape for state in states]
        whole = states[0].new_empty((count + 1, sum(sizes)))
        self._copies, self._chosen = whole[:count], whole[count:]
        *self.rows, self._chosen_row = (
            [
                part[: shape.numel()].view(shape)
                for part, shape in zip(row.split(sizes), shapes, strict=True)
            ]
            for row in whole
        )
        """The states of each copy."""

    def row(self, index: int | torch.Tensor) -> list[torch.Tensor]:
        """Return the states of a copy; a later call with a tensor overwrites those of an earlier
        one."""
        if isinstance(index, int):
            return self.rows[index]
        torch.index_select(self._copies, 0, index, out=self._chosen)
        return self._chosen_row


def _by_dtype(layers: Iterable[LinearLayer]) -> list[list[torch.Tensor]]:
    """Return the states of layers, one list for each dtype."""
    found = defaultdict[torch.dtype, list[torch.Tensor]](list)
    for state in states_of(layers):
        found[state.dtype].append(state)
    return list(found.values())


class Marks:
    """Lengths to which a cache can be cropped, with copies of its states there.

    Args:
        kept: length -> layer index -> layer with the copies, which nobody changes; no layers in a
            cache without states, whose layers with sliding windows keep the windows of these
            lengths (``oscar_mm.cache.window_pages``).
    """

    def __init__(self, kept: Mapping[int, Mapping[int, LinearLayer]] | None = None) -> None:
        self.kept = {} if kept is None else dict(kept)

    def fork(self) -> Marks:
        """Return marks that share the copies."""
        return Marks(self.kept)

    def keep(self, length: int, layers: Mapping[int, LinearLayer]) -> None:
        """Copy the states at the current length; above ``MARK_BYTES``, drop the oldest copies."""
        if length in self.kept:
            return
        # A new dict each time, since other threads may be reading this one.
        self.kept = self.kept | {length: {index: one.fork() for index, one in layers.items()}}
        while len(self.kept) > 1 and held_bytes(self.states) > MARK_BYTES:
            self.kept = {one: self.kept[one] for one in sorted(self.kept)[1:]}

    def up_to(self, length: int) -> Marks:
        """Return the marks up to a length."""
        return Marks({one: layers for one, layers in self.kept.items() if one <= length})

    def back_to(self, length: int) -> dict[int, LinearLayer]:
        """Return the layers as they were at a marked length, and drop all later marks."""
        self.kept = self.up_to(length).kept
        return {index: layer.fork() for index, layer in self.kept[length].items()}

    @property
    def states(self) -> list[torch.Tensor]:
        """Tensors of all copies."""
        by_length = self.kept.values()
        return [x for layers in by_length for layer in layers.values() for x in layer.states]


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of memory behind tensors; memory that several of them share counts once."""
    memory = [tensor.untyped_storage() for tensor in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in memory}.values())
