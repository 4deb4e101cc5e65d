"""A step of Gated DeltaNet by kernel and by PyTorch, against the recurrence in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from oscar_mm.cache.states import LinearLayer, StateRow, StateTable
from oscar_mm.fast_decode import delta as module
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
            target = self.arguments.states.targets[row]
            for new, old in zip(target.states, layer.states, strict=True):
                new.copy_(old)
            window, states = (x[0] for x in target.states)
            channels = self.channels(row, window)
            rows.append(torch.stack([self.head(row, i, channels, states[i]) for i in heads]))
        return torch.stack(rows)


def on_cpu(given: DeltaArguments) -> DeltaArguments:
    """A copy on the CPU."""
    sides = given.states.layers, given.states.targets
    copies = {
        one.states[0].data_ptr(): one.on(CPU) for side in sides for one in side if one is not None
    }
    # Some are the same, as for a step in place.
    layers, targets = (
        [None if one is None else copies[one.states[0].data_ptr()] for one in side]
        for side in sides
    )
    states = given.states._replace(layers=layers, targets=targets)
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
    for one, other in zip(given.states.results, truth.arguments.states.results, strict=True):
        assert relative_error(one.cpu().flatten(), other.flatten()) <= bound


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("parts", ["one_after_the_other", "by_key_head"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
def test_by_torch(parts: str, dtype: torch.dtype, bound: float, in_place: bool) -> None:
    given = sample(TINY, getattr(TINY, parts), 3, dtype, CPU, idle=1, in_place=in_place)
    before = [x.clone() for x in given.states.tensors]
    check(given, 3, bound)
    assert in_place or all(map(torch.equal, before, given.states.tensors))


def test_each_token_of_a_sequence_continues_the_states_of_the_one_before() -> None:
    """The states before the first token stay."""
    given = sample(TINY, TINY.by_key_head, 3, torch.float32, CPU, in_place=False, chained=True)
    first = given.states.layers[0]
    assert first is not None
    before = [x.clone() for x in first.states]
    check(given, 2, 1e-5)
    assert all(map(torch.equal, before, first.states))


def layers() -> list[LinearLayer | str]:
    pair = torch.zeros(2, 3, TAPS), torch.zeros(2, 1, 4, 2).transpose(2, 3)
    return ["attention", LinearLayer.of(*pair)]


def places(rows: list[StateRow | None], layers: list[LinearLayer | None]) -> list[list[int]]:
    """Addresses of the rows in these layers."""
    return [
        [
            0 if row is None else layer.states[kind][row.row].data_ptr()
            for row, layer in zip(rows, layers, strict=True)
        ]
        for kind in range(2)
    ]


def test_a_table_follows_its_rows() -> None:
    """Addresses are those of the rows' states, in a tensor that stays; it keeps no state alive."""
    table, one, other = StateTable(), layers(), layers()
    first, second, third = StateRow(one, {}, 0), StateRow(one, {}, 1), StateRow(other, {}, 0)
    for rows in ([second, third], [third, None], [first, second]):
        table.begin(rows)
        states = table.of(1)
        place = states.addresses.data_ptr()
        expected = places(rows, [None if row is None else row.layers[1] for row in rows])
        assert states.addresses.tolist() == expected * 2
        assert all(x.is_contiguous() for x in states.tensors)
        table.end()
    assert table._rows == () and place == table.of(1).addresses.data_ptr()
    # The same rows, whose cache has returned to a copy of its states.
    one[1] = one[1].fork()
    table.begin([first, None])
    assert table.of(1).addresses.tolist() == [[x.data_ptr(), 0] for x in one[1].states] * 2


def test_steps_to_spare_layers() -> None:
    """A step reads the states and writes to the spare layers, whichever of the two these are; the
    host writes addresses only if layers are new."""
    table, rows = StateTable(), [StateRow(layers(), {}, 1), None, StateRow(layers(), {}, 0)]
    real, written = [row for row in rows if row is not None], []
    write = table._write
    table._write = lambda: (written.append(1), write())
    for row in real:
        row.make_spares()

    def check(*, to_spares: bool) -> None:
        table.begin(rows, to_spares=to_spares)
        before, after = (
            [None if row is None else (row.spares if spare else row.layers)[1] for row in rows]
            for spare in (False, to_spares)
        )
        found = table.of(1)
        assert found.addresses.tolist() == places(rows, before) + places(rows, after)
        for given, expected in ((found.tensors, before), (found.results, after)):
            theirs = sum(zip(*places(rows, expected), strict=True), ())
            assert [x.data_ptr() for x in given] == [x for x in theirs if x]
        table.end()

    for _ in range(2):
        for to_spares in (False, True, True, False):
            check(to_spares=to_spares)
        for row in real:
            row.take_spares()
    assert len(written) == 1
    real[0].take_spares()  # The other row's token was one too many.
    check(to_spares=True)
    real[1].spares.clear()
    check(to_spares=False)
    assert len(written) == 3


@pytest.mark.parametrize("arch", architectures(("sm_80", "sm_90a", "sm_100a", "sm_120")))
@pytest.mark.parametrize(
    ("dtype", "group", "keys", "values", "cluster", "tokens"),
    [
        *((torch.bfloat16, 2, 128, 128, cluster, 1) for cluster in (1, 4, 8)),
        *((torch.bfloat16, 2, 128, 128, 8, tokens) for tokens in (2, 4)),
        (torch.float16, 2, 128, 128, 1, 1),
        (torch.bfloat16, 3, 128, 128, 1, 1),
        (torch.bfloat16, 3, 128, 128, 6, 4),
        (torch.bfloat16, 1, 64, 128, 4, 1),
        (torch.bfloat16, 4, 128, 64, 8, 1),
    ],
)
def test_compiles(
    arch: str,
    dtype: torch.dtype,
    group: int,
    keys: int,
    values: int,
    cluster: int,
    tokens: int,
) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    if cluster not in cluster_sizes(group, values, arch):
        assert arch == "sm_80"
        return
    made = Specialization(keys, values, group, cluster, dtype, tokens)
    text = (csrc_folder() / "delta/delta.cu").read_text() + (
        f"{same_struct(Params).replace('Place', 'Part')}static_assert(THREADS == {THREADS});\n"
        f"static_assert(TAPS == {TAPS} && COLUMNS == {COLUMNS});\n"
    )
    report = compile_once("delta/delta.cu", text, arch, made.macros)["delta"]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    # At least three thread blocks per multiprocessor, which hide each other's waits; those of a
    # single sequence do not fill all of them.
    assert tokens > 1 or report.registers <= 65536 // (3 * THREADS)


def test_few_rows_are_divided_among_more_thread_blocks() -> None:
    assert cluster_sizes(2, 128, "sm_90a") == [1, 2, 4, 8]
    assert cluster_sizes(3, 128, "sm_120") == [1, 2, 3, 4, 6]
    assert cluster_sizes(2, 128, "sm_80") == cluster_sizes(2, 128, None) == [1]


def test_few_rows_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    shape, device = DeltaShape(16, 32, 128, 128), torch.device("cpu")
    found = [
        Specialization.of(shape, torch.bfloat16, rows, device).cluster
        for rows in (1, 2, 4, 8, 16, 17, 64)
    ]
    assert found == [8, 8, 4, 2, 1, 1, 1]


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
    for in_place in (True, False):
        given = sample(shape, getattr(shape, parts), rows, dtype, CUDA, idle=1, in_place=in_place)
        before = [x.clone() for x in given.states.tensors]
        check(given, 2, 0.01)
        assert in_place or all(map(torch.equal, before, given.states.tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 4, 5])
@pytest.mark.parametrize("name", ["Qwen3.5 9B", "Qwen3.5 27B", "many"])
def test_the_kernel_computes_tokens_of_a_sequence(name: str, tokens: int) -> None:
    shape = SHAPES[name]
    made = Specialization.of(shape, torch.bfloat16, tokens, CUDA, tokens)
    assert DeltaKernel.of(made, CUDA) is not None
    parts = shape.one_after_the_other
    check(sample(shape, parts, tokens, torch.bfloat16, CUDA, in_place=False, chained=True), 2, 0.01)


@pytest.mark.gpu
def test_nothing_else_is_written() -> None:
    """States of other rows in the same tensors, and of a row without a token, stay."""
    shape = SHAPES["Qwen3.5 9B"]
    given = sample(shape, shape.one_after_the_other, 2, torch.bfloat16, CUDA)
    pool = LinearLayer.joined([one for one in given.states.layers if one is not None] * 2)
    table, before = StateTable(), pool.fork()
    table.begin([StateRow([pool], {}, 2), None])
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
