"""Loading and launching, and which code runs on which device."""

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oscar_mm.kernels import compile, launch
from oscar_mm.kernels.compile import KernelError
from oscar_mm.kernels.launch import architecture, load_kernel

SOURCE = """
struct Params {
  const float* x;
  float* y;
  int count;
  float factor;
};
extern "C" __global__ void scale(const __grid_constant__ Params params) {
  extern __shared__ float held[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  held[threadIdx.x + OFFSET] = i < params.count ? params.x[i] : 0.0f;
  if (i < params.count) params.y[i] = held[threadIdx.x + OFFSET] * params.factor;
}
"""
COUNT, THREADS = 1000, 256


class Params(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("factor", ctypes.c_float),
    )


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), None),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_100"),
        ((11, 0), None),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
        ((13, 0), None),
    ],
)
def test_architecture(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert architecture(torch.device("cuda", 0)) == expected
    assert architecture(torch.device("cpu")) is None
    monkeypatch.setattr(torch.version, "cuda", None)  # a ROCm build also says "cuda"
    assert architecture(torch.device("cuda", 0)) is None


def test_device_that_cannot_run_it() -> None:
    with pytest.raises(KernelError, match=r"decode\.cu needs an NVIDIA GPU .* 8\.0 .*, not cpu"):
        load_kernel("decode/decode.cu", {}, torch.device("cpu"))


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "scale.cu").write_text(SOURCE)
    monkeypatch.setattr(compile, "csrc_folder", lambda: tmp_path)
    monkeypatch.setenv("OSCAR_MM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "_kernels", {})
    yield tmp_path


class Scale:
    """Multiply by a factor on the current stream."""

    def __init__(self, offset: int = 0, device: str = "cuda:0") -> None:
        self.kernel = load_kernel("scale.cu", {"OFFSET": offset}, torch.device(device))
        self.x = torch.randn(COUNT, device=device)
        self.y = torch.full_like(self.x, float("nan"))
        self.shared_bytes = (THREADS + offset) * 4

    def launch(self, factor: float, blocks: int = -(-COUNT // THREADS)) -> None:
        params = Params(self.x.data_ptr(), self.y.data_ptr(), COUNT, factor)
        stream = torch.cuda.current_stream(self.x.device).cuda_stream
        self.kernel.launch((blocks, 1, 1), (THREADS, 1, 1), self.shared_bytes, params, stream)
        params.factor = float("nan")  # the launch has its own copy

    def check(self, factor: float) -> None:
        torch.cuda.synchronize(self.x.device)
        assert torch.equal(self.y, self.x * factor)


@pytest.mark.gpu
def test_launch(csrc: Path) -> None:
    scale = Scale()
    for factor in (2.0, -3.0):
        scale.launch(factor)
        scale.check(factor)


@pytest.mark.gpu
def test_a_kernel_is_loaded_once(csrc: Path) -> None:
    assert Scale().kernel is Scale(device="cuda").kernel
    assert Scale().kernel is not Scale(offset=1).kernel


@pytest.mark.gpu
def test_more_shared_memory_than_without_asking(csrc: Path) -> None:
    scale = Scale(offset=20_000)
    scale.launch(2.0)
    scale.check(2.0)
    scale.shared_bytes = 1 << 20
    with pytest.raises(KernelError, match=r"scale needs 1048576 bytes of shared memory"):
        scale.launch(2.0)


@pytest.mark.gpu
def test_launch_from_a_thread_that_has_not_used_cuda(csrc: Path) -> None:
    scale = Scale()
    thread = threading.Thread(target=scale.launch, args=(2.0,))
    thread.start()
    thread.join()
    scale.check(2.0)


@pytest.mark.gpu
def test_launch_in_a_cuda_graph(csrc: Path) -> None:
    scale, graph = Scale(), torch.cuda.CUDAGraph()
    scale.launch(1.0)
    with torch.cuda.graph(graph):
        scale.launch(5.0)
    scale.check(1.0)
    scale.x.normal_()
    graph.replay()
    scale.check(5.0)


@pytest.mark.gpu
def test_launch_on_another_device_than_the_current(csrc: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    scale = Scale(device="cuda:1")
    assert torch.cuda.current_device() == 0
    scale.launch(2.0)
    scale.check(2.0)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_what_the_driver_refuses(csrc: Path) -> None:
    scale = Scale()
    with pytest.raises(KernelError, match="scale on cuda:0: launching: CUDA_ERROR_INVALID_VALUE"):
        scale.launch(2.0, blocks=0)
    with pytest.raises(KernelError, match="finding the function: CUDA_ERROR_NOT_FOUND"):
        load_kernel("scale.cu", {"OFFSET": 0}, torch.device("cuda", 0), name="nothing")
    with pytest.raises(KernelError, match="structure of 24 bytes, not c_int of 4"):
        scale.kernel.launch((1, 1, 1), (1, 1, 1), 0, ctypes.c_int(0), 0)
    scale.launch(2.0)
    scale.check(2.0)
