"""Table of what each model can do and what was tried, from the code, the tests and the records.

python -m tests.support_matrix  # writes the table into docs/models.md
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.random_model import RANDOM_MODELS
from benchmarks.record import RESULTS
from oscar_mm import InputError
from oscar_mm.engine.family import Family
from oscar_mm.fast_decode.decoder import has_decode_kernel, supports
from oscar_mm.models import bundled
from oscar_mm.pipelines.registry import find_family
from oscar_mm.pipelines.weight_formats import FORMATS, quantize
from tests.cache.test_generate import DECODERS
from tests.cache.test_other_decoders import OVERRIDES
from tests.checkpoints import BUILDERS, build
from tests.languages import build_language_model
from tests.pipelines.test_text_models import MODELS
from tests.tiny_pictures import PICTURES, build_pictures

PAGE = Path("docs") / "models.md"
BEGIN, END = "<!-- support matrix -->", "<!-- end of the support matrix -->"
_HEAD = (
    "model",
    "reads",
    "bare `OscarCache`",
    "vLLM",
    "decode kernel",
    "fused layers, CUDA graphs",
    "`weights=`",
    "full size, random weights",
    "trained weights",
)
_LANGUAGE = {"SmolLM2": "llama", "Qwen2.5-Coder": "qwen2", "Gemma-3": "gemma3_text"}
"""Beginning of a language model's name -> model type."""
_VARIANTS = ("_vicuna", "_thinking", "_talker")
"""Ends of names of tiny checkpoints of the same model type."""


def table() -> str:
    """Return the table in Markdown, after building tiny checkpoints in a temporary folder."""
    with TemporaryDirectory() as folder:
        rows = [_row(name, one) for name, one in _checkpoints(Path(folder))]
    lines = [_HEAD, ("---",) * len(_HEAD), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(text: str) -> str:
    """Return the page with a new table between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


def _checkpoints(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names of tiny checkpoints and their folders."""
    for name in BUILDERS:
        if not name.endswith(_VARIANTS):
            yield "", build(name, folder / name)
    for name in PICTURES:
        yield "", build_pictures(name, folder / name)
    for number, (name, (kind, fields)) in enumerate(MODELS.items()):
        yield name, build_language_model(kind, folder / str(number), **fields)


def _row(name: str, folder: Path) -> tuple[str, ...]:
    config = AutoConfig.from_pretrained(folder)
    family = find_family(config.model_type)
    assert family is not None
    make: Any = getattr(family.auto_class, "from_config", None) or family.auto_class._from_config
    model = family.text_part(make(config))
    devices = [x for x in ("cpu", "cuda") if has_decode_kernel(model, torch.device(x))]
    reads = sorted(modality.label for modality in family.reads) or ["text only"]
    decoder = config.get_text_config(decoder=True).model_type
    tried = _tried()[config.model_type]
    return (
        f"{name or family.name} (`{config.model_type}`)",
        ", ".join(reads),
        "tested" if decoder in {*DECODERS, *OVERRIDES} else "",
        ", ".join(sorted(tried["vllm"])),
        ", ".join(devices).upper(),
        "yes" if supports(model) else "",
        ", ".join(one for one in FORMATS if _quantizes(make(config), family, one)),
        ", ".join(sorted(tried["random"])),
        ", ".join(sorted(tried["trained"])),
    )


def _quantizes(made: Any, family: type[Family], weights: str) -> bool:
    """Whether weights can be quantized to a format while the model is loaded."""
    try:
        quantize(made, family.text_part(made).get_decoder(), weights)
    except InputError:
        return False
    return True


@cache
def _tried() -> dict[str, dict[str, set[str]]]:
    """Return model type -> "vllm", "random" or "trained" -> names of models in the records."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in RESULTS.glob("*.json"):
        text, is_vllm = path.read_text(), path.name.startswith("vllm")
        if is_vllm:  # Only rows with the plugin's pages; others are of vLLM's own caches.
            rows = json.loads(text)["rows"]
            text = json.dumps([x for x in rows if "standard" in json.dumps(x)])
        for found_name in set(re.findall(r'"model": "([^"]+)"', text)):
            # Adapters, and other weights or ways to run, make no model of its own.
            name = re.sub(r"-(lora-\d+|fp8|int4|modules)$", "", found_name)
            kind, weights = _known(name)
            found[kind]["vllm" if is_vllm else weights].add(name)
    return found


def _known(name: str) -> tuple[str, str]:
    """Return the model type of a model in a record, and whether it was "trained"."""
    if (folder := bundled(name)) is not None:
        return json.loads((folder / "config.json").read_text())["model_type"], "trained"
    for begin, kind in _LANGUAGE.items():
        if name.startswith(begin):
            return kind, "trained"
    return RANDOM_MODELS[name].family, "random"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
