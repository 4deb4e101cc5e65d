"""INT4 and FP8 as the package compressed-tensors writes them, and configurations that are refused.

``tests/pipelines/test_quantized_checkpoints.py`` compares all formats with numbers by hand.
"""

import pytest
import torch

from oscar_mm.weights.checkpoint_formats import formats_of
from tests.quantized_checkpoints import AWQ, FP8, GPTQ, INT4, compressed_tensors

BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
SCHEMES = {
    "int4": ("pack-quantized", INT4),
    "int4 channel": ("pack-quantized", INT4 | {"strategy": "channel", "group_size": None}),
    "int4 asymmetric": ("pack-quantized", INT4 | {"symmetric": False}),
    "fp8 tensor": ("float-quantized", FP8 | {"strategy": "tensor"}),
    "fp8 channel": ("float-quantized", FP8 | {"strategy": "channel"}),
    "fp8 block": ("float-quantized", FP8 | BLOCKS),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_what_compressed_tensors_writes(name) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    kind, weights = SCHEMES[name]
    outputs, width = 131, 384
    shapes = {"tensor": (1,), "channel": (outputs, 1), "group": (outputs, 12), "block": (2, 3)}
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(outputs, width, generator=generator)
    scale = torch.rand(shapes[weights["strategy"]], generator=generator) / 4 + 0.2
    state = {"weight": dense, "weight_scale": scale.to(torch.bfloat16)}
    if not weights["symmetric"]:
        zeros = torch.randint(-8, 8, scale.shape, generator=generator)
        state["weight_zero_point"] = zeros.to(torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    (found,) = formats_of(compressed_tensors(weights, kind))
    found.check(stored, outputs, width)
    matrix, permutation = found.matrix(stored, outputs, width)
    assert permutation is None
    torch.testing.assert_close(
        matrix.dequantized(torch.float32), expected.float(), rtol=0.01, atol=0
    )


def ct(kind: str = "pack-quantized", weights: dict = INT4, **fields) -> dict:
    return compressed_tensors(weights, kind, **fields)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (["gptq"], "quantization_config must be a dict, not list"),
        (GPTQ | {"bits": 8}, r"quantization_config.bits is 8; supported: 4"),
        (GPTQ | {"bits": None}, r"quantization_config.bits is None; supported: 4"),
        (GPTQ | {"bits": [4] * 1000}, r"quantization_config.bits is \[4, 4.{0,80}; supported: 4"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported: gptq"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True; supported: False"),
        (GPTQ | {"dynamic": {"+:.*q_proj": {"bits": 8}}}, r"dynamic.\+:.*q_proj.bits is 8"),
        (GPTQ | {"dynamic": [1]}, "quantization_config.dynamic must be a dict, not list"),
        (AWQ | {"bits": 3}, "quantization_config.bits is 3"),
        (AWQ | {"version": "gemv"}, "quantization_config.version is 'gemv'; supported: gemm"),
        (AWQ | {"zero_point": False}, "quantization_config.zero_point is False; supported: True"),
        (ct("nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'; supported: pack-quant"),
        (ct("marlin-24"), "format is 'marlin-24'"),
        (ct(weights=INT4 | {"num_bits": 8}), "group_0.weights.num_bits is 8; supported: 4"),
        (ct(weights=INT4 | {"type": "float"}), "group_0.weights.type is 'float'; supported: int"),
        (ct("float-quantized", FP8 | {"strategy": "group"}), "strategy is 'group'; supported: ten"),
        (
            ct("float-quantized", FP8 | {"strategy": "block", "block_structure": [64, 64]}),
            r"block_structure is \[64, 64\]; supported: None, \[128, 128\]",
        ),
        (ct(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is {'num_bits': 8}; supported: No"),
        (ct(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format is 'sparse"),
        (ct(transform_config={"config_groups": {"R1": {}}}), "transform_config is "),
        (
            ct(quantization_status="frozen"),
            "quantization_status is 'frozen'; supported: compressed",
        ),
        (ct(config_groups={}), "config_groups is empty"),
        (ct(config_groups={"W4A16": ["Linear"]}), "config_groups.W4A16 must be a dict, not list"),
        (
            ct(
                config_groups={
                    "a": {"weights": INT4},
                    "b": {"weights": INT4 | {"symmetric": False}},
                }
            ),
            "groups with and without zero points",
        ),
    ],
)
def test_configurations_that_are_refused(config, message) -> None:
    with pytest.raises(ValueError, match=message):
        formats_of(config)


@pytest.mark.parametrize("method", ["bitsandbytes", "fp9", None, 7, ["gptq"]])
def test_other_methods_are_left_to_transformers(method) -> None:
    assert formats_of({"quant_method": method}) is None


@pytest.mark.parametrize(
    "config",
    [
        ct(sparsity_config={"format": "dense", "global_sparsity": 0.1}),
        ct(transform_config={}),
        AWQ | {"version": "GEMM"},
        GPTQ | {"dynamic": {"-:.*visual.*": {}, "+:.*q_proj": {"group_size": 64}}},
    ],
)
def test_configurations_that_are_accepted(config) -> None:
    assert len(formats_of(config)) == 1
