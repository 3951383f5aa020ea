"""What the relay's tests share: a clock to turn, a transport without sockets, a PostgreSQL server and relay processes."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from io import BytesIO
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import pytest
from anyio.from_thread import BlockingPortal
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from sqlalchemy import Engine, event, select
from starlette.types import ASGIApp

from ldpfl.relay import RoundStatus, SumTerms, Terms
from ldpfl.relay.errors import Refusal
from ldpfl.relay.schema import READ_ONLY, blocks, meta, parts, rounds, tokens, uploads
from ldpfl.relay.serve import Tls, serve
from ldpfl.relay.store import Store
from ldpfl.relay.tokens import Owner, Role, Tokens
from ldpfl.relay.usage_limits import ConnectionLimits
from ldpfl.transport.sums import ENVELOPE_BYTES, SumBinding, fold, signer_of
from ldpfl.transport.sums.masks import zeros
from ldpfl.util.entropy import Words, secure_words

TABLES = (meta, tokens, rounds, uploads, blocks, parts)
RUN = "run-1"
RECORD_BYTES = 16
_SEALED_BYTES = 80


def unsynced(engine: Engine) -> Engine:
    """Let a SQLite store wait for no disk, as the tests' PostgreSQL does not: they are about what it holds, not about power cuts."""
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
        engine.dispose()
    return engine


def terms(**changes: Any) -> Terms:
    """Terms of a small round; by name, others."""
    usual = {"record_bytes": RECORD_BYTES, "records_per_upload": 40, "min_clients": 2, "closes_in_s": 100.0, "max_uploads": 8}
    return Terms(**{"agreement": "0" * 64, **usual, **changes})


def sum_terms(**changes: Any) -> SumTerms:
    """Terms of a small sum round; by name, others."""
    usual = {"dimension": 10, "bits": 32, "min_clients": 2, "closes_in_s": 100.0, "max_uploads": 8}
    return SumTerms(**{"agreement": "0" * 64, **usual, **changes})


def signing_key(client: str) -> Ed25519PrivateKey:
    """Return the key by which a client of a sum signs."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(client.encode()).digest())


def signer(client: str, *, signs: bool = True) -> Owner:
    """Return a client as the relay knows it by its token, with its signing key or without one."""
    return Owner(client, Role.CLIENT, signing_key(client).public_key() if signs else None)


def tokens_for(engine: Engine, clients: Iterable[str]) -> dict[str, str]:
    """Issue a token to each client, with its signing key, and to the aggregator "server"; return them by name."""
    known = Tokens(engine)
    made = {name: known.add(name, Role.CLIENT, signing_key(name).public_key()) for name in clients}
    return made | {"server": known.add("server", Role.AGGREGATOR)}


def share_for(name: str, size: SumTerms | None = None, number: int = 1, *, by: str | None = None) -> bytes:
    """Return an upload to a sum round, masked vector and envelope, that looks as random as a real one and is signed as one.

    Args:
        name: another one, other bytes.
        by: the client that signs it, if that is not ``name``.
    """
    size = size or sum_terms()
    source = np.random.default_rng(list(name.encode()))
    return source.bytes(size.sum_bytes) + envelope_of(source.bytes(_SEALED_BYTES), by or name, size, number)


def envelope_of(sealed: bytes, client: str, size: SumTerms, number: int = 1) -> bytes:
    """Return what ``client`` would send of a seed that is ``sealed``."""
    binding, key = SumBinding(RUN, number, bytes.fromhex(size.agreement), size.dimension, size.bits), signing_key(client)
    return signer_of(key.public_key()) + key.sign(binding.info(b"sign") + sealed) + sealed


def share_id(share: bytes) -> str:
    return hashlib.sha256(share[-ENVELOPE_BYTES:]).hexdigest()


def give(store: Store, client: str | Owner, share: bytes, number: int = 1) -> None:
    """Add a share to a sum as the application does."""
    owner = signer(client) if isinstance(client, str) else client
    expected = store.sums.check(owner, RUN, number, share_id(share), len(share))
    store.sums.add(expected, BytesIO(share)).result(60)


def die_before(last: int, store: Store, having: str = "") -> None:
    """Have this process killed (9) before the ``last``-th statement or commit of ``store`` from now on; of those ``having`` a text."""
    left = [last]

    def count(*seen: object) -> None:
        left[0] -= having in str(seen)
        if left[0] == 0:
            os.kill(os.getpid(), 9)

    event.listen(store.engine, "before_cursor_execute", count)
    event.listen(store.engine, "commit", count)


def sum_of(shares: Iterable[bytes], size: SumTerms) -> NDArray[np.unsignedinteger]:
    total = zeros(size.dimension, size.bits)
    for share in shares:
        fold(total, share[: size.sum_bytes])
    return total


def members(data: bytes, shares: Mapping[str, bytes], size: SumTerms) -> set[str]:
    """Return whose shares a released sum is of, by its envelopes; it must be the sum of exactly theirs."""
    by_envelope = {share[-ENVELOPE_BYTES:]: client for client, share in shares.items()}
    envelopes = records(data[size.sum_bytes :], ENVELOPE_BYTES)
    assert set(envelopes.values()) == {1}
    inside = {by_envelope[envelope] for envelope in envelopes}
    assert data[: size.sum_bytes] == sum_of((shares[client] for client in inside), size).tobytes()
    return inside


def upload_id(client: str) -> str:
    return f"upload-of-{client}-0123456789"


def blob(client: str, size: Terms | None = None) -> bytes:
    """Return an upload whose records name their client and number."""
    size = size or terms()
    return b"".join(f"{client}-{index}".encode().ljust(size.record_bytes, b".") for index in range(size.records_per_upload))


def records(data: bytes, record_bytes: int = RECORD_BYTES) -> Counter[bytes]:
    assert len(data) % record_bytes == 0
    return Counter(data[start : start + record_bytes] for start in range(0, len(data), record_bytes))


def put(store: Store, client: str, number: int = 1, *, size: Terms | None = None, block: int = 300) -> None:
    """Upload a whole blob, in blocks that cut through records."""
    data = blob(client, size)
    store.begin(client, RUN, number, upload_id(client), len(data))
    for start in range(0, len(data), block):
        store.append(client, RUN, number, upload_id(client), start, data[start : start + block])


def pull(store: Store, number: int = 1, owner: str = "aggregator") -> bytes:
    """Return all parts of a round."""
    first = store.part(owner, RUN, number, 0)
    return first.data + b"".join(store.part(owner, RUN, number, index).data for index in range(1, first.count))


def on_disk(path: Path) -> bytes:
    """Return all bytes of a SQLite store's files, but for its reserve."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob(f"{path.name}*")) if file.suffix != ".reserve")


def content(store: Store) -> list[list[tuple[Any, ...]]]:
    with store.engine.connect().execution_options(**READ_ONLY) as connection:
        return [sorted(tuple(row) for row in connection.execute(select(table))) for table in TABLES]


def sum_opened(store: Store, number: int = 1, **changes: Any) -> SumTerms:
    """Open a sum round; return its terms."""
    size = sum_terms(**changes)
    store.open_round("aggregator", RUN, number, size)
    return size


def opened(store: Store, number: int = 1, **changes: Any) -> RoundStatus:
    return store.open_round("aggregator", RUN, number, terms(**changes))


def refused(store: Store, kind: type[Refusal], action: Callable[[], object], match: str | None = None) -> None:
    """Expect a refusal of exactly this kind that changes nothing."""
    before = content(store)
    with pytest.raises(kind, match=match) as caught:
        action()
    assert type(caught.value) is kind
    assert content(store) == before


def seeded(seed: int) -> Words:
    source = np.random.PCG64DXSM(seed)
    return lambda count: source.random_raw((count + 1) // 2).view(np.int32)[:count]


@dataclass
class Clock:
    """Seconds that pass only when a test says so."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class InProcess(httpx.BaseTransport):
    """Carries requests to an application in this process. ``fault`` sees each request first and may break it."""

    app: ASGIApp
    portal: BlockingPortal
    fault: Callable[[httpx.Request], httpx.Response | None] = lambda request: None
    seen: list[httpx.Request] = field(default_factory=list)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        return self.fault(request) or self.portal.call(self._send, request)

    async def _send(self, request: httpx.Request) -> httpx.Response:
        sent = httpx.Request(request.method, request.url, headers=request.headers, stream=httpx.ByteStream(request.read()))
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        response = await transport.handle_async_request(sent)
        return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())


class Changes:
    """Counts what others commit to a SQLite file; an own connection, since SQLite counts for each one apart."""

    def __init__(self, path: str | None) -> None:
        self._connection = sqlite3.connect(str(path), check_same_thread=False)

    def count(self) -> int:
        """Return a number that is another one after each change."""
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        self._connection.close()


class Postgres:
    """A PostgreSQL server of the tests' own, in a temporary folder, reached by a socket in it, and on loopback, there also with TLS.

    Attributes:
        folder: where its socket is.
        port: on loopback, and in the socket's name.
        authority: file of the certificate authority that vouches for 127.0.0.1.
        programs: folder of the server's programs.

    Args:
        programs: folder of the server's programs.
        more: settings of the server, by name.
    """

    def __init__(self, programs: Path, **more: str) -> None:
        # As root it must run under another name, which cannot enter pytest's own folders.
        self.folder = Path(tempfile.mkdtemp(prefix="relay-pg-"))
        self.port = free_port()
        self._as: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
        if self._as:
            shutil.chown(self.folder, "postgres", "postgres")
        files = certificate(self.folder)
        self.authority = files.certificate
        if self._as:
            shutil.chown(files.key, "postgres", "postgres")
        data = self.folder / "data"
        self._run(programs / "initdb", "--no-sync", "--auth=trust", "--username=admin", "--encoding=UTF8", f"--pgdata={data}")
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.folder,
            "ssl": "on",
            "ssl_cert_file": files.certificate,
            "ssl_key_file": files.key,
            "max_connections": 60,
            **more,
        }
        self._process = subprocess.Popen(
            [programs / "postgres", "-D", data, *(f"--{name}={value}" for name, value in settings.items())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            **self._as,
        )
        self._databases = 0
        self.programs = programs
        self._wait()
        self.command("CREATE ROLE relay LOGIN")

    def new_store(self) -> str:
        """Return the URL of an empty store."""
        return self.url(self.new_database())

    def new_database(self) -> str:
        """Return the name of an empty database."""
        self._databases += 1
        self.command(f"CREATE DATABASE d{self._databases} OWNER relay")
        return f"d{self._databases}"

    def url(self, database: str, *, user: str = "relay", host: str | Path = "", port: int | None = None, more: str = "") -> str:
        """Return the URL of a store in a database, by the socket or by a host."""
        return f"postgresql://{user}@/{database}?host={host or self.folder}&port={port or self.port}{more}"

    def command(self, *commands: str, database: str = "postgres", user: str = "admin") -> str:
        """Run SQL commands, each on its own, as a superuser unless another role is named; return what they print."""
        options = [part for command in commands for part in ("-c", command)]
        to = ("-h", self.folder, "-p", str(self.port), "-U", user, "-d", database)
        return self._run(self.programs / "psql", "-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", *to, *options)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)  # ends its sessions; SIGTERM would wait for them
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder)

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.command("SELECT 1")
                return
            except subprocess.CalledProcessError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.stop()
                    raise
                time.sleep(0.1)

    def _run(self, *command: str | Path) -> str:
        return str(subprocess.run(command, check=True, capture_output=True, text=True, cwd=self.folder, **self._as).stdout)


def free_port() -> int:
    """Return a port on loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def postgres_programs() -> Path | None:
    """Return the folder of PostgreSQL's server programs, or None."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    path = shutil.which("initdb")
    return found[-1].parent if found else Path(path).parent if path else None


_processes = multiprocessing.get_context("forkserver")
_environment = threading.Lock()
"""Held by the thread that changes the process's environment: of two threads at once, one would restore what the other had set."""


def _start_server(module: str) -> None:
    """Start the server that forks processes, unless it runs, with a ``module`` that they take: it costs each of them seconds otherwise."""
    _processes.set_forkserver_preload([__name__, module])
    with _environment, pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        ensure_running()


@contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[Any]:
    """Run a function in a process of its own that does not outlive the block."""
    _start_server(target.__module__)
    started = _processes.Process(target=target, args=arguments, daemon=True)
    started.start()
    try:
        yield started
    finally:
        started.kill()
        started.join()


@contextmanager
def relay_process(
    store: str,
    log: Path,
    port: int = 0,
    tls: Tls | None = None,
    connections: ConnectionLimits | None = None,
    descriptors: int | None = None,
) -> Iterator[tuple[Any, int]]:
    """Run a relay on loopback; yield its process and port. Its output goes to ``log``; it may have so many file descriptors."""
    log.unlink(missing_ok=True)
    with process(serve_to, log, store, port, tls, connections or ConnectionLimits(), descriptors) as running:
        deadline = time.monotonic() + 60
        while not (lines := _read(log)) or not lines.endswith("\n"):
            assert time.monotonic() < deadline
            assert running.is_alive(), lines
            time.sleep(0.02)
        yield running, json.loads(lines.splitlines()[0])["port"]


def _read(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def serve_to(
    log: Path,
    store: str,
    port: int,
    tls: Tls | None = None,
    connections: ConnectionLimits = ConnectionLimits(),  # noqa: B008  (it is frozen)
    descriptors: int | None = None,
    dies: int = 0,
) -> None:
    """Serve in this process, which kills itself when it draws random bits for the ``dies``-th time; what it says goes to ``log``."""
    if descriptors is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    with mock.patch("ldpfl.relay.serve.Store", partial(Store, words=KillsItself(dies)) if dies else Store):
        serve(store, "127.0.0.1", port, tls, connections=connections)


class KillsItself:
    """A secure source that ends its process, as kill -9 does, when it is asked for the ``last``-th time."""

    def __init__(self, last: int) -> None:
        self._left = last

    def __call__(self, count: int) -> NDArray[np.int32]:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), 9)
        return secure_words(count)


def certificate(folder: Path) -> Tls:
    """Make a certificate of its own authority for loopback."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "relay")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = Tls(folder / "relay.crt", folder / "relay.key")
    files.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form: Any = serialization.PrivateFormat.PKCS8
    files.key.touch(0o600)
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return files
