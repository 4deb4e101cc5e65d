"""Attention of concatenated sequences by warpgroups, compared with float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from oscar_mm.cache.varlen_attention import attend_without_past
from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.kernels.launch import ELEMENTS
from oscar_mm.kernels.self_check import relative_error
from oscar_mm.ops.varlen import (
    HEAD_DIMS,
    Params,
    VarlenArguments,
    VarlenKernel,
    VarlenSpecialization,
    boundaries,
    varlen_by_torch,
)
from tests.compiled import compile_once, same_struct

SPECIALIZATIONS = [VarlenSpecialization(one, dtype) for one in HEAD_DIMS for dtype in ELEMENTS]


@pytest.mark.parametrize("made", SPECIALIZATIONS)
def test_compiles(made: VarlenSpecialization) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "varlen/varlen.cu").read_text() + (
        f"{same_struct(Params)}static_assert(THREADS == 384 && QUERIES == KEYS && KEYS == 128);\n"
        f"static_assert(QUERY_TILE + 2 * STAGES * KEY_TILE + 72 == {made.shared_bytes});\n"
    )
    report = compile_once("varlen/varlen.cu", text, "sm_90a", made.macros)["varlen"]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)


def sequences(
    made: VarlenSpecialization, new: list[int], whole: list[int], heads: tuple[int, int] = (8, 2)
) -> VarlenArguments:
    """Random arguments, with views whose rows are not adjacent, and NaN after the last key.

    Args:
        new, whole: numbers of queries and of keys of each sequence.
        heads: query heads and KV heads.
    """
    head_dim, dtype = made
    device, (own, shared) = torch.device("cuda", 0), heads
    generator = torch.Generator(device).manual_seed(len(new))
    shape = own + 2 * shared, head_dim
    queries = torch.randn(sum(new), *shape, generator=generator, device=device, dtype=dtype)
    shape = sum(whole) + 200, 2 * shared, head_dim
    both = torch.randn(*shape, generator=generator, device=device, dtype=dtype)
    both[sum(whole) :] = torch.nan
    ends = boundaries(new, device), boundaries(whole, device)
    output = torch.full_like(queries[:, :own].contiguous(), torch.nan)
    sides = queries[:, :own], both[:, :shared], both[:, shared:]
    return VarlenArguments(*sides, *ends, head_dim**-0.5, output)


def run(arguments: VarlenArguments) -> torch.Tensor:
    kernel = VarlenKernel.for_arguments(arguments)
    assert kernel is not None
    kernel(arguments)
    return arguments.output


CASES = {
    "one query": ([1], [1]),
    "a tile and one": ([129], [129]),
    "all of two tiles": ([256], [256]),
    "a past": ([77], [4096]),
    "many": ([1, 128, 40, 300, 5], [1000, 128, 41, 300, 1500]),
    "more than 32": ([3] * 33 + [200] + [130] * 10, [5] * 33 + [900] + [130] * 10),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("made", SPECIALIZATIONS)
def test_equals_float64(made: VarlenSpecialization, case: str) -> None:
    for heads in ((8, 2), (5, 5), (7, 1)):
        arguments = sequences(made, *CASES[case], heads)
        assert relative_error(run(arguments), varlen_by_torch(arguments)) < 0.01


@pytest.mark.gpu
def test_random_sequences_equal_float64() -> None:
    chance, made = random.Random(0), SPECIALIZATIONS[-1]
    for _ in range(60):
        new = [chance.choice((0, 1, 7, 64, 127, 200, 513)) for _ in range(chance.randint(1, 9))]
        new[0] = new[0] or 1
        past = [chance.choice((0, 0, 1, 100, 128, 1000)) for _ in new]
        arguments = sequences(made, new, [x + y for x, y in zip(new, past, strict=True)])
        assert relative_error(run(arguments), varlen_by_torch(arguments)) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("made", SPECIALIZATIONS)
def test_a_sequence_without_keys_is_zero(made: VarlenSpecialization) -> None:
    arguments = sequences(made, [40, 300], [90, 0])
    found = run(arguments)
    assert relative_error(found[:40], varlen_by_torch(arguments)[:40]) < 0.01
    assert not found[40:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("made", SPECIALIZATIONS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_stays_in_its_sequence(made: VarlenSpecialization, poison: float) -> None:
    """Neighboring sequences have rows in the same tiles of queries, keys and values."""
    arguments = sequences(made, [50, 60, 70], [250, 260, 270])
    expected = varlen_by_torch(arguments)
    arguments.queries[50:110] = poison
    for side in arguments[1:3]:
        side[250:510] = poison
    found = run(arguments)
    assert found[50:110].isnan().all()
    for own in (slice(50), slice(110, None)):
        assert relative_error(found[own], expected[own]) < 0.01


@pytest.mark.gpu
def test_a_graph_reads_its_boundaries_when_it_runs() -> None:
    """It writes no rows beyond them."""
    made = SPECIALIZATIONS[0]
    arguments = sequences(made, [100, 200, 0, 0], [500, 900, 0, 0])
    run(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(arguments)
    for new, whole in (([100, 200, 0, 0], [500, 900, 0, 0]), ([0, 13, 130, 1], [9, 700, 131, 1])):
        arguments.query_ends.copy_(boundaries(new, arguments.queries.device))
        arguments.key_ends.copy_(boundaries(whole, arguments.queries.device))
        arguments.output.fill_(torch.nan)
        graph.replay()
        rows = slice(sum(new))
        expected = varlen_by_torch(arguments)[rows]
        assert relative_error(arguments.output[rows], expected) < 0.01
        assert arguments.output[sum(new) :].isnan().all()


@pytest.mark.gpu
def test_the_kernel_refuses_other_layouts_sizes_and_dtypes() -> None:
    """Heads that are not next to each other, other sizes of heads, float32."""
    good = sequences(SPECIALIZATIONS[0], [5], [9])
    apart = good._replace(queries=good.queries[:, ::2])
    names = "queries", "keys", "values", "output"
    small = good._replace(**{x: getattr(good, x)[..., :48].contiguous() for x in names})
    floats = good._replace(queries=good.queries.float())
    for arguments in (apart, small, floats):
        assert VarlenKernel.for_arguments(arguments) is None


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
def test_rows_of_equal_length_equal_torch(batch: int) -> None:
    """Heads of a token are next to each other, as projections give them."""
    states = torch.randn(batch, 700, 6, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    queries, keys, values = states.split((4, 1, 1), 1)
    found = attend_without_past(queries, keys, values, 0.1)
    assert found is not None
    exact = scaled_dot_product_attention(
        *(queries.double(), keys.double(), values.double()),
        is_causal=True,
        scale=0.1,
        enable_gqa=True,
    )
    assert relative_error(found, exact) < 0.01
