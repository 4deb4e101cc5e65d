"""Which kernels are used: those that were seen to agree, in this process or an earlier one."""

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from oscar_mm.kernels import compile, self_check
from oscar_mm.kernels import launch as kernel_module
from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import SWITCH
from oscar_mm.kernels.self_check import CheckedKernels
from oscar_mm.ops import append as append_module
from oscar_mm.ops import decode_kernel, pack_kernel, store_kernel, unpack_kernel
from oscar_mm.ops.decode_kernel import Specialization
from oscar_mm.ops.decode_torch import decode_by_torch
from oscar_mm.ops.pack_torch import pack_by_torch
from oscar_mm.ops.store_torch import store_by_torch, store_layers_by_torch
from oscar_mm.quant.basis import Basis
from oscar_mm.quant.quantize import Recipe, unpack_by_torch
from tests.ops.arguments import (
    ARGUMENTS,
    OPERATIONS,
    POLICY,
    page_format,
    results,
    stream_policy,
)

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
    monkeypatch.setattr(kernel_module, "_told", set())
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


def test_a_kernel_that_cannot_be_made_is_tried_and_told_once(
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
    assert caplog.text.count("copy uses PyTorch operations, which are slow: no compiler") == 1


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
    with pytest.raises(RuntimeError, match=r"oscar_mm\.copy .* first time inside a CUDA graph"):
        process.kernel(GPU)
    assert process.made == 0
    capturing[0] = False
    assert process.kernel(GPU) == Code()
    capturing[0] = True
    assert process.kernel(GPU) == Code()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_first_use_in_a_real_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (append_module, pack_kernel, decode_kernel, store_kernel, unpack_kernel):
        monkeypatch.setattr(module.TRUSTED, "_chosen", {})
    arguments = ARGUMENTS[name]("cuda:0", torch.bfloat16)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="first time inside a CUDA graph"),
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


def check(trusted: CheckedKernels, specialization: object, kernel: object, agrees: bool) -> None:
    assert trusted.verdict(specialization, kernel, CPU).agrees is agrees


FAULTS = [(right, True), (one_element, False), (shifted, False), (nothing, False)]


@pytest.mark.parametrize(("fault", "agrees"), FAULTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unpack_is_compared(
    dtype: torch.dtype, fault: Wrong, agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(kernel, pages, slots, sigma, made, keys, values) -> None:
        sides = unpack_by_torch(pages[slots], made, Basis(made.head_dim, True, sigma), dtype)
        for target, side in zip((keys, values), sides, strict=True):
            target.copy_(side)
        whole = keys.contiguous()
        fault(whole)
        keys.copy_(whole)

    monkeypatch.setattr(unpack_kernel, "launch", launch)
    check(unpack_kernel.TRUSTED, (page_format(), True, dtype), Code(), agrees)


@pytest.mark.parametrize(("fault", "agrees"), [*FAULTS[:1], *FAULTS[2:]])
def test_pack_is_compared(fault: Wrong, agrees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(kernel, *arguments) -> None:
        pack_by_torch(*arguments)
        fault(arguments[6])

    monkeypatch.setattr(pack_kernel, "launch", launch)
    recipe = Recipe.of(page_format(), POLICY)
    check(pack_kernel.TRUSTED, (recipe, torch.bfloat16), Code(), agrees)


@pytest.mark.parametrize(("fault", "agrees"), [*FAULTS[:1], *FAULTS[2:]])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("center", [True, False])
def test_store_is_compared(
    center: bool, several: bool, fault: Wrong, agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(kernel, *arguments) -> None:
        store_by_torch(*arguments)
        if not several:
            fault(arguments[5])

    def launch_layers(kernel, *arguments) -> None:
        store_layers_by_torch(*arguments)
        if several:
            fault(arguments[3][-1])

    monkeypatch.setattr(store_kernel, "launch", launch)
    monkeypatch.setattr(store_kernel, "launch_layers", launch_layers)
    policy = stream_policy(center=center)
    recipe = Recipe.of(page_format((3, 2), policy=policy), policy)
    check(store_kernel.TRUSTED, (recipe, torch.bfloat16), Code(), agrees)


@pytest.mark.parametrize(("fault", "agrees"), FAULTS)
def test_append_is_compared(fault: Wrong, agrees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_kernel(kernel, keys, values, recent, writes, bad) -> None:
        append_module._by_torch(keys, values, recent, writes, bad)
        fault(recent)

    monkeypatch.setattr(append_module, "_by_kernel", by_kernel)
    check(append_module.TRUSTED, (torch.bfloat16, 16), Code(), agrees)


@pytest.mark.parametrize(("fault", "agrees"), FAULTS)
@pytest.mark.parametrize("columns", [4, 8])
@pytest.mark.parametrize("bits", [(2,), (2, 4), ((3, 2),), ((2, 2), (4, 2))])
def test_decode_is_compared(bits: tuple, columns: int, fault: Wrong, agrees: bool) -> None:
    policy = POLICY if isinstance(bits[0], int) else stream_policy()
    formats = [page_format(one, policy=policy) for one in bits]
    specialization = Specialization.of(formats, 64, True, torch.bfloat16, columns)

    def kernel(*arguments) -> None:
        *states, items, recents, counts, _, scaling, output = arguments
        heads = states[1].shape[1]
        made = [replace(one, kv_heads=heads) for one in specialization.formats]
        found = decode_by_torch(*states, items, recents, counts, scaling, made, True)
        fault(found)
        output.copy_(found)

    kernel.key = "a"
    check(decode_kernel.TRUSTED, specialization, kernel, agrees)
