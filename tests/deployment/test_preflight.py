"""Before dialling: every cause gets its own words, found against a real gRPC server with mTLS."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deployment.consortium import DAY, Consortium, serving
from metis.deployment.preflight import preflight, serving_problem
from metis.deployment.route import Route
from metis.deployment.security.identity import Kit, load_kit, now_utc
from metis.errors import ConfigError, Unreachable


@pytest.fixture
def ours(tmp_path: Path) -> Consortium:
    return Consortium(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Consortium:
    return Consortium(tmp_path / "theirs", "Theirs")


def problem_of(
    controller: Kit | None, kit: Kit | None, host: str = "127.0.0.1", timeout: float = 30
) -> ConfigError | None:
    """What the preflight finds with a running controller; the time-out is only against hanging."""

    async def play() -> ConfigError | None:
        async with serving(controller) as port:
            try:
                await asyncio.to_thread(preflight, Route(host, port), kit, timeout)
            except ConfigError as problem:
                return problem
        return None

    return asyncio.run(play())


def lasting(problem: ConfigError | None, *words: str) -> bool:
    """A cause that does not pass by itself, in these words."""
    assert problem is not None and not isinstance(problem, Unreachable), problem
    assert all(word in str(problem) for word in words), problem
    return True


# --- a real controller ------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_nothing_is_said_when_all_is_well(ours: Consortium, host: str) -> None:
    assert problem_of(ours.controller(), ours.kit("a"), host) is None
    assert problem_of(None, None, host) is None


def test_the_controllers_certificate_has_expired(ours: Consortium) -> None:
    controller = ours.controller(days=10, made=now_utc() - 13 * DAY)
    problem = problem_of(controller, ours.kit("a"))
    assert lasting(problem, "the controller's certificate at 127.0.0.1:", "3 days ago", "this machine's clock says")
    assert lasting(problem, f"expired on {controller.not_after:%Y-%m-%d %H:%M} UTC")


def test_the_controllers_certificate_is_not_valid_yet(ours: Consortium) -> None:
    controller = ours.controller(made=now_utc() + 3 * DAY)
    problem = problem_of(controller, ours.kit("a"))
    assert lasting(problem, f"is not valid before {controller.not_before:%Y-%m-%d %H:%M} UTC", "slow by 2 days or more")


def test_the_controller_is_of_another_ca(ours: Consortium, theirs: Consortium) -> None:
    problem = problem_of(theirs.controller(), ours.kit("a"))
    assert lasting(
        problem, "is not signed by our CA: it is signed by 'Theirs', but the CA of this kit is 'Ours'", "proxy"
    )


def test_the_controllers_certificate_is_for_other_hosts(ours: Consortium) -> None:
    problem = problem_of(ours.controller(["federation.example.org", "10.0.0.1"]), ours.kit("a"))
    assert lasting(problem, "is not for 127.0.0.1 but for federation.example.org, 10.0.0.1", "--host 127.0.0.1")
    problem = problem_of(ours.controller(["federation.example.org"]), ours.kit("a"), "localhost")
    assert lasting(problem, "is not for localhost but for federation.example.org;")


def test_a_learner_that_poses_as_the_controller(ours: Consortium) -> None:
    assert lasting(problem_of(ours.kit("impostor"), ours.kit("a")), "is learner 'impostor', not a controller")


@pytest.mark.parametrize("ends", ["before", "after"])
def test_our_own_certificate_is_out_of_date(ours: Consortium, ends: str) -> None:
    """Found before anything is sent."""
    made = now_utc() + (-20 if ends == "before" else 20) * DAY
    problem = problem_of(ours.controller(), ours.kit("a", days=10, made=made))
    assert lasting(
        problem, "the certificate of learner 'a'", "expired on" if ends == "before" else "is not valid before"
    )


def test_our_own_certificate_is_of_another_ca(ours: Consortium, theirs: Consortium) -> None:
    kit = theirs.kit("a")
    shutil.copy(ours.folder / "ca" / "ca.pem", kit.folder / "ca.pem")
    assert lasting(problem_of(ours.controller(), load_kit(kit.folder)), "is not signed by", "'Theirs'")


def test_our_key_is_not_of_our_certificate(ours: Consortium) -> None:
    kit = ours.kit("a")
    shutil.copy(ours.kit("b").folder / "key.pem", kit.folder / "key.pem")
    assert lasting(problem_of(ours.controller(), kit), "key.pem does not belong to")


def test_the_controller_refuses_a_certificate_that_is_good_here(ours: Consortium, theirs: Consortium) -> None:
    """gRPC's server closes without a word: with TLS 1.3 that shows only when the answer is read."""
    controller = ours.controller()
    shutil.copy(theirs.folder / "ca" / "ca.pem", controller.folder / "ca.pem")
    problem = problem_of(controller, ours.kit("a"))
    assert lasting(problem, "refuses our certificate", "learner 'a'", "its ca.pem is not ours, or its clock is off")


def test_plain_text_against_tls(ours: Consortium) -> None:
    assert lasting(problem_of(None, ours.kit("a")), "speaks plain text (--insecure), but we speak TLS")
    assert lasting(problem_of(ours.controller(), None), "requires TLS: give --identity instead of --insecure")


# --- no controller ----------------------------------------------------------------------------


@contextmanager
def listening(answer: bytes | None, context: ssl.SSLContext | None = None, most: int = 99) -> Iterator[int]:
    """A server that sends something and closes, to this many clients; None sends nothing and does not close."""
    held: list[socket.socket] = []

    def serve() -> None:
        for _ in range(most):
            try:
                peer, _ = server.accept()
            except OSError:  # closed: the test is over
                return
            held.append(peer)
            if answer is None:
                continue
            try:
                if context is not None:
                    peer = context.wrap_socket(peer, server_side=True)
                    held.append(peer)
                if answer:
                    peer.recv(1024)
                    peer.sendall(answer)
            except OSError:
                pass
            peer.close()
        server.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            with suppress(OSError):  # it may be closed already
                server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for peer in held:
                peer.close()


def failing(port: int, kit: Kit | None, host: str = "127.0.0.1", timeout: float = 30) -> ConfigError:
    with pytest.raises(ConfigError) as problem:
        preflight(Route(host, port), kit, timeout)
    return problem.value


def test_nothing_listens(ours: Consortium) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # bound, but not listening
        for kit in (None, ours.kit("a")):
            problem = failing(port, kit)
            assert isinstance(problem, Unreachable) and not problem.unknown_name
            assert f"nothing listens at 127.0.0.1:{port}" in str(problem)


def test_the_host_is_unknown(ours: Consortium) -> None:
    """Worth trying again, since a network that is down looks the same; the caller may look at unknown_name."""
    problem = failing(8443, ours.kit("a"), "federation.invalid")
    assert isinstance(problem, Unreachable)
    assert "the host name federation.invalid is unknown" in str(problem) or "name service" in str(problem)
    assert lasting(failing(8443, ours.kit("a"), "a" * 64 + ".org"), "is not a valid host name")


def test_a_host_that_does_not_answer(ours: Consortium) -> None:
    """Packets are dropped: here because the queue of connections is full."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        try:
            problem = failing(address[1], ours.kit("a"), timeout=0.5)
        finally:
            for one in waiting:
                one.close()
    assert isinstance(problem, Unreachable) and "does not answer; is there a firewall" in str(problem)


def test_a_controller_that_hangs(ours: Consortium) -> None:
    """It is stopped or overloaded: the kernel takes the connection and nobody speaks."""
    with listening(None) as port:
        for kit in (None, ours.kit("a")):
            problem = failing(port, kit, timeout=0.3)
            assert isinstance(problem, Unreachable) and "then sends nothing" in str(problem)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH\r\n"])
def test_something_else_listens(ours: Consortium, answer: bytes) -> None:
    with listening(answer) as port:
        assert lasting(failing(port, ours.kit("a")), "does not speak TLS", repr(answer[:24]))
        assert lasting(failing(port, None), "is not a Metis controller", repr(answer[:24]))


def test_something_that_closes(ours: Consortium) -> None:
    """As a controller does that stops at this moment, or a tunnel whose other end is down."""
    with listening(b"") as port:
        for kit in (None, ours.kit("a")):
            problem = failing(port, kit)
            assert isinstance(problem, Unreachable) and "is the controller starting or stopping?" in str(problem)


def tls_of(kit: Kit, trusted: Consortium) -> ssl.SSLContext:
    """TLS as a proxy in front of a controller would end it: OpenSSL, which sends alerts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kit.folder / "certificate.pem", kit.folder / "key.pem")
    context.load_verify_locations(trusted.folder / "ca" / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def test_a_server_that_says_why_it_refuses(ours: Consortium, theirs: Consortium) -> None:
    with listening(b"", tls_of(ours.controller(), theirs)) as port:
        assert lasting(failing(port, ours.kit("a")), "refuses our certificate as signed by a CA that it does not know")


def test_a_controller_that_is_killed_after_the_handshake(ours: Consortium) -> None:
    """It closes like one that refuses us, but only once: this mends by itself."""
    with listening(b"", tls_of(ours.controller(), ours), most=1) as port:
        problem = failing(port, ours.kit("a"))
    assert isinstance(problem, Unreachable) and "nothing listens" in str(problem)


def test_a_tls_server_that_is_no_controller(ours: Consortium) -> None:
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n", tls_of(ours.controller(), ours)) as port:
        assert lasting(failing(port, ours.kit("a")), "is not a Metis controller")


def test_a_wrong_clock_is_seen(ours: Consortium) -> None:
    """The machine itself believes that it is 2001."""
    faketime = shutil.which("faketime")
    if faketime is None:
        pytest.skip("faketime is not installed")
    program = (
        "import sys\nfrom metis.deployment import preflight, route\nfrom metis.deployment.security import identity\n"
        "try:\n    preflight.preflight(route.Route('127.0.0.1', 1), identity.load_kit(sys.argv[1]))\n"
        "except identity.ConfigError as problem:\n    print(problem)"
    )
    kit = ours.kit("a")
    done = subprocess.run(
        [faketime, "2001-02-03 04:05:06", sys.executable, "-c", program, str(kit.folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "TZ": "UTC"},
    )
    assert "and this machine's clock says 2001-02-03 04:05 UTC: either that clock is slow by" in done.stdout, done


# --- the controller's side --------------------------------------------------------------------


def test_a_controller_that_can_serve(ours: Consortium) -> None:
    assert serving_problem(ours.controller(), "0.0.0.0") is None
    assert serving_problem(None, "127.0.0.1", 0) is None


def test_a_controller_that_cannot_serve(ours: Consortium, theirs: Consortium) -> None:
    controller = ours.controller()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expected = f"cannot listen on 127.0.0.1:{port}: the port is in use; is a controller running already?"
        assert serving_problem(controller, "127.0.0.1", port) == expected
    assert "this machine has no such address" in str(serving_problem(controller, "192.0.2.1", 8443))
    assert "is unknown" in str(serving_problem(controller, "federation.invalid", 8443)) or "name service" in str(
        serving_problem(controller, "federation.invalid", 8443)
    )
    assert "plain text is served on loopback only" in str(serving_problem(None, "0.0.0.0", 8443))
    assert "but this is a controller" in str(serving_problem(ours.kit("a"), "127.0.0.1"))
    expired = ours.controller(days=10, made=now_utc() - 20 * DAY, folder="expired")
    assert "the certificate of controller 'main' expired on" in str(serving_problem(expired, "127.0.0.1"))
    shutil.copy(theirs.folder / "ca" / "revoked.pem", controller.folder / "revoked.pem")
    assert "revoked.pem is not signed by" in str(serving_problem(controller, "127.0.0.1"))
