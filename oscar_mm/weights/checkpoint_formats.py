"""Formats in which checkpoints store quantized matrices: FP8, compressed-tensors, AWQ and GPTQ.

Each format names the tensors of a matrix, checks their shapes, and makes a ``QuantizedMatrix`` of
them. INT4 codes lie in 32-bit words, eight in each, the first in the lowest bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from oscar_mm.errors import shown
from oscar_mm.weights import fp8, int4
from oscar_mm.weights.matrix import QuantizedMatrix

Tensors = Mapping[str, torch.Tensor]
"""Tensors of one matrix, by the last part of their names."""
_PER_WORD = 8
_SYMMETRIC_ZERO = 8
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)
_Dtypes = Mapping[str, tuple[torch.dtype, ...]]
_PACKED: _Dtypes = {
    "weight_packed": (torch.int32,),
    "weight_scale": _FLOATS,
    "weight_shape": _INTEGERS,
}
_AWQ: _Dtypes = {"qweight": (torch.int32,), "qzeros": (torch.int32,), "scales": _FLOATS}
_GPTQ: _Dtypes = {**_AWQ, "g_idx": _INTEGERS}


class CheckpointFormat(ABC):
    """How a checkpoint stores a quantized matrix.

    Attributes:
        title: name of the format, for people.
        scales: name of the scales.
        dtypes: dtypes of the tensors of a matrix; others, such as scales of activations, are
            ignored.
        needed: names of the tensors that each matrix must have.
        stacked_scales: suffix that makes the name of the scales from that of the stacked matrices
            of all experts; None if each expert has matrices of its own.
    """

    title: ClassVar[str]
    scales: ClassVar[str]
    dtypes: _Dtypes
    needed: frozenset[str]
    stacked_scales: ClassVar[str | None] = None

    @property
    def marks(self) -> frozenset[str]:
        """Names that tensors of quantized matrices have, and no others."""
        return frozenset(self.dtypes.keys() - {"weight"})

    @property
    def reorders(self) -> bool:
        """Whether the columns of each matrix may be in another order than those of x."""
        return False

    def check(self, tensors: Tensors, outputs: int, width: int) -> None:
        """Check that tensors, which may be on the meta device, are those of a matrix.

        Raises:
            ValueError: if they are not; the message begins with the name of a tensor.
        """
        for name in sorted(self.needed - tensors.keys()):
            raise ValueError(f"{name} is missing: download the checkpoint again")
        for name, tensor in tensors.items():
            if tensor.dtype not in self.dtypes[name]:
                supported = " or ".join(str(one) for one in self.dtypes[name])
                raise ValueError(f"{name}: the dtype is {tensor.dtype}, must be {supported}")
        self._check_shapes(tensors, outputs, width)

    @abstractmethod
    def _check_shapes(self, tensors: Tensors, outputs: int, width: int) -> None:
        """See ``check``."""

    def matrix(
        self, tensors: Tensors, outputs: int, width: int
    ) -> tuple[QuantizedMatrix, torch.Tensor | None]:
        """Convert the tensors of a matrix, which ``check`` accepts.

        Returns:
            The matrix, and the permutation of its columns, see ``QuantizedLinear``.

        Raises:
            ValueError: if values are invalid; the message begins with the name of a tensor.
        """
        if not bool(torch.isfinite(tensors[self.scales]).all()):
            raise ValueError(f"{self.scales} has NaN or infinite values: download it again")
        return self._matrix(tensors, outputs, width)

    @abstractmethod
    def _matrix(
        self, tensors: Tensors, outputs: int, width: int
    ) -> tuple[QuantizedMatrix, torch.Tensor | None]:
        """See ``matrix``."""


class Float8(CheckpointFormat):
    """FP8 of the method ``fp8``: codes as they are, with scales of a matrix, a row or a block."""

    title = "FP8"
    scales = "weight_scale_inv"
    stacked_scales = "_scale_inv"

    def __init__(self) -> None:
        self.dtypes = {"weight": (fp8.CODES,), self.scales: _FLOATS}
        self.needed = frozenset(self.dtypes)

    def _check_shapes(self, tensors: Tensors, outputs: int, width: int) -> None:
        check_shape("weight", tensors["weight"], (outputs, width))
        self._expanded(tensors)

    def _matrix(
        self, tensors: Tensors, outputs: int, width: int
    ) -> tuple[QuantizedMatrix, torch.Tensor | None]:
        return QuantizedMatrix(tensors["weight"], self._expanded(tensors)), None

    def _expanded(self, tensors: Tensors) -> torch.Tensor:
        """Return the scales with the shape that kernels read, see ``fp8.expanded``.

        Raises:
            ValueError: if their shape does not fit the codes; the message names the scales.
        """
        try:
            return fp8.expanded(tensors["weight"], tensors[self.scales])
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{self.scales}: {error}") from error


class CompressedFloat8(Float8):
    """FP8 of compressed-tensors, which has other names and no stacked matrices."""

    title = "FP8 (compressed-tensors)"
    scales, stacked_scales = "weight_scale", None


class _Int4(CheckpointFormat):
    """INT4 codes with a scale, and mostly a zero point, for each group of columns.

    Attributes:
        columns: dimension of the scales whose places are groups of columns.
        order: name of the tensor with the group of each column, if the format has one.
    """

    columns: ClassVar[int]
    order: ClassVar[str | None] = None

    @property
    def reorders(self) -> bool:
        """Whether each matrix must have a tensor with the group of each column."""
        return self.order in self.needed

    @abstractmethod
    def _shapes(self, outputs: int, width: int, groups: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors that the format knows."""

    @abstractmethod
    def _parts(self, tensors: Tensors, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes, (outputs, width), and zero points, (outputs, groups), both uint8."""

    def _check_shapes(self, tensors: Tensors, outputs: int, width: int) -> None:
        scales = tensors[self.scales]
        groups = scales.shape[self.columns] if scales.ndim == 2 else 0
        if groups == 0 or width % groups or width % _PER_WORD:
            raise ValueError(
                f"{self.scales}: the shape is {list(scales.shape)}, which does not divide the "
                f"{width} columns of the weights into groups"
            )
        for name, shape in self._shapes(outputs, width, groups).items():
            if name in tensors:
                check_shape(name, tensors[name], shape)

    def _matrix(
        self, tensors: Tensors, outputs: int, width: int
    ) -> tuple[QuantizedMatrix, torch.Tensor | None]:
        scales = tensors[self.scales].movedim(self.columns, 1).contiguous()
        codes, zeros = self._parts(tensors, outputs)
        permutation = None
        if self.order and self.order in tensors:
            permutation = self._permutation(tensors[self.order], scales.shape[1])
        if permutation is not None:
            codes = codes[:, permutation]
        return QuantizedMatrix(int4.packed(codes), scales, zeros.contiguous()), permutation

    def _permutation(self, groups: torch.Tensor, count: int) -> torch.Tensor | None:
        """Return the order in which columns of a group are neighbours; None if they are already.

        Args:
            groups: (width,) group of each column; -1 everywhere if the order is that of the groups.
            count: number of groups.

        Raises:
            ValueError: if the groups do not have the same number of columns each.
        """
        width = len(groups)
        if bool((groups == -1).all()):
            return None
        if not bool(((groups >= 0) & (groups < count)).all()):
            raise ValueError(f"{self.order} has groups outside of 0 to {count - 1}")
        if not bool((torch.bincount(groups, minlength=count) == width // count).all()):
            raise ValueError(f"{self.order}: each group must have {width // count} columns")
        permutation = groups.argsort(stable=True)
        return None if bool((groups[1:] >= groups[:-1]).all()) else permutation


class PackedInt4(_Int4):
    """INT4 of compressed-tensors: words along the width, zero points along the outputs."""

    title = "INT4 (compressed-tensors)"
    scales, columns, order = "weight_scale", 1, "weight_g_idx"

    def __init__(self, has_zeros: bool, has_order: bool) -> None:
        """
        Args:
            has_zeros: whether matrices have zero points; otherwise 8 stands for 0.
            has_order: whether each matrix must have the groups of its columns.
        """
        self._has_zeros = has_zeros
        needed = dict(_PACKED)
        if has_zeros:
            needed["weight_zero_point"] = (torch.int32,)
        self.dtypes = needed | {"weight_g_idx": _INTEGERS}
        self.needed = frozenset(self.dtypes if has_order else needed)

    def _shapes(self, outputs: int, width: int, groups: int) -> dict[str, tuple[int, ...]]:
        return {
            "weight_packed": (outputs, width // _PER_WORD),
            "weight_scale": (outputs, groups),
            "weight_zero_point": (-(-outputs // _PER_WORD), groups),
            "weight_shape": (2,),
            "weight_g_idx": (width,),
        }

    def _parts(self, tensors: Tensors, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = _codes(tensors["weight_packed"], 1)
        shape = tensors["weight_shape"].tolist()
        if shape != list(codes.shape):
            raise ValueError(f"weight_shape is {shape}, must be {list(codes.shape)}")
        if self._has_zeros:
            return codes, _codes(tensors["weight_zero_point"], 0)[:outputs]
        scales = tensors["weight_scale"]
        return codes, torch.full_like(scales, _SYMMETRIC_ZERO, dtype=torch.uint8)


class Awq(_Int4):
    """INT4 of AWQ ("gemm"): words along the outputs, whose codes are in an order of their own."""

    title = "INT4 (AWQ)"
    scales, columns = "scales", 0
    dtypes = _AWQ
    needed = frozenset(dtypes)
    _PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
    """Places in a word of the codes of eight consecutive outputs."""

    def _shapes(self, outputs: int, width: int, groups: int) -> dict[str, tuple[int, ...]]:
        words = -(-outputs // _PER_WORD)
        return {"qweight": (width, words), "qzeros": (groups, words), "scales": (groups, outputs)}

    def _parts(self, tensors: Tensors, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Words are transposed, which takes less time than their codes.
        codes, zeros = (
            _codes(tensors[name].T.contiguous(), 0, self._PLACES) for name in ("qweight", "qzeros")
        )
        return codes[:outputs], zeros[:outputs]


class Gptq(_Int4):
    """INT4 of GPTQ: words along the width, zero points along the outputs."""

    title = "INT4 (GPTQ)"
    scales, columns, order = "scales", 0, "g_idx"
    dtypes = _GPTQ

    def __init__(self, zeros_less_one: bool, has_order: bool) -> None:
        """
        Args:
            zeros_less_one: whether zero points are stored minus one, as in the first version.
            has_order: whether each matrix must have the groups of its columns.
        """
        self._added = int(zeros_less_one)
        self.needed = Awq.needed | ({"g_idx"} if has_order else set())

    def _shapes(self, outputs: int, width: int, groups: int) -> dict[str, tuple[int, ...]]:
        return {
            "qweight": (width // _PER_WORD, outputs),
            "qzeros": (groups, -(-outputs // _PER_WORD)),
            "scales": (groups, outputs),
            "g_idx": (width,),
        }

    def _parts(self, tensors: Tensors, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Words are transposed, which takes less time than their codes.
        codes = _codes(tensors["qweight"].T.contiguous(), 1)
        zeros = _codes(tensors["qzeros"].T.contiguous(), 0)[:outputs]
        # 4 bits: a zero point of 0 is stored as 15.
        return codes, (zeros + self._added) & 15


def _codes(
    words: torch.Tensor, dimension: int, places: Sequence[int] = range(_PER_WORD)
) -> torch.Tensor:
    """Return the codes of 32-bit words, uint8, eight for each place of a dimension.

    Args:
        places: where each of eight codes is in a word, in steps of four bits.
    """
    codes = [(words >> 4 * place & 15).to(torch.uint8) for place in places]
    return torch.stack(codes, dimension + 1).flatten(dimension, dimension + 1)


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Check a tensor's shape.

    Raises:
        ValueError: if it is another; the message begins with the tensor's name.
    """
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name}: the shape is {list(tensor.shape)}, must be {list(expected)}")


def formats_of(fields: Mapping[str, Any]) -> list[CheckpointFormat] | None:
    """Return the formats of a checkpoint's matrices.

    Args:
        fields: ``quantization_config`` of the checkpoint's configuration.

    Returns:
        None if its method has no format here.

    Raises:
        ValueError: if the method is known, but not this kind of it; the message names the field.
    """
    given = _Fields("quantization_config", fields)
    readers = {
        "fp8": _fp8,
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": _compressed_tensors,
    }
    reader = readers.get(str(fields.get("quant_method")).lower())
    return None if reader is None else reader(given)


class _Fields:
    """Fields of a configuration, whose values are not trusted."""

    def __init__(self, path: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{path} must be a dict, not {type(values).__name__}")
        self._path, self._values = path, values

    def get(self, name: str, *supported: Any, absent: Any = None) -> Any:
        """Return a field's value, which must be one of those supported, in lower case."""
        value = self._values.get(name)
        value = absent if value is None else value
        value = value.lower() if isinstance(value, str) else value
        if value not in supported:
            possible = ", ".join(str(one) for one in supported)
            raise ValueError(f"{self._path}.{name} is {shown(value)}; supported: {possible}")
        return value

    def has(self, name: str) -> bool:
        """Return whether a field is there, and neither empty nor null."""
        return bool(self._values.get(name))

    def part(self, name: str) -> _Fields:
        """Return the fields of a part."""
        return _Fields(f"{self._path}.{name}", self._values.get(name))

    def parts(self, name: str) -> list[_Fields]:
        """Return the fields of all entries of a part, which may be absent."""
        if not self.has(name):
            return []
        part = self.part(name)
        return [part.part(entry) for entry in part._values]


def _fp8(fields: _Fields) -> list[CheckpointFormat]:
    fields.get("fmt", "e4m3", absent="e4m3")
    fields.get("scale_fmt", "float", absent="float")
    fields.get("weight_block_size", None, [fp8.BLOCK, fp8.BLOCK])
    return [Float8()]


def _awq(fields: _Fields) -> list[CheckpointFormat]:
    fields.get("bits", 4, absent=4)
    fields.get("zero_point", True, absent=True)
    # AutoAWQ writes "version", newer libraries write "format".
    fields.get("version", "gemm", absent="gemm")
    fields.get("format", "gemm", absent="gemm")
    return [Awq()]


def _gptq(fields: _Fields) -> list[CheckpointFormat]:
    fields.get("bits", 4)
    for entry in fields.parts("dynamic"):
        entry.get("bits", 4, absent=4)
    fields.get("is_marlin_format", False, absent=False)
    fields.get("pack_dtype", "int32", absent="int32")
    versions = "gptq", "gptq_v2"
    # AutoGPTQ writes "checkpoint_format", newer libraries write "format".
    version = fields.get("checkpoint_format", *versions, absent="gptq")
    version = fields.get("format", *versions, absent=version)
    by_activation = fields.get("desc_act", False, True, absent=False)
    return [Gptq(zeros_less_one=version == "gptq", has_order=by_activation)]


def _compressed_tensors(fields: _Fields) -> list[CheckpointFormat]:
    fields.get("quantization_status", "compressed", absent="compressed")
    fields.get("kv_cache_scheme", None)
    fields.get("transform_config", None, {})
    if fields.has("sparsity_config"):
        fields.part("sparsity_config").get("format", "dense", absent="dense")
    names = "pack-quantized", "float-quantized"
    default = fields.get("format", *names, "mixed-precision")
    found = {}
    for group in fields.parts("config_groups"):
        name = group.get("format", *names, absent=default)
        weights = group.part("weights")
        one = _packed_int4(weights) if name == "pack-quantized" else _float8(weights)
        known = found.setdefault(name, one)
        if known.needed != one.needed:
            raise ValueError(
                "quantization_config.config_groups: groups with and without zero points or "
                "actorder; supported: all with or all without"
            )
    if not found:
        raise ValueError("quantization_config.config_groups is empty; at least one is needed")
    return list(found.values())


def _packed_int4(weights: _Fields) -> CheckpointFormat:
    weights.get("num_bits", 4)
    weights.get("type", "int")
    weights.get("strategy", "group", "channel")
    symmetric = weights.get("symmetric", True, False, absent=True)
    order = weights.get("actorder", None, False, True, "weight", "static", "group", "dynamic")
    return PackedInt4(has_zeros=not symmetric, has_order=order in (True, "group", "dynamic"))


def _float8(weights: _Fields) -> CheckpointFormat:
    weights.get("num_bits", 8)
    weights.get("type", "float")
    weights.get("strategy", "tensor", "channel", "block")
    weights.get("symmetric", True, absent=True)
    weights.get("block_structure", None, [fp8.BLOCK, fp8.BLOCK])
    return CompressedFloat8()
