"""Which requests count as those of one client."""

import pytest
from starlette.datastructures import Address

from oscar_mm.apps.serve.clients import client_of, read_proxies
from oscar_mm.errors import InputError


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", ""),
        ("", ""),
    ],
)
def test_addresses(host: str, expected: str) -> None:
    assert client_of(Address(host, 1234), "me") == (expected, "me")


def test_users_have_a_bound() -> None:
    assert client_of(None, "a" * 10**6) == ("", "a" * 256)


def test_proxies() -> None:
    assert read_proxies(["10.0.0.2", "10.1.0.0/16", "::1"]) == ("10.0.0.2", "10.1.0.0/16", "::1")
    with pytest.raises(InputError, match=r"--trusted-proxy 10.0.0.1/8: must be an IP address"):
        read_proxies(["10.0.0.1/8"])
