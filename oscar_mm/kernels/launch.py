"""Load compiled kernels onto a GPU and launch them.

A kernel takes one structure as its only parameter (``__grid_constant__ const Params``); the host
side of an operation fills the same structure in ctypes. Launches go straight to the driver, which
is the cheapest call from Python and can be captured in torch's CUDA graphs.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from oscar_mm.kernels.compile import KernelError, Report, compile_kernel, not_installed
from oscar_mm.pages.fragments import KERNEL_HEAD_DIMS
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pages.quantize import Recipe
from oscar_mm.policy import FITS
from oscar_mm.quant.fit import LSQ_ROUNDS, first_range

SWITCH = "OSCAR_MM_KERNELS"
"""Environment variable: "auto" (default), "off" (PyTorch operations), or "no-bulk" (use the copy
path for GPUs before sm_90 on every GPU)."""
_ARCHITECTURES = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (12, 0): "sm_120",
}


def kernels_disabled() -> bool:
    """Return whether the user has disabled the kernels in favor of PyTorch operations."""
    return os.environ.get(SWITCH) == "off"


def architecture(device: torch.device) -> str | None:
    """Return the architecture to compile for; None if the kernels do not support the device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability in _ARCHITECTURES:
        return _ARCHITECTURES[capability]
    # Code for a lower minor version of the same generation runs too; code with an "a" runs only on
    # its own version, and no code runs on another generation.
    lower = [known for known in _ARCHITECTURES if known[0] == capability[0] and known < capability]
    return _ARCHITECTURES[max(lower)].rstrip("a") if lower else None


def uses_tma(device: torch.device) -> bool:
    """Return whether kernels copy with TMA (csrc/common/copy.cuh), the default from sm_90 on.

    Raises:
        KernelError: if the device does not support the kernels.
    """
    arch = architecture(device)
    if arch is None:
        raise KernelError(
            f"{device}: an NVIDIA GPU with compute capability 8.0 or newer is required"
        )
    return int(arch[3:].rstrip("a")) >= 90 and os.environ.get(SWITCH) != "no-bulk"


def uses_wgmma(device: torch.device) -> bool:
    """Return whether kernels multiply with warpgroups (csrc/common/wgmma.cuh), which only Hopper
    GPUs do, and copy with TMA."""
    return architecture(device) == "sm_90a" and uses_tma(device)


def current_stream(device: torch.device) -> int:
    """Return the handle of torch's current stream on a GPU with an index."""
    # Same as ``torch.cuda.current_stream(device).cuda_stream``, which takes longer than a launch.
    return torch._C._cuda_getCurrentRawStream(device.index)


def shared_limit(device: torch.device) -> int:
    """Return the maximum shared memory per thread block of a GPU, in bytes."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@lru_cache(maxsize=16)
def exclusive_shared_bytes(device: torch.device) -> int:
    """Return the shared memory per thread block at which a multiprocessor runs only one block.

    If two kernels that read weights share multiprocessors, the next one's weights arrive while the
    current one still waits for its own, which takes 10% to 40% longer (H200).
    """
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor // 2


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, or 1 for another device."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
"""Supported dtypes of keys and values, and the value of the kernels' macro ELEMENT for each."""
OUT_OF_ORDER = (
    f"the kernels support a head_dim of {KERNEL_HEAD_DIMS}; with key_axis 'channel', up to 128 and "
    "the same 2 or 4 bits for keys and values; with 'token', one key group for the whole head "
    "(key_group='head')"
)
"""Error text for page formats that are not in fragments, which the kernels do not support."""
_MAX_CONFIGS = 256
"""Maximum number of cached launch configurations; creating one takes as long as a launch."""
_log = logging.getLogger(__name__)
_warned: set[str] = set()
_kernels: dict[tuple[object, ...], Kernel] = {}
_loading = threading.Lock()


def warn_once(what: str, reason: str) -> None:
    """Log why an operation does not use its kernel, once for each reason."""
    message = f"{what}: falling back to PyTorch operations (slow): {reason}"
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)


class NotCapturable(RuntimeError):
    """An operation would have waited for the GPU during a CUDA graph capture."""


def refuse_capture(what: str, device: torch.device) -> None:
    """Raise an error if a CUDA graph capture is in progress, which an operation that waits for the
    GPU would break.

    Args:
        what: name of the operation.
        device: device of its tensors.

    Raises:
        NotCapturable: if the current stream is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotCapturable(
            f"{what}: PyTorch operations, which wait for the GPU, cannot be captured"
        )


def cpu_kernels_available(what: str) -> bool:
    """Return whether CPU kernels (``oscar_mm.kernels.numba_vectors``) can run; if not, log the
    reason once."""
    if kernels_disabled():
        return False
    if failure := numba_failure():
        warn_once(what, failure)
    return not failure


@cache
def numba_failure() -> str | None:
    """Return why numba cannot be imported (such as an unsupported numpy); None if it can."""
    try:
        import_module("numba")
    except Exception as error:
        return f"numba cannot be imported ({error})"
    return None


def load_kernel(
    source: str, macros: Mapping[str, str | int], device: torch.device, name: str | None = None
) -> Kernel:
    """Return the kernel of a source file for a device, compiled and loaded on first use and cached.

    Must not be called during a CUDA graph capture. Callers should keep the kernel, since looking it
    up takes as long as launching it.

    Args:
        source: file name in csrc, like "decode/decode.cu".
        macros: preprocessor macros for compiling the source.
        device: a CUDA device.
        name: name of the function; by default the source's name without its suffix.

    Raises:
        KernelError: if the device cannot run the kernel, or it cannot be compiled or loaded.
    """
    arch = architecture(device)
    if arch is None:
        raise KernelError(
            f"{source} needs an NVIDIA GPU with compute capability 8.0 or newer, not {device}"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    name = Path(source).stem if name is None else name
    key = (source, name, index, tuple(sorted(macros.items())))
    kernel = _kernels.get(key)
    if kernel is None:
        with _loading:
            if key not in _kernels:
                cubin = compile_kernel(source, arch, macros)
                report = cubin.reports.get(name)
                _kernels[key] = Kernel(cubin.code, name, index, report, cubin.key)
            kernel = _kernels[key]
    return kernel


class Kernel:
    """A function of a cubin on one device.

    Attributes:
        device: device of the kernel.
        key: hash of source, options, architecture and compiler.
        report: the compiler's report, if known.
        shared_limit: maximum dynamic shared memory per thread block, in bytes.
    """

    def __init__(
        self, code: bytes, name: str, index: int, report: Report | None = None, key: str = ""
    ) -> None:
        """
        Args:
            code: cubin for the device's architecture.
            name: name of the function, declared ``extern "C"``.
            index: torch's index of the device.
            report: the compiler's report.
            key: ``Cubin.key``.
        """
        try:
            # This is a compiled module without stubs.
            from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]
        except ImportError as error:
            raise not_installed(error) from error
        self.name, self.report, self.key = name, report, key
        self.device = torch.device("cuda", index)
        self._driver = driver
        self._overlaps = torch.cuda.get_device_capability(self.device) >= (9, 0)
        # The runtime, and so torch, uses the device's primary context. It stays retained, since the
        # kernel lives as long as the process.
        handle = self._checked("finding the device", driver.cuDeviceGet(index))
        self._context = self._checked(
            "entering its primary context", driver.cuDevicePrimaryCtxRetain(handle)
        )
        self._context_address = int(self._context)
        self._early_configs: dict[tuple[Any, ...], Any] = {}
        with self._in_context():
            self._module = self._checked("loading", driver.cuModuleLoadData(code))
            self._function = self._checked(
                "finding the function", driver.cuModuleGetFunction(self._module, name.encode())
            )
            _, self._params_bytes = self._checked(
                "reading its parameter", driver.cuFuncGetParamInfo(self._function, 0)
            )
            self.shared_limit = self._allow_shared(handle)

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: ctypes.Structure,
        stream: int,
        dependent: bool = False,
    ) -> None:
        """Launch without waiting.

        Args:
            grid: number of thread blocks.
            block: threads per thread block.
            shared_bytes: dynamic shared memory per thread block.
            params: the kernel's structure; copied, so that it may be changed afterwards.
            stream: handle of a stream of the kernel's device, ``torch.cuda.Stream.cuda_stream``.
            dependent: whether to begin before the preceding kernel has ended; the kernel itself
                must then wait for it (csrc/common/overlap.cuh). Has no effect before sm_90.

        Raises:
            KernelError: if the structure or the shared memory does not fit, or the driver fails.
        """
        if ctypes.sizeof(params) != self._params_bytes:
            raise KernelError(
                f"{self.name} takes a structure of {self._params_bytes} bytes, "
                f"not {type(params).__name__} of {ctypes.sizeof(params)}"
            )
        if shared_bytes > self.shared_limit:
            raise KernelError(
                f"{self.name} needs {shared_bytes} bytes of shared memory; {self.device} has "
                f"{self.shared_limit} per thread block"
            )
        # Array with the address of the only parameter; one per launch, since several threads may
        # launch.
        pointer = ctypes.c_void_p(ctypes.addressof(params))
        # The default stream has the same handle on every device, so the context selects the device.
        # A thread that has not used CUDA yet has no context.
        current = self._checked("launching", self._driver.cuCtxGetCurrent())
        how = grid, block, shared_bytes, pointer, stream, dependent and self._overlaps
        if int(current) == self._context_address:
            self._launch(*how)
        else:
            with self._in_context():
                self._launch(*how)

    def capture_on(self, stream: int) -> int | None:
        """Return the id of a stream's CUDA graph capture; None if it is not being captured."""
        active = self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        asking = "asking for a capture"
        if self._checked(asking, self._driver.cuStreamIsCapturing(stream)) != active:
            return None
        _, capture, *_ = self._checked(asking, self._driver.cuStreamGetCaptureInfo(stream))
        return int(capture)

    def _launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        pointer: ctypes.c_void_p,
        stream: int,
        early_start: bool,
    ) -> None:
        driver, address = self._driver, ctypes.addressof(pointer)
        if not early_start:
            launched = driver.cuLaunchKernel(
                self._function, *grid, *block, shared_bytes, stream, address, 0
            )
            self._checked("launching", launched)
            return
        key = grid, block, shared_bytes, stream
        config = self._early_configs.get(key)
        if config is None:
            if len(self._early_configs) >= _MAX_CONFIGS:
                self._early_configs.clear()
            config = self._early_configs[key] = self._early_config(*key)
        self._checked("launching", driver.cuLaunchKernelEx(config, self._function, address, 0))

    def _early_config(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
    ) -> Any:
        driver = self._driver
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        config.attrs, config.numAttrs = [early], 1
        return config

    def _allow_shared(self, handle: Any) -> int:
        """Raise the shared memory limit of launches from 48 KiB to the device's maximum; return the
        dynamic shared memory per thread block, in bytes."""
        driver = self._driver
        device_attribute, attribute = driver.CUdevice_attribute, driver.CUfunction_attribute
        limit = self._checked(
            "reading the device's limits",
            driver.cuDeviceGetAttribute(
                device_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, handle
            ),
        )
        limit -= self._checked(
            "reading its shared memory",
            driver.cuFuncGetAttribute(
                attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self._function
            ),
        )
        self._checked(
            "allowing it shared memory",
            driver.cuFuncSetAttribute(
                self._function,
                attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                limit,
            ),
        )
        return limit

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        self._checked("entering its context", self._driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._checked("leaving its context", self._driver.cuCtxPopCurrent())

    def _checked(self, doing: str, returned: tuple[Any, ...]) -> Any:
        """Return the result of a driver call without its status; raise KernelError if it failed."""
        if returned[0]:
            raise KernelError(f"{self.name} on {self.device}: {doing}: {returned[0].name}")
        return returned[1] if len(returned) == 2 else returned[1:]


def page_macros(page_format: PageFormat) -> dict[str, str | int]:
    """Return the macros that csrc/common/page.cuh needs."""
    return page_format.codec.macros(page_format)


def recipe_macros(recipe: Recipe, dtype: torch.dtype) -> dict[str, str | int]:
    """Return the macros for kernels that write pages, without those for bits and scales."""
    page_format = recipe.page_format
    return page_macros(page_format) | {
        "ELEMENT": ELEMENTS[dtype],
        "ROTATE": int(recipe.rotate),
        "FIT": FITS.index(recipe.fit),
        "KEY_START": f"{first_range(page_format.bits.keys, page_format.key_group)}f",
        "VALUE_START": f"{first_range(page_format.bits.values, page_format.value_group)}f",
        "LSQ_ROUNDS": LSQ_ROUNDS,
    }


def check_pages(page_format: PageFormat, dtype: torch.dtype) -> None:
    """Raise KernelError unless the kernels support the page format and the dtype of states."""
    if not page_format.in_fragments or page_format.head_dim not in KERNEL_HEAD_DIMS:
        raise KernelError(OUT_OF_ORDER)
    if dtype not in ELEMENTS:
        raise KernelError(f"the kernel supports bfloat16 and float16, not {dtype}")


Strides = ctypes.c_int64 * 3
"""Field of a kernel's parameters: strides of (batch, heads, tokens), in elements."""


def pointers(*names: str) -> tuple[tuple[str, Any], ...]:
    """Return parameter fields of a kernel that hold tensor addresses."""
    return tuple((name, ctypes.c_void_p) for name in names)


def ints(*names: str) -> tuple[tuple[str, Any], ...]:
    """Return parameter fields of a kernel that hold 32-bit integers."""
    return tuple((name, ctypes.c_int) for name in names)


def addresses(*tensors: torch.Tensor | None) -> list[int | None]:
    """Return values for ``pointers``; the tensors must outlive the launch."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def strides(states: torch.Tensor) -> Any:
    """Return a value for ``Strides``."""
    return Strides(*states.stride()[:3])


def sigma_strides(sigma: torch.Tensor | None) -> tuple[int, int]:
    """Return the strides of the balancing factors between rows and between heads, in elements;
    0 if all share one vector."""
    if sigma is None:
        return 0, 0
    *rows, heads, head_dim = sigma.shape
    return heads * head_dim if rows else 0, head_dim if heads > 1 else 0


def aligned_rows(states: torch.Tensor) -> torch.Tensor:
    """Return (batch, heads, tokens, head_dim) states, copied if rows are not aligned to 16
    bytes."""
    unit = 16 // states.element_size()
    aligned = states.data_ptr() % 16 == 0 and all(x % unit == 0 for x in states.stride()[:3])
    return states if aligned else states.contiguous()
