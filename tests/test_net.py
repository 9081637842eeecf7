"""Addresses: HOST:PORT in both directions, and what counts as this machine."""

from __future__ import annotations

import re

import pytest

from metis.errors import ConfigError
from metis.net import header_is_loopback, host_and_port, is_loopback, is_served_locally, join_address, listen_on


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("127.0.0.1:80", "127.0.0.1", 80), ("[::1]:9464", "::1", 9464), ("federation.example.org:1", None, 1)],
)
def test_an_address_is_split_and_joined(address: str, host: str | None, port: int) -> None:
    split = host_and_port(address)
    assert split == (host or address.partition(":")[0], port)
    assert join_address(*split) == address


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:x", "host:70000", "host:-1", "host:²", "::1:80"])
def test_anything_else_is_refused_with_an_example(address: str) -> None:
    expected = f"'{address}' is not a valid address; write HOST:PORT, as in federation.example.org:7443"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        host_and_port(address, "federation.example.org:7443", listen=True)


def test_port_0_is_for_listening_only() -> None:
    assert host_and_port("host:0", listen=True) == ("host", 0)
    with pytest.raises(ConfigError, match="is not a valid address"):
        host_and_port("host:0")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.8.9.1", "::1", "[::1]"])
def test_this_machine_has_several_names(host: str) -> None:
    assert is_loopback(host)
    assert header_is_loopback(host if host != "::1" else "[::1]")
    assert header_is_loopback(f"{host}:8484")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "128.0.0.1", "localhost.example.org", "127.0.0.1.example.org"])
def test_other_names_may_lead_elsewhere(host: str) -> None:
    assert not is_loopback(host)
    assert not header_is_loopback(host) and not header_is_loopback(f"{host}:80")


def test_a_port_in_use_is_an_error_unless_any_will_do() -> None:
    with listen_on("127.0.0.1:0", "the page") as taken:
        address = join_address(*taken.getsockname())
        expected = f"the page cannot be served on {address}: the port is in use; port 0 takes a free one"
        with pytest.raises(ConfigError, match=re.escape(expected)):
            listen_on(address, "the page")
        with listen_on(address, "the page", or_any_port=True) as another:
            assert is_served_locally(another)
            assert another.getsockname() != taken.getsockname()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be served on 192\.0\.2\.1:8484: this machine has no such address"):
        listen_on("192.0.2.1:8484", "the page")
    with pytest.raises(ConfigError, match=r"cannot be served on nowhere\.invalid:80: "):
        listen_on("nowhere.invalid:80", "the page")


def test_every_interface_is_more_than_this_machine() -> None:
    with listen_on("0.0.0.0:0", "the page") as bound:
        assert not is_served_locally(bound)
