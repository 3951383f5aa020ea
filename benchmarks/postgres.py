"""A PostgreSQL server of a benchmark's own, with its default settings, and what its processes take."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_START_S = 60.0


@dataclass(frozen=True)
class Postgres:
    """A server that runs.

    Attributes:
        pid: process id of its first process, which starts all others.
        folder: where its socket is.
        sql: runs an SQL command, and returns whether it succeeded.
    """

    pid: int
    folder: Path
    sql: Callable[[str], bool]

    def new_store(self, name: str) -> str:
        """Return the URL of an empty store in a new database of this ``name``."""
        if not self.sql(f"CREATE DATABASE {name} OWNER relay"):
            raise SystemExit(f"PostgreSQL makes no database {name}")
        return f"postgresql://relay@/{name}?host={self.folder}"

    def processor_s(self) -> float:
        """Return the processor time of all processes of the server, in seconds. Processes that have ended count as well."""
        first = psutil.Process(self.pid)
        total = float(sum(first.cpu_times()[:4]))  # its own, and its ended children's
        for child in first.children():
            with suppress(psutil.NoSuchProcess):
                total += sum(child.cpu_times()[:2])
        return total

    def own_memory(self) -> float:
        """Return the memory of the server's processes that they do not share with others, in MB."""
        processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children()]
        return sum(float(process.memory_full_info().uss) for process in processes) / 1e6


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Start a server in a temporary folder, with a role for a relay; stop and delete it afterwards."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    path = shutil.which("initdb")
    if not found and path is None:
        raise SystemExit("PostgreSQL's programs are not here: install them, as by apt-get install postgresql")
    programs, folder = found[-1].parent if found else Path(path or "").parent, Path(tempfile.mkdtemp(prefix="bench-pg-"))
    role: dict[str, Any] = {"cwd": folder}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        role |= {"user": "postgres", "group": "postgres", "extra_groups": []}
        shutil.chown(folder, "postgres", "postgres")
    role |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    data = folder / "data"
    subprocess.run([programs / "initdb", "--auth=trust", "--username=admin", "--encoding=UTF8", f"--pgdata={data}"], check=True, **role)
    options = ("--listen_addresses=", f"--unix_socket_directories={folder}", "--max_connections=60")
    process = subprocess.Popen([programs / "postgres", "-D", data, *options], **role)

    def sql(command: str) -> bool:
        return subprocess.run([programs / "psql", "-h", folder, "-U", "admin", "-d", "postgres", "-c", command], **role).returncode == 0

    try:
        end = time.monotonic() + _START_S
        while not sql("CREATE ROLE relay LOGIN"):
            if time.monotonic() > end:
                raise SystemExit("PostgreSQL did not start")
            time.sleep(0.2)
        yield Postgres(process.pid, folder, sql)
    finally:
        process.send_signal(signal.SIGINT)  # ends its sessions too
        process.wait()
        shutil.rmtree(folder)
