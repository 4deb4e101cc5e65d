"""README and docs/ name files, sections, commands and options that exist."""

import pydoc
import re
import shlex
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import typer

import oscar_mm
from benchmarks.memory import page_bits
from oscar_mm import KVPolicy, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.cli import app
from oscar_mm.pipelines.loading_options import LoadingOptions
from oscar_mm.pipelines.pipeline import Pipeline

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALL_TEXT = "\n".join(page.read_text() for page in PAGES)


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(((?!https?:)[^)]*)\)", page.read_text())
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= 200


def test_benchmarks_are_commands_and_all_are_listed() -> None:
    names = set(re.findall(r"python -m benchmarks\.([a-z]\w+)", ALL_TEXT))
    commands = {
        path.stem
        for path in (ROOT / "benchmarks").glob("[!_]*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert names <= commands == set(re.findall(r"^\| `([a-z_]+)` \| [^|]* \|$", page, re.MULTILINE))


def test_troubleshooting_names_options_that_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    root: Any = typer.main.get_command(app)
    commands = [*root.commands.values()]
    commands += [one for command in commands for one in getattr(command, "commands", {}).values()]
    known = {option for one in commands for parameter in one.params for option in parameter.opts}
    assert set(re.findall(r"`(--[\w-]+)", page)) <= known


def command_lines() -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```$", ALL_TEXT, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in re.findall(r"^oscar-mm .*$", block, re.MULTILINE)]


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_use_options_that_exist(line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(line, comments=True)[1:]
    words = words[: words.index("--")] if "--" in words else words  # The rest is vLLM's.
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_the_table_of_presets_has_their_bits() -> None:
    page = (ROOT / "docs" / "policies.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\d.]+) \|$", page, re.MULTILINE)
    presets = {name: float(bits) for name, bits in rows if name in KVPolicy.preset_names()}
    assert set(presets) == set(KVPolicy.preset_names())
    for name, bits in presets.items():
        assert page_bits(KVPolicy.preset(name)) == pytest.approx(bits, abs=0.006)


def test_the_table_of_arguments_is_the_signature() -> None:
    parameters = list(signature(Pipeline.__init__).parameters.values())[1:-1]
    expected = [
        (one.name, "" if one.default is one.empty else f"`{one.default!r}`") for one in parameters
    ]
    expected += [(name, "`None`") for name in LoadingOptions.__annotations__]
    page = (ROOT / "docs" / "usage.md").read_text()
    section = page.partition("## Arguments of pipelines")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| (\S*) ?\| .+ \|$", section, re.MULTILINE) == expected
    for kind in (OscarVLPipeline, OscarOmniPipeline):
        shown = pydoc.plain(pydoc.render_doc(kind))
        assert not [name for name, _ in expected if not re.search(rf" {name}\b", shown)]


def test_troubleshooting_quotes_messages_that_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sections = re.findall(r"^## (?:Errors|Warnings)\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`.*?) \|", "".join(sections), re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`(.+?)`", row)]
    folders = [ROOT / name for name in ("oscar_mm", "apps", "pipelines")]
    code = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    code = re.sub(r'"\n\s+f?"', "", code)  # Parts of one string.
    assert len(quoted) > 10 and not [text for text in quoted if text not in code]


def test_all_examples_are_listed() -> None:
    listed = set(re.findall(r"^\| `(\w+\.py)` \|", PAGES[0].read_text(), re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_nothing_is_installed_by_a_name_that_is_not_ours() -> None:
    assert not re.search(r"pip install (-\S+ )*['\"]?oscar-mm", ALL_TEXT)


def test_contributing_names_files_and_objects_that_exist() -> None:
    page = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w./]+/\w+\.(?:py|cuh?|md))`", page)
    files = {path for path in named if "NAME" not in path}
    assert len(files) > 15 and not [path for path in files if not (ROOT / path).is_file()]
    names = set(re.findall(r"`@?(_?[A-Za-z]\w+)`", page)) - {"NAME"}
    code = "\n".join(
        path.read_text()
        for folder in ("oscar_mm", "pipelines", "tests", "csrc")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cu", ".cuh")
    )
    words = set(re.findall(r"\w+", code))
    assert not names - words


def test_the_changelog_begins_with_this_version() -> None:
    page = (ROOT / "docs" / "changelog.md").read_text()
    newest, *_ = re.findall(r"^## \[(.*)\]", page, re.MULTILINE)
    assert newest in (oscar_mm.__version__, "Unreleased")


def test_names_of_arguments_end_on_their_line() -> None:
    """The site's parser looks for the colon after the names on the line where they begin."""
    section = re.compile(r"^( +)(?:Args|Attributes):\n((?:\1 {4}.*\n|\n)+)", re.MULTILINE)
    found = []
    for folder in ("oscar_mm", "pipelines", "apps"):
        for path in (ROOT / folder).rglob("*.py"):
            for indent, lines in section.findall(path.read_text()):
                entries = re.findall(rf"^{indent}    (\S.*)$", lines, re.MULTILINE)
                found += [(path.name, entry, ":" in entry) for entry in entries]
    assert len(found) > 500
    assert [entry for *entry, is_complete in found if not is_complete] == []
