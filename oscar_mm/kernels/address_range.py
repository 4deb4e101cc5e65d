"""Address range: GPU memory that grows and shrinks in place, at addresses that are reserved once.

The driver allocates addresses and memory separately. A range reserves enough addresses for all
memory of its GPU, but maps memory only to the first of them: kernels and CUDA graphs that use its
address keep working while it grows, and nothing is copied. ``torch.cuda.mem_get_info`` counts this
memory, but ``torch.cuda.memory_allocated`` does not.
"""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch

from oscar_mm.kernels.launch import kernels_disabled
from oscar_mm.sizes import format_bytes


class AddressRange:
    """Consecutive GPU addresses, with memory mapped to the first of them.

    Tensors on the range keep it alive; it is freed with the last of them. All work that uses the
    range must run on streams that were current when it grew, or on the stream that is current when
    it shrinks, since shrinking waits only for these streams.

    Attributes:
        device: the GPU.
        size: size last requested, in bytes.
        nbytes: size of the memory in bytes: ``size`` rounded up to a multiple of the driver's
            mapping size (2 MiB).
    """

    def __init__(self, gpu: _Gpu) -> None:
        self._address = self.size = self.nbytes = 0
        self.device, self._gpu, self._streams = gpu.device, gpu, set[torch.cuda.Stream]()
        self._address = gpu.reserve()
        _ranges.add(self)

    @classmethod
    def reserve(cls, device: torch.device) -> AddressRange | None:
        """Return a range without memory; None if the device or the driver does not support ranges,
        or kernels are disabled."""
        if device.type != "cuda" or torch.version.cuda is None or kernels_disabled():
            return None
        try:
            return cls(_gpu(torch.cuda.current_device() if device.index is None else device.index))
        except (ImportError, RuntimeError) as error:
            _warn_once(f"pools on {device} are copied when they grow: {error}")
            return None

    def resize(self, size: int) -> None:
        """Resize the memory to ``size`` bytes, keeping its content.

        Shrinking waits for the GPU.

        Raises:
            torch.OutOfMemoryError: if the GPU has too little memory, even after torch has released
                its unused memory; the range is unchanged.
        """
        gpu, nbytes = self._gpu, self._whole(size)
        if nbytes > self.nbytes:
            free_dropped()
            try:
                gpu.map(self._address, self.nbytes, nbytes)
            except torch.OutOfMemoryError as error:
                free, total = map(format_bytes, torch.cuda.mem_get_info(self.device))
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to grow a pool on {self.device} from "
                    f"{format_bytes(self.size)} to {format_bytes(size)}; {free} of {total} are free"
                ) from error
            with torch.cuda.device(self.device):
                if not torch.cuda.is_current_stream_capturing():
                    self._streams.add(torch.cuda.current_stream())
        elif nbytes < self.nbytes:
            gpu.wait(self._streams)
            gpu.unmap(self._address, nbytes, self.nbytes)
        self.size, self.nbytes = size, nbytes

    def surplus(self, size: int) -> int:
        """Return how many bytes the GPU gets back if the range shrinks to ``size`` bytes."""
        return self.nbytes - self._whole(size)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the beginning of the range as a contiguous tensor, which keeps the range alive."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device=self.device)
        memory = torch.as_tensor(_Bytes(self, self._address, nbytes), device=self.device)
        return memory.view(dtype).view(shape)

    def _whole(self, size: int) -> int:
        """Return ``size`` rounded up to a multiple of the mapping size."""
        return -(-size // self._gpu.piece) * self._gpu.piece

    def __del__(self) -> None:
        if self._address and not sys.is_finalizing():
            _dropped.append((self._gpu, self._address, self.nbytes, self._streams))
            with suppress(RuntimeError):  # the next allocation retries and reports
                free_dropped()


class _Bytes:
    """Exposes the beginning of a range to torch, which keeps this object alive as long as a tensor
    uses it."""

    def __init__(self, owner: AddressRange, address: int, nbytes: int) -> None:
        self.owner, self.address, self.nbytes = owner, address, nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "version": 3}


class _Gpu:
    """Driver calls for the addresses and memory of one GPU.

    Attributes:
        piece: size of a mapping in bytes; a mapping cannot be unmapped in part.
        total: number of addresses in a range.

    Raises:
        RuntimeError: if the GPU does not support virtual memory management.
    """

    def __init__(self, index: int) -> None:
        # This is a compiled module without stubs.
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        torch.cuda.init()  # also initializes the driver, which may not have been used yet
        self.device, self._driver = torch.device("cuda", index), driver
        attribute = driver.CUdevice_attribute
        manages = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        handle = self._checked(driver.cuDeviceGet(index))
        if not self._checked(driver.cuDeviceGetAttribute(manages, handle)):
            raise RuntimeError("the GPU does not support virtual memory management")
        # This is the context of the CUDA runtime, and so of torch; it lives as long as the process.
        self._context = self._checked(driver.cuDevicePrimaryCtxRetain(handle))
        self._memory, self._access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
        self._memory.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        for owner in (self._memory, self._access):
            owner.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            owner.location.id = index
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with self._in_context():
            self.piece = self._checked(driver.cuMemGetAllocationGranularity(self._memory, minimum))
        total = torch.cuda.get_device_properties(index).total_memory
        self.total = -(-total // self.piece) * self.piece

    def reserve(self) -> int:
        """Reserve ``total`` addresses and return the first."""
        with self._in_context():
            return int(self._checked(self._driver.cuMemAddressReserve(self.total, 0, 0, 0)))

    def free(self, address: int) -> None:
        """Release a reserved range of addresses, to which no memory may be mapped."""
        with self._in_context():
            self._checked(self._driver.cuMemAddressFree(address, self.total))

    def map(self, address: int, start: int, stop: int) -> None:
        """Map memory to bytes start to stop - 1 of a range.

        Raises:
            torch.OutOfMemoryError: if there is too little memory; nothing is mapped in this case.
        """
        driver, access = self._driver, [self._access]
        if stop > self.total:
            raise torch.OutOfMemoryError("more memory than the GPU has")
        with self._in_context(), ExitStack() as undo:
            for at in range(address + start, address + stop, self.piece):
                memory = self._allocate()
                try:
                    self._checked(driver.cuMemMap(at, self.piece, 0, memory, 0))
                    undo.callback(driver.cuMemUnmap, at, self.piece)
                finally:
                    driver.cuMemRelease(memory)  # the mapping keeps the memory alive
            size = stop - start
            self._checked(driver.cuMemSetAccess(address + start, size, access, len(access)))
            undo.pop_all()

    def unmap(self, address: int, start: int, stop: int) -> None:
        """Release the memory of bytes start to stop - 1 of a range."""
        with self._in_context():
            self._checked(self._driver.cuMemUnmap(address + start, stop - start))

    def wait(self, streams: set[torch.cuda.Stream]) -> None:
        """Wait for these streams and the current one.

        Synchronizing the whole GPU would break a CUDA graph capture in another thread.
        """
        with torch.cuda.device(self.device):
            for stream in {*streams, torch.cuda.current_stream()}:
                stream.synchronize()

    def _allocate(self) -> Any:
        """Allocate the memory for one mapping."""
        created = self._driver.cuMemCreate(self.piece, self._memory, 0)
        if created[0] == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            created = self._driver.cuMemCreate(self.piece, self._memory, 0)
        return self._checked(created)

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        # A thread that has not used CUDA yet has no context.
        self._checked(self._driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._checked(self._driver.cuCtxPopCurrent())

    def _checked(self, returned: tuple[Any, ...]) -> Any:
        """Return the result of a driver call without its status; raise an error if it failed."""
        if returned[0]:
            none_left = returned[0] == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
            error = torch.OutOfMemoryError if none_left else RuntimeError
            raise error(f"virtual memory of {self.device}: {returned[0].name}")
        return returned[1] if len(returned) == 2 else None


_gpu = lru_cache(maxsize=None)(_Gpu)
_warn_once = lru_cache(maxsize=None)(logging.getLogger(__name__).warning)
_ranges = weakref.WeakSet[AddressRange]()
_dropped = deque[tuple[_Gpu, int, int, set[torch.cuda.Stream]]]()


def free_dropped() -> None:
    """Free the ranges that are no longer referenced.

    During a CUDA graph capture on this thread, which must not wait, they are left for a later call.
    """
    while _dropped and not torch.cuda.is_current_stream_capturing():
        try:
            gpu, address, nbytes, streams = dropped = _dropped.popleft()
        except IndexError:  # another thread freed it
            return
        if nbytes:
            try:
                gpu.wait(streams)
            except BaseException:
                _dropped.append(dropped)
                raise
            gpu.unmap(address, 0, nbytes)
        gpu.free(address)


def bytes_in_ranges(device: torch.device) -> tuple[int, int]:
    """Return the total ``size`` and ``nbytes`` of all ranges on a GPU, or on all GPUs if the device
    has no index."""
    there = [one for one in list(_ranges) if device.index in (None, one.device.index)]
    return sum(one.size for one in there), sum(one.nbytes for one in there)
