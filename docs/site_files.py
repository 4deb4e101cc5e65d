"""Hooks of the site: files outside of docs/ that pages need, and code in docstrings."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_LINK = re.compile(r"\]\(\.\./((?:benchmarks|examples)/[^)#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files to the site, under the paths that they have in the repository."""
    docs = Path(config.docs_dir)
    pages = "".join(page.read_text() for page in docs.glob("*.md"))
    for path in sorted(set(_LINK.findall(pages))):
        files.append(File(path, str(docs.parent), config.site_dir, use_directory_urls=False))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links lead to them."""
    return _LINK.sub(r"](\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Remove the marks of code in docstrings, which are not Markdown."""
    return html.replace("<p>::</p>\n", "").replace("::</p>", ":</p>")
