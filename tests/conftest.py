"""Fixtures of the whole suite."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.prompts import Reference

# Tiny tensors gain nothing from threads, and on busy cores threads waiting for each other cost
# more than the work. Said before torch is there, and so to processes that tests start. Nothing here
# imports torch on its own: where tests are shared out, the process that does so needs it not.
os.environ["OMP_NUM_THREADS"] = "1"

# A full collection of garbage looks through all objects of torch and transformers. At Python's own
# thresholds, collections take a twentieth of the suite.
gc.set_threshold(50_000, 20, 100)

# filelock, which torch imports, looks for forks at every event that Python audits, such as each
# id() and each import: a fiftieth of the suite.
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "addaudithook", lambda _: None)
    import filelock  # noqa: F401


ELSEWHERE = ("gpu", "browser", "clients", "soak")
"""Markers of tests that neither ``make test`` nor ``make nightly`` runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases as slow if the marker ``daily`` of their test does not name them.

    Raises:
        pytest.UsageError: if the marker names cases that do not exist; not if single tests are
            selected by their ids.
    """
    named = dict[str, set[str]]()
    for item in items:
        marker = item.get_closest_marker("daily")
        if marker is None or any(map(item.get_closest_marker, ELSEWHERE)):
            continue
        test, _, case = item.nodeid.removesuffix("]").partition("[")
        found = {part for part in marker.args if f"-{part}-" in f"-{case}-"}
        named.setdefault(test, set(marker.args)).difference_update(found)
        if not found:
            item.add_marker("slow")
    wrong = {test: parts for test, parts in named.items() if parts}
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"daily names cases that do not exist: {wrong}: correct the names")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze the objects of imports and collection, which all stay: looking through them for
    garbage would take a second at each gc.collect(), which benchmarks call for every cell, and
    pytest at the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        if "torch" in sys.modules:
            from tests.quick_loading import shorten_loading

            shorten_loading()
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """Leave nothing to the five collections of garbage by which pytest ends: the first has it all,
    and each takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests with ``gpu(alone=True)`` have the GPU for themselves, also among several processes."""
    marker, run = item.get_closest_marker("gpu"), os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if marker is None or run is None:
        return (yield)
    from tests.gpu_lock import gpu_lock

    with gpu_lock(run, alone=marker.kwargs.get("alone", False)):
        return (yield)


def built(family: str, factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint of this family."""
    from tests.checkpoints import build

    return build(family, factory.mktemp(family))


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step that was launched early was the one that came next."""
    from oscar_mm.fast_decode.graph_runner import InflightStep

    found, is_step = [], InflightStep.is_step
    monkeypatch.setattr(
        InflightStep, "is_step", lambda *given: found.append(is_step(*given)) or found[-1]
    )
    return found


@pytest.fixture(scope="module")
def quick_collection() -> None:
    """Exempt objects of earlier files from the collection of garbage, for a file that often runs
    it, or whose benchmarks do for each cell."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def qwen3_vl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL with its processor."""
    return built("qwen3_vl", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen2_5_vl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL with its processor."""
    return built("qwen2_5_vl", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen3_vl_moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL with experts."""
    return built("qwen3_vl_moe", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen3_vl_thinking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL that begins its answers with reasoning."""
    return built("qwen3_vl_thinking", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen3_5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 with its processor."""
    return built("qwen3_5", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen3_5_moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 with experts."""
    return built("qwen3_5_moe", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen3_5_thinking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 that begins its answers with reasoning."""
    return built("qwen3_5_thinking", tmp_path_factory)


@pytest.fixture(scope="session")
def llava_next_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA-v1.6 on Mistral."""
    return built("llava_next", tmp_path_factory)


@pytest.fixture(scope="session")
def llava_next_vicuna_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA-v1.6 on Vicuna."""
    return built("llava_next_vicuna", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen3_omni_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-Omni that cannot speak."""
    return built("qwen3_omni", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen3_omni_talker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-Omni that can speak."""
    return built("qwen3_omni_talker", tmp_path_factory)


@pytest.fixture(scope="session")
def qwen3_omni_calls_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-Omni that can speak, whose template has tools."""
    return built("qwen3_omni_calls_talker", tmp_path_factory)


@pytest.fixture(scope="session")
def oscar(qwen3_vl_folder: Path) -> "Reference":
    """A tiny Qwen3-VL with attention "oscar"; nobody changes it."""
    from tests.prompts import Reference

    return Reference(qwen3_vl_folder, attention={"text_config": "oscar"})
