"""The progress bar: on a terminal only."""

import sys

import pytest

from oscar_mm.apps.audio_qa.watch import bar


@pytest.mark.parametrize("terminal", [True, False])
def test_rows_audio_and_memory(terminal: bool, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    monkeypatch.setenv("COLUMNS", "120")
    with bar(8) as shown:
        shown.update(3, audio_seconds=90.0, seconds=6.0, kv_bytes=2_500_000)
    captured = capsys.readouterr()
    assert captured.out == ""
    for part in ("3/8", "15.0 h audio/h", "KV 2.50 MB"):
        assert (part in captured.err) is terminal
