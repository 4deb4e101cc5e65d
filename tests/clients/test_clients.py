"""Clients of other people, as they are released, against a server of ours.

The clients are installed beside the package, those for node into the folder that ``CLIENTS_NODE``
names; what is not there is skipped, and the reason is the command that installs it.
"""

from collections.abc import Iterator

import pytest

from tests.clients import programs, python_clients  # noqa: F401
from tests.clients.matrix import CELLS, CLIENTS, fill
from tests.clients.served import Served, serving

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def served(qwen3_omni_folder) -> Iterator[Served]:
    with serving(qwen3_omni_folder) as found:
        yield found


@pytest.mark.parametrize(("client", "feature"), CELLS, ids=str)
def test_cell(served, client: str, feature: str) -> None:
    [known] = [one for one in CLIENTS if one.name == client]
    if known.version is None:
        pytest.skip(known.install)
    fill(client, feature, served)
