"""Records are files that read back as they were written."""

import re
from pathlib import Path

from benchmarks.record import Record


def test_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record("memory", "python -m x", "Some (R) CPU", [{"a": 1.5}], ["note"], {"b": 2})
    path = record.write(tmp_path / "new")
    assert path.name == "memory-some-r-cpu.json"
    assert Record.load(path) == record
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record.date)
    assert {"oscar_mm", "python", "torch", "transformers"} <= set(record.versions)
