"""Cases of several parameters: each pair of values once instead of each combination."""

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any


def pairs(
    *axes: Iterable[Any], allowed: Callable[..., bool] = lambda *case: True
) -> list[tuple[Any, ...]]:
    """Choose combinations of one value per axis in which each pair of values of two axes occurs.

    Few faults need three particular values to show, and there are about as many cases as the two
    longest axes have pairs. The choice is greedy, and the same each time.

    Args:
        axes: values of each parameter.
        allowed: function that returns whether a combination exists; pairs that occur in none are
            left out.
    """
    values = [list(axis) for axis in axes]
    left = [
        (case, set(combinations(enumerate(case), 2)))
        for case in product(*(range(len(axis)) for axis in values))
        if allowed(*(axis[at] for axis, at in zip(values, case, strict=True)))
    ]
    chosen = []
    while left:
        best, found = max(left, key=lambda one: len(one[1]))
        chosen.append(tuple(axis[at] for axis, at in zip(values, best, strict=True)))
        left = [(case, rest) for case, new in left if (rest := new - found)]
    return chosen
