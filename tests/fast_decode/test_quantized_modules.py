"""Products with FP8 weights against the dequantized weights in float64, on a CPU and a GPU."""

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from oscar_mm.fast_decode.linear import linear, linear_operation
from oscar_mm.fast_decode.linear_params import WORST_ERROR, WeightFormat, worst_error
from oscar_mm.fast_decode.linear_torch import Norm, linear_by_torch
from oscar_mm.fast_decode.quantized_modules import QuantizedExperts, QuantizedLinear
from oscar_mm.weights import int4
from oscar_mm.weights.fp8 import dequantized, expanded, quantized
from oscar_mm.weights.matrix import QuantizedMatrix
from tests.pairs import pairs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def made(dtype, device, rows, width, outputs, by_row=False):
    generator = torch.Generator().manual_seed(rows + width)
    x = torch.randn(rows, width, generator=generator).to(device, dtype)
    weights, scales = [], []
    for count in outputs:
        weight = torch.randn(count, width, generator=generator) / width**0.5
        # Blocks of different magnitudes, so that a wrong scale shows.
        weight *= torch.logspace(-1, 1, width)
        codes, of_codes = quantized(weight)
        if by_row:
            of_codes = expanded(codes, torch.rand(count, 1, generator=generator) + 0.5)
        weights.append(codes.to(device))
        scales.append(of_codes.to(device))
    return x, weights, scales


def truth(x, weights, scales):
    whole = [
        dequantized(*pair, torch.float32).double() for pair in zip(weights, scales, strict=True)
    ]
    return [x.double() @ weight.T for weight in whole]


def relative(found, expected):
    return ((found.double() - expected).norm(dim=1) / expected.norm(dim=1)).max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "dtype", "by_row", "shape"),
    pairs((1, 2, 3, 8, 13, 24, 60), DTYPES, (False, True), ((256, (5,)), (4352, (300, 130, 128)))),
)
def test_products(device, dtype, by_row, rows, shape) -> None:
    width, outputs = shape
    x, weights, scales = made(dtype, device, rows, width, outputs, by_row)
    found = linear(x, weights, scales=scales)
    assert relative(found, torch.cat(truth(x, weights, scales), 1)) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
def test_with_bias_norm_and_residual(device, dtype, rows) -> None:
    x, weights, scales = made(dtype, device, rows, 512, (300, 128))
    generator = torch.Generator().manual_seed(7)
    norm = Norm(torch.randn(512, generator=generator).to(x), 1e-5)
    biases = [torch.randn(count, generator=generator).to(x) for count in (300, 128)]
    residual = torch.randn(rows, 428, generator=generator).to(x)
    found = linear(x, weights, biases, norm=norm, residual=residual, scales=scales)
    products = truth(norm(x), weights, scales)
    whole = torch.cat([y + bias.double() for y, bias in zip(products, biases, strict=True)], 1)
    assert relative(found, whole + residual.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_gated(device, dtype, rows) -> None:
    x, weights, scales = made(dtype, device, rows, 512, (900, 900))
    gate, up = truth(x, weights, scales)
    found = linear(x, weights, gated=True, scales=scales)
    assert relative(found, silu(gate) * up) < TOLERANCE[dtype]


def made_int4(dtype, rows, group, device):
    """Return x, and two matrices with groups of that many columns; a row of the second has a zero
    point beyond four bits."""
    generator = torch.Generator().manual_seed(group + rows)
    x = torch.randn(rows, 512, generator=generator).to(device, dtype)
    matrices = []
    for _ in range(2):
        words, scales, zeros = int4.quantized(
            torch.randn(900, 512, generator=generator) / 20, group
        )
        # Scales of both dtypes that kernels take.
        scales = scales.to(torch.float32 if group == 64 else dtype)
        matrices.append(QuantizedMatrix(words.to(device), scales.to(device), zeros.to(device)))
    matrices[1].zeros[7] = 200
    return x, matrices


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "dtype", "group"), pairs((1, 2, 8, 16, 64, 90), DTYPES, (32, 64, 128, 512))
)
def test_int4_products(device, dtype, rows, group) -> None:
    x, matrices = made_int4(dtype, rows, group, device)
    norm = Norm(torch.linspace(0.5, 2, 512).to(x), 1e-5)
    exact = [norm(x).double() @ one.dequantized(torch.float64).T for one in matrices]
    words, scales, zeros = map(list, zip(*matrices, strict=True))
    found = linear(x, words, norm=norm, scales=scales, zeros=zeros)
    assert relative(found, torch.cat(exact, 1)) < TOLERANCE[dtype]
    found = linear(x, words, norm=norm, gated=True, scales=scales, zeros=zeros)
    assert relative(found, silu(exact[0]) * exact[1]) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [2, 8, 16])
def test_rows_do_not_change_each_other(device, bits, rows) -> None:
    """Rows of NaN and infinity, and rows of very large, small and no numbers beside them."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 512, generator=generator).to(device, torch.bfloat16)
    matrix = QuantizedMatrix.of(torch.randn(300, 512, generator=generator), bits)
    codes, scales, *zeros = (one.to(device) for one in matrix if one is not None)
    extremes = {"nan": torch.nan, "infinite": torch.inf, "large": 1e30, "small": 1e-30, "none": 0.0}
    for name, factor in extremes.items():
        changed = x.clone()
        if name in ("nan", "infinite"):
            changed[1, 300] = factor
        else:
            changed[1] *= factor
        found = linear(changed, [codes], scales=[scales], zeros=zeros)
        exact = changed.double() @ matrix.dequantized(torch.float64).T.to(device)
        others = [row for row in range(rows) if row != 1]
        assert relative(found[others], exact[others]) < TOLERANCE[torch.bfloat16]
        if name in ("large", "small"):
            assert relative(found[1:2], exact[1:2]) < TOLERANCE[torch.bfloat16]
        elif name == "none":
            assert not found[1].any()
        else:
            assert not found[1].isfinite().any()
            assert found[1].isnan().all() or name == "infinite"


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_module_is_that_of_its_dequantized_weights(bias, bits) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(256, 70, bias=bias)
    own = QuantizedLinear.of(plain, torch.device("cpu"), bits)
    plain.weight.data = own.matrix.dequantized(torch.float32)
    x = torch.randn(2, 3, 256)
    torch.testing.assert_close(own(x), plain(x))
    assert own(x[:0]).shape == (0, 3, 70)


def test_a_module_moved_to_another_dtype_computes_the_same() -> None:
    own = QuantizedLinear.of(nn.Linear(200, 70), torch.device("cpu"), 8)
    x = torch.randn(4, 200)
    before = own(x)
    torch.testing.assert_close(own.to(torch.float32)(x), before)


def test_bad_arguments_are_named() -> None:
    x, weights, scales = made(torch.float32, "cpu", 2, 256, (300, 128))
    given = x, weights, [None, None], None, 0.0, None, False
    with pytest.raises(ValueError, match="scales is 1 for 2 matrices, must be one for each"):
        linear_operation(*given, scales[:1], [])
    with pytest.raises(ValueError, match=r"FP8 weights of shape \[300, 256\] need \[3, 2\] or"):
        linear_operation(*given, [scales[1], scales[1]], [])
    with pytest.raises(TypeError, match="weights"):
        linear_operation(*given, [], [])
    with pytest.raises(ValueError, match="zeros is 1 tensors without scales"):
        linear_operation(*given, [], [scales[0].byte()])


def test_zero_points_are_checked_like_scales() -> None:
    x, weight = torch.randn(2, 256), torch.randn(64, 256)
    words, scales, zeros = QuantizedMatrix.of(weight, 4)
    given = x, [words], [None], None, 0.0, None, False, [scales]
    linear_operation(*given, [zeros])
    for wrong in (zeros.int(), zeros[:, :1], zeros.T.contiguous().T):
        with pytest.raises((TypeError, ValueError), match="zeros"):
            linear_operation(*given, [wrong])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_a_kernel_that_reads_the_scales_of_another_block_is_not_used(bits, gated) -> None:
    """Errors that must show: the last columns with the scales of those before, and each row with
    the scales of its neighbour."""

    def last_columns(scales):
        scales[:, -1] = scales[:, -2]

    def off_by_one(scales):
        scales.copy_(scales.roll(1, 0))

    def by(change):
        def kernel(arguments):
            scales = [one.clone() for one in arguments.scales]
            for one in scales:
                if min(one.shape) > 1 and len(one) > 4:
                    change(one)
            return linear_by_torch(arguments._replace(scales=scales))

        problems = [(3, 4096 + 64, (90, 90) if gated else (300, 7, 31))]
        weights = WeightFormat(bits, group_columns=64)
        return worst_error(kernel, gated, torch.float32, torch.device("cpu"), problems, weights)

    assert by(lambda _: None) == 0
    for change in (last_columns, off_by_one):
        assert by(change) > 2 * WORST_ERROR


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts_are_those_of_their_dequantized_weights(tokens, bits) -> None:
    generator = torch.Generator().manual_seed(0)
    count, width, between = 6, 200, 72
    into = torch.randn(count, 2 * between, width, generator=generator) / width**0.5
    out_of = torch.randn(count, width, between, generator=generator) / between**0.5
    gate_up, down = (QuantizedMatrix.of(weight, bits) for weight in (into, out_of))
    own = QuantizedExperts(gate_up, down, nn.SiLU())
    x = torch.randn(tokens, width, generator=generator)
    order = torch.stack([torch.randperm(count, generator=generator)[:3] for _ in range(tokens)])
    shares = torch.rand(tokens, 3, generator=generator)
    into, out_of = (
        torch.stack([one.chosen(i).dequantized(torch.float32) for i in range(count)]).double()
        for one in (gate_up, down)
    )
    expected = torch.zeros(tokens, width, dtype=torch.float64)
    for token in range(tokens):
        for expert, share in zip(order[token].tolist(), shares[token].double(), strict=True):
            gate, up = (into[expert] @ x[token].double()).chunk(2)
            expected[token] += share * (out_of[expert] @ (silu(gate) * up))
    torch.testing.assert_close(own(x, order, shares).double(), expected, rtol=1e-4, atol=1e-5)
