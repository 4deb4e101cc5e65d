"""What doctor finds on this machine, and that it notices what is broken."""

import json
from pathlib import Path

import pytest

import oscar_mm
from oscar_mm.apps import doctor as doctor_module
from oscar_mm.cli import run
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import Bits, KVPolicy


def test_doctor_finds_this_machine_healthy(capsys) -> None:
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["versions"]["oscar-mm"] == oscar_mm.__version__
    assert report["devices"][0]["name"] == "cpu"
    assert report["devices"][0]["total_bytes"] > 2**28
    names = [check["name"] for check in report["checks"]]
    assert "video decoder" in names
    assert all(f"roundtrip {preset} on cpu" in names for preset in KVPolicy.preset_names())
    assert run(["doctor"]) == 0
    bits = PageFormat.of(KVPolicy(), Bits(2, 2), 8, 128).bits_per_value
    assert f"{bits:.2f} bits per value" in capsys.readouterr().out


@pytest.mark.parametrize("noise", [2.0, float("nan")])
def test_doctor_notices_wrong_arithmetic(noise: float, monkeypatch, capsys) -> None:
    from oscar_mm.inspect import quantization_errors

    is_right = quantization_errors.roundtrip

    def wrong(k, v, policy):
        result = is_right(k, v, policy)
        result.k.mul_(noise)
        return result

    monkeypatch.setattr(quantization_errors, "roundtrip", wrong)
    assert run(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    failed = [check["name"] for check in report["checks"] if not check["ok"]]
    assert [name for name in failed if "on cpu" in name] == [
        f"roundtrip {preset} on cpu" for preset in KVPolicy.preset_names()
    ]


def test_doctor_reports_a_broken_video_decoder(monkeypatch, capsys) -> None:
    def fail(path: Path) -> str:
        raise ImportError("no libav here")

    monkeypatch.setattr(doctor_module, "_write_clip", fail)
    assert run(["doctor"]) == 1
    assert "FAILED  video decoder: ImportError: no libav here" in capsys.readouterr().out
