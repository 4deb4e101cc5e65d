"""Draft runner: speculative decoding of a single row, several tokens in a pass."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.states import StateChain
from oscar_mm.cache.step_plan import StagedTables, StepPlan
from oscar_mm.fast_decode.decoder import Capture, FastDecoder, Verified
from oscar_mm.fast_decode.drafts import Drafts
from oscar_mm.fast_decode.graph_runner import GraphInputs, graph_capture
from oscar_mm.modality import Modality
from oscar_mm.ops.decode_tables import upload

DRAFTS = 3
"""Number of drafts in a pass."""
_TEXT = np.full((1, 1), int(Modality.TEXT), np.int8)
_log = logging.getLogger("oscar_mm")


class _Pass(NamedTuple):
    """A pass that has been launched.

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

    A pass writes to slots that no token has, and states to tensors of this object, so that nothing
    is left of drafts that are not accepted, or of a pass that was launched early in vain.

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
        self._inputs = torch.zeros(2 + count, dtype=torch.long, device=device)
        """Id of the first token, and the positions of all tokens of a pass."""
        self._hidden = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=device)
        self._steps = GraphInputs(cache, 1 + count)
        self._states = StateChain(1 + count)
        self._capture = graph_capture(self._layers.devices) if capture == "auto" else capture
        self._replay: Callable[[], Verified] | None = None
        self._version: object = None
        self._early: _Pass | None = None
        self._pass: _Pass | None = None
        self._following: Verified | None = None
        """Result of the pass after ``_pass``, launched by ``launch_following``."""
        self._targets: list[list[torch.Tensor]] = []
        """States of the row, which ``finish`` overwrites, see ``StateChain.targets``."""
        self._ready: dict[int, tuple[StepPlan, StepPlan, StagedTables]] = {}
        """Prepared passes by ``id`` of their first token's plan: that plan, which keeps the id in
        use, the chained step, and its tables."""

    def __call__(self, token: int, position: int) -> Verified | None:
        """Draft tokens, compute the logits after each, and add the first token to the cache.

        ``finish`` must follow before the next call.

        Args:
            token: last token of the row, which is not in the cache.
            position: its RoPE position.

        Returns:
            Tensors that a later pass overwrites; None if the cache cannot plan so many steps
            ahead, and an ordinary step must follow.
        """
        early, self._early = self._early, None
        if early is None or not self._is_next(early, token, position):
            early = self._launched(token, position)
        if early is None:
            return None
        # The rest is done while the device computes.
        [row] = self._cache.state_rows()
        assert row is not None
        self._pass, self._following = early, None
        self._targets = self._states.targets(row)
        self._add_token()
        self._plan_next()
        return early.verified

    def launch_following(self, tokens: torch.Tensor, accepted: torch.Tensor) -> bool:
        """Launch the next pass before the host knows how many drafts of this one are right, if it
        is a replay of a graph that is prepared for each possible number.

        Args:
            tokens: (1 + drafts,) ids on the device: the model's choices after each token.
            accepted: (1,) int64 on the device: number of drafts that were right, with which
                ``finish`` must be called if the pass is launched.

        Returns:
            Whether the pass is launched.
        """
        kv_manager, replay, last = self._cache.kv_manager, self._replay, self._pass
        assert last is not None
        plans = [kv_manager.next_plan(first) for first in range(1 + self.count)]
        ready = [self._ready.get(id(plan)) for plan in plans if plan is not None]
        prepared = [one for one in ready if one is not None]
        if replay is None or len(prepared) <= self.count or self._version != self._steps.version:
            return False
        _, steps, staged = zip(*prepared, strict=True)
        self._cache.store.reserve()
        self._steps.fix_one_of(steps, staged, accepted)
        if self._version != self._steps.version:
            return False  # A pool has moved; the pass must be captured again.
        self._states.take(self._targets, accepted)
        torch.index_select(last.verified.hidden, 0, accepted, out=self._hidden)
        self._inputs[:1] = tokens.index_select(0, accepted)
        self._inputs[1:] += 1 + accepted
        [row] = self._cache.state_rows()
        assert row is not None
        with self._steps.dry_run(steps[0]), self._layers.chaining(self._states.rows(row)):
            self._following = replay()
        return True

    def finish(self, accepted: int, token: int | None = None) -> None:
        """End the pass: add its first ``accepted`` drafts to the cache.

        Args:
            accepted: number of drafts that were right.
            token: the token after them, with which the next pass is launched early if it is a
                replay of a graph; None if no pass will follow. If the next call has another token,
                or another step comes in between, that pass is discarded.

        Raises:
            RuntimeError: if the cache has changed since the pass began.
        """
        assert self._pass is not None
        if (verified := self._following) is not None:
            self._finish_ahead(self._pass, verified, accepted, token)
            return
        self._states.take(self._targets, accepted)
        self._targets = []
        self._hidden.copy_(self._pass.verified.hidden[accepted : accepted + 1])
        following, position = None, self._pass.position + 1 + accepted
        if token is not None and self._replay is not None:
            following = partial(self._launched, token, position)
        # The device waits for the launch, not for the tables of the host.
        early = None if following is None else following(accepted)
        for _ in range(accepted):
            self._add_token()
        self._early = following() if early is None and following is not None else early

    def _finish_ahead(
        self, last: _Pass, verified: Verified, accepted: int, token: int | None
    ) -> None:
        """End the pass ``last``; see ``finish``. ``verified`` is the result of the next one."""
        self._following, self._targets = None, []
        plan = self._cache.kv_manager.next_plan(accepted)
        for _ in range(accepted):
            self._add_token()
        if token is not None and plan is not None:
            self._early = _Pass(token, last.position + 1 + accepted, plan, verified)

    @property
    def is_ahead(self) -> bool:
        """Whether a pass has been launched early."""
        return self._early is not None

    def _is_next(self, early: _Pass, token: int, position: int) -> bool:
        """Return whether the early pass did exactly what a pass with this token would do."""
        kv_manager = self._cache.kv_manager
        return (
            (token, position) == (early.token, early.position)
            and kv_manager.next_plan() is early.plan
            and kv_manager.holds_chain(1 + self.count)
        )

    def _add_token(self) -> None:
        """Add the next token of the pass to the cache."""
        if not self._cache.kv_manager.holds_plan:
            raise RuntimeError("the cache has changed during a pass")
        self._cache.replayed(self._cache.begin(_TEXT))

    def _launched(self, token: int, position: int, first: int = 0) -> _Pass | None:
        """Launch a pass; return None if that is not possible.

        Args:
            token, position: see ``__call__``.
            first: number of planned tokens that come before the pass and are not in the cache yet.
        """
        step = self._planned(first)
        plan = self._cache.kv_manager.next_plan(first)
        if step is None or plan is None:
            return None
        if self._cache.hidden is not None:
            self._hidden.copy_(self._cache.hidden)
            self._cache.hidden = None
        numbers = np.array([token, *range(position, position + 1 + self.count)], np.int64)
        self._inputs.copy_(upload(numbers, self._inputs.device))
        [row] = self._cache.state_rows()
        assert row is not None
        with self._steps.dry_run(step), self._layers.chaining(self._states.rows(row)):
            return _Pass(token, position, plan, self._run(step))

    def _planned(self, first: int) -> StepPlan | None:
        """Plan a chained step, see ``KVCacheManager.planned_chain``; None if that is not possible.

        Args:
            first: see ``_launched``.
        """
        self._cache.check_complete()
        if all(layer.index != self._index for layer in self._cache.packed_layers):
            return None  # The cache was begun without drafts.
        kv_manager, staged = self._cache.kv_manager, None
        ready = self._ready.get(id(kv_manager.next_plan(first)))
        if ready is not None and kv_manager.holds_chain(1 + self.count):
            _, step, staged = ready
        else:
            step = None if first else kv_manager.planned_chain(1 + self.count)
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
                self._replay = self._capture(self._verify, self._inputs.device)
            except Exception as error:
                _log.info("drafts run eagerly: %s", error.__context__ or error)
                self._capture = None
            step.restart()
        return self._verify() if self._replay is None else self._replay()

    def _verify(self) -> Verified:
        positions = self._inputs[1:, None].expand(*self._axes, -1, 1)
        return self._layers.verified(self._inputs[:1, None], positions, self._hidden, self._cache)
