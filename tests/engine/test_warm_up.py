"""Warm-up: graphs captured before the first request are not captured again later."""

from collections.abc import Sequence
from functools import partial

import pytest

from oscar_mm.cache.page_store import PageStore
from oscar_mm.engine import decode_runner, mixed_prefill
from oscar_mm.engine import warm_up as warm_up_module
from oscar_mm.engine.warm_up import warm_up
from oscar_mm.fast_decode import graph_runner, picture_tower
from tests.engine.engine import SHORT, alone, empty, loaded, made, together
from tests.fast_decode.test_graph_runner import Repeat
from tests.prompts import noise

ROWS = 14
"""Number of rows in a batch of 16."""


@pytest.fixture
def repeat(monkeypatch) -> Repeat:
    """Capture steps with pools whose addresses do not change, as on a GPU."""
    monkeypatch.setattr(PageStore, "version", 0)
    repeat = Repeat()
    steps = partial(graph_runner.GraphRunner, capture=repeat)
    monkeypatch.setattr(decode_runner, "GraphRunner", steps)
    return repeat


@pytest.mark.daily("standard")
@pytest.mark.parametrize("policy", ["bf16", "standard", "channel"])
def test_no_step_is_captured_after_it(qwen3_vl_folder, repeat, policy) -> None:
    pipe = loaded(qwen3_vl_folder, policy, kv_budget="20MB", prefix_cache="1MB")
    warm_up(pipe.engine, ROWS)
    assert empty(pipe) and pipe.prefixes.hits == pipe.prefixes.misses == 0
    captures = repeat.captures
    assert captures == len([1, 2, 4, 8, 12, 16])
    prompts: Sequence[str] = (SHORT * 4)[:ROWS]
    found = together(pipe, [made(pipe, prompt) for prompt in prompts])
    for count in range(1, ROWS + 1):
        together(pipe, [made(pipe, prompt, max_new_tokens=4) for prompt in prompts[:count]])
    assert repeat.captures == captures
    assert found == (alone(pipe) * 4)[:ROWS]


@pytest.mark.parametrize("seconds", [60, 0])
def test_mixed_passes(
    qwen3_vl_folder, capture, pieces, small, monkeypatch, caplog, seconds
) -> None:
    """None is captured after the warm-up if that had the time; otherwise prompts capture them,
    with and without a picture."""
    caplog.set_level("DEBUG", mixed_prefill.__name__)
    monkeypatch.setattr(decode_runner, "_BESIDE_PROMPTS", (1, 2, 4, 8, 16))
    monkeypatch.setattr(PageStore, "version", 0)
    monkeypatch.setattr(warm_up_module, "_MIXED_S", seconds)
    prompts = [" ".join(SHORT * count) for count in (1, 2, 4, 6, 9, 1)]
    pipe = loaded(qwen3_vl_folder, "standard")
    warm_up(pipe.engine, ROWS)
    captures = capture.made
    # Steps, reading and storing the prompts, and pieces of three sizes, alone and beside five sizes
    # of a batch. Towers have graphs of their own.
    most = 6 + 2 + (3 * (1 + 5) + len(picture_tower._SIZES)) * bool(seconds)
    assert len([1, 2, 4, 8, 12, 16]) <= captures <= most
    assert ("with 16 that decode" in caplog.text) == (not seconds)
    pieces.clear()
    for seed in range(3):
        shown = made(pipe, prompts[0], noise(64, 96, seed))
        together(pipe, [shown, *(made(pipe, prompt) for prompt in prompts[1:])])
    assert any(with_step for _, with_step in pieces)
    assert (capture.made > captures) == (not seconds)
    assert empty(pipe)


def test_nothing_runs_where_steps_are_eager(qwen3_vl_folder) -> None:
    pipe = loaded(qwen3_vl_folder)
    steps = []
    pipe.model.register_forward_pre_hook(lambda *_: steps.append(1))
    warm_up(pipe.engine, ROWS)
    assert not steps


def test_a_small_budget_warms_up_what_it_has_memory_for(qwen3_vl_folder, repeat) -> None:
    pipe = loaded(qwen3_vl_folder, kv_budget="1MB")
    warm_up(pipe.engine, ROWS)
    assert repeat.captures and empty(pipe)


def test_an_error_is_logged(qwen3_vl_folder, repeat, monkeypatch, caplog) -> None:
    pipe = loaded(qwen3_vl_folder)
    with monkeypatch.context() as broken:
        for name in ("prefill_passes", "read_in_chunks"):
            broken.setattr(pipe.engine.reader, name, lambda *_, **__: 1 / 0)
        warm_up(pipe.engine, ROWS)
    assert "division by zero" in caplog.text
    assert empty(pipe) and together(pipe, [made(pipe, SHORT[0])])
