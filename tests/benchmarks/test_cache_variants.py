"""What a decoder's step reads; random caches report their bytes, and steps attend to tokens."""

import pytest
import torch

from benchmarks.cache_variants import VARIANTS, Decoder, FilledCache
from oscar_mm import KVPolicy
from oscar_mm.compare.methods import not_installed
from oscar_mm.policy import PLAIN, Bits

ROWS, TOKENS, STEPS = 2, 300, 6


def test_weights_that_a_step_reads(mixture: Decoder) -> None:
    """Four tokens, each of which uses 2 of 8 experts, are expected to read 68% of them."""
    parts = dict(mixture.model.named_parameters())
    experts = sum(weight.nbytes for name, weight in parts.items() if ".experts." in name)
    unread = ("visual", "embed_tokens")
    dense = sum(x.nbytes for n, x in parts.items() if not any(part in n for part in unread))
    dense -= experts
    assert mixture.weights(1) == dense + experts / 4
    assert abs(mixture.weights(4) - dense - experts * (1 - 0.75**4)) < 1


def test_pieces(decoder: Decoder) -> None:
    """64 Mi elements at a time, of 1 KV head of 128 channels: 524,288 tokens of one row."""
    assert list(decoder.pieces(1, 1000, 512)) == [(0, 1000)]
    assert list(decoder.pieces(8, 100_000, 512)) == [(0, 65536), (65536, 100_000)]
    assert list(decoder.pieces(1 << 20, 1200, 512)) == [(0, 512), (512, 1024), (1024, 1200)]


def test_bytes_of_a_token(decoder: Decoder) -> None:
    assert decoder.token_bytes == 2 * 2 * 1 * 128 * 2


def fill(decoder: Decoder, name: str) -> FilledCache:
    variant = VARIANTS[name]
    decoder.model.set_attn_implementation({"text_config": variant.attention})
    return variant.fill(decoder, ROWS, TOKENS, STEPS)


def logits(decoder: Decoder, run: FilledCache) -> torch.Tensor:
    """Logits of all steps, (STEPS, rows, vocabulary)."""
    steps = []
    for step in range(STEPS):
        tokens = torch.arange(ROWS) + step
        steps.append(run.step(tokens, torch.zeros(ROWS, dtype=torch.bool)).float())
    return torch.stack(steps)


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> torch.Tensor:
    with torch.inference_mode():
        return logits(decoder, fill(decoder, "dynamic"))


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", ["bf16-eager", "bf16-graph"])
def test_ours_in_16_bit_steps_as_dynamic_cache(
    decoder: Decoder, expected: torch.Tensor, name: str
) -> None:
    with torch.inference_mode():
        run = fill(decoder, name)
        assert error(logits(decoder, run), expected) < 0.01
    assert bool(run.captures) == VARIANTS[name].graph


@pytest.mark.slow
def test_static_cache_compiled(decoder: Decoder, expected: torch.Tensor) -> None:
    with torch.no_grad():
        run = fill(decoder, "static-compiled")
        assert error(logits(decoder, run), expected) < 0.01
    assert run.kv_bytes() == ROWS * (TOKENS + STEPS) * decoder.token_bytes
    VARIANTS["static-compiled"].release()


@pytest.mark.parametrize("backend", ["hqq", "quanto"])
def test_quantized_cache(decoder: Decoder, expected: torch.Tensor, backend: str) -> None:
    variant = VARIANTS[f"quantized-{backend}"]
    assert variant.missing() == not_installed(backend)
    if variant.missing():
        pytest.skip(variant.missing())
    with torch.inference_mode():
        run = fill(decoder, f"quantized-{backend}")
        assert run.kv_bytes() < ROWS * TOKENS * decoder.token_bytes / 4
        assert error(logits(decoder, run), expected) < 0.5
    assert run.kv_bytes() > ROWS * STEPS * decoder.token_bytes


@pytest.mark.parametrize("policy", ["bf16", "compact"])
def test_our_pools_are_as_large_as_needed_from_the_start(decoder: Decoder, policy: str) -> None:
    variant = VARIANTS[f"{policy}-eager"]
    with torch.inference_mode():
        run = fill(decoder, f"{policy}-eager")
        before = run.kv_bytes()
        logits(decoder, run)
    # Tables grow by a token's modality for each row and step.
    assert run.kv_bytes() - before < 200
    tables = 20 * ROWS * TOKENS
    expected = ROWS * variant.row_bytes(decoder, TOKENS, STEPS)
    assert expected <= run.kv_bytes() < expected + tables


def test_slots_of_a_row() -> None:
    """4 sinks and a window of 32 leave 1,064 of 1,100 tokens; with 20 more they take 9 pages. A
    step writes one token. In 16-bit precision an answer takes 32 slots at a time."""
    policy = KVPolicy.preset("compact")
    assert (policy.sinks, policy.window) == (4, 32)
    assert VARIANTS["compact-graph"].slots(1100, 20) == {Bits(2, 2): 9, PLAIN: 4 + 32 + 1}
    assert VARIANTS["bf16-graph"].slots(1100, 20) == {PLAIN: 1100 + 32}
