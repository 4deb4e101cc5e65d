"""The table in docs/serving.md lists exactly the clients and features that are tested."""

from tests.clients import programs, python_clients  # noqa: F401
from tests.clients.matrix import CELLS, CLIENTS, FEATURES
from tests.clients.table import LACKS, current_rows


def test_the_table_has_the_clients_and_features_that_are_tried() -> None:
    head, *rows = current_rows()
    assert head == ["client", *(feature.name for feature in FEATURES)]
    assert [row[0].rpartition(" ")[0] for row in rows] == [client.name for client in CLIENTS]
    for client, row in zip(CLIENTS, rows, strict=True):
        found = [name for name, value in zip(head, row, strict=True) if value != LACKS]
        assert found == [
            "client",
            *(one.name for one in FEATURES if (client.name, one.name) in CELLS),
        ]
