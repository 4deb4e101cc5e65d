"""Packages that only an extra installs: the error if one is missing, and the command for it."""

import importlib.metadata
import json
from importlib.util import find_spec
from urllib.parse import urlparse

from oscar_mm.errors import InputError

DISTRIBUTION = "oscar-mm"


def require(feature: str, extra: str, *modules: str) -> None:
    """Check that modules can be imported, without importing them.

    Args:
        feature: subject of the message, in the singular: "serve", "--ray".
        extra: the extra that installs the modules.
        modules: names of the modules.

    Raises:
        InputError: if a module is missing.
    """
    for name in modules:
        if find_spec(name) is None:
            raise missing(feature, name, extra)


def missing(feature: str, module: str | None, extra: str) -> InputError:
    """Return the error of a feature whose module is missing; arguments as of ``require``."""
    return InputError(f"{feature} requires the {module} package: run {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that adds an extra to the package from where it was installed.

    A wheel can be installed without a clone, and an index need not have the package.
    """
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"pip install '.[{extra}]' in a clone of the repository"
    source = installed.read_text("direct_url.json")
    if source is None:  # It comes from an index.
        return f"pip install '{DISTRIBUTION}[{extra}]=={installed.version}'"
    origin = json.loads(source)
    if origin.get("dir_info", {}).get("editable"):
        from urllib.request import url2pathname  # imports ssl

        folder = url2pathname(urlparse(origin["url"]).path)
        return f"pip install -e '{folder}[{extra}]'"
    version = origin.get("vcs_info")
    url = f"{version['vcs']}+{origin['url']}@{version['commit_id']}" if version else origin["url"]
    return f"pip install '{DISTRIBUTION}[{extra}] @ {url}'"
