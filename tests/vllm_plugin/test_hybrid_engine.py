"""A hybrid model in vLLM's engine on a GPU, against plain transformers."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration

from benchmarks.vllm_process import rows_of_child
from tests.draft_weights import with_drafts
from tests.tiny_qwen3_5 import qwen3_5

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

EXACT = "standard:window=128,sinks=64"
LENGTHS = (5, 115, 160)
"""Numbers of tokens that the window and the sinks of ``EXACT`` have in 16 bits, also with answers;
one answer begins a page."""
MARGIN = 0.5
"""Difference of log-probabilities that rounding to float16 may cause. Without attention, those of
the same tokens differ by 20."""


@pytest.mark.parametrize("drafts", [0, 2])
def test_answers_are_those_of_transformers(
    drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen3_5(
        tmp_path / "model",
        seed=0,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=8,
        layer_types=[*["linear_attention"] * 3, "full_attention"] * 2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1,
    )
    folder = with_drafts(tmp_path / "model", tmp_path / "with_drafts")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 490, (n,), generator=generator).tolist() for n in LENGTHS]
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_TRITON_FORCE_FIRST_CONFIG", "1")  # Autotuning takes a minute.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    spec = {"model": str(folder), "policy": EXACT, "drafts": drafts, "prompts": prompts}
    spec["tokens"] = 24
    rows, error = rows_of_child("tests.vllm_plugin.hybrid_engine", spec, 200)
    assert error is None
    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    for prompt, row in zip(prompts, rows, strict=True):
        tokens = torch.tensor(row["tokens"])
        with torch.inference_mode():
            ids = torch.tensor([prompt + row["tokens"]])
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        own = expected.gather(1, tokens[:, None])[:, 0]
        assert (expected.amax(1) - own).max() < MARGIN
        assert (own - torch.tensor(row["logprobs"])).abs().max() < MARGIN
