"""What doctor runs: calls that it times, and what it says of kernels and loops that are wrong."""

import json

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.apps import doctor, operation_checks
from oscar_mm.cli import app
from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.self_check import Verdict
from oscar_mm.ops.unpack import slots_by_torch
from oscar_mm.pages.layout import PageFormat
from oscar_mm.policy import DEFAULT, Bits

CPU = torch.device("cpu")


@pytest.mark.parametrize("operation", operation_checks.KERNELS)
def test_calls_that_are_timed(operation: str) -> None:
    """They run, do something, and move what their page format says."""
    workload = operation_checks.workload(operation, CPU, pages=16)
    returned = workload.call()
    in_16_bit = 2 * 16 * 128 * 8 * 128 * 2
    by_token = 16 * PageFormat.of(KVPolicy.preset(DEFAULT), Bits(3, 2), 8, 128).page_bytes
    by_channel = 16 * PageFormat.of(KVPolicy.preset("compact"), Bits(2, 2), 8, 128).page_bytes
    assert (
        workload.moved_bytes
        == {
            "append": 2 * 8 * 2 * 8 * 128 * 2,
            "decode": by_token,
            "delta": 2 * 64 * (4 * 32 * 128 * 128 + 2 * 4 * 8192),
            "linear": 2 * 12288 * 4096 * 2,
            "mixture": 8 * 3 * 768 * 2048 * 2,
            "pack": in_16_bit + by_channel,
            "rope": 2 * 8 * (32 + 8 + 1) * 128 * 2,
            "store": in_16_bit + by_token,
            "unpack": in_16_bit + by_token,
        }[operation]
    )
    if operation == "decode":
        assert returned.shape == (8, 32, 1, 128) and returned.isfinite().all()
    elif operation == "unpack":
        assert [x.shape for x in returned] == [(16, 8, 128, 128)] * 2


@pytest.mark.parametrize("operation", operation_checks.KERNELS)
def test_there_is_no_kernel_on_a_cpu(operation: str) -> None:
    with pytest.raises(KernelError, match="NVIDIA GPU"):
        operation_checks.check_kernel(operation, CPU)


def test_a_kernel_that_disagrees_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = {"append": (0.0, 0.0), "decode": (0.5, 0.02), "pack": (float("nan"), 0.01)}
    monkeypatch.setattr(operation_checks, "KERNELS", (*verdicts, "unpack"))

    def check(operation: str, device: torch.device) -> Verdict:
        if operation == "unpack":
            raise KernelError("no compiler today")
        return Verdict(*verdicts[operation])

    monkeypatch.setattr(operation_checks, "check_kernel", check)
    monkeypatch.setattr(operation_checks, "copy_speed", lambda device: 4e12)
    monkeypatch.setattr(
        operation_checks, "workload", lambda *_: operation_checks.Workload(print, 2 << 20)
    )
    monkeypatch.setattr(operation_checks, "call_seconds", lambda call, device: 2e-6)
    found = {check.name: check for check in doctor._kernel_checks("cpu")}
    assert found.pop("copy on cpu").detail == "4000 GB/s read and written"
    append = found.pop("append kernel on cpu")
    assert append.ok and "2.0 us, 1049 GB/s, 26% of a copy" in append.detail
    assert not any(check.ok for check in found.values()) and len(found) == 3
    assert "error 0.5, limit 0.02): it is not used" in found["decode kernel on cpu"].detail
    assert found["unpack kernel on cpu"].detail == "KernelError: no compiler today"


def test_doctor_says_what_a_gpu_would_do(capsys: pytest.CaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    app(["doctor"], standalone_mode=False)
    assert (
        "(delta, linear, mixture, rope) are compared with PyTorch operations"
        in capsys.readouterr().out
    )


@pytest.mark.gpu
def test_doctor_checks_and_times_every_kernel(capsys: pytest.CaptureFixture) -> None:
    app(["doctor", "--json"], standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in report["checks"]}
    for operation in operation_checks.KERNELS:
        check = checks[f"{operation} kernel on cuda:0"]
        print(check)
        assert check["ok"] and "GB/s" in check["detail"] and "of a copy" in check["detail"]
    assert checks["copy on cuda:0"]["ok"]


def test_cpu_kernels_agree() -> None:
    assert all(verdict.agrees for verdict in operation_checks.check_all_loops().values())


@pytest.mark.parametrize("name", [f"{one}_on_cpu" for one in operation_checks.LOOPS])
def test_wrong_cpu_kernels_are_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "decode_on_cpu": lambda arguments: torch.roll(arguments.queries, 1, 0),
        "store_on_cpu": lambda arguments: arguments.pages.bitwise_not_(),
        "unpack_on_cpu": lambda arguments: [x.roll(1, 2) for x in slots_by_torch(arguments)],
    }
    monkeypatch.setattr(operation_checks, name, wrong[name])
    monkeypatch.setattr(operation_checks._StoreLoops, "of_layers", lambda self, arguments: None)
    operation = name.removesuffix("_on_cpu")
    found = {check.name: check.ok for check in doctor._loop_checks()}
    assert (
        not found[f"CPU kernel, {operation}, float32"]
        and not found[f"CPU kernel, {operation}, bfloat16"]
    )
