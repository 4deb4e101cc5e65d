"""The operations of decode steps: schema, fakes, compiling, and refusing arguments."""

from __future__ import annotations

import pytest
import torch

from oscar_mm.fast_decode.experts import mixture_operation
from oscar_mm.fast_decode.linear import linear_operation
from oscar_mm.fast_decode.rope import rope_operation
from oscar_mm.weights.matrix import QuantizedMatrix

OPERATIONS = {"linear": linear_operation, "rope": rope_operation, "mixture": mixture_operation}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def arguments_of(name: str, device: str = "cpu") -> tuple:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    if name == "linear":
        weights = [random(24, 32), random(8, 32)]
        around = [random(24), None], random(32), 1e-6, random(3, 32)
        return (random(3, 32), weights, *around, False, [], [])
    if name == "rope":
        norms = (random(64), random(64), 1e-6, False, False)
        return (random(3, 6, 64)[:, :5], 4, random(3, 64), random(3, 64), *norms)
    experts = (random(5, 32), random(5, 96, 32), random(5, 32, 48), 2, True, [], [])
    return (random(3, 32), random(32), 1e-6, *experts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_opcheck(name: str, device: str) -> None:
    found = torch.library.opcheck(OPERATIONS[name], arguments_of(name, device))
    assert set(found.values()) == {"SUCCESS"} and len(found) == 4


@pytest.mark.parametrize("name", OPERATIONS)
def test_under_torch_compile(name: str) -> None:
    def step(*arguments: object) -> torch.Tensor:
        returned = OPERATIONS[name](*arguments)
        return (arguments[0] if returned is None else returned) * 2

    expected = step(*arguments_of(name))
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments_of(name)), expected)


def test_schemas_say_what_is_written() -> None:
    written = {
        name: [one.name for one in operation._schema.arguments if one.is_write]
        for name, operation in OPERATIONS.items()
    }
    assert written == {"linear": [], "rope": ["heads"], "mixture": []}


@pytest.mark.parametrize("name", OPERATIONS)
def test_tensors_that_do_not_fit(name: str) -> None:
    arguments = arguments_of(name)
    places = [at for at, x in enumerate(arguments) if isinstance(x, torch.Tensor)]
    for at in places:
        argument = OPERATIONS[name]._schema.arguments[at].name
        for wrong, kind in ((arguments[at].double(), TypeError), (arguments[at][None], ValueError)):
            with pytest.raises(kind, match=rf"oscar_mm\.{name}: {argument} is .*, must be "):
                OPERATIONS[name](*arguments[:at], wrong, *arguments[at + 1 :])


@pytest.mark.parametrize(
    ("name", "argument", "value", "message"),
    [
        ("linear", "weights", [], "weights is 0 matrices with 2 biases, must be 1 to 4"),
        ("linear", "weights", [torch.zeros(24, 31)] * 2, r"must be of shape \(outputs, 32\)"),
        ("linear", "biases", [torch.zeros(9), None], r"biases is of shape \(9,\)"),
        ("rope", "query_heads", 6, "query_heads is 6, must be 0 to 5"),
        ("rope", "cosine", torch.zeros(3, 66), "of 66 channels, must be even, at most 64"),
        ("rope", "sine", torch.zeros(3, 62), r"sine is of shape \(3, 62\), must be of shape"),
        ("rope", "gated", True, "query_heads is 4, must be 0 to 2"),
        ("rope", "key_norm", None, "query_norm is one of two norms, must be given with key_norm"),
        ("mixture", "chosen", 6, "chosen is 6, must be 1 to 5, the experts"),
        ("mixture", "scales", [torch.zeros(1)], "scales is 1 tensors, must be none or two"),
        ("mixture", "zeros", [torch.zeros(1)] * 2, "zeros is 2 tensors, must be given with scales"),
    ],
)
def test_values_that_do_not_fit(name: str, argument: str, value: object, message: str) -> None:
    arguments = list(arguments_of(name))
    names = [one.name for one in OPERATIONS[name]._schema.arguments]
    arguments[names.index(argument)] = value
    with pytest.raises((ValueError, TypeError), match=message):
        OPERATIONS[name](*arguments)


def test_a_gate_has_two_matrices() -> None:
    x, weight = torch.zeros(3, 32), torch.zeros(8, 32)
    with pytest.raises(ValueError, match="weights is 1 matrices, must be 2 with a gate"):
        linear_operation(x, [weight], [None], None, 0.0, None, True, [], [])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_mixture_of_quantized_experts(bits: int) -> None:
    """It is that of the dequantized ones; scales and zero points are checked like weights."""
    x, norm, epsilon, router, *weights, chosen, normalized, _, _ = arguments_of("mixture")
    matrices = [QuantizedMatrix.of(weight, bits) for weight in weights]
    codes, scales, zeros = map(list, zip(*matrices, strict=True))
    zeros = zeros if bits == 4 else []
    start = x, norm, epsilon, router
    plain = [matrix.dequantized(torch.float32) for matrix in matrices]
    expected = mixture_operation(*start, *plain, chosen, normalized, [], [])
    found = mixture_operation(*start, *codes, chosen, normalized, scales, zeros)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="scales"):
        mixture_operation(*start, *codes, chosen, normalized, [scales[0], scales[1][:4]], zeros)
    if zeros:
        with pytest.raises(ValueError, match="zeros"):
            wrong = [zeros[0], zeros[1].int()]
            mixture_operation(*start, *codes, chosen, normalized, scales, wrong)
