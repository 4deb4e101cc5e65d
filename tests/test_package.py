"""The package: what importing costs, what it exports, and that pyproject.toml names every part."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import oscar_mm
from oscar_mm.models import BUNDLED
from tests.processes import Forked

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
PARTS = {"oscar_mm": "oscar_mm", "pipelines": "oscar_mm.pipelines", "apps": "oscar_mm.apps"}


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["oscar_mm", "oscar_mm.cli"])
def test_import_leaves_torch_alone(module: str) -> None:
    program = (
        f"import sys, time; start = time.perf_counter(); import {module}; "
        "print(time.perf_counter() - start, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    seconds, torch_there, transformers_there = run_python(program).split()
    assert (torch_there, transformers_there) == ("False", "False")
    assert float(seconds) < 1


@pytest.mark.parametrize("name", oscar_mm.__all__)
def test_every_exported_name_resolves(name: str) -> None:
    value = getattr(oscar_mm, name)
    assert name == "__version__" or value.__name__ == name
    assert name in dir(oscar_mm)


def print_what_a_star_imports() -> None:
    print(*(name for name in oscar_mm.__all__ if hasattr(sys.modules["tests.imported"], name)))


def test_star_import_and_unknown_name() -> None:
    # What such processes have imported, which the star was the first of, in a process of its own.
    with Forked(print_what_a_star_imports) as process:
        code, out, errors = process.end()
    assert (code, out.decode().split()) == (0, oscar_mm.__all__), errors.decode()
    with pytest.raises(AttributeError, match="module 'oscar_mm' has no attribute 'Oskar'"):
        oscar_mm.Oskar  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    source = (ROOT / "oscar_mm" / "__init__.py").read_text()
    typed = source.partition("if TYPE_CHECKING:\n")[2].partition("\n\n")[0]
    for name in set(oscar_mm.__all__) - {"__version__"}:
        home = oscar_mm._HOME[name]
        assert any(
            line.startswith(f"    from {home} import ") and name in line.split()
            for line in typed.replace(",", "").splitlines()
        ), f"{name} is not imported from {home} under TYPE_CHECKING"


def test_pyproject_lists_every_package() -> None:
    found = {"oscar_mm.csrc"}
    for folder, package in PARTS.items():
        for module in (ROOT / folder).rglob("*.py"):
            inner = module.parent.relative_to(ROOT / folder).parts
            assert (module.parent / "__init__.py").is_file(), f"{module.parent} has no __init__.py"
            found.add(".".join([package, *inner]))
    assert set(SETUPTOOLS["packages"]) == found


def test_models_are_shipped() -> None:
    models = ROOT / "oscar_mm" / "models"
    files = [path for path in models.rglob("*") if path.is_file() and path.suffix != ".py"]
    files = [path.relative_to(models) for path in files if "__pycache__" not in path.parts]
    assert {path.parts[0] for path in files} == set(BUNDLED)
    shipped = {
        path
        for pattern in SETUPTOOLS["package-data"]["oscar_mm.models"]
        for path in models.glob(pattern)
    }
    assert {models / path for path in files} == shipped


def test_data_files_are_shipped() -> None:
    shipped = SETUPTOOLS["package-data"]
    assert (ROOT / "oscar_mm" / "py.typed").is_file()
    assert "py.typed" in shipped["oscar_mm"]
    kernels = [path for path in (ROOT / "csrc").iterdir() if path.is_file()]
    assert kernels
    for path in kernels:
        assert any(path.match(pattern) for pattern in shipped["oscar_mm.csrc"]), path
