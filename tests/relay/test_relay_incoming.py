"""What a stranger without a token can do to a relay process with connections alone, over real sockets."""

from __future__ import annotations

import _ssl
import ctypes
import json
import socket
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

import httpx
import psutil
import pytest
from relay_support import certificate, relay_process

from ldpfl.relay.connections import Gate
from ldpfl.relay.usage_limits import ConnectionLimits

HASTY = ConnectionLimits(per_address=20, in_total=30, head_s=0.5, handshake_s=0.5, idle_s=1, answer_s=0.5, closing_s=0.5)
pytestmark = pytest.mark.slow

SOON_S = 20.0  # many times the times above, and less than the usual ones of uvicorn and asyncio, 30 s and more


@contextmanager
def relay(folder: Path, bounds: ConnectionLimits = HASTY, *, tls: bool = False) -> Iterator[tuple[int, int]]:
    """Run a relay; yield its process id and port."""
    files = certificate(folder) if tls else None
    with relay_process(str(folder / "relay.db"), folder / "relay.log", tls=files, connections=bounds) as (running, port):
        yield running.pid, port


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """The process id and port of a relay with the usual bounds, for tests that leave it as it was."""
    with relay(tmp_path_factory.mktemp("usual"), ConnectionLimits()) as running:
        yield running


def connect(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SOON_S, source_address=(source, 0))


def is_ended(connection: socket.socket) -> bool:
    """Read on, and return whether the relay ended the connection; the socket's time-out says how long to wait for that."""
    try:
        while connection.recv(65_536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def is_turned_away(port: int, source: str = "127.0.0.1") -> bool:
    with connect(port, source) as connection:
        return is_ended(connection)


def health(port: int, source: str = "127.0.0.1") -> int:
    with httpx.Client(transport=httpx.HTTPTransport(verify=False, local_address=source), timeout=SOON_S) as http:
        return http.get(f"http://127.0.0.1:{port}/health").status_code


def drips(connection: socket.socket, piece: bytes) -> bool:
    """Send ``piece`` again and again; return whether the relay ended the connection soon."""
    deadline = time.monotonic() + SOON_S
    try:
        while time.monotonic() < deadline:
            connection.sendall(piece)
            time.sleep(0.05)
    except OSError:
        return True
    return False


@pytest.mark.thorough
def test_a_head_without_an_end_takes_no_memory(tmp_path: Path) -> None:
    with relay(tmp_path, ConnectionLimits()) as (pid, port):
        before, sent = psutil.Process(pid).memory_info().rss, 0
        with connect(port) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nX: ")
            with suppress(OSError):
                while sent < 100 * 2**20:
                    stranger.sendall(b"a" * 2**20)
                    sent += 2**20
            assert sent < 40 * 2**20  # what the sockets' buffers take
            assert is_ended(stranger)
        assert psutil.Process(pid).memory_info().rss - before < 20 * 2**20
        assert health(port) == 200


def test_who_says_nothing_or_drips_a_head_is_cut_off(tmp_path: Path) -> None:
    with relay(tmp_path) as (_, port), ExitStack() as stack:
        silent = [stack.enter_context(connect(port)) for _ in range(HASTY.per_address - 1)]
        dripping = stack.enter_context(connect(port))
        assert drips(dripping, b"G")
        assert [is_ended(connection) for connection in silent] == [True] * len(silent)
        # After a request that was answered, too.
        later = stack.enter_context(connect(port))
        later.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in later.recv(65_536)
        assert drips(later, b"G")
        assert health(port) == 200


def test_without_a_tls_handshake_a_connection_ends(tmp_path: Path) -> None:
    with relay(tmp_path, tls=True) as (_, port), ExitStack() as stack:
        silent = [stack.enter_context(connect(port)) for _ in range(5)]
        assert [is_ended(connection) for connection in silent] == [True] * 5
        dripping = stack.enter_context(connect(port))
        assert drips(dripping, b"\x16")


def test_one_address_has_so_many_connections_and_all_together_so_many(tmp_path: Path) -> None:
    bounds = ConnectionLimits(per_address=5, in_total=8)
    with relay(tmp_path, bounds) as (_, port), ExitStack() as stack:
        held = [stack.enter_context(connect(port)) for _ in range(5)]
        assert all(is_turned_away(port) for _ in range(5))
        assert health(port, "127.0.0.2") == 200
        held += [stack.enter_context(kept(port, "127.0.0.2")) for _ in range(3)]
        assert is_turned_away(port, "127.0.0.3")
        for connection in held:
            connection.settimeout(0.05)
            assert not is_ended(connection)
        held[0].close()
        assert soon(lambda: health(port) == 200)


def kept(port: int, address: str) -> socket.socket:
    """Return a connection that the relay holds. It may still count the one before, which was closed only just now."""
    deadline = time.monotonic() + SOON_S
    while True:
        connection = connect(port, address)
        connection.settimeout(0.2)
        if not is_ended(connection):
            return connection
        connection.close()
        assert time.monotonic() < deadline


def soon(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if holds():
                return True
        time.sleep(0.05)
    return False


@pytest.mark.thorough_for("Content-Length: 1000000-GET /health")
@pytest.mark.parametrize("ask", ["GET /health", "PUT /v1/rounds/run-1/1", "POST /nothing", "PATCH /v1/rounds/run-1/1/uploads/" + "x" * 16])
@pytest.mark.parametrize("length", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
def test_a_refused_request_with_a_body_that_drips_ends_its_connection(ask: str, length: str, usual: tuple[int, int]) -> None:
    piece = b"1\r\nx\r\n" if "chunked" in length else b"x"
    with connect(usual[1]) as stranger:
        stranger.sendall(f"{ask} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode() + piece)
        answer = stranger.recv(65_536)
        assert answer.split()[1] in (b"200", b"400", b"401", b"404", b"405")
        assert b"connection: close" in answer
        assert drips(stranger, piece)


@pytest.mark.parametrize(
    "head",
    [
        "POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: x\r\n" + "a:\r\n" * 100 + "\r\n",
    ],
)
def test_what_is_cheap_to_send_and_dear_to_read_is_refused_at_once(head: str, usual: tuple[int, int]) -> None:
    """Chunks of one byte, and crowds of headers: a few MB a second of them kept the relay from everybody else."""
    with connect(usual[1]) as stranger:
        stranger.sendall(head.encode() + b"1\r\nx\r\n" * 1000)
        answer = stranger.recv(65_536)
        assert answer.split()[1] == b"400"
        stranger.settimeout(SOON_S)
        with suppress(ConnectionResetError):
            while stranger.recv(65_536):
                pass  # it is closed


def test_who_does_not_read_answers_is_cut_off(tmp_path: Path) -> None:
    bounds = ConnectionLimits(per_address=1, head_s=600.0, idle_s=600, answer_s=0.5)
    with relay(tmp_path, bounds) as (_, port), socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stranger.connect(("127.0.0.1", port))
        stranger.settimeout(0.5)
        with suppress(OSError):
            while True:  # until the relay reads no more, since its answers are not read
                stranger.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        assert soon(lambda: health(port) == 200)  # the one connection of this address is free again


def test_callers_cannot_fill_the_log(tmp_path: Path) -> None:
    broken = b"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    asked = [b"\x00\x01 nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n: x\r\n\r\n", broken + b"zz\r\n", broken + b"1\r\nxzz\r\n"]
    asked += [b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"]
    with relay(tmp_path, ConnectionLimits(served=3)) as (_, port), ExitStack() as stack:
        for request in asked * 3:
            with connect(port) as stranger, suppress(OSError):
                stranger.sendall(request)
                stranger.settimeout(0.2)
                is_ended(stranger)
        for _ in range(4):
            connection = stack.enter_context(connect(port))
            connection.sendall(asked[-1])
            assert connection.recv(65_536)
        assert health(port) == 503
        lines = (tmp_path / "relay.log").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["listening"]


@pytest.fixture
def counted() -> Iterator[Gate]:
    with Gate(
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True), ConnectionLimits(per_address=2, in_total=3)
    ) as gate:
        yield gate


def test_a_connection_counts_until_it_is_closed_or_forgotten(counted: Gate) -> None:
    port = counted.getsockname()[1]
    counted.setblocking(False)
    for _ in range(4):
        with connect(port), connect(port), connect(port):
            first, second = counted.accept()[0], counted.accept()[0]
            with pytest.raises(BlockingIOError):
                counted.accept()
            first.close()
            first.close()
        with connect(port):
            accepted = counted.accept()[0]
            assert accepted.fileno() >= 0
            with pytest.warns(ResourceWarning):
                del second
            accepted.close()


@pytest.mark.parametrize("host", ["::1"])
def test_an_ipv6_address_counts_as_its_network(host: str, counted: Gate) -> None:
    """All of ::/64 is loopback's network here: ::1 itself is the only address of it that a test can have."""
    port = counted.getsockname()[1]
    counted.setblocking(False)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection((host, port), timeout=SOON_S))
        kept = [counted.accept()[0] for _ in range(2)]
        with pytest.raises(BlockingIOError):
            counted.accept()
        with connect(port):  # IPv4 by way of the same socket is a network of its own
            kept.append(counted.accept()[0])
        for connection in kept:
            connection.close()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(resource is None, reason="needs limits of a process")
def test_a_process_that_may_have_few_descriptors_turns_strangers_away(tmp_path: Path) -> None:
    bounds = ConnectionLimits(per_address=0)
    with relay_process(str(tmp_path / "relay.db"), tmp_path / "relay.log", connections=bounds, descriptors=120) as (_, port):
        with ExitStack() as stack:
            held = [stack.enter_context(connect(port)) for _ in range(150)]
            for connection in held:
                connection.settimeout(0.01)
            assert soon(lambda: sum(map(is_ended, held)) >= 150 - 56)
        assert soon(lambda: health(port) == 200)
    assert len((tmp_path / "relay.log").read_text().splitlines()) == 1  # that it listens: none of them was a fault


@pytest.mark.thorough_except("GET /health HTTP/1.1\\r\\nHost: x\\r\\n")
@pytest.mark.parametrize(
    "ask", ["GET /health HTTP/1.1\r\nHost: x\r\n", f"GET /v1/rounds/run-1/1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {'x' * 43}\r\n"]
)
def test_who_asks_and_leaves_has_nothing_waiting(ask: str, tmp_path: Path) -> None:
    """While the store is held, each request waits for it; those whose callers have left must not count to what is served at once."""
    bounds = ConnectionLimits(served=40, in_total=60, per_address=30)
    with relay(tmp_path, bounds) as (_, port), closing(sqlite3.connect(tmp_path / "relay.db")) as other:
        assert soon(lambda: health(port) == 200)
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(150):
            with suppress(OSError), connect(port) as stranger:
                stranger.sendall(f"{ask}\r\n".encode())
                stranger.setblocking(False)
                with suppress(BlockingIOError):
                    stranger.recv(1)
                time.sleep(0.005)
        with httpx.Client(timeout=SOON_S) as http:
            assert [http.get(f"http://127.0.0.1:{port}/metrics").status_code for _ in range(3)] == [200] * 3
        other.rollback()
        assert soon(lambda: health(port) == 200)


@pytest.mark.parametrize("tls", [False, True])
def test_a_head_of_any_length_that_comes_at_once_is_not_read(tls: bool, tmp_path: Path) -> None:
    with relay(tmp_path, ConnectionLimits(), tls=tls) as (_, port), connect(port) as plain:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(plain) if tls else plain as stranger:
            answer = b""
            with suppress(OSError):  # the connection may be over before the answer is read
                stranger.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 15_000 + b"\r\n")
                answer = stranger.recv(65_536)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def test_more_requests_at_once_on_a_connection_end_it(usual: tuple[int, int]) -> None:
    """The later ones would be read as a whole, however long."""
    one = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    _, port = usual
    with connect(port) as stranger:
        stranger.sendall(one * 2)
        assert is_ended(stranger)
    with httpx.Client(timeout=SOON_S) as http:  # one after the other is how callers of the relay ask
        assert [http.get(f"http://127.0.0.1:{port}/metrics").status_code for _ in range(3)] == [200] * 3
    assert health(port) == 200


def test_many_threads_may_knock_at_once(tmp_path: Path) -> None:
    with relay(tmp_path, ConnectionLimits(per_address=10)) as (pid, port):
        assert soon(lambda: health(port) == 200)  # it listens before all its own files are open
        before = psutil.Process(pid).num_fds()

        def knock() -> None:
            for _ in range(20):
                with suppress(OSError), connect(port):
                    pass

        threads = [threading.Thread(target=knock) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert soon(lambda: health(port) == 200)
        assert soon(lambda: psutil.Process(pid).num_fds() <= before + 2)


def key_updates(speaking: ssl.SSLObject, outgoing: ssl.MemoryBIO, count: int) -> bytes:
    """Return ``count`` TLS 1.3 KeyUpdate messages of a connection, which Python has no function for."""
    library = ctypes.CDLL(_ssl.__file__)
    library.SSL_key_update.argtypes, library.SSL_do_handshake.argtypes = (ctypes.c_void_p, ctypes.c_int), (ctypes.c_void_p,)
    own = id(speaking._sslobj)  # type: ignore[attr-defined]
    pointer = ctypes.c_void_p.from_address(own + 3 * ctypes.sizeof(ctypes.c_void_p)).value
    for _ in range(count):
        assert library.SSL_key_update(pointer, 1) == 1
        library.SSL_do_handshake(pointer)
    return outgoing.read()


def speak_tls(port: int, source: str = "127.0.0.1") -> tuple[socket.socket, ssl.SSLObject, ssl.MemoryBIO]:
    """Shake hands; return the connection, what speaks on it, and what it has to say."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode, context.minimum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_3
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    speaking, connection = context.wrap_bio(incoming, outgoing), connect(port, source)
    while True:
        try:
            speaking.do_handshake()
            connection.sendall(outgoing.read())
            return connection, speaking, outgoing
        except ssl.SSLWantReadError:
            connection.sendall(outgoing.read())
            incoming.write(connection.recv(65_536))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(_ssl.__file__), "SSL_key_update"), reason="OpenSSL's own functions cannot be called")
@pytest.mark.slow
@pytest.mark.thorough
def test_tls_that_says_nothing_is_ended_and_others_are_served_meanwhile(tmp_path: Path) -> None:
    """Each of 4 strangers sends 324 kB of KeyUpdates, which would hold the relay for 150 ms each time it looks."""
    with (
        relay(tmp_path, ConnectionLimits(), tls=True) as (_, port),
        ExitStack() as stack,
        httpx.Client(verify=False, timeout=SOON_S) as http,
    ):
        floods = []
        for _ in range(4):
            connection, speaking, outgoing = speak_tls(port, "127.0.0.2")
            stack.callback(connection.close)
            speaking.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            floods.append((connection, outgoing.read() + key_updates(speaking, outgoing, 12_000)))
        threads = [threading.Thread(target=suppressed, args=(connection.sendall, flood)) for connection, flood in floods]
        for thread in threads:
            thread.start()
        assert http.get(f"https://127.0.0.1:{port}/health").status_code == 200
        for thread in threads:
            thread.join(SOON_S)
        assert all(is_ended(connection) for connection, _ in floods)
        assert http.get(f"https://127.0.0.1:{port}/health").status_code == 200


def suppressed(act: Callable[[bytes], object], data: bytes) -> None:
    with suppress(OSError):
        act(data)


def test_a_hello_that_costs_a_tenth_of_a_second_is_refused(tmp_path: Path) -> None:
    """Finite-field groups, which OpenSSL knows by default: who sends such a hello computes nothing."""
    with relay(tmp_path, ConnectionLimits(), tls=True) as (_, port):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode, context.minimum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_3
        context.set_ecdh_curve("ffdhe8192")
        with connect(port) as connection, pytest.raises((ssl.SSLError, ConnectionError)):
            context.wrap_socket(connection)
        with httpx.Client(verify=False, timeout=SOON_S) as http:
            assert http.get(f"https://127.0.0.1:{port}/health").status_code == 200


def test_a_hello_of_many_kilobytes_is_not_read(tmp_path: Path) -> None:
    """Lists of groups and of shares make OpenSSL compare each with each: 12 ms for 24 KiB, which costs its sender nothing."""
    with relay(tmp_path, ConnectionLimits(), tls=True) as (_, port), connect(port) as stranger:
        hello = b"\x01" + (16_000).to_bytes(3, "big") + b"\x03\x03" + bytes(16_000 - 2)
        with suppress(OSError):
            for _ in range(8):
                stranger.sendall(b"\x16\x03\x01" + len(hello[:2_000]).to_bytes(2, "big") + hello[:2_000])
                hello = hello[2_000:]
                time.sleep(0.05)
        assert is_ended(stranger)


def test_large_uploads_by_tls_say_enough(tmp_path: Path) -> None:
    """What waits to be decrypted while a body is being read does not count as saying nothing."""
    with relay(tmp_path, ConnectionLimits(), tls=True) as (_, port), httpx.Client(verify=False, timeout=SOON_S) as http:
        for _ in range(3):
            answer = http.patch(f"https://127.0.0.1:{port}/v1/rounds/r/1/uploads/{'u' * 20}", content=bytes(4 * 2**20))
            assert answer.status_code == 401


@pytest.mark.parametrize("head", ["X:" + " " * 3_000 + "\0", "X:" + "\t" * 3_000 + "y", "X: a" + " " * 3_000 + "\rb"])
def test_a_head_of_blanks_takes_no_time(head: str, usual: tuple[int, int]) -> None:
    pid, port = usual
    before = sum(psutil.Process(pid).cpu_times()[:2])
    for _ in range(50):
        with connect(port) as stranger:
            stranger.sendall(f"GET /health HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
            assert is_ended(stranger)
    assert sum(psutil.Process(pid).cpu_times()[:2]) - before < 1.0  # 50 ms each, were they read
    assert health(port) == 200


@pytest.mark.parametrize("first", ["GET /health HTTP/1.1\r\nUpgrade: x", "CONNECT x:1 HTTP/1.1"])
def test_no_other_protocol_is_spoken(first: str, tmp_path: Path) -> None:
    with relay(tmp_path) as (_, port), connect(port) as stranger:
        stranger.sendall(f"{first}\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        said = b""
        with suppress(OSError):
            while block := stranger.recv(65_536):
                said += block
        assert b" 200 " not in said


@pytest.mark.parametrize("headers", ["Transfer-Encoding: chunked\r\n", "A: b\r\n" * 70, "Connection: close\r\n\r\nx"])
def test_a_head_request_that_is_refused_leaves_nothing_in_the_log(headers: str, tmp_path: Path) -> None:
    with relay(tmp_path) as (_, port):
        with connect(port) as stranger:
            stranger.sendall(f"HEAD / HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
            assert is_ended(stranger)
        assert health(port) == 200
        lines = (tmp_path / "relay.log").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["listening"]
