"""Methods are chosen by their names, and keep the same tokens in 16-bit precision."""

from dataclasses import replace

from oscar_mm.compare.methods import (
    DEFAULT,
    FINE,
    PUBLISHED,
    REFERENCE,
    ablation_methods,
    main_methods,
    selected,
)
from oscar_mm.compare.paged import Paged


def names(*texts: str) -> list[str]:
    return [one.name for one in selected(main_methods(), texts)]


def test_a_whole_name_is_that_method_and_a_part_all_that_have_it() -> None:
    assert names(DEFAULT) == [DEFAULT]
    assert names("channel, norm", REFERENCE) == [
        *(REFERENCE, "channel, norm plain", "channel, norm refit")
    ]
    assert names() == [one.name for one in main_methods()] and names("magic") == []


def test_the_main_table_compares_methods_and_not_windows() -> None:
    methods = {one.name: one for one in main_methods()}
    assert {REFERENCE, DEFAULT, PUBLISHED, FINE} <= methods.keys()
    packed = [one for one in methods.values() if isinstance(one, Paged) and one.policy.packs]
    assert {(one.policy.window, one.policy.sinks) for one in packed} == {(32, 4)}


def test_the_ablation_changes_what_it_says() -> None:
    main = {one.policy for one in main_methods() if isinstance(one, Paged)}
    pure = [one for one in ablation_methods() if not one.mixed]
    assert len({one.policy for one in pure}) == len(pure)
    assert main.isdisjoint(one.policy for one in pure)
    assert {one.policy for one in ablation_methods() if one.mixed} <= main
    plain = [one.name for one in pure if one.policy == replace(one.policy, value_scale="plain")]
    assert {"channel, value scale plain", "groups 32, value scale plain"} < set(plain)
