"""Compare our attention in vLLM with vLLM's own: decode steps, full memory and prompts.

python -m benchmarks.vllm_attention [--model qwen3-vl-8b] [--attention auto,fp8,standard,...]
    [--contexts 2048,32768,131072] [--full 32768] [--prompts]

An attention is one of vLLM's KV cache dtypes, or one of our policies. Each runs in its own
processes, with random weights. vLLM and a GPU are required.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, get_args

from benchmarks.random_model import FAMILIES, RANDOM_MODELS, Released
from benchmarks.record import Record, Row, command, device_name, finish, merge_rows, parser, show
from benchmarks.vllm_process import (
    CHILD,
    rows_of_child,
    vllm_versions,
    waiting_worker,
    write_rows,
)
from oscar_mm.policy import KVPolicy
from oscar_mm.vllm_plugin import additional_config

_TOKENS = 264
_BEGUN = 4
"""Number of tokens to generate for each sequence before steps are timed."""
_SECONDS = 6.0
"""Seconds of timed steps after which a run ends, for attention that is slow."""
_WARM = 32
"""Number of tokens to generate once before steps are timed."""
_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, *range(40, 129, 8), *range(144, 257, 16))
"""Batch sizes for which vLLM captures CUDA graphs of a step."""
_FEW_SIZES = _SIZES[:4]
"""Such batch sizes if memory is not filled."""
_FURTHER = 1024
"""Number of tokens beyond the longest context for which vLLM's cache has room."""
_READ_AT_ONCE = 8192
_PROMPT, _HIT, _LONG = 8192, 7168, 32768
_LAST_ID = 150_000
_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 128,
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*mlp\\.gate$"],
}
"""Configuration of INT4 weights as compressed-tensors stores them; vLLM makes random weights."""
NOTES = [
    "The decoder of the model alone, with vLLM's random weights. vLLM decodes by CUDA graphs "
    "without torch.compile.",
    "one sequence, full memory: caches are filled with random values, nothing is read; a step is "
    "from one token on the host to the next, once each sequence has some. full memory: as many "
    "sequences as vLLM's cache has room for. The prompts of hybrid models are read instead.",
    f"prompt: milliseconds to the first token, median of 5: {_PROMPT:,} tokens; as many, of which "
    f"the first {_HIT:,} were read before; {_LONG:,} tokens, in pieces of {_READ_AT_ONCE:,}.",
]
BOUNDS = (
    ("capacity", "auto", "standard", 5.6),
    ("capacity", "auto", "standard:bits=2", 6.8),
    ("capacity", "auto", "standard:bits=4/2", 4.7),
    ("one sequence 2048", "auto", "standard", 1.0),
    ("one sequence 131072", "auto", "standard", 1.4),
    ("full memory 32768", "auto", "standard", 4.0),
    ("full memory 32768", "fp8", "standard", 2.7),
    ("full memory 131072", "auto", "standard", 5.0),
    ("full memory 131072", "fp8", "standard", 3.3),
    (f"prompt {_PROMPT}", "auto", "standard", 1 / 1.05),
    (f"prompt {_PROMPT}, {_HIT} known", "auto", "standard", 1 / 1.1),
)
"""Bounds for Qwen3-VL-8B: the measurement, vLLM's attention, our attention, and the required
ratio."""
_MIXTURE_BOUNDS = (("full memory 32768", "auto", "standard", 3.5),)


def model_folder(name: str, folder: Path) -> Path:
    """Write the config.json of a released model's decoder to a folder, and return the folder.

    vLLM has no class for the decoder of a hybrid model alone, so that model is complete.
    """
    text, weights = RANDOM_MODELS[name].text, RANDOM_MODELS[name].weights
    if is_hybrid(name):
        return _hybrid_folder(RANDOM_MODELS[name], folder)
    kind = "qwen3_moe" if "num_experts" in text else "qwen3"
    architecture = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[kind]
    rope = {"rope_type": "default", "rope_theta": text["rope_parameters"]["rope_theta"]}
    config = text | {
        "architectures": [architecture],
        "model_type": kind,
        "rope_parameters": rope,
        "dtype": "bfloat16",
        "norm_topk_prob": True,
        **({"quantization_config": _INT4} if weights == "int4" else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _hybrid_folder(released: Released, folder: Path) -> Path:
    model_class, config, processor = FAMILIES[released.family](released)
    config.architectures, config.dtype = [model_class.__name__], "bfloat16"
    config.text_config.mamba_ssm_dtype = "float32"  # as released, and as our cache has states
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def is_hybrid(name: str) -> bool:
    """Return whether some layers of a released model have states instead of keys and values."""
    return "linear_num_value_heads" in RANDOM_MODELS[name].text


def engine_options(
    attention: str,
    folder: Path,
    longest: int,
    *,
    filled: bool,
    weights: str | None = None,
    hybrid: bool = False,
    sizes: Sequence[int] = _SIZES,
) -> dict[str, Any]:
    """Return arguments for ``vllm.LLM``.

    Args:
        attention: one of vLLM's KV cache dtypes, or one of our policies.
        folder: folder of the model.
        longest: maximum number of tokens of a context.
        filled: True to time decoding with a cache of random values, False to time prompts.
        weights: format of the weights: "fp8", to which vLLM quantizes them; "int4", which
            the configuration of ``model_folder`` says; None for 16 bits.
        hybrid: whether the model has states. vLLM has no connector that fills them.
        sizes: batch sizes for which vLLM captures CUDA graphs.
    """
    options: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": longest + _FURTHER,
        "max_num_seqs": max(sizes),
        "max_num_batched_tokens": _READ_AT_ONCE,
        "gpu_memory_utilization": 0.92,
        "disable_log_stats": True,
        "enable_prefix_caching": not filled,
        "enable_flashinfer_autotune": False,
        "additional_config": {},
    }
    if is_ours(attention):
        options["attention_backend"] = "CUSTOM"
        options["additional_config"] |= additional_config(attention)
    else:
        options["kv_cache_dtype"] = attention
    if weights == "fp8":
        options["quantization"] = weights
    if hybrid:
        options["limit_mm_per_prompt"] = {"image": 0, "video": 0}
        if find_spec("flashinfer") is None:  # vLLM takes it without asking, on a Hopper GPU.
            options["additional_config"] |= {"gdn_prefill_backend": "triton"}
    if not filled:
        return options | {"enforce_eager": True}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [*sizes]}
    options["compilation_config"] = graphs
    if not hybrid:
        connector = {"kv_connector": "FilledCache", "kv_role": "kv_both"}
        connector["kv_connector_module_path"] = "benchmarks.filled_cache"
        options["kv_transfer_config"] = connector
    return options


def is_ours(attention: str) -> bool:
    """Return whether an attention is one of our policies."""
    return attention.partition(":")[0] in KVPolicy.preset_names()


def missing(attention: str) -> str | None:
    """Return why the installed vLLM cannot run an attention; None if it can."""
    if is_ours(attention) or attention == "auto":
        return None
    from vllm.config.cache import CacheDType

    if attention in get_args(CacheDType):
        return None
    return (
        f"vLLM {version('vllm')} has no KV cache dtype {attention}; "
        f"it has {', '.join(get_args(CacheDType))}"
    )


def tokens_of(count: int, seed: object) -> list[int]:
    """Return ``count`` random token ids."""
    generator = random.Random(str(seed))
    return [generator.randrange(5, _LAST_ID) for _ in range(count)]


def decode(
    engine: Any, prompts: Sequence[list[int]], tag: str, tokens: int = _TOKENS
) -> dict[str, float]:
    """Decode several sequences together; return milliseconds per step and tokens per second.

    Args:
        engine: vLLM's engine.
        prompts: token ids of each sequence.
        tag: name of the run, which no other run of this engine has.
        tokens: number of tokens to generate for each sequence.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=tokens,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{tag}-{index}", {"prompt_token_ids": prompt}, params.clone())
    lengths: Counter[str] = Counter()
    marks: list[tuple[float, int, int]] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        for output in outputs:
            lengths[output.request_id] += len(output.outputs[0].token_ids)
        least, all_tokens = min(lengths.values(), default=0), sum(lengths.values())
        timed = len(lengths) == len(prompts) and least >= _BEGUN
        if outputs and timed and max(lengths.values()) < tokens:
            marks.append((perf_counter(), least, all_tokens))
            if len(marks) > 1 and marks[-1][0] - marks[0][0] > _SECONDS:
                engine.abort_request(list(lengths))
    (start, first, before), (stop, last, after) = marks[0], marks[-1]
    seconds = stop - start
    return {
        "ms": 1e3 * seconds / (last - first),
        "tokens_per_s": (after - before) / seconds,
    }


def decode_rows(engine: Any, contexts: Sequence[int], full: Sequence[int]) -> Iterator[Row]:
    """Yield rows of decoding: a single sequence for each context, then full memory."""
    cache = engine.vllm_config.cache_config
    capacity = getattr(cache, "kv_cache_size_tokens", None)
    capacity = capacity or cache.num_gpu_blocks * cache.block_size
    yield {"what": "capacity", "tokens": capacity, "blocks": cache.num_gpu_blocks}
    decode(engine, [tokens_of(256, 0)], "warm", _WARM)
    for context in contexts:
        if context + _TOKENS < capacity:
            prompt = [tokens_of(context, 1)]
            decode(engine, prompt, f"warm-{context}", _WARM)  # It may compile kernels.
            found = decode(engine, prompt, f"{context}")
            yield {"what": f"one sequence {context}", "sequences": 1, **found}
    for context in full:
        count = min(capacity // (context + 2 * cache.block_size + _TOKENS), max(_SIZES))
        if count:
            prompts = [tokens_of(context, (2, index)) for index in range(count)]
            found = decode(engine, prompts, f"full-{context}")
            yield {"what": f"full memory {context}", "sequences": count, **found}


def flash_attention_of_turboquant() -> None:
    """Let TurboQuant run where vLLM has FlashAttention 3 alone.

    vLLM demands FlashAttention 2 for the layers that TurboQuant leaves in 16 bits. Decoding works
    with 3 as well, which vLLM takes for these layers with every other cache.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    if is_fa_version_supported(2):
        return
    create = EngineArgs.create_engine_config

    def with_version_3(*args: Any, **kwargs: Any) -> Any:
        config = create(*args, **kwargs)
        config.attention_config.flash_attn_version = 3
        return config

    EngineArgs.create_engine_config = with_version_3


def prompt_rows(llm: Any) -> Iterator[Row]:
    """Yield rows with the times to the first token of prompts."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1, detokenize=False)

    def read(prompt: list[int]) -> float:
        start = perf_counter()
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return 1e3 * (perf_counter() - start)

    known = tokens_of(_HIT, "known")
    cases = {
        f"prompt {_PROMPT}": ([], _PROMPT),
        f"prompt {_PROMPT}, {_HIT} known": (known, _PROMPT - _HIT),
        f"prompt {_LONG}": ([], _LONG),
    }
    for what, (beginning, new) in cases.items():
        prompts = [beginning + tokens_of(new, (what, number)) for number in range(6)]
        _, *times = map(read, prompts)
        yield {"what": what, "sequences": 1, "ms": median(times)}


def child(spec: dict[str, Any]) -> None:
    """Measure one attention, and write a line of JSON to a file for each row.

    For an attention that the installed vLLM lacks, the only row is an error.
    """
    if error := missing(spec["attention"]):
        write_rows(spec["rows"], with_error(spec, [], error))
        return
    from vllm import LLM

    folder = model_folder(spec["model"], Path(spec["folder"]))
    filled = not spec["prompts"]
    longest = max([*spec["contexts"], *spec["full"], _LONG])
    weights, hybrid = RANDOM_MODELS[spec["model"]].weights, is_hybrid(spec["model"])
    sizes = _SIZES if spec["full"] else _FEW_SIZES
    if spec["attention"].startswith("turboquant_"):
        flash_attention_of_turboquant()
    how = {"filled": filled, "weights": weights, "hybrid": hybrid, "sizes": sizes}
    options = engine_options(spec["attention"], folder, longest, **how)
    llm = LLM(**options, **waiting_worker(spec))
    engine: Any = llm.llm_engine
    rows = decode_rows(engine, spec["contexts"], spec["full"]) if filled else prompt_rows(llm)
    common = {"model": spec["model"], "attention": spec["attention"]}
    write_rows(spec["rows"], (common | row for row in rows))


def with_error(spec: dict[str, Any], rows: list[Row], error: str | None) -> list[Row]:
    """Return the rows of a child process, and one more with its error, if any."""
    if error is None:
        return rows
    common = {"model": spec["model"], "attention": spec["attention"]}
    return [*rows, common | {"what": "prompts" if spec["prompts"] else "decode", "error": error}]


def measured(spec: dict[str, Any], seconds: float) -> list[Row]:
    """Return the rows of a child process; if it fails or times out, the last row is an error."""
    return with_error(spec, *rows_of_child("benchmarks.vllm_attention", spec, seconds))


def bounds(rows: Iterable[Row]) -> Iterator[tuple[str, float, float]]:
    """Yield the bounds: a description of the comparison, our ratio, and the required ratio."""
    figures: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if "error" not in row:
            figure = row.get("tokens") or row.get("tokens_per_s") or 1e3 / row["ms"]
            figures[row["model"], row["attention"], row["what"]] = figure
    for model in dict.fromkeys(model for model, _, _ in figures):
        if is_hybrid(model):  # Its bound is our own engine's; see benchmarks.md.
            continue
        wanted = _MIXTURE_BOUNDS if "num_experts" in RANDOM_MODELS[model].text else BOUNDS
        for what, theirs, ours, least in wanted:
            pair = [figures.get((model, name, what)) for name in (ours, theirs)]
            if pair[0] and pair[1]:
                yield f"{model}, {what}: {ours} / {theirs}", pair[0] / pair[1], least


def report(rows: Sequence[Row]) -> None:
    """Print a table and verdicts."""
    columns = ("attention", "what", "sequences", "ms", "tokens/s", "capacity")

    def line(row: Row) -> tuple[str, ...]:
        if "error" in row:
            return row["attention"], f"{row['what']}: {row['error']}", "", "", "", ""
        ms, speed, capacity = row.get("ms"), row.get("tokens_per_s"), row.get("tokens")
        return (
            *(row["attention"], row["what"], str(row.get("sequences", ""))),
            "" if ms is None else f"{ms:.2f}",
            "" if speed is None else f"{speed:.1f}",
            "" if capacity is None else f"{capacity:,}",
        )

    show("Attention in vLLM", columns, map(line, rows))
    for what, found, least in bounds(rows):
        verdict = "met" if found >= least else "NOT met"
        print(f"{what}: {found:.2f}, at least {least:.2f}: {verdict}")


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark: measure, print and record; return the exit code, 1 if a run failed."""
    if list(arguments[:1]) == [CHILD]:
        child(json.loads(arguments[1]))
        return 0
    options_parser = parser("benchmarks.vllm_attention", __doc__)
    options_parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = options_parser.add_argument
    add("--model", default="qwen3-vl-8b", choices=list(RANDOM_MODELS))
    add(
        "--attention",
        default="auto,fp8,standard",
        help='attentions, separated by commas, or by ";"',
    )
    add(
        "--contexts",
        default="2048,32768,131072",
        help="tokens of a single sequence, comma-separated",
    )
    add("--full", default="32768", help="contexts at full memory, comma-separated")
    add("--prompts", action="store_true", help="also time prompts")
    add("--limit", type=float, default=170.0, help="time limit of a process, in seconds")
    add("--add", action="store_true", help="keep the file's rows of other runs")
    options = options_parser.parse_args(arguments)
    contexts, full = (
        [int(x) for x in text.split(",") if x] for text in (options.contexts, options.full)
    )
    line = command("benchmarks.vllm_attention", arguments)
    record = Record(
        "vllm_attention", line, device_name("cuda"), [], NOTES, versions=vllm_versions()
    )
    if options.add and (earlier := record.earlier(options.out)) is not None:
        record = record.continuing(earlier)
    earlier_rows, rows = record.rows, list[Row]()
    # Semicolons separate policies that have several changes, because these contain commas.
    for attention in options.attention.split(";" if ";" in options.attention else ","):
        spec = {"model": options.model, "attention": attention, "contexts": contexts, "full": full}
        for prompts in (False, True) if options.prompts else (False,):
            rows += measured(spec | {"prompts": prompts}, options.limit)
            record.rows = merge(earlier_rows, rows)
            record.write(options.out)  # Keep the results even if the run is interrupted.
    report(record.rows)
    finish(record, options.out)
    return int(any("error" in row for row in rows))


def merge(rows: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Merge rows; new figures replace old figures, and old errors of repeated runs are dropped."""
    again = {(row["model"], row["attention"]) for row in new}
    kept = [x for x in rows if "error" not in x or (x["model"], x["attention"]) not in again]
    return merge_rows(kept, new, ("model", "attention", "what"), lambda row, old: True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
