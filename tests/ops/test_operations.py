"""What holds for all operations: schema, fakes, compiling, graphs, and refusing arguments."""

import pytest
import torch

from oscar_mm.ops.library import numbers_of
from tests.ops.arguments import (
    ARGUMENTS,
    BALANCED_BY_ROW,
    OPERATIONS,
    balanced_by_row,
    page_format,
    results,
    stream_policy,
    written,
)

BOTH = [
    pytest.param("cpu", torch.float32, id="cpu"),
    pytest.param("cuda:0", torch.bfloat16, id="cuda", marks=pytest.mark.gpu),
]

CHANNEL = numbers_of(page_format())
STREAM = numbers_of(page_format((3, 2), policy=stream_policy()))


@pytest.mark.parametrize(("device", "dtype"), BOTH)
@pytest.mark.parametrize("name", OPERATIONS)
def test_opcheck(name: str, device: str, dtype: torch.dtype) -> None:
    found = torch.library.opcheck(OPERATIONS[name], ARGUMENTS[name](device, dtype))
    assert set(found.values()) == {"SUCCESS"} and len(found) == 4


@pytest.mark.parametrize(("device", "dtype"), BOTH)
@pytest.mark.parametrize("name", OPERATIONS)
def test_under_torch_compile(name: str, device: str, dtype: torch.dtype) -> None:
    """As part of a graph; a generated kernel around it is none of our business."""

    def step(*arguments: object) -> list[torch.Tensor]:
        return [tensor * 2 for tensor in results(name, arguments)]

    expected = step(*ARGUMENTS[name](device, dtype))
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(compiled(*ARGUMENTS[name](device, dtype)), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("device", "dtype"), BOTH)
@pytest.mark.parametrize("name", BALANCED_BY_ROW)
def test_opcheck_with_balancing_by_row(name: str, device: str, dtype: torch.dtype) -> None:
    arguments = tuple(balanced_by_row(name, device, dtype).values())
    found = torch.library.opcheck(OPERATIONS[name], arguments)
    assert set(found.values()) == {"SUCCESS"} and len(found) == 4


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("device", "dtype"), BOTH)
@pytest.mark.parametrize("name", BALANCED_BY_ROW)
def test_a_row_with_its_own_balancing_equals_that_row_alone(
    name: str, device: str, dtype: torch.dtype, heads: int
) -> None:
    """Bit for bit."""
    given = balanced_by_row(name, device, dtype, heads)
    balancing = given["sigma"]
    together = results(name, tuple(given.values()))
    alone = balanced_by_row(name, device, dtype, heads)
    for row in range(2):
        of_row = [x[row] for x in balancing] if name == "store_layers" else balancing[row]
        if name == "decode":
            found = results(name, tuple((alone | {"sigma": of_row}).values()))[0]
            assert torch.equal(found[row], together[0][row])
            assert not torch.equal(found[1 - row], together[0][1 - row])
            continue
        # The pages of the other row are left alone: both rows' calls together make all pages.
        of_others = alone | {"sigma": of_row}
        if name == "pack":
            of_others["slots"] = alone["slots"].masked_fill(alone["rows"] != row, -1)
        else:
            for table, at in (("jobs", 2), ("begins", 1)):
                of_others[table] = alone[table].clone()
                of_others[table][alone[table][:, at] != row, 0] = -1
        found = results(name, tuple(of_others.values()))
        assert all(map(torch.equal, found, together)) == (row == 1)


@pytest.mark.parametrize("name", OPERATIONS)
def test_in_inference_mode(name: str) -> None:
    outside = ARGUMENTS[name]("cpu", torch.float32)
    expected = results(name, ARGUMENTS[name]("cpu", torch.float32))
    with torch.inference_mode():
        found = results(name, outside)
    assert all(map(torch.equal, found, expected))


def refused(name: str, arguments: list, kind: type[Exception], at: int) -> None:
    argument = OPERATIONS[name]._schema.arguments[at].name
    with pytest.raises(kind, match=rf"oscar_mm\.{name}: {argument} is .*, must be "):
        OPERATIONS[name](*arguments)
    others = [*arguments[:at], torch.zeros(0), *arguments[at + 1 :]]
    assert not any(tensor.any() for tensor in written(name, others))


def tensors_of(name: str, arguments: tuple) -> list[int]:
    return [at for at, x in enumerate(arguments) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(("device", "dtype"), BOTH)
@pytest.mark.parametrize("name", OPERATIONS)
def test_tensors_that_do_not_fit(name: str, device: str, dtype: torch.dtype) -> None:
    arguments = ARGUMENTS[name](device, dtype)
    first, *_ = places = tensors_of(name, arguments)
    for at in places:

        def changed(tensor: torch.Tensor, at: int = at) -> list:
            return [*arguments[:at], tensor, *arguments[at + 1 :]]

        right = arguments[at]
        refused(name, changed(right.double()), TypeError, at)
        refused(name, changed(right[None]), ValueError, at)
        if right.numel() > 1:
            refused(name, changed(torch.stack([right, right], dim=-1)[..., 0]), ValueError, at)
        if at != first:  # that tells where the others must be
            refused(name, changed(right.to("meta")), ValueError, at)


@pytest.mark.parametrize(
    ("name", "argument", "value", "message"),
    [
        ("unpack", "dtype", torch.int8, "dtype is torch.int8, must be one of"),
        ("unpack", "format", [2, 2], r"page format \[2, 2\]: must be 9 numbers"),
        ("unpack", "sigma", torch.ones(3, 64), "sigma is of 3 heads, must be of 2 or 1"),
        ("unpack", "sigma", torch.ones(2, 2, 64), r"must be of shape \(KV heads or 1, 64\)"),
        ("unpack", "pages", torch.zeros(4, 7, dtype=torch.uint8), r"pages is of shape \(4, 7\)"),
        ("pack", "recipe_numbers", [2, 2], r"page format \[2, 2\]: must be 9 numbers"),
        ("pack", "recipe_numbers", [*CHANNEL, 1, 2, 0, 0], r"recipe \[2, .*\]: must be 13 numbers"),
        ("pack", "rows", torch.zeros(4, dtype=torch.int32), r"rows is of shape \(4,\).*\(5\)"),
        ("append", "writes", torch.zeros(4, 4, dtype=torch.int32), r"must be of shape \(n, 3\)"),
        ("pack", "sigma", torch.ones(3, 2, 64), r"must be of shape \(2, KV heads or 1, 64\)"),
        ("store", "sigma", torch.ones(3, 2, 64), r"must be of shape \(2, KV heads or 1, 64\)"),
        ("store", "recipe_numbers", [*STREAM, 1, 1, 1, 0], "norm is 'refit', must be one of"),
        (
            "store",
            "recipe_numbers",
            [*CHANNEL, 1, 0, 0, 0],
            "format is of key_axis 'channel', must",
        ),
        ("store", "jobs", torch.zeros(4, 16, dtype=torch.int32), r"must be of shape \(jobs, 20\)"),
        ("store_layers", "recipe_numbers", [*STREAM, 1, 1, 3, 0], "must be 13 numbers"),
        ("store_layers", "pages", [], "pages is of 0 layers, must be of 2, as recent"),
        ("store_layers", "sigma", [torch.ones(4, 3, 64), None], "sigma is of 3 heads, must be of"),
        ("store_layers", "sigma", [None] * 3, "sigma is of 3 layers, must be of 2, as recent"),
        (
            "store_layers",
            "not_finite",
            [torch.zeros(1)] * 2,
            "not_finite is torch.float32, must",
        ),
        ("decode", "queries", torch.zeros(2, 8, 17, 64), "queries is of 17 tokens, must be of 1"),
        ("decode", "queries", torch.zeros(2, 7, 3, 64), "queries is of 7 heads, must be of a mul"),
        ("decode", "sigma", torch.ones(3, 2, 64), r"must be of shape \(2, KV heads or 1, 64\)"),
        ("decode", "pages", [], "pages is of 0 pools, must be of 2, as formats"),
        (
            "decode",
            "formats",
            [4, 4, 2, 64, 0, 128, 64, 1, 0] * 2,
            r"formats is of .* bits, must be at most two, by ascending bits",
        ),
        (
            "decode",
            "formats",
            [2, 2, 3, 64, 0, 128, 64, 1, 0, 4, 4, 3, 64, 0, 128, 64, 1, 0],
            "formats is for 3 heads of 64, must be for 2 of 64, as keys",
        ),
    ],
)
def test_values_that_do_not_fit(name: str, argument: str, value: object, message: str) -> None:
    arguments = list(ARGUMENTS[name]("cpu", torch.float32))
    names = [one.name for one in OPERATIONS[name]._schema.arguments]
    arguments[names.index(argument)] = value
    with pytest.raises((ValueError, TypeError), match=message):
        OPERATIONS[name](*arguments)


def test_schemas_say_what_is_written() -> None:
    written = {
        name: [one.name for one in operation._schema.arguments if one.is_write]
        for name, operation in OPERATIONS.items()
    }
    assert written == {
        "append": ["recent", "not_finite"],
        "decode": [],
        "pack": ["pages", "not_finite"],
        "store": ["pages", "not_finite"],
        "store_layers": ["pages", "not_finite"],
        "unpack": [],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_on_another_stream_and_in_a_graph(name: str) -> None:
    arguments = ARGUMENTS[name]("cuda:0", torch.bfloat16)
    expected = results(name, arguments)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        other = results(name, ARGUMENTS[name]("cuda:0", torch.bfloat16))
    stream.synchronize()
    assert all(map(torch.equal, other, expected))
    graph = torch.cuda.CUDAGraph()
    fresh = ARGUMENTS[name]("cuda:0", torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = results(name, fresh)
    for _ in range(3):
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, expected))


@pytest.mark.gpu
def test_graphs_of_one_stream_replayed_at_once() -> None:
    """Each has counters of its own: they would end in wrong sums or never."""
    arguments = ARGUMENTS["decode"]("cuda:0", torch.bfloat16)
    expected = results("decode", arguments)[0]
    stream, graphs = torch.cuda.Stream(), []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = [results("decode", arguments)[0] for _ in range(20)]
        graphs.append((graph, outputs, torch.cuda.Stream()))
    for _ in range(50):
        for graph, _, own in graphs:
            with torch.cuda.stream(own):
                graph.replay()
        eager = results("decode", arguments)[0]
    torch.cuda.synchronize()
    assert torch.equal(eager, expected)
    for _, outputs, _ in graphs:
        assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_on_another_device(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = results(name, ARGUMENTS[name]("cuda:0", torch.bfloat16))
    found = results(name, ARGUMENTS[name]("cuda:1", torch.bfloat16))
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(found, expected, strict=True))
