"""Slots and their bytes."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from oscar_mm.cache.block_table import DryRunSlots, SlotPool
from oscar_mm.cache.page_store import Pool
from oscar_mm.policy import PLAIN


class Allocation(RuleBasedStateMachine):
    """Owners take, share and release slots; a slot in use is never given out."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotPool()
        self.owners: list[list[int]] = []
        self.most = 0

    def held(self) -> list[int]:
        return [slot for owner in self.owners for slot in owner]

    @rule(count=st.integers(0, 40))
    def allocate(self, count: int) -> None:
        before = set(self.held())
        slots = self.slots.allocate(count)
        assert len(slots) == len(set(slots)) == count
        assert not before & set(slots)
        self.owners.append(slots)
        self.most = max(self.most, len(set(self.held())))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.owners:
            owner = data.draw(st.sampled_from(self.owners))
            self.slots.share(owner)
            self.owners.append(owner.copy())

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owners:
            at = data.draw(st.integers(0, len(self.owners) - 1))
            self.slots.release(self.owners.pop(at))

    @invariant()
    def counts(self) -> None:
        held = self.held()
        assert self.slots.used == len(set(held))
        assert all(0 <= slot < self.slots.capacity for slot in held)
        assert all(self.slots.is_shared(slot) == (held.count(slot) > 1) for slot in held)
        # Slots are used again before the pool grows, which it does by little.
        assert self.slots.capacity <= self.most + self.most // 32


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_growth_is_bounded() -> None:
    slots = SlotPool()
    slots.allocate(3200)
    assert slots.capacity == 3200
    slots.allocate(1)
    assert slots.capacity == 3300


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_reserve_keeps_what_is_stored(dtype: torch.dtype) -> None:
    pool = Pool((2, 3), dtype, torch.device("cpu"))
    assert pool.slot_bytes == 0 and pool.storage.shape == (0, 2, 3)
    content = torch.arange(24).view(4, 2, 3).to(dtype)
    pool.reserve(4)
    pool.storage[:] = content
    for capacity in (9, 2, 0):
        pool.reserve(capacity)
        assert pool.storage.shape == (9, 2, 3) and pool.storage.dtype == dtype
        assert torch.equal(pool.storage[:4], content)
    assert pool.slot_bytes == 6 * dtype.itemsize


def test_pool_of_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        pool = Pool((2,), torch.float32, torch.device("cpu"))
        pool.reserve(1)
    pool.storage[0] = 1
    assert pool.storage.tolist() == [[1, 1]]


def plan(pool: SlotPool, count: int, planned: Sequence[int] = ()) -> list[int]:
    """Slots that a step plans to take, besides those of earlier plans."""
    step = DryRunSlots(PLAIN, pool)
    for slot in planned:
        step.skip(slot)
    return step.allocate(count)


def test_slots_released_after_a_plan_leave_its_slots_alone() -> None:
    pool = SlotPool()
    held, free = pool.allocate(3), pool.allocate(6)
    pool.release(free)
    planned = plan(pool, 2)
    uses = [pool.uses(slot) for slot in planned]
    pool.release(held)
    later = plan(pool, 5, planned)
    assert later == [*reversed(held), free[-3], free[-4]]
    assert [pool.uses(slot) for slot in planned] == uses


def test_a_prompt_takes_new_slots_and_none_that_a_step_has_planned() -> None:
    pool = SlotPool()
    pool.release(pool.allocate(3))
    [planned] = plan(pool, 1)
    uses = pool.uses(planned)
    pool.make_free(8)
    assert (pool.free, pool.capacity) == (8, 8)
    assert not {0, 1, 2} & {*pool.allocate(5, for_prompt=True)}
    assert pool.uses(planned) == uses
    pool.claim([planned])
    pool.make_free(2)
    assert (pool.free, pool.capacity) == (2, 8)


def test_planned_slots_are_claimed_among_later_ones() -> None:
    pool = SlotPool()
    held, free = pool.allocate(4), pool.allocate(5)
    pool.release(free)
    planned = plan(pool, 3)[::2]
    assert planned == [free[-1], free[-3]]
    pool.release(held)  # After the plan.
    pool.claim(planned)
    assert (pool.free, [pool.owners(slot) for slot in planned]) == (7, [1, 1])
    left = [free[0], free[1], free[3], *held]  # In the order in which they became free.
    assert [pool.allocate(1) for _ in left] == [[slot] for slot in reversed(left)]
