"""A pipeline says at once which layers its policy breaks."""

import pytest
import torch

from oscar_mm import OscarVLPipeline


def test_a_pipeline_warns_when_it_is_made(caplog: pytest.LogCaptureFixture) -> None:
    pipe = OscarVLPipeline("pocket-vl", device="cpu")
    attention = pipe.model.get_decoder().layers[2].self_attn
    # A pair of channels 200 times as large in keys and as small in queries: the same scores.
    with torch.no_grad():
        for norm, factor in ((attention.q_norm, 1 / 200), (attention.k_norm, 200)):
            norm.weight[[5, 5 + attention.head_dim // 2]] *= factor
    assert not caplog.messages
    OscarVLPipeline(pipe.model, processor=pipe.processor)
    pipe.with_policy("compact")
    assert not caplog.messages, "balancing takes it out"
    pipe.with_policy("compact:balance=none")
    OscarVLPipeline(pipe.model, processor=pipe.processor, policy="quarot")
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert "layers.2.self_attn (" in message and message.count("self_attn") == 1
