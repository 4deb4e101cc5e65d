"""Run the Python of README, docs/, docstrings and notebooks as it is written.

The snippets of a page are one program, from top to bottom. Hub ids are found in a cache whose
repositories hold bundled models and tiny checkpoints; files that snippets name are made first.
"""

import ast
import asyncio
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEDIA = ROOT / "examples" / "media"
FILES = {
    "cards/01.png": ("a.png", "before.png", "page.png", "report/1.png"),
    "cards/02.png": ("b.png", "after.png"),
    "cards/03.png": ("c.png",),
    "receipt.jpg": ("receipt.jpg",),
    "clips/01.wav": ("call.wav",),
}
"""Names in snippets of our media."""
REPOSITORIES = {
    "Qwen/Qwen3-VL-8B-Instruct": "pocket-vl",
}
"""Bundled models in place of released ones."""
OMNI = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
"""A released model that speaks, unlike the bundled ones; a tiny checkpoint replaces it."""
HYBRID = "Qwen/Qwen3.5-9B"
"""A released model with a draft module."""
DOCUMENTED = {
    "Chat": "oscar_mm.chat.chat",
    "OscarCache": "oscar_mm",
    "OscarOmniPipeline": "oscar_mm",
    "OscarVLPipeline": "oscar_mm",
    "Pipeline.batch": "oscar_mm.pipelines.pipeline",
}
"""Objects whose docstrings have a snippet, and their modules."""


def pages() -> dict[str, str]:
    """The program of each page that has Python, by the name of its file."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    programs = {str(path.relative_to(ROOT)): python_of(path.read_text()) for path in paths}
    return {name: program for name, program in programs.items() if program}


def python_of(page: str) -> str:
    """The Python blocks of a page, one after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))


def notebooks() -> dict[str, str]:
    """The program of each notebook, by the name of its file."""
    programs = {}
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        programs[str(path.relative_to(ROOT))] = "\n".join(sources)
    return programs


def docstrings() -> dict[str, str]:
    """The program in each docstring of ``DOCUMENTED``, with the names that it takes for granted."""
    given = (
        "from oscar_mm import *\nimport transformers\n"
        'pipe = OscarVLPipeline("Qwen/Qwen3-VL-8B-Instruct")\n'
        'model = transformers.AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")\n'
        'inputs = transformers.AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")("Why?", '
        'return_tensors="pt")\n'
    )
    programs = {}
    for name, module in DOCUMENTED.items():
        value: Any = sys.modules.get(module) or __import__(module, fromlist=["_"])
        for part in name.split("."):
            value = getattr(value, part)
        text = inspect.getdoc(value) or ""
        _, _, rest = text.partition("::\n\n")
        block = re.match(r"(?: {4}.*\n|\n)+", rest + "\n")
        assert block, f"{name} has no snippet"
        programs[f"{module}.{name}"] = given + textwrap.dedent(block[0])
    return programs


def make_hub(cache: Path, text_model: Path, template: str) -> None:
    """Make a hub cache with the repositories that snippets name; models of it can call tools."""
    from oscar_mm.models import bundled
    from tests.checkpoints import build
    from tests.draft_weights import with_drafts

    for name, model in REPOSITORIES.items():
        snapshot = snapshot_of(cache, name)
        shutil.copytree(bundled(model), snapshot)
        if model == "pocket-vl":
            (snapshot / "chat_template.jinja").write_text(template)
    shutil.copytree(text_model, snapshot_of(cache, "Qwen/Qwen3-0.6B"))
    build("qwen3_omni_talker", snapshot_of(cache, OMNI))
    build("qwen3_5", cache / "qwen3_5")
    with_drafts(cache / "qwen3_5", snapshot_of(cache, HYBRID))


def snapshot_of(cache: Path, name: str) -> Path:
    """The folder of a repository's only revision, which "main" names."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return repository / "snapshots" / ("0" * 40)


def make_files(folder: Path) -> None:
    """Make the files that snippets name, in a folder."""
    import av
    import numpy as np

    (folder / "report").mkdir()
    for source, names in FILES.items():
        for name in names:
            shutil.copy(MEDIA / source, folder / name)
    (folder / "examples").symlink_to(ROOT / "examples")
    with av.open(str(folder / "film.mp4"), "w") as film:
        stream = film.add_stream("mpeg4", rate=2)
        stream.width = stream.height = 64
        for number in range(200):
            pixels = np.full((64, 64, 3), number, np.uint8)
            film.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        film.mux(stream.encode())


def make_adapter(folder: Path) -> None:
    """Save a LoRA adapter of the released model that snippets name."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained("Qwen/Qwen3-VL-8B-Instruct")
    targets = r".*language_model.*\.(q_proj|v_proj)"
    get_peft_model(model, LoraConfig(r=4, target_modules=targets)).save_pretrained(folder)


def run(program: str, name: str) -> None:
    """Run a program, which may await at its top level, as notebooks do."""
    code = compile(program, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, namespace))
    else:
        exec(code, namespace)


def main(folder: Path, results: Path) -> None:
    """Run all programs in a folder, and write the error of each, or null, to a file."""
    from oscar_mm import OscarOmniPipeline
    from oscar_mm.apps.serve.server import create_app
    from oscar_mm.apps.serve.service import ServerLimits
    from tests.apps.serve.conftest import started

    os.chdir(folder)
    make_files(folder)
    make_adapter(folder / "my-lora")
    shutil.copytree(folder / "my-lora", folder / "medical-lora")
    errors: dict[str, str | None] = {}
    app = create_app(OscarOmniPipeline(OMNI), OMNI, ServerLimits(max_new_tokens=64))
    with started(app) as (_, address):
        for name, program in {**pages(), **docstrings(), **notebooks()}.items():
            try:
                with redirect_stdout(sys.stderr):
                    run(program.replace("http://127.0.0.1:8000", address), name)
                errors[name] = None
            except BaseException as error:
                errors[name] = f"{type(error).__name__}: {error}"
    results.write_text(json.dumps(errors))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
