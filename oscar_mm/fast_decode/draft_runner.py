"""Draft runner: passes that add several tokens to a single row, if its drafts are right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.states import StateChain
from oscar_mm.cache.step_plan import StepPlan
from oscar_mm.fast_decode.decoder import Capture, FastDecoder, Verified
from oscar_mm.fast_decode.drafts import Drafts
from oscar_mm.fast_decode.graph_runner import GraphInputs, Staged, graph_capture
from oscar_mm.modality import Modality
from oscar_mm.ops.decode_tables import upload

DRAFTS = 3
"""Drafts of a pass."""
_TEXT = np.full((1, 1), int(Modality.TEXT), np.int8)
_log = logging.getLogger("oscar_mm")


class _InflightPass(NamedTuple):
    """A pass that has been launched; it has added nothing to the cache.

    Attributes:
        token, position: see ``DraftRunner.__call__``.
        plan: plan of the token.
        verified: result of the pass.
    """

    token: int
    position: int
    plan: StepPlan
    verified: Verified


class DraftRunner:
    """Runs passes that draft the next tokens of a row and verify them.

    A pass adds only its first token to the cache. Drafts write to slots that no token has, and
    states to tensors of this object, so that nothing is left of drafts that are not accepted.

    Args:
        model: transformers model with ``Drafts``, which ``supports`` accepts, on one device.
        cache: cache of the row.
        axes: leading axes of the position ids, see ``GraphRunner``.
        device: device of the model.
        count: drafts of a pass, at least 1.
        capture: see ``GraphRunner``.
    """

    def __init__(
        self,
        model: Any,
        cache: OscarCache,
        axes: tuple[int, ...],
        device: torch.device,
        count: int = DRAFTS,
        capture: Capture | Literal["auto"] | None = "auto",
    ) -> None:
        self.count, self._cache, self._axes = count, cache, axes
        self._layers, drafts = FastDecoder(model), Drafts.of(model)
        assert drafts is not None
        self._index = drafts.index
        weight = model.get_input_embeddings().weight
        self._ids = torch.zeros((1, 1), dtype=torch.long, device=device)
        self._positions = torch.zeros(1 + count, dtype=torch.long, device=device)
        self._positions = self._positions.view(*[1] * len(axes), -1, 1)
        self._hidden = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=device)
        self._steps = GraphInputs(cache, 1 + count)
        self._states = StateChain(1 + count)
        self._capture = graph_capture(self._layers.devices) if capture == "auto" else capture
        self._replay: Callable[[], Verified] | None = None
        self._version: object = None
        self._early: _InflightPass | None = None
        self._verified: Verified | None = None
        self._copies: list[list[tuple[list[torch.Tensor], list[torch.Tensor]]]] = []
        self._ready: dict[int, tuple[StepPlan, StepPlan, Staged]] = {}
        """By the identity of its first token's plan: that plan, the step and its tables."""
        self._accepted = 0
        """Tokens of the pass that are in the cache."""

    def __call__(self, token: int, position: int) -> Verified | None:
        """Draft tokens and compute the logits after each, which a later pass overwrites.

        Args:
            token: last token of the row, which is not in the cache.
            position: its RoPE position.

        Returns:
            None if the cache cannot plan so many steps ahead; an ordinary step must follow.
        """
        early, self._early = self._early, None
        if early is None or not self._is_next(early, token, position):
            early = self._launched(token, position)
        if early is None:
            return None
        [row] = self._cache.state_rows()
        assert row is not None
        self._copies, self._accepted, self._verified = self._states.copies(row), 0, early.verified
        if not self.accept():
            raise RuntimeError("the cache has changed during a pass")
        self._plan_next()
        return self._verified

    @property
    def is_ahead(self) -> bool:
        """Whether a pass has been launched early."""
        return self._early is not None

    def ahead(self, token: int, position: int) -> None:
        """Launch a pass early, if it is a replay; see ``__call__``.

        The cache does not change. If the next call has the same token, and no step has come in
        between, it uses the launched pass; any other call discards it.
        """
        self._early = None if self._replay is None else self._launched(token, position)

    def _is_next(self, early: _InflightPass, token: int, position: int) -> bool:
        """Return whether the early pass did exactly what a pass with this token would do."""
        kv_manager = self._cache.kv_manager
        return (
            (token, position) == (early.token, early.position)
            and kv_manager.next_plan() is early.plan
            and kv_manager.holds_chain(1 + self.count)
        )

    def _launched(self, token: int, position: int) -> _InflightPass | None:
        """Launch a pass; return None if that is not possible."""
        step = self._planned()
        plan = self._cache.kv_manager.next_plan()
        if step is None or plan is None:
            return None
        if self._cache.hidden is not None:
            self._hidden.copy_(self._cache.hidden)
            self._cache.hidden = None
        numbers = np.array([token, *range(position, position + 1 + self.count)], np.int64)
        inputs = upload(numbers, self._ids.device)
        self._ids.copy_(inputs[:1, None])
        self._positions.copy_(inputs[1:].view(self._positions.shape))
        [row] = self._cache.state_rows()
        assert row is not None
        with self._cache.trying(step), self._layers.chaining(self._states.rows(row)):
            return _InflightPass(token, position, plan, self._run(step))

    def accept(self) -> bool:
        """Add the next token of the pass to the cache.

        Returns:
            Whether that is possible; if not, the token must be the first of the next pass.
        """
        if not self._cache.kv_manager.holds_plan:
            return False
        self._cache.replayed(self._cache.begin(_TEXT))
        self._accepted += 1
        return True

    def finish(self) -> None:
        """End the pass: its accepted tokens change the states."""
        assert self._verified is not None
        last = self._accepted - 1
        for targets, sources in self._copies[last]:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        self._copies = []
        self._hidden.copy_(self._verified.hidden[last : last + 1])

    def _planned(self) -> StepPlan | None:
        """Plan a step with a row for each token; None if that is not possible."""
        self._cache.check_complete()
        if all(layer.index != self._index for layer in self._cache.packed_layers):
            return None  # The cache was begun without drafts.
        kv_manager, staged = self._cache.kv_manager, None
        ready = self._ready.get(id(kv_manager.next_plan()))
        if ready is not None and kv_manager.holds_chain(1 + self.count):
            _, step, staged = ready
        else:
            step = kv_manager.planned_chain(1 + self.count)
        if step is None:
            return None
        self._cache.store.reserve()
        return step if self._capture is None or self._steps.fix(step, staged) else None

    def _plan_next(self) -> None:
        """Plan the next pass for any number of accepted drafts, while the device computes."""
        self._ready = {}
        if self._replay is None:
            return
        kv_manager, count = self._cache.kv_manager, 1 + self.count
        kv_manager.plan_further(2 * count - 1)
        for first in range(count):
            plan, step = kv_manager.next_plan(first), kv_manager.later_chain(first, count)
            staged = None if step is None else self._steps.staged(step)
            if plan is not None and step is not None and staged is not None:
                self._ready[id(plan)] = plan, step, staged

    def _run(self, step: StepPlan) -> Verified:
        if self._capture is None or not self._steps.is_ready:
            return self._verify()
        if self._version != self._steps.version:
            self._replay, self._version = None, self._steps.version
            try:
                self._replay = self._capture(self._verify, self._ids.device)
            except Exception as error:
                _log.info("drafts run eagerly: %s", error.__context__ or error)
                self._capture = None
            step.restart()
        return self._verify() if self._replay is None else self._replay()

    def _verify(self) -> Verified:
        positions = self._positions.expand(*self._axes, -1, 1)
        return self._layers.verified(self._ids, positions, self._hidden, self._cache)
