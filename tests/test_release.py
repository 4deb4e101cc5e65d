"""A release as a whole or not at all; building and trying the wheel are left to the release."""

import importlib.util
import subprocess
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[1] / ".ci" / "release.py"
MODULE = '"""A package."""\n\n__version__ = "0.2.0"\n'
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.2.0] - 2026-01-01\n"


def git(folder: Path, *words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=folder, text=True).strip()


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program in a repository of its own, where tests pass and wheels work."""
    spec = importlib.util.spec_from_file_location("release", FILE)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    for name, text in (("__init__.py", MODULE), ("changelog.md", CHANGELOG)):
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.name", "A")
    git(tmp_path, "config", "user.email", "a@example.org")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "Begin")
    monkeypatch.setattr(made, "MODULE", tmp_path / "__init__.py")
    monkeypatch.setattr(made, "CHANGELOG", tmp_path / "changelog.md")
    run = made.run

    def in_our_folder(*line: str) -> str:
        return run(*line, folder=tmp_path) if line[0] == "git" else ""

    monkeypatch.setattr(made, "run", in_our_folder)
    monkeypatch.setattr(made, "build", lambda: tmp_path / "a.whl")
    monkeypatch.setattr(made, "try_out", lambda wheel, version: None)
    return made


def test_version_changelog_commit_and_tag(release: ModuleType, tmp_path: Path) -> None:
    release.main("0.3.0")
    assert (tmp_path / "__init__.py").read_text() == MODULE.replace("0.2.0", "0.3.0")
    dated = f"## [Unreleased]\n\n## [0.3.0] - {date.today()}\n"
    changelog = (tmp_path / "changelog.md").read_text()
    assert changelog == CHANGELOG.replace("## [Unreleased]\n", dated)
    assert git(tmp_path, "describe") == "v0.3.0" and git(tmp_path, "status", "--porcelain") == ""
    assert git(tmp_path, "log", "-1", "--format=%s") == "Release 0.3.0"
    with pytest.raises(SystemExit, match="no entries under"):
        release.main("0.4.0")


@pytest.mark.parametrize("step", ["build", "try_out"])
def test_a_step_that_fails_leaves_all_as_it_was(
    step: str, release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise SystemExit("release: failed")

    monkeypatch.setattr(release, step, fail)
    with pytest.raises(SystemExit, match="failed"):
        release.main("0.3.0")
    assert git(tmp_path, "status", "--porcelain") == "" and git(tmp_path, "tag") == ""
    assert git(tmp_path, "log", "--format=%s") == "Begin"


@pytest.mark.parametrize("version", ["", "v1.0", "1.0.0-rc1", "0.2.0", "0.1.9", "next"])
def test_only_a_new_version_is_released(version: str, release: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"must be a version above 0\.2\.0"):
        release.main(version)


def test_a_tree_with_changes_or_a_tag_is_refused(release: ModuleType, tmp_path: Path) -> None:
    git(tmp_path, "tag", "v0.3.0")
    with pytest.raises(SystemExit, match=r"the tag v0\.3\.0 exists"):
        release.main("0.3.0")
    (tmp_path / "more.txt").touch()
    with pytest.raises(SystemExit, match="the working tree has changes"):
        release.main("0.4.0")
