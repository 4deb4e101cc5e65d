"""Tensor maps: descriptors of matrices from which TMA copies boxes (sm_90 and newer)."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from oscar_mm.kernels.compile import KernelError, not_installed

PANEL_BYTES = 128
"""Width of a swizzled box, in bytes."""


class TensorMap(ctypes.Structure):
    """Mirror of ``TensorMap`` in csrc/common/cluster.cuh: what the driver encodes."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(
    matrix: torch.Tensor, box_rows: int, row_bytes: int = PANEL_BYTES, swizzled: bool = True
) -> TensorMap:
    """Return the map of a matrix of 16-bit elements, FP8 codes or INT4 words, for boxes of box_rows
    times row_bytes.

    Elements of a box beyond the matrix are zeros.

    Args:
        matrix: (rows, width), contiguous except between rows.
        box_rows: rows of a box, at most 256.
        row_bytes: bytes of each row of a box, at most 256 elements.
        swizzled: whether chunks of 16 bytes are swizzled in shared memory, for wgmma.

    Raises:
        KernelError: if the driver does not encode it; rows must begin at multiples of 16 bytes.
    """
    rows, width = matrix.shape
    pitch = matrix.stride(0) if rows > 1 else width
    box = box_rows, row_bytes, swizzled
    return _encoded(matrix.data_ptr(), rows, width, pitch, matrix.dtype, *box)


# Maps depend on nothing but these arguments. Encoding one takes as long as a launch.
@lru_cache(maxsize=4096)
def _encoded(
    address: int,
    rows: int,
    width: int,
    pitch: int,
    dtype: torch.dtype,
    box_rows: int,
    row_bytes: int,
    swizzled: bool,
) -> TensorMap:
    try:
        # This is a compiled module without stubs.
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise not_installed(error) from error
    kinds, long, short = driver.CUtensorMapDataType, driver.cuuint64_t, driver.cuuint32_t
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.float8_e4m3fn: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        torch.int32: kinds.CU_TENSOR_MAP_DATA_TYPE_INT32,
    }[dtype]
    swizzles = driver.CUtensorMapSwizzle
    status, found = driver.cuTensorMapEncodeTiled(
        *(kind, 2, address),
        *([long(width), long(rows)], [long(dtype.itemsize * pitch)]),
        *([short(row_bytes // dtype.itemsize), short(box_rows)], [short(1), short(1)]),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise KernelError(f"tensor map of ({rows}, {width}) elements: {status.name}")
    return TensorMap.from_buffer_copy(ctypes.string_at(found.getPtr(), ctypes.sizeof(TensorMap)))
