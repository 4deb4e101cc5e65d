"""Decode steps: one token of every row through the model, eagerly or as a CUDA graph.

Eagerly a step costs the host ten times what it costs the GPU. A captured step is launched at once;
what changes from step to step (tokens, positions, where the past is and where the new tokens go)
lies in tensors that are written over before each replay. A step may be launched early, before the
host has seen the tokens that feed it: the host learns only later which tokens were chosen and which
rows have ended, and the device goes on as if none had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.fixed_tables import FixedTables
from oscar_mm.cache.step import Step
from oscar_mm.fast_decode.decoder import FastDecoder, devices, sees_all, supports
from oscar_mm.fast_decode.graphs import Record, recorder
from oscar_mm.modality import PADDING, Modality
from oscar_mm.ranks import Ranks


@dataclass(frozen=True, eq=False)
class EarlyStep:
    """What was launched.

    It has written keys and values only where nothing is stored, so nothing needs to be taken back.

    Attributes:
        tokens: (batch,) ids that it was launched with.
        state: of the ledger: its past.
        promises: of the store.
        step: as it was foretold: where it has put the tokens of rows that had not ended, and what
            it has packed.
        logits: (batch, vocabulary) that come of it.
    """

    tokens: torch.Tensor
    state: tuple[Any, ...]
    promises: int
    step: Step
    logits: torch.Tensor

    def is_step(
        self, tokens: torch.Tensor, state: tuple[Any, ...], promises: int, step: Step
    ) -> bool:
        """Whether it was this step: with the same tokens and past it writes the same, or less.

        Where a row has ended, what was written of it lies in slots and places that are free.

        Args:
            tokens, state, promises: as they are when the step comes.
        """
        if tokens is not self.tokens or state != self.state or step.copies:
            return False
        if self.step.promised and promises != self.promises:
            return False
        told, writes = self.step.writes, step.writes
        if writes is not None:
            if told is None:
                return False
            stored = np.isin(told[0], writes[0])
            if not np.array_equal(told[:, stored], writes):
                return False
        packed = {filling.row: filling for filling in self.step.fillings}
        return all(filling.is_same(packed.get(filling.row)) for filling in step.fillings)


_log = logging.getLogger("oscar_mm")


class DecodeSteps:
    """The decode steps of one answer.

    Args:
        model: a model of transformers that generates, with attention "oscar" in its decoder.
        cache: what a step attends to and adds to.
        axes: leading axes of its position ids: 1 or 3 or 4 for M-RoPE, () for plain RoPE.
        position: (batch,) RoPE positions of the first step's tokens; each step comes one after.
        device: of the model's inputs.
        record: how a step is captured; None for eager steps only. By default a CUDA graph where
            one can be had, unless ``SWITCH`` is "off".
    """

    def __init__(
        self,
        model: nn.Module,
        cache: OscarCache,
        axes: tuple[int, ...],
        position: torch.Tensor,
        device: torch.device,
        record: Record | Literal["auto"] | None = "auto",
    ) -> None:
        self.model, self.cache, self.axes = model, cache, axes
        self._ranks = Ranks.of(model)
        self._layers = FastDecoder(model) if supports(model) else None
        # What a step is fed with, at addresses that stay.
        self._ids = torch.zeros((len(position), 1), dtype=torch.long, device=device)
        self._positions = position.to(device, copy=True).view(*[1] * len(axes), -1, 1)
        self._fixed = FixedTables(len(position), cache.policy)
        self._record = self._recorder() if record == "auto" else record
        self._foreseen: tuple[Any, ...] | None = None
        """State of the ledger whose tables are written."""
        self._ahead: EarlyStep | None = None
        self._replay: Callable[[], torch.Tensor] | None = None
        self._captured: tuple[int, ...] = ()
        self._layout: tuple[int, ...] = ()

    def __call__(self, tokens: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        """Logits (batch, vocabulary) after one more token of each row; overwritten by a later step.

        Args:
            tokens: (batch,) ids.
            ended: (batch,) bool on the CPU: rows that go on as padding, which is not stored.
        """
        ahead, self._ahead = self._ahead, None
        if self._record is None:
            self._ids.copy_(tokens[:, None])
            self.cache.expect(torch.where(ended, PADDING, int(Modality.TEXT))[:, None])
            logits = self._repeatable()
        else:
            logits = self._on_fixed_tables(tokens, ended, ahead)
        self._positions += 1
        return logits

    def ahead(self, tokens: torch.Tensor, ended: torch.Tensor) -> None:
        """Launch the step that comes next, if that is a replay which only appends tokens.

        The cache stays as it is. A call with the same tokens, in which more rows may have ended,
        makes it the next step; without one it has never been.

        Args:
            tokens, ended: as of a step.
        """
        if self._replay is None:
            return
        ledger = self.cache.ledger
        if self._foreseen != self._state():
            self._foresee()
        if (self._fixed.version, *ledger.store.layout) != self._layout:
            return
        step = ledger.foretold(_codes(ended))
        if (
            step is None
            or self._is_eager(step)
            or (step.fillings and not self.cache.policy.by_token)
        ):
            return
        self._ids.copy_(tokens[:, None])
        self._fixed.refill_tokens(step)
        step.fixed = self._fixed
        before = ledger.steps, ledger.last
        # What is replayed may be the layers' code, which asks for the step.
        ledger.steps, ledger.last = ledger.steps + 1, step
        try:
            logits = self._replay()
        finally:
            ledger.steps, ledger.last = before
            self._mark(ledger.steps)
        self._ahead = EarlyStep(tokens, self._state(), ledger.store.promises, step, logits)

    def _recorder(self) -> Record | None:
        """CUDA graphs, where that is known to work."""
        if self._layers is not None:
            return recorder(self._layers.devices)
        # What modules of several devices or ranks say to each other in a graph was never tried.
        places = devices(self.model)
        alone = self._ranks.count == 1 and places == {self._ids.device}
        return recorder(places) if alone and sees_all(self.model) else None

    def _on_fixed_tables(
        self, tokens: torch.Tensor, ended: torch.Tensor, ahead: EarlyStep | None
    ) -> torch.Tensor:
        """A step that is replayed, or was ahead, or is captured where that needs to be."""
        ledger = self.cache.ledger
        state, promises = self._state(), ledger.store.promises
        step = self.cache.begin(_codes(ended))
        if ahead is not None and ahead.is_step(tokens, state, promises, step):
            self._mark(ledger.steps)
            self._foresee()
            return ahead.logits
        self._ids.copy_(tokens[:, None])
        if self._is_eager(step):
            return self._repeatable()
        if self._foreseen != state:
            self._fixed.refill(step.past)
        self._fixed.refill_tokens(step)
        # A row that has ended is computed like the others, and nobody looks at what comes of it.
        step.fixed, step.real = self._fixed, None
        logits = self._by_record(step)
        self._foresee()
        return logits

    def _is_eager(self, step: Step) -> bool:
        """Whether a step does what no graph has in it."""
        if self.cache.policy.by_token:
            return bool(step.copies) or not self._fixed.takes(step)
        return any((filling.source >= 0).any() for filling in step.fillings)

    def _state(self) -> tuple[Any, ...]:
        """The same as long as the past is."""
        ledger = self.cache.ledger
        return ledger, ledger.changes, ledger.store.trims

    def _foresee(self) -> None:
        """Write the next step's tables while the device computes: its past is what there is now."""
        self._fixed.refill(self.cache.ledger.sequences)
        self._foreseen = self._state()

    def _repeatable(self) -> torch.Tensor:
        """The step, on tensors that stay where they are."""
        positions = self._expanded_positions()
        if self._layers is not None:
            return self._layers(self._ids, positions, self.cache)
        output = self.model(
            input_ids=self._ids,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache.end_step()
        return output.logits[:, -1]

    def _expanded_positions(self) -> torch.Tensor:
        return self._positions.expand(*self.axes, -1, 1)

    def _by_record(self, step: Step) -> torch.Tensor:
        layout = self._fixed.version, *self.cache.ledger.store.layout
        if layout != self._layout:
            for layer in self.cache.layers:
                layer.reserve()
        if step.fillings and not self.cache.policy.by_token:
            self._pack_first(step)
        if not self._fixed.known:
            # The first step is eager: it asks for tables, and for kernels that are compiled now.
            return self._repeatable()
        if layout != self._layout:
            places = self._places()
            if places != self._captured and not self._capture():
                return self._repeatable()
            self._captured, self._layout = places, layout
        if self._replay is None:
            return self._repeatable()
        logits = self._replay()
        self._mark(self.cache.ledger.steps)
        return logits

    def _capture(self) -> bool:
        """Record the step; False if that failed, for good."""
        self._replay = None  # its memory goes back before the next one takes some
        record = self._record
        try:
            if record is not None and self._layers is not None:
                given = self._ids, self._expanded_positions(), self.cache
                self._replay = self._layers.recorded(record, *given)
            elif record is not None:
                self._replay = record(self._repeatable, self._ids.device)
        except Exception as error:
            _log.warning("decode steps run eagerly, a CUDA graph could not be made: %s", error)
        # Among ranks all or none: what is launched ahead is more than an eager rank would do.
        if not self._ranks.all(self._replay is not None, self._ids.device):
            self._record = self._replay = None
            self._mark(self.cache.ledger.steps - 1)
        return self._replay is not None

    def _pack_first(self, step: Step) -> None:
        """Pack the pages that leave the window.

        Otherwise that comes after attention, whose tables still list the slots of 16 bit: they are
        read, and not written to before the new token is.
        """
        for layer in self.cache.layers:
            some = layer.recent.storage[:1, 0, :, None, :].expand(len(step.past), -1, -1, -1)
            layer.pack(some, some, step)
        step.filled()

    def _places(self) -> tuple[int, ...]:
        """What a graph has built in: addresses of pools, balancing and tables."""
        places = [self._fixed.version]
        for layer in self.cache.layers:
            tensors = [layer.recent.storage, *(pool.storage for pool in layer.pages.values())]
            places += [x.data_ptr() for x in (*tensors, layer.sigma) if x is not None]
        return tuple(places)

    def _mark(self, steps: int) -> None:
        """Let layers have carried out so many steps: a replay does not run their code."""
        for layer in self.cache.layers:
            layer.steps, layer.waits = steps, False


def _codes(ended: torch.Tensor) -> np.ndarray:
    """(batch, 1) modality ids of a step's tokens, as the ledger takes them."""
    return np.where(ended.numpy(), np.int8(PADDING), np.int8(Modality.TEXT))[:, None]
