"""The bytes that a decoder's step reads, and the pieces that fill its caches."""

from benchmarks.decoder import Decoder


def test_weights_that_a_step_reads(mixture: Decoder) -> None:
    """Of 8 experts, of which a token takes 2, four tokens are expected to read 68%."""
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
