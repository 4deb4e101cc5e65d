"""CPU kernels that numba compiles: compilation, threads, and vectors of 16 numbers.

A kernel uses vectors as values: ``store(sums, 0, load(sums, 0) + a * b)``. LLVM maps each vector to
one register or to several shorter ones. LLVM thus decides neither whether loops are vectorized nor
the order of additions.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from filelock import FileLock, Timeout
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from oscar_mm.kernels.compile import announced

_HOW = {"nogil": True, "fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
_LOCK = "oscar_mm.lock"
"""Name of the file that a process locks while it compiles."""
_log = logging.getLogger(__name__)
LANES = 16
_HAND_OVER_US = 50
"""Time to hand work to another thread and to be notified of its end, in microseconds."""
# Type checkers assume that decorated functions take other arguments.
_intrinsic: Any = intrinsic
_typed: Any = infer_global


class compiled:  # a decorator
    """A function that is compiled on its first call; it must not raise exceptions.

    If files can be written and read, the code is cached in a file for the next process.
    """

    patience_s: ClassVar[float] = 120.0
    """Seconds to wait for the lock before compiling without a cache file; 0 after a failed wait,
    since the lock's owner may be stuck."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        try:
            self._compiled: Any = njit(cache=True, **_HOW)(function)
        except RuntimeError as error:  # No folder is writable.
            self._do_without_file(error)
        else:
            self._compiled.compile = partial(_compile_alone, self._compiled)

    def __call__(self, *arguments: Any) -> None:
        """Run the kernel."""
        try:
            self._compiled(*arguments)
        except Exception as error:  # a full disk, a damaged file, or a lock that is never free
            self._do_without_file(error)
            self._compiled(*arguments)

    def _do_without_file(self, error: Exception) -> None:
        name = self._function.__name__
        _log.warning("%s is compiled at each start, which takes seconds: %s", name, error)
        self._compiled = njit(**_HOW)(self._function)


def _compile_alone(dispatcher: Any, types: Any) -> Any:
    """Compile a function, or load its code, while no other process does so.

    numba records the name of a code file before it writes the file, and does not check whether the
    name is taken: another process could run code for other types, or of an older version, and write
    out of bounds.
    """
    folder = Path(dispatcher.stats.cache_path)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.info("another process is compiling CPU kernels: waiting for %s", lock.lock_file)
        try:
            lock.acquire(timeout=compiled.patience_s)
        except Timeout:
            compiled.patience_s = 0.0
            raise
    try:
        with announced("CPU"):
            return type(dispatcher).compile(dispatcher, types)
    finally:
        lock.release()


# Without inlining by numba, a called function exists twice, once inlined in the caller's code;
# which of the two runs, with bitwise different results, depends on whether the code comes from the
# cache. The cache checks only the compiled function's own file: after changing a function in
# another file, touch the files of its callers.
inlined = njit(inline="always", **_HOW)
"""Decorator for functions that compiled functions call."""


def as_bits(states: torch.Tensor) -> np.ndarray:
    """Return the bits of bfloat16 (as uint16) or float32 (as uint32) numbers, contiguous; float16
    is converted to float32 first."""
    states = states.detach()
    if states.dtype == torch.bfloat16:
        return states.contiguous().view(torch.uint16).numpy()
    if states.dtype != torch.float32:
        states = states.float()
    return np.ascontiguousarray(states.numpy()).view(np.uint32)


@inlined
def widen(row, bits):
    """Convert bit patterns, a row of the result of ``as_bits``, to those of float32 numbers."""
    shift = np.uint32(32 - 8 * row.itemsize)
    for index in range(len(row)):
        bits[index] = np.uint32(row[index]) << shift


@inlined
def read_floats(halves, places, numbers):
    """Convert float16 numbers, which must be finite, to float32.

    Args:
        halves: (n,) uint16.
        places: (m,) indices of the numbers to convert.
        numbers: (m,) float32, written to.
    """
    bits = numbers.view(np.uint32)
    for index in range(len(numbers)):
        bits[index] = halves[places[index]]
    for index in range(len(numbers)):
        half = bits[index]
        bits[index] = (half & np.uint32(0x8000)) << np.uint32(16) | (
            half & np.uint32(0x7FFF)
        ) << np.uint32(13)
    for index in range(len(numbers)):
        numbers[index] *= np.float32(2.0**112)  # The exponent biases are 15 and 127.


def shares(tasks: np.ndarray) -> list[np.ndarray]:
    """Split tasks among torch's threads."""
    threads = min(torch.get_num_threads(), len(tasks))
    return [tasks[first::threads].copy() for first in range(threads)]


def threads_for(microseconds: float) -> int:
    """Return how many of torch's threads are worth using for work that takes a single thread this
    long."""
    return max(1, min(torch.get_num_threads(), int(microseconds / _HAND_OVER_US)))


class VectorType(types.Type):
    """Type of a vector of 16 numbers in CPU kernels.

    Attributes:
        element: LLVM type of the numbers.
    """

    def __init__(self, name: str, element: ir.Type) -> None:
        self.element = element
        super().__init__(name)


FLOATS = VectorType("Floats", ir.FloatType())
"""float32 numbers with ``+``, ``-`` and ``*``; a multiply-add is rounded once."""
WORDS = VectorType("Words", ir.IntType(32))
"""32-bit words with ``&`` and ``|``, and ``<<`` and ``>>`` (zero-filling) by an integer."""


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: VectorType) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(fe_type.element, LANES))


def _splat(builder: Any, number: Any) -> Any:
    """Return a vector of 16 copies of a number."""
    vector = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    vector = builder.insert_element(vector, number, ir.Constant(ir.IntType(32), 0))
    return _shuffle(builder, vector, vector, [0] * LANES)


def _shuffle(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    order = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(first, second, order)


def _define_operator(
    name: Callable[..., Any],
    operands: tuple[types.Type, types.Type],
    emit: Callable[[Any, Any, Any], Any],
) -> None:
    """Define an operator on two vectors, or on a vector and an integer."""

    @_typed(name)
    class _(ConcreteTemplate):
        cases = [signature(operands[0], *operands)]  # noqa: RUF012

    @lower_builtin(name, *operands)
    def _(context: Any, builder: Any, _: Any, values: Any) -> Any:
        first, second = values
        if operands[1] == types.int64:
            second = _splat(builder, builder.trunc(second, ir.IntType(32)))
        return emit(builder, first, second)


_CONTRACT = ("contract",)
_define_operator(operator.add, (FLOATS, FLOATS), lambda b, x, y: b.fadd(x, y, flags=_CONTRACT))
_define_operator(operator.sub, (FLOATS, FLOATS), lambda b, x, y: b.fsub(x, y, flags=_CONTRACT))
_define_operator(operator.mul, (FLOATS, FLOATS), lambda b, x, y: b.fmul(x, y, flags=_CONTRACT))
_define_operator(operator.and_, (WORDS, WORDS), lambda b, x, y: b.and_(x, y))
_define_operator(operator.or_, (WORDS, WORDS), lambda b, x, y: b.or_(x, y))
_define_operator(operator.lshift, (WORDS, types.int64), lambda b, x, y: b.shl(x, y))
_define_operator(operator.rshift, (WORDS, types.int64), lambda b, x, y: b.lshr(x, y))


def _pointer(context: Any, builder: Any, sig: Any, values: Any, vector: ir.Type) -> Any:
    """Return a pointer to an array element; ``values`` begin with the array and the index."""
    array = context.make_array(sig.args[0])(context, builder, values[0])
    place = builder.gep(array.data, [values[1]])
    return builder.bitcast(place, vector.as_pointer())


def _vector_of(array: types.Array) -> VectorType:
    return FLOATS if array.dtype == types.float32 else WORDS


@_intrinsic
def load(typing: Any, array: types.Array, index: types.Type) -> Any:
    """Load 16 numbers from a contiguous array of float32 or 32-bit integers.

    Args:
        array: array of any shape.
        index: flat index of the first number.
    """
    vector = _vector_of(array)

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind = context.get_value_type(vector)
        return builder.load(_pointer(context, builder, sig, values, kind), align=4)

    return vector(array, types.int64), emit


@_intrinsic
def store(typing: Any, array: types.Array, index: types.Type, vector: VectorType) -> Any:
    """Write 16 numbers to a contiguous array; see ``load``."""

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        place = _pointer(context, builder, sig, values, values[2].type)
        builder.store(values[2], place, align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), emit


@_intrinsic
def splat(typing: Any, number: types.Type) -> Any:
    """Return a vector of 16 copies of a float32 number, or of the low 32 bits of an integer."""
    is_float = number == types.float32

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        value = values[0] if is_float else builder.trunc(values[0], ir.IntType(32))
        return _splat(builder, value)

    return (FLOATS(number) if is_float else WORDS(types.int64)), emit


@_intrinsic
def splat_one(typing: Any, array: types.Array, index: types.Type) -> Any:
    """Load a number from a contiguous array, and return a vector of 16 copies; see ``load``."""

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        array = context.make_array(sig.args[0])(context, builder, values[0])
        return _splat(builder, builder.load(builder.gep(array.data, [values[1]]), align=4))

    return _vector_of(array)(array, types.int64), emit


@_intrinsic
def prefetch(typing: Any, array: types.Array, index: types.Type) -> Any:
    """Prefetch the cache line of a number; see ``load``."""

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        place = _pointer(context, builder, sig, values, ir.IntType(8))
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), emit


@_intrinsic
def as_floats(typing: Any, words: VectorType) -> Any:
    """Convert unsigned words to float32 numbers."""

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.uitofp(values[0], context.get_value_type(FLOATS))

    return FLOATS(words), emit


def _reinterpret(vector: VectorType) -> Callable[..., Any]:
    """Return a function that reinterprets the bits of a vector as numbers of another type."""

    @_intrinsic
    def reinterpreted(typing: Any, bits: VectorType) -> Any:
        def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return builder.bitcast(values[0], context.get_value_type(vector))

        return vector(bits), emit

    return reinterpreted


as_words, from_words = _reinterpret(WORDS), _reinterpret(FLOATS)


def _larger(builder: Any, first: Any, second: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", first, second), second, first)


@_intrinsic
def larger(typing: Any, first: VectorType, second: VectorType) -> Any:
    """Return the elementwise maximum of float32 vectors; the first number if either is NaN."""

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return _larger(builder, *values)

    return FLOATS(first, second), emit


def _reduction(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Return a function that reduces a vector of float32 numbers by halving: it combines each
    number with the one 8 lanes further, and so on."""

    @_intrinsic
    def reduced(typing: Any, vector: VectorType) -> Any:
        def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            (found,) = values
            for half in (8, 4, 2, 1):
                lanes = [(lane + half) % LANES for lane in range(LANES)]
                found = combine(builder, found, _shuffle(builder, found, found, lanes))
            return builder.extract_element(found, ir.IntType(32)(0))

        return types.float32(vector), emit

    return reduced


total, largest = _reduction(lambda b, x, y: b.fadd(x, y)), _reduction(_larger)


def shuffle(*lanes: int) -> Callable[..., Any]:
    """Return a function that shuffles two vectors of the same type in CPU kernels.

    Args:
        lanes: 16 indices; the first vector's numbers count from 0, the second's from 16.
    """

    @_intrinsic
    def shuffled(typing: Any, first: VectorType, second: VectorType) -> Any:
        def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return _shuffle(builder, values[0], values[1], list(lanes))

        return first(first, second), emit

    return shuffled


@inlined
def aligned(count):
    """Return a (count,) float32 array in which no vector of 16 crosses a cache line."""
    whole = np.empty(count + LANES, np.float32)
    first = -(whole.ctypes.data // 4) % LANES
    return whole[first : first + count]


def _swapping(width: int) -> Callable[..., Any]:
    """Return a shuffle that swaps each number with the number whose index differs in one bit."""
    return shuffle(*(lane ^ width for lane in range(LANES)))


_SWAP_1, _SWAP_2, _SWAP_4, _SWAP_8 = map(_swapping, (1, 2, 4, 8))
_SIGNS = np.array(
    [[-1 if lane & width else 1 for lane in range(LANES)] for width in (1, 2, 4, 8)], np.float32
)


@inlined
def rotation_block(count):
    """Return the size of the first of the rotation's blocks that ``count`` channels have left, a
    multiple of 16 (``oscar_mm.quant.basis.rotation_blocks``)."""
    size = LANES
    while 2 * size <= count:
        size *= 2
    return size


@inlined
def rotate_vector(vector):
    """Multiply a contiguous float32 array by the normalized Hadamard matrix
    (``oscar_mm.quant.basis.hadamard``); its length must be a multiple of 16."""
    for index in range(0, len(vector), LANES):
        x = load(vector, index)
        x = _SWAP_1(x, x) + x * load(_SIGNS, 0)
        x = _SWAP_2(x, x) + x * load(_SIGNS, LANES)
        x = _SWAP_4(x, x) + x * load(_SIGNS, 2 * LANES)
        store(vector, index, _SWAP_8(x, x) + x * load(_SIGNS, 3 * LANES))
    begin = 0
    while begin < len(vector):
        count, width = rotation_block(len(vector) - begin), LANES
        end = begin + count
        while width < count:
            for start in range(begin, end, 2 * width):
                for index in range(start, start + width, LANES):
                    one, two = load(vector, index), load(vector, index + width)
                    store(vector, index, one + two)
                    store(vector, index + width, one - two)
            width *= 2
        factor = splat(np.float32(1 / np.sqrt(np.float64(count))))
        for index in range(begin, end, LANES):
            store(vector, index, load(vector, index) * factor)
        begin = end
