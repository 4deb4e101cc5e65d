"""What errors about missing packages tell users to run, by how they have installed the package."""

import importlib
import importlib.metadata
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from oscar_mm.apps.doctor import missing_by_extra
from oscar_mm.errors import InputError
from oscar_mm.extras import install_command, require
from tests.processes import Forked
from tests.test_package import requirements

WHEEL = "file:///downloads/oscar_mm-1.0-py3-none-any.whl"
REPOSITORY = "https://example.org/oscar.git"


def installed(folder: Path, source: dict | None) -> None:
    """Metadata of the package in a folder, as pip leaves them."""
    info = folder / "oscar_mm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oscar-mm\nVersion: 1.0\n")
    if source is not None:
        (info / "direct_url.json").write_text(json.dumps(source))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, "oscar-mm[demo]==1.0"),
        ({"url": WHEEL, "archive_info": {}}, f"oscar-mm[demo] @ {WHEEL}"),
        ({"url": "file:///clone", "dir_info": {}}, "oscar-mm[demo] @ file:///clone"),
        (
            {"url": REPOSITORY, "vcs_info": {"vcs": "git", "commit_id": "1f2e"}},
            f"oscar-mm[demo] @ git+{REPOSITORY}@1f2e",
        ),
    ],
)
def test_an_extra_comes_from_where_the_package_did(
    source: dict | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert install_command("demo") == f"pip install '{expected}'"
    wanted = Requirement(expected)
    assert (wanted.name, wanted.extras) == ("oscar-mm", {"demo"})


def test_an_editable_install_stays_editable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "my clone"
    installed(tmp_path, {"url": clone.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert install_command("demo") == f"pip install -e '{clone}[demo]'"


def test_a_bare_checkout_needs_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", fail)
    assert install_command("demo") == "pip install '.[demo]' in a clone of the repository"


def test_the_first_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require("serve", "serve", "json")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(InputError, match=r"^serve requires the uvicorn package: run pip install"):
        require("serve", "serve", "json", "uvicorn")


def test_doctor_lists_every_extra_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["ray[data]>=2; extra == 'batch'", 'lmms-eval<1; extra == "lmms-eval"', "torch"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: required)
    assert missing_by_extra().keys() == {"batch", "lmms-eval"}


def installed_by(open_still: list[Requirement]) -> set[str]:
    """Names of all packages that requirements install."""
    found = set[tuple[str, str]]()
    while open_still:
        wanted = open_still.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            with suppress(importlib.metadata.PackageNotFoundError):
                lines = importlib.metadata.requires(name) or []
                open_still += [
                    one
                    for one in map(Requirement, lines)
                    if one.marker is None or one.marker.evaluate({"extra": extra})
                ]
    return {name for name, _ in found}


def import_with(extra: str, module: str) -> None:
    """Import a module of ours where nothing is installed but the package with an extra."""
    there = installed_by(requirements() + requirements(extra)) | {"oscar-mm"}
    for name, homes in importlib.metadata.packages_distributions().items():
        if not there & {canonicalize_name(home) for home in homes}:
            sys.modules[name] = None
    ours = ("oscar_mm.apps", "uvicorn", "starlette", "fastapi", "gradio")
    for name in [name for name in sys.modules if name.startswith(ours)]:
        del sys.modules[name]
    importlib.import_module(module)


@pytest.mark.parametrize("extra", ["demo", "serve"])
def test_an_extra_installs_what_its_command_imports(extra: str) -> None:
    with Forked(import_with, extra, f"oscar_mm.apps.{extra}.server") as process:
        code, _, errors = process.end()
    assert code == 0, errors.decode()


def test_the_package_runs_as_a_module() -> None:
    line = [sys.executable, "-m", "oscar_mm", "--version"]
    assert subprocess.check_output(line, text=True).startswith("oscar-mm ")
