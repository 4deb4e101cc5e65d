"""Attention "oscar" after `import oscar_mm` alone, whatever is imported first."""

import importlib.util
import inspect
import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import oscar_mm
from oscar_mm import _MODELS, _Registration
from tests.checkpoints import build_decoder
from tests.processes import Forked
from tests.test_package import run_python

LOAD = """
from transformers import AutoModelForCausalLM, AttentionInterface, AttentionMaskInterface
model = AutoModelForCausalLM.from_pretrained({folder!r}, attn_implementation="oscar")
import sys, torch
assert model.config._attn_implementation == "oscar"
assert "oscar" in AttentionInterface() and "oscar" in AttentionMaskInterface()
assert "oscar_mm.cache.cache" not in sys.modules
assert not [x for x in sys.meta_path if type(x).__module__.startswith("oscar_mm")]
"""
ANSWER = """
from oscar_mm import OscarCache
from oscar_mm.cache.cache import as_argument
cache = OscarCache("channel")
model.generate(torch.arange(3, 203)[None], **as_argument(cache), max_new_tokens=4)
"""
"""An answer of the model: it needs modules that the order of imports does not change."""
ORDERS = {
    "before transformers": "import oscar_mm",
    "after transformers": "import transformers\nimport oscar_mm",
    "after its models": "from transformers import LlamaForCausalLM\nimport oscar_mm",
    "by a part": "from oscar_mm.policy import KVPolicy",
    "loaded again": "import importlib, oscar_mm\nimportlib.reload(oscar_mm)",
    "imported anew": "import oscar_mm, sys\ndel sys.modules['oscar_mm']\nimport oscar_mm",
}
FORK = """
import gc, json, os, sys
gc.disable()
import accelerate, huggingface_hub.hf_api, scipy.optimize, tokenizers, torch, torch._dynamo
import torchvision.transforms.v2
assert not {{"transformers", "oscar_mm"}} & {{*sys.modules}}
def output(program):
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        os.dup2(writer, 1)
        exec(program, {{"__name__": "__main__"}})
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        found = file.read().strip()
    assert os.waitpid(process, 0)[1] == 0, program
    return found
print(json.dumps({{name: output(program) for name, program in {programs!r}.items()}}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("registration") / "llama"
    build_decoder("llama").save_pretrained(path)
    return path


def outputs(programs: dict[str, str]) -> dict[str, str]:
    """Return what programs print that are forked from a process with what transformers imports of
    other packages, which takes longest."""
    return json.loads(run_python(FORK.format(programs=programs), seconds=200))


@pytest.fixture(scope="module")
def printed_by_orders(folder: Path) -> dict[str, str]:
    programs = {name: order + LOAD.format(folder=str(folder)) for name, order in ORDERS.items()}
    for name in ("before transformers", "imported anew"):
        programs[name] += ANSWER
    return outputs(programs)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_in_any_order(order: str, printed_by_orders: dict[str, str]) -> None:
    assert printed_by_orders[order] == ""


def test_transformers_alone_stays_without_torch() -> None:
    """Its own laziness is not ended by ours."""
    program = "import oscar_mm, transformers, sys; print('torch' in sys.modules)"
    assert run_python(program) == "False"


def look_at_models_module() -> None:
    """In a process that imported us before transformers."""
    module, parent = sys.modules[_MODELS], sys.modules["transformers"]
    found = PathFinder.find_spec(_MODELS, parent.__path__)
    assert found is not None and found.origin == module.__file__
    assert type(module.__loader__) is type(found.loader)
    assert module.__spec__.loader is module.__loader__
    assert inspect.getsource(module) == Path(module.__file__).read_text()
    assert not [finder for finder in sys.meta_path if isinstance(finder, _Registration)]


def test_the_models_module_is_what_it_would_be_without_us() -> None:
    with Forked(look_at_models_module) as process:
        code, _, errors = process.end()
    assert code == 0, errors.decode()


def test_a_failed_import_may_be_tried_again(tmp_path: Path, monkeypatch) -> None:
    """The finder stays until the module is there, and asks the other finders for it."""
    package = tmp_path / "models_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(oscar_mm, "_MODELS", "models_of_a_test.base")
    registered = []
    monkeypatch.setattr(oscar_mm.importlib, "import_module", registered.append)
    finder = _Registration()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with pytest.raises(ZeroDivisionError):
        import models_of_a_test.base
    assert finder in sys.meta_path and not registered
    (package / "base.py").write_text("this = 'comes second'\n")
    importlib.invalidate_caches()
    found = importlib.util.find_spec("models_of_a_test.base")
    assert found.loader.get_source("models_of_a_test.base") == "this = 'comes second'\n"
    import models_of_a_test.base

    assert models_of_a_test.base.this == "comes second"
    assert finder not in sys.meta_path and registered == ["oscar_mm.attention"]
    for name in ("models_of_a_test.base", "models_of_a_test"):
        del sys.modules[name]


def test_registered_once_where_models_are_there(monkeypatch) -> None:
    assert _MODELS in sys.modules
    before = list(sys.meta_path)
    oscar_mm._register()
    assert sys.meta_path == before
    monkeypatch.delitem(sys.modules, _MODELS)
    monkeypatch.setattr(sys, "meta_path", before)
    for _ in range(2):
        oscar_mm._register()
    assert sum(isinstance(finder, _Registration) for finder in sys.meta_path) == 1


def test_from_pretrained_here(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="oscar")
    with torch.no_grad():
        assert model(torch.arange(3, 9)[None]).logits.isfinite().all()
