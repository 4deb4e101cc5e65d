"""The package: what importing costs, what it exports, and that the wheel holds every file."""

import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import oscar_mm
from oscar_mm.models import BUNDLED
from tests.processes import Forked

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKS = ("apps", "csrc", "pipelines")
OURS = (*LINKS, "oscar_mm")
SAMPLES = ROOT / "examples" / "media"


def run_python(program: str, folder: Path = ROOT, seconds: float = 60) -> str:
    line, how = [sys.executable, "-c", program], {"capture_output": True, "text": True}
    done = subprocess.run(line, cwd=folder, timeout=seconds, **how)
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
    assert float(seconds) < 3


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


def test_the_folders_next_to_the_package_are_parts_of_it() -> None:
    assert (ROOT / "oscar_mm" / "samples").resolve() == SAMPLES
    for name in LINKS:
        assert (ROOT / "oscar_mm" / name).readlink() == Path("..", name)
        assert importlib.util.find_spec(f"oscar_mm.{name}").submodule_search_locations
    assert oscar_mm.__path__ == [str(ROOT / "oscar_mm")]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the project, as setuptools leaves files beside what it builds."""
    for name in OURS:
        hidden = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=hidden)
    shutil.copytree(SAMPLES, tmp_path / "examples" / "media")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def built(folder: Path, how: str) -> zipfile.ZipFile:
    """What a function of the build backend makes of a folder."""
    run_python(f"from setuptools import build_meta; print(build_meta.{how}('.'))", folder)
    [wheel] = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_an_editable_install_is_a_plain_path(copied: Path) -> None:
    """Type checkers follow no import hook: a script outside of the clone would lose all types."""
    with built(copied, "build_editable") as wheel:
        [path, *others] = [name for name in wheel.namelist() if ".dist-info/" not in name]
        assert not others and path.endswith(".pth")
        assert wheel.read(path).decode().split() == [str(copied)]


@pytest.mark.slow
def test_the_wheel_holds_every_file(copied: Path) -> None:
    with built(copied, "build_wheel") as wheel:
        found = {name for name in wheel.namelist() if name.startswith("oscar_mm/")}
    there = set()
    for name in OURS:
        inner = "oscar_mm" if name == "oscar_mm" else f"oscar_mm/{name}"
        files = [path for path in (ROOT / name).rglob("*") if path.is_file()]
        files = [path.relative_to(ROOT / name) for path in files if "__pycache__" not in path.parts]
        there |= {f"{inner}/{path.as_posix()}" for path in files}
        assert all(
            (ROOT / name / path).with_name("__init__.py").is_file()
            for path in files
            if path.suffix == ".py"
        ), name
    samples = {path.name for path in SAMPLES.glob("*.json*")}
    samples |= {f"{path.parent.name}/{path.name}" for path in SAMPLES.glob("c*s/*.*")}
    there |= {f"oscar_mm/samples/{name}" for name in samples}
    assert (
        len(samples) == 32
        and found == there
        and {Path(name).suffix for name in there} > {".py", ".cu", ".cuh", ".css"}
    )
    models = {Path(name).parts[2] for name in there if name.startswith("oscar_mm/models/pocket")}
    assert models == set(BUNDLED)


def requirements(extra: str | None = None) -> list[Requirement]:
    """Those of the package, or of an extra with the extras that it takes in."""
    project = PROJECT["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    found = []
    for one in map(Requirement, lines):
        if one.name == "oscar-mm":
            for other in one.extras:
                found += requirements(other)
        else:
            found.append(one)
    return found


@pytest.mark.parametrize(
    ("extra", "package", "with_holes"),
    [
        (None, "pillow", "12.2.0"),
        ("demo", "av", "17.0.1"),
        ("serve", "av", "17.0.1"),
        ("demo", "soundfile", "0.12.1"),
        ("audio", "soundfile", "0.12.1"),
        ("batch", "ray", "2.55.1"),
        ("demo", "starlette", "1.0.0"),
        ("demo", "python-multipart", "0.0.29"),
        ("serve", "starlette", "1.0.0"),
        ("serve", "h11", "0.14.0"),
        ("serve", "soundfile", "0.12.1"),
        ("test", "starlette", "1.0.0"),
    ],
)
def test_versions_with_known_holes_are_not_installed(
    extra: str | None, package: str, with_holes: str
) -> None:
    found = [one for one in requirements(extra) if one.name == package]
    assert any(not one.specifier.contains(with_holes) for one in found)


@pytest.mark.parametrize("extra", ["demo", "serve"])
def test_an_extra_brings_the_audio_packages_of_its_default_model(extra: str) -> None:
    assert {"soundfile", "soxr"} <= {one.name for one in requirements(extra)}
