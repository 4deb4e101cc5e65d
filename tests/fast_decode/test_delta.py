"""A step of Gated DeltaNet by kernel and by PyTorch, against the recurrence in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from oscar_mm.cache.states import LinearLayer, StateTable
from oscar_mm.fast_decode.delta import (
    COLUMNS,
    TAPS,
    THREADS,
    DeltaArguments,
    DeltaKernel,
    DeltaShape,
    Params,
    Specialization,
    cluster_sizes,
    delta,
    sample,
)
from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.kernels.launch import ELEMENTS, NotCapturable, architecture
from oscar_mm.kernels.self_check import relative_error
from tests.compiled import architectures, compile_once, same_struct

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TINY = DeltaShape(2, 6, 16, 8)
SHAPES = {
    "Qwen3.5 9B": DeltaShape(16, 32, 128, 128),
    "Qwen3.5 27B": DeltaShape(16, 48, 128, 128),
    "as many": DeltaShape(3, 3, 64, 128),
    "many": DeltaShape(2, 8, 128, 64),
}


@dataclass
class Truth:
    """The recurrence, head by head; rounded to the dtype of the model where modules round."""

    arguments: DeltaArguments

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.arguments.mixed.dtype).double()

    def channels(self, row: int, window: torch.Tensor) -> torch.Tensor:
        """The convolution's output; ``window`` moves on."""
        given, shape = self.arguments, self.arguments.shape
        widths = (shape.keys, shape.keys, shape.group * shape.values)
        new = [
            given.mixed[row, part.offset + part.stride * head :][:width]
            for part, width in zip(given.parts[:3], widths, strict=True)
            for head in range(shape.key_heads)
        ]
        window.copy_(torch.cat([window[:, 1:], torch.cat(new)[:, None]], 1))
        found = self.rounded((window.double() * given.convolution.double()).sum(1))
        return self.rounded(found * found.sigmoid())

    def head(
        self, row: int, head: int, channels: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """The output of a value head; ``state`` moves on."""
        given, (key_heads, _, keys, values) = self.arguments, self.arguments.shape
        key_head, inner = divmod(head, self.arguments.shape.group)
        query, key = (channels[(side * key_heads + key_head) * keys :][:keys] for side in range(2))
        value = channels[2 * key_heads * keys + head * values :][:values]
        query, key = (x / math.sqrt(float(x @ x) + 1e-6) for x in (query, key))
        b, a = (
            float(given.gates[row, part.offset + part.stride * key_head + inner])
            for part in given.parts[4:]
        )
        beta = self.rounded(torch.tensor(1 / (1 + math.exp(-b))))
        step = math.log1p(math.exp(a + float(given.bias[head])))
        before = state.double() * math.exp(-math.exp(float(given.decay[head])) * step)
        after = before + torch.outer(key, beta * (value - key @ before))
        state.copy_(after)
        output = self.rounded(query @ after / math.sqrt(keys))
        scale = 1 / math.sqrt(float(output.square().mean()) + given.epsilon)
        output = self.rounded(self.rounded(output * scale) * given.norm.double())
        part = given.parts.z
        z = given.mixed[row, part.offset + part.stride * key_head + inner * values :][:values]
        return self.rounded(output * z.double() * z.double().sigmoid())

    def __call__(self) -> torch.Tensor:
        rows = []
        for row, layer in enumerate(self.arguments.states.layers):
            heads = range(self.arguments.shape.value_heads)
            if layer is None:
                zeros = torch.zeros(len(heads), self.arguments.shape.values)
                rows.append(zeros.double())
                continue
            window, states = (x[0] for x in layer.states)
            channels = self.channels(row, window)
            rows.append(torch.stack([self.head(row, i, channels, states[i]) for i in heads]))
        return torch.stack(rows)


def on_cpu(given: DeltaArguments) -> DeltaArguments:
    """A copy on the CPU."""
    layers = [None if one is None else one.on(CPU) for one in given.states.layers]
    states = given.states._replace(layers=layers)
    moved = {k: x.cpu() for k, x in given._asdict().items() if isinstance(x, torch.Tensor)}
    return given._replace(states=states, **moved)


def check(given: DeltaArguments, steps: int, bound: float) -> None:
    """Compare steps, which go on from the states of the one before."""
    truth = Truth(on_cpu(given))
    for _ in range(steps):
        expected = truth()
        found = delta(given).cpu().unflatten(1, (-1, given.shape.values))
        for row, layer in enumerate(given.states.layers):
            if layer is None:
                assert not found[row].any()
            else:
                assert relative_error(found[row], expected[row]) <= bound
    for one, other in zip(given.states.tensors, truth.arguments.states.tensors, strict=True):
        assert relative_error(one.cpu().flatten(), other.flatten()) <= bound


@pytest.mark.parametrize("parts", ["one_after_the_other", "by_key_head"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
def test_by_torch(parts: str, dtype: torch.dtype, bound: float) -> None:
    given = sample(TINY, getattr(TINY, parts), 3, dtype, CPU, idle=1)
    check(given, 3, bound)


def test_a_table_follows_its_rows() -> None:
    """Addresses are those of the rows' states, in a tensor that stays; it keeps no state alive."""

    def layers() -> list[LinearLayer | str]:
        pair = torch.zeros(2, 3, TAPS), torch.zeros(2, 1, 4, 2).transpose(2, 3)
        return ["attention", LinearLayer.of(*pair)]

    table, one, other = StateTable(), layers(), layers()
    for rows in ([(one, 1), (other, 0)], [(other, 0), None], [(one, 0), (one, 1)]):
        table.begin(rows)
        states = table.of(1)
        place = states.addresses.data_ptr()
        assert states.addresses.tolist() == [
            [0 if row is None else row[0][1].states[kind][row[1] :].data_ptr() for row in rows]
            for kind in range(2)
        ]
        assert all(x.is_contiguous() for x in states.tensors)
        table.end()
    assert table._rows == () and place == table.of(1).addresses.data_ptr()
    # The same rows, whose cache has returned to a copy of its states.
    one[1] = one[1].fork()
    table.begin([(one, 0), None])
    assert table.of(1).addresses.tolist() == [[x.data_ptr(), 0] for x in one[1].states]


@pytest.mark.parametrize("arch", architectures(("sm_80", "sm_90a", "sm_100a", "sm_120")))
@pytest.mark.parametrize(
    ("dtype", "group", "keys", "values", "cluster"),
    [
        *((torch.bfloat16, 2, 128, 128, cluster) for cluster in (1, 4, 8)),
        (torch.float16, 2, 128, 128, 1),
        (torch.bfloat16, 3, 128, 128, 1),
        (torch.bfloat16, 3, 128, 128, 6),
        (torch.bfloat16, 1, 64, 128, 4),
        (torch.bfloat16, 4, 128, 64, 8),
    ],
)
def test_compiles(
    arch: str, dtype: torch.dtype, group: int, keys: int, values: int, cluster: int
) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    if cluster not in cluster_sizes(group, values, arch):
        assert arch == "sm_80"
        return
    made = Specialization(keys, values, group, cluster, dtype)
    text = (csrc_folder() / "delta/delta.cu").read_text() + (
        f"{same_struct(Params).replace('Place', 'Part')}static_assert(THREADS == {THREADS});\n"
        f"static_assert(TAPS == {TAPS} && COLUMNS == {COLUMNS});\n"
    )
    report = compile_once("delta/delta.cu", text, arch, made.macros)["delta"]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    # At least three thread blocks per multiprocessor, which hide each other's waits.
    assert report.registers <= 65536 // (3 * THREADS)


def test_few_rows_are_divided_among_more_thread_blocks() -> None:
    assert cluster_sizes(2, 128, "sm_90a") == [1, 2, 4, 8]
    assert cluster_sizes(3, 128, "sm_120") == [1, 2, 3, 4, 6]
    assert cluster_sizes(2, 128, "sm_80") == cluster_sizes(2, 128, None) == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize(("name", "rows"), [*((name, 3) for name in SHAPES), ("as many", 20)])
@pytest.mark.parametrize("parts", ["one_after_the_other", "by_key_head"])
def test_on_a_gpu(dtype: torch.dtype, name: str, rows: int, parts: str) -> None:
    shape = SHAPES[name]
    sizes = cluster_sizes(shape.group, shape.values, architecture(CUDA))
    for cluster in sizes if name == "Qwen3.5 9B" else sizes[-1:]:
        made = Specialization(shape.keys, shape.values, shape.group, cluster, dtype)
        assert DeltaKernel.of(made, CUDA) is not None
    given = sample(shape, getattr(shape, parts), rows, dtype, CUDA, idle=1)
    check(given, 2, 0.01)


@pytest.mark.gpu
def test_nothing_else_is_written() -> None:
    """States of other rows in the same tensors, and of a row without a token, stay."""
    shape = SHAPES["Qwen3.5 9B"]
    given = sample(shape, shape.one_after_the_other, 2, torch.bfloat16, CUDA)
    pool = LinearLayer.joined([one for one in given.states.layers if one is not None] * 2)
    table, before = StateTable(), pool.fork()
    table.begin([([pool], 2), None])
    delta(given._replace(states=table.of(0)))
    for one, old in zip(pool.states, before.states, strict=True):
        changed = (one != old).flatten(1).any(1)
        assert changed.tolist() == [False, False, True, False]


@pytest.mark.gpu
def test_what_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sizes of heads and float32 run with PyTorch, which a capture refuses."""
    for shape, dtype in ((TINY, torch.bfloat16), (SHAPES["as many"], torch.float32)):
        given = sample(shape, shape.by_key_head, 2, dtype, CUDA)
        check(given, 1, 0.01)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(NotCapturable):
            delta(given)
        monkeypatch.undo()
