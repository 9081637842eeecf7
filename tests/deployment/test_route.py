"""The way to a controller through a site's HTTP proxy: which one, how, and one sentence for whatever fails."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from deployment.connect_proxy import ConnectProxy
from deployment.consortium import WHO, Consortium, serving
from deployment.faults import tried
from metis.cli.app import app
from metis.deployment.preflight import preflight
from metis.deployment.route import HttpProxy, Route, route_to
from metis.deployment.security.identity import channel_credentials
from metis.errors import ConfigError, Unreachable

HOST = "controller.example"  # which only the proxy can resolve
USER, PASSWORD = "dr. a@b", "p:w/%ü"
CREDENTIALS = "dr.%20a%40b:p%3Aw%2F%25%C3%BC"


@pytest.fixture
def ours(tmp_path: Path) -> Consortium:
    return Consortium(tmp_path / "ours")


def _proxy() -> ConnectProxy:
    return ConnectProxy(user=USER, password=PASSWORD, hosts={HOST: "127.0.0.1"})


# --- through a proxy -------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["https_proxy", "HTTPS_PROXY", "--proxy"])
def test_preflight_and_grpc_go_through_the_proxy_with_any_password(ours: Consortium, variable: str) -> None:
    """C1 row 42: to a name that only the proxy knows, with the controller's certificate checked under it."""
    controller, kit = ours.controller(hosts=[HOST]), ours.kit("a")

    async def scene() -> None:
        with _proxy() as proxy:
            async with serving(controller) as port:
                url = proxy.url(CREDENTIALS)
                if variable == "--proxy":
                    route = route_to(HOST, port, url, {"no_proxy": "*"})
                else:
                    route = route_to(HOST, port, None, {variable: url, "no_proxy": "other.example"})
                await asyncio.to_thread(preflight, route, kit, 30.0)
                assert set(proxy.targets) == {f"{HOST}:{port}"}
                before = len(proxy.targets)
                target, options = route.channel()
                async with grpc.aio.secure_channel(target, channel_credentials(kit), options) as channel:
                    answer: bytes = await channel.unary_unary(WHO)(b"", timeout=600)
                assert answer.startswith(b"learner/a/")
                tried()
                assert proxy.targets[before:] == [f"{HOST}:{port}"] and not proxy.refused

    asyncio.run(scene())


def test_check_goes_through_the_proxy_of_the_environment(ours: Consortium, monkeypatch: pytest.MonkeyPatch) -> None:
    """`metis certificates check` names the proxy when all is well, and when it refuses; never its password."""
    controller, kit = ours.controller(hosts=[HOST]), ours.kit("a")
    for name in ("grpc_proxy", "https_proxy", "HTTPS_PROXY", "http_proxy", "no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def scene() -> None:
        with _proxy() as proxy:
            async with serving(controller) as port:
                words = ["certificates", "check", str(kit.folder), "--controller", f"{HOST}:{port}"]
                monkeypatch.setenv("https_proxy", proxy.url(CREDENTIALS))
                well = await asyncio.to_thread(CliRunner().invoke, app, words)
                assert well.exit_code == 0 and f"the proxy 127.0.0.1:{proxy.port} (from https_proxy)" in well.output
                monkeypatch.setenv("https_proxy", proxy.url("dr:secret"))
                wrong = await asyncio.to_thread(CliRunner().invoke, app, words)
                assert wrong.exit_code != 0 and "secret" not in wrong.output + str(wrong.exception)

    asyncio.run(scene())


# --- which proxy ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "environment", "proxied"),
    [
        ("c.example.org", {}, False),
        ("c.example.org", {"https_proxy": "http://p:1"}, True),
        ("c.example.org", {"https_proxy": ""}, False),
        ("c.example.org", {"http_proxy": "p:1"}, True),
        ("c.example.org", {"ftp_proxy": "http://p:1"}, False),
        ("127.0.0.1", {"https_proxy": "http://p:1"}, False),
        ("localhost", {"https_proxy": "http://p:1"}, False),
        ("c.example.org", {"https_proxy": "http://p:1", "no_proxy": "c.example.org"}, False),
        ("C.Example.org", {"https_proxy": "http://p:1", "NO_PROXY": "x, example.ORG"}, False),
        ("c.example.org", {"https_proxy": "http://p:1", "no_proxy": ".example.org"}, False),
        ("c.example.org", {"https_proxy": "http://p:1", "no_proxy": "*.example.org"}, False),
        ("c.example.org", {"https_proxy": "http://p:1", "no_proxy": "ample.org,,"}, True),
        ("c.example.org", {"https_proxy": "http://p:1", "no_proxy": "*"}, False),
        ("c.example.org", {"https_proxy": "http://p:1", "no_proxy": "c.example.org:443"}, False),
        ("c.example.org", {"https_proxy": "http://p:1", "no_proxy": "c.example.org:80"}, True),
        ("c.example.org", {"https_proxy": "http://p:1", "no_grpc_proxy": "x", "no_proxy": "*"}, True),
        ("10.1.2.3", {"https_proxy": "http://p:1", "no_proxy": "10.0.0.0/8"}, False),
        ("11.1.2.3", {"https_proxy": "http://p:1", "no_proxy": "10.0.0.0/8"}, True),
        ("[2001:db8::1]", {"https_proxy": "http://p:1", "no_proxy": "2001:db8::/32"}, False),
    ],
)
def test_the_environment_says_which_proxy(host: str, environment: dict[str, str], proxied: bool) -> None:
    assert (route_to(host, 443, None, environment).proxy is not None) == proxied
    assert route_to(host, 443, "none", environment).proxy is None
    assert route_to(host, 443, "http://q:2", environment).proxy == HttpProxy("q", 2, None, "--proxy")


@pytest.mark.parametrize("url", ["https://u:secret@p:1", "socks5://u:secret@p", "http://u:secret@:80", "http://p:x"])
def test_what_is_not_a_proxy_is_named_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"https_proxy.*write http://HOST:PORT") as raised:
        route_to("c.example.org", 443, None, {"https_proxy": url})
    assert "secret" not in str(raised.value)
    assert "secret" not in repr(HttpProxy.parse("http://u:secret@p:1", "https_proxy"))


# --- what can go wrong ------------------------------------------------------------------------------


def _problem(proxy_url: str, host: str = HOST) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        route_to(host, 7443, proxy_url).connect(time.monotonic() + 30)
    assert "\n" not in str(raised.value) and "secret" not in str(raised.value)
    return raised.value


def test_every_refusal_of_a_proxy_is_one_sentence_that_names_it() -> None:
    for status, words, passes in (
        ("407 Proxy Authentication Required", "does not accept the user and the password of --proxy", True),
        ("403 Forbidden", f"does not allow connections to {HOST}:7443 (403 Forbidden)", True),
        ("502 Bad Gateway", f"cannot reach {HOST}:7443 (502 Bad Gateway)", True),
        ("503 Service Unavailable", f"cannot reach {HOST}:7443", True),
    ):
        with ConnectProxy(status=status) as proxy:
            problem = _problem(proxy.url("u:secret"))
            assert f"the proxy 127.0.0.1:{proxy.port} (from --proxy)" in str(problem) and words in str(problem)
            assert isinstance(problem, Unreachable) == passes
    with ConnectProxy(user="u", password="secret") as proxy:
        problem = _problem(proxy.url())
        assert "requires a user and a password" in str(problem) and not isinstance(problem, Unreachable)


def test_a_proxy_that_is_not_there_or_is_not_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert f"nothing listens at the proxy 127.0.0.1:{port}" in str(_problem(f"http://127.0.0.1:{port}"))
    unknown = _problem("http://no-such-proxy.invalid:3128")
    assert "no-such-proxy.invalid is unknown" in str(unknown) and isinstance(unknown, Unreachable)
    with _answering(b"SSH-2.0-OpenSSH_9.6\r\n\r\n") as port:
        assert "is not an HTTP proxy (it sends b'SSH-2.0" in str(_problem(f"http://127.0.0.1:{port}"))
    with _answering(b"") as port:
        assert "closes the connection" in str(_problem(f"http://127.0.0.1:{port}"))


@contextmanager
def _answering(answer: bytes) -> Iterator[int]:
    """Something that listens, answers this to whatever comes, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(30)


def test_without_a_proxy_grpc_is_kept_from_looking_for_one() -> None:
    assert Route("c.example.org", 443).channel() == ("c.example.org:443", [("grpc.enable_http_proxy", 0)])
