"""Rows of the memory benchmark are the reports of caches."""

from pathlib import Path

import pytest
import torch

from benchmarks import memory
from benchmarks.random_model import synthetic_cache, text_and_images
from benchmarks.record import Record
from oscar_mm import KVPolicy
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import Bits


@pytest.mark.daily("standard", "kivi", "bf16")
@pytest.mark.parametrize("preset", KVPolicy.preset_names())
def test_memory_rows_are_the_report_of_the_cache(preset: str, generator: torch.Generator) -> None:
    [row] = memory.measure([1024], [preset])
    shape = (1, memory.KV_HEADS, 1024, memory.HEAD_DIM)
    cache = synthetic_cache(preset, shape, generator, memory.ANSWER)
    cache.shrink()
    report = cache.memory().to_dict()
    assert row == {"preset": preset, "context": 1024, "page_bits": row["page_bits"]} | report
    [layer] = cache.layers
    pools = [layer.recent, *layer.pages.values()]
    stored = sum(pool.storage.nbytes for pool in pools)
    stored += cache.kv_manager.table_bytes + layer.overflow.nbytes
    assert row["kv_bytes"] == stored + (0 if layer.sigma is None else layer.sigma.nbytes)
    assert (layer.sigma is not None) == (cache.policy.balance is not None and cache.policy.packs)
    assert sum(row["tokens"].values()) == cache.get_seq_length() == 1024
    assert row["tokens"]["image"] == int((text_and_images(1024 - memory.ANSWER) == 1).sum())


def test_longer_contexts_come_nearer_to_the_page_format() -> None:
    rows = memory.measure([1024, 4096], ["channel"])
    assert rows[0]["ratio"] < rows[1]["ratio"] < 16 / rows[1]["page_bits"]
    page_bits = PageFormat.of(
        KVPolicy.preset("channel"), Bits(2, 2), memory.KV_HEADS, memory.HEAD_DIM
    ).bits_per_value
    assert rows[0]["page_bits"] == page_bits


def test_main_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SIZES", (1024,))
    assert memory.main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    [path] = tmp_path.iterdir()
    record = Record.load(path)
    assert record.command == "python -m benchmarks.memory", "no folder of one machine"
    assert [row["preset"] for row in record.rows] == list(KVPolicy.preset_names())
    assert all(f"{row['ratio']:.2f}x" in printed for row in record.rows)
    assert all(note in printed for note in record.notes)
