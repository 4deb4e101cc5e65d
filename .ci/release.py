"""Make a release: make release VERSION=1.2.3

Sets the version, dates the changelog, builds dist/ anew, checks the files, tries the wheel in an
empty environment, commits and tags. Nothing is pushed or published: `git push --follow-tags` does
that, and a workflow publishes the tag. A failure leaves files, commits and tags as they were.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from datetime import date
from pathlib import Path
from shutil import rmtree

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
MODULE, CHANGELOG = ROOT / "oscar_mm" / "__init__.py", ROOT / "docs" / "changelog.md"
DIST = ROOT / "dist"
CARD = ROOT / "examples" / "media" / "cards" / "01.png"
EXTRAS = "demo,audio,serve"
UNRELEASED = "## [Unreleased]\n"


def run(*line: str | Path, folder: Path = ROOT) -> str:
    """Run a command and return its output; end the release if it fails."""
    # Modules of the caller would hide what the new environment lacks.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [*map(str, line)]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"release: {' '.join(command)} failed with {done.returncode}")
    return done.stdout


def check(text: str, module: str, changelog: str) -> None:
    """End the release if the version is not a new one, or the repository is not ready for it."""
    [current] = re.findall(r'^__version__ = "(.*)"$', module, re.MULTILINE)
    try:
        is_new = str(Version(text)) == text and Version(text) > Version(current)
    except InvalidVersion:
        is_new = False
    if not is_new:
        sys.exit(f"release: VERSION={text} must be a version above {current}, such as 1.2.3")
    if run("git", "status", "--porcelain"):
        sys.exit("release: the working tree has changes; commit or stash them")
    if run("git", "tag", "--list", f"v{text}"):
        sys.exit(f"release: the tag v{text} exists; choose another version, or delete the tag")
    if not changelog.partition(UNRELEASED)[2].partition("\n## ")[0].strip():
        sys.exit(
            "release: docs/changelog.md has no entries under [Unreleased]; add what users notice"
        )


def build() -> Path:
    """Build and check dist/, and return the wheel.

    The wheel is built from the sdist, so a file that the sdist lacks is missing in both. Therefore
    it is compared with a wheel that is built from the clone, which tests/test_package.py checks.
    """
    rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    [wheel] = DIST.glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--wheel", "--outdir", folder)
        [whole] = Path(folder).glob("*.whl")
        if missing := names(whole) - names(wheel):
            sys.exit(f"release: the sdist lacks {', '.join(sorted(missing))}")
    return wheel


def names(wheel: Path) -> set[str]:
    """Return the names of a wheel's files."""
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def try_out(wheel: Path, version: str) -> None:
    """Install the wheel in an empty environment and ask a bundled model, away from the clone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "venv", folder / "env")
        bin_ = folder / "env" / "bin"
        run(bin_ / "python", "-m", "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]")
        program = "import oscar_mm; print(oscar_mm.__version__)"
        found = run(bin_ / "python", "-c", program, folder=folder).strip()
        if found != version:
            sys.exit(f"release: the wheel has version {found}, not {version}")
        answer = run(bin_ / "oscar-mm", "ask", CARD, "--prompt", "What is the code?", folder=folder)
        print(answer)


def main(version: str) -> None:
    """Make the release."""
    module, changelog = MODULE.read_text(), CHANGELOG.read_text()
    check(version, module, changelog)
    dated = f"{UNRELEASED}\n## [{version}] - {date.today()}\n"
    try:
        MODULE.write_text(re.sub(r'(?m)^__version__ = ".*"$', f'__version__ = "{version}"', module))
        CHANGELOG.write_text(changelog.replace(UNRELEASED, dated, 1))
        run(sys.executable, "-m", "pytest", "-q", "tests/test_package.py", "tests/test_docs.py")
        try_out(build(), version)
        run("git", "commit", "--quiet", "--all", "--message", f"Release {version}")
    except BaseException:
        MODULE.write_text(module)
        CHANGELOG.write_text(changelog)
        raise
    run("git", "tag", "--annotate", f"v{version}", "--message", f"oscar_mm {version}")
    print(f"v{version} is tagged; `git push --follow-tags` publishes it")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else sys.exit("release: make release VERSION=1.2.3"))
