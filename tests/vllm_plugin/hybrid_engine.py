"""Answers of vLLM's engine with our pages to prompts of token ids, for a process of its own."""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.vllm_attention import engine_options
from benchmarks.vllm_process import CHILD, write_rows
from oscar_mm.vllm_plugin import register


def answers(spec: dict[str, Any]) -> None:
    """Write a row with the tokens, and their log-probabilities, of each prompt of a batch.

    Args:
        spec: "model", a checkpoint; "policy"; "prompts", lists of token ids; "tokens" of an answer;
            "drafts" of a step; "rows", a file.
    """
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    register()
    options = engine_options(
        spec["policy"], Path(spec["model"]), 2048, filled=True, hybrid=True, sizes=(1, 2, 4, 8, 16)
    )
    options |= {
        "load_format": "auto",
        "dtype": "float16",
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 2**29,
    }
    if spec["drafts"]:
        drafts = {"method": "mtp", "num_speculative_tokens": spec["drafts"]}
        options["speculative_config"] = drafts | {"attention_backend": "CUSTOM"}
    sampling = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=spec["tokens"], detokenize=False, logprobs=0
    )
    prompts = [{"prompt_token_ids": ids} for ids in spec["prompts"]]
    found = [x.outputs[0] for x in LLM(**options).generate(prompts, sampling, use_tqdm=False)]
    write_rows(
        spec["rows"],
        (
            {
                "tokens": list(x.token_ids),
                "logprobs": [
                    step[token].logprob for step, token in zip(x.logprobs, x.token_ids, strict=True)
                ],
            }
            for x in found
        ),
    )


if __name__ == "__main__" and sys.argv[1:2] == [CHILD]:
    answers(json.loads(sys.argv[2]))
