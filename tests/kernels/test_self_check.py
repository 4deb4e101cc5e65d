"""Which kernels are used: those that were seen to agree, in this process or an earlier one."""

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import pytest
import torch

from oscar_mm.kernels import compile, self_check
from oscar_mm.kernels import launch as kernel_module
from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import SWITCH
from oscar_mm.kernels.self_check import CheckedKernels, OperationKernel, relative_error
from oscar_mm.ops import append as append_module
from oscar_mm.ops import decode as decode_module
from oscar_mm.ops import pack as pack_module
from oscar_mm.ops import store as store_module
from oscar_mm.ops import unpack as unpack_module
from oscar_mm.ops.append import append_by_torch
from oscar_mm.ops.decode_torch import decode_by_torch
from oscar_mm.ops.pack import pack_by_torch
from oscar_mm.ops.store_torch import (
    StoreArguments,
    StoreLayersArguments,
    store_by_torch,
    store_layers_one_by_one,
)
from oscar_mm.ops.unpack import UnpackArguments, slots_by_torch
from oscar_mm.pages.quantize import Recipe
from tests.ops.arguments import (
    ARGUMENTS,
    OPERATIONS,
    POLICY,
    page_format,
    results,
    stream_policy,
)
from tests.pairs import pairs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@dataclass
class Code:
    key: str = "a"


class Process:
    """One operation in one process: how often it compiled and compared, and what it chose."""

    def __init__(self, disagreement: float = 0.0, key: str = "a", bound: float = 0.1) -> None:
        self.made, self.compared = 0, 0
        self.disagreement, self.key = disagreement, key
        self.trusted = CheckedKernels("copy", self._make, self._compare, bound)

    def _make(self, specialization: str, device: torch.device) -> Code:
        self.made += 1
        return Code(self.key)

    def _compare(self, specialization: str, kernel: Code, device: torch.device) -> float:
        self.compared += 1
        return self.disagreement

    def kernel(self, device: torch.device = CPU) -> Code | None:
        return self.trusted.kernel("any", device)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSCAR_MM_CACHE", str(tmp_path / "kept"))
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(kernel_module, "_warned", set())
    return tmp_path / "kept"


def test_a_kernel_that_agrees_is_compared_once() -> None:
    first = Process(0.1)
    assert [first.kernel() for _ in range(3)] == [Code()] * 3
    assert (first.made, first.compared) == (1, 1)
    later = Process(0.1)
    assert later.kernel() == Code()
    assert (later.made, later.compared) == (1, 0)


@pytest.mark.parametrize("disagreement", [0.11, 1e9, float("inf"), float("nan")])
def test_a_kernel_that_disagrees_is_never_used(
    disagreement: float, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for compared in (1, 0):  # the second is another process
        process = Process(disagreement)
        caplog.clear()
        assert [process.kernel() for _ in range(3)] == [None] * 3
        assert process.compared == compared
        [record] = caplog.records
        [file] = folder.iterdir()
        assert record.levelno == logging.ERROR
        for part in ("copy kernel disagrees", "on cpu", "oscar-mm doctor", str(file), "delete it"):
            assert part in record.message
    file.unlink()
    assert Process(0.0).kernel() == Code()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content.replace(b"0.5", b"0.0"),
        lambda content: content + b" ",
    ],
    ids=["empty", "shorter", "another number", "longer"],
)
def test_a_damaged_verdict_is_made_again(damage: Callable[[bytes], bytes], folder: Path) -> None:
    assert Process(0.5).kernel() is None
    [file] = folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(damage(content))
    again = Process(0.5)
    assert again.kernel() is None and again.compared == 1
    assert file.read_bytes() == content
    assert json.loads(content.partition(b"\n")[2]) == {"disagreement": 0.5}


def test_what_a_verdict_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Process(0.5).kernel() is None
    assert Process(0.0, key="b").kernel() == Code("b"), "other code"
    assert Process(0.5, bound=1.0).kernel() == Code(), "another bound"
    monkeypatch.setattr(self_check, "_identity", lambda device: ["another driver"])
    assert Process(0.0).kernel() == Code()


def test_without_a_folder_it_is_compared_by_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OSCAR_MM_CACHE", str(tmp_path / "file" / "folder"))
    compile._warn_not_kept.cache_clear()
    processes = [Process(), Process()]
    with pytest.warns(RuntimeWarning, match="OSCAR_MM_CACHE"):
        assert [process.kernel() for process in processes] == [Code()] * 2
    assert [process.compared for process in processes] == [1, 1]


def test_a_kernel_that_cannot_be_made_is_tried_and_reported_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process()

    def refuse(*_: object) -> Code:
        process.made += 1
        raise KernelError("no compiler today")

    process.trusted = CheckedKernels("copy", refuse, process._compare, 0.1)
    with caplog.at_level(logging.WARNING):
        assert [process.kernel() for _ in range(3)] == [None] * 3
    assert process.made == 1 and not folder.exists()
    assert caplog.text.count("copy: falling back to PyTorch operations (slow): no compiler") == 1


def test_threads_that_ask_at_once() -> None:
    process, found = Process(), []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        found.append(process.kernel())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Code()] * 8 and process.made == 1


def test_first_use_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(self_check, "_identity", lambda device: [str(device)])
    process = Process()
    with pytest.raises(RuntimeError, match=r"oscar_mm\.copy .* first time during a CUDA graph"):
        process.kernel(GPU)
    assert process.made == 0
    capturing[0] = False
    assert process.kernel(GPU) == Code()
    capturing[0] = True
    assert process.kernel(GPU) == Code()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_first_use_in_a_real_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (
        append_module.AppendKernel,
        decode_module.DecodeKernel,
        pack_module.PackKernel,
        store_module.StoreKernel,
        unpack_module.UnpackKernel,
    ):
        monkeypatch.setattr(kind.checked, "_chosen", {})
    arguments = ARGUMENTS[name]("cuda:0", torch.bfloat16)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="first time during a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        OPERATIONS[name](*arguments)
    results(name, arguments)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        results(name, arguments)


def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process()
    monkeypatch.setenv(SWITCH, "off")
    assert process.kernel() is None and process.made == 0
    monkeypatch.setenv(SWITCH, "no-bulk")
    assert process.kernel() is not process.trusted.kernel("other", CPU)
    monkeypatch.delenv(SWITCH)
    assert process.kernel() == Code() and process.made == 3


# What each operation's comparison notices: its kernel is played by PyTorch operations, right or
# wrong in one way.

Wrong = Callable[[torch.Tensor], None]


def right(result: torch.Tensor) -> None:
    pass


def one_element(result: torch.Tensor) -> None:
    flat = result.view(-1)
    flat[len(flat) // 2] = torch.nan if result.is_floating_point() else 77


def shifted(result: torch.Tensor) -> None:
    result.copy_(result.roll(1, dims=-2 if result.is_floating_point() else -1))


def nothing(result: torch.Tensor) -> None:
    result.zero_()


def check(kind: type[OperationKernel], specialization: object, run: Callable, agrees: bool) -> None:
    """Judge what is called with the operation's arguments as a kernel is."""
    run.key = "a"
    assert kind.checked.verdict(specialization, run, CPU).agrees is agrees


FAULTS = [(right, True), (one_element, False), (shifted, False), (nothing, False)]


@pytest.mark.parametrize(("fault", "agrees"), FAULTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unpack_is_compared(dtype: torch.dtype, fault: Wrong, agrees: bool) -> None:
    def kernel(arguments: UnpackArguments) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = slots_by_torch(arguments)
        keys = keys.contiguous()
        fault(keys)
        return keys, values

    specialization = unpack_module.Specialization(page_format(), True, dtype)
    check(unpack_module.UnpackKernel, specialization, kernel, agrees)


@pytest.mark.parametrize(("fault", "agrees"), [*FAULTS[:1], *FAULTS[2:]])
def test_pack_is_compared(fault: Wrong, agrees: bool) -> None:
    def kernel(arguments: pack_module.PackArguments) -> None:
        pack_by_torch(arguments)
        fault(arguments.pages)

    recipe = Recipe.of(page_format(), POLICY)
    specialization = pack_module.Specialization(recipe, torch.bfloat16)
    check(pack_module.PackKernel, specialization, kernel, agrees)


@pytest.mark.parametrize(
    ("center", "several", "fault", "agrees"),
    [
        (center, several, *fault)
        for center, several, fault in pairs((True, False), (True, False), (FAULTS[0], *FAULTS[2:]))
    ],
)
def test_store_is_compared(center: bool, several: bool, fault: Wrong, agrees: bool) -> None:
    def kernel(arguments: StoreArguments) -> None:
        store_by_torch(arguments)
        if not several:
            fault(arguments.pages)

    def of_layers(arguments: StoreLayersArguments) -> None:
        store_layers_one_by_one(arguments)
        if several:
            fault(arguments.pages[-1])

    kernel.of_layers = of_layers
    policy = stream_policy(center=center)
    recipe = Recipe.of(page_format((3, 2), policy=policy), policy)
    specialization = store_module.Specialization(recipe, torch.bfloat16)
    check(store_module.StoreKernel, specialization, kernel, agrees)


@pytest.mark.parametrize(("fault", "agrees"), FAULTS)
def test_append_is_compared(fault: Wrong, agrees: bool) -> None:
    def kernel(arguments: append_module.AppendArguments) -> None:
        append_by_torch(arguments)
        fault(arguments.recent)

    specialization = append_module.Specialization(torch.bfloat16, 16)
    check(append_module.AppendKernel, specialization, kernel, agrees)


@pytest.mark.parametrize(
    ("bits", "columns", "fault", "agrees"),
    [
        (bits, columns, *fault)
        for bits, columns, fault in pairs(
            ((2,), (2, 4), ((3, 2),), ((2, 2), (4, 2))), (4, 8), FAULTS
        )
    ],
)
def test_decode_is_compared(bits: tuple, columns: int, fault: Wrong, agrees: bool) -> None:
    policy = POLICY if isinstance(bits[0], int) else stream_policy()
    formats = [page_format(one, policy=policy) for one in bits]
    specialization = decode_module.Specialization.of(formats, 64, True, torch.bfloat16, columns)

    def kernel(arguments: decode_module.DecodeArguments) -> torch.Tensor:
        output = decode_by_torch(arguments).contiguous()
        fault(output)
        return output

    check(decode_module.DecodeKernel, specialization, kernel, agrees)


@pytest.mark.parametrize("value", [0.5, torch.nan])
def test_relative_error_is_that_of_the_worst_row(value: float) -> None:
    expected = torch.ones(3, 4)
    found = expected.clone()
    found[1] = value
    worst = relative_error(found, expected)
    assert isnan(worst) if isnan(value) else worst == 0.5
    assert relative_error(expected, expected) == 0
