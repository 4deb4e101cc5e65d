"""The benchmark of products: its shapes, errors and verdicts."""

import torch

from benchmarks.products import FORMATS, MAX_ERROR, Product, products_of, report
from oscar_mm.models.released import RELEASED


def test_the_products_are_those_of_the_layer() -> None:
    text = RELEASED["qwen3-vl-8b"].text
    found = sum(width * sum(outputs) for width, outputs, _ in products_of("qwen3-vl-8b").values())
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    heads = text["num_attention_heads"] + text["num_key_value_heads"]
    assert found == 3 * hidden * inner + 2 * hidden * heads * text["head_dim"]


def test_errors_and_bytes_of_each_format() -> None:
    sizes = {}
    for form, bits in FORMATS.items():
        product = Product(512, (128, 128), True, bits, torch.device("cpu"))
        first, second = product.calls(3, 2)
        assert product.error(first) == product.error(second) < 2 * MAX_ERROR
        assert all(
            a.data_ptr() != b.data_ptr() for a, b in zip(first.weights, second.weights, strict=True)
        )
        sizes[form] = product.nbytes
    weights = 2 * 128 * 512
    assert sizes["bf16"] == 2 * weights
    assert sizes["fp8"] == weights + 4 * 2 * 4
    assert sizes["int4"] == weights // 2 + 3 * weights // 128


def test_verdicts(capsys) -> None:
    row = {"model": "m", "format": "fp8", "rows": 1, "floor_us": 10.0, "error": 1e-3}
    report([row | {"product": name, "us": us} for name, us in (("qkv", 11.0), ("down", 11.5))])
    assert "1.12 floors, at most 1.2: met" in capsys.readouterr().out
    report([row | {"product": "qkv", "us": 13.0, "error": float("nan")}])
    printed = capsys.readouterr().out
    assert "1.30 floors, at most 1.2: NOT met" in printed and "error nan" in printed
