"""Processes are watched, and nothing of them is left, even of those that ignore signals, leave their session, or are orphaned."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ldpfl.deploy.processes import Processes, Program, Running, free_ports, last_lines
from ldpfl.errors import DeploymentError

pytestmark = pytest.mark.slow  # nearly all of them start processes

# Starts a process in a session of its own that ignores SIGTERM, one that is orphaned at once, and then ends or sleeps.
FAMILY = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, stays = Path(sys.argv[1]), sys.argv[2] == "stays"
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
one = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
one.stdout.readline()
between = subprocess.run(
    [sys.executable, "-c", "import subprocess, sys; "
     "print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL).pid)"],
    stdout=subprocess.PIPE, text=True)
pids = f"{os.getpid()} {one.pid} {between.stdout}"
(folder / "partial").write_text(pids)
(folder / "partial").rename(folder / "pids")
time.sleep(600 if stays else 0)
sys.exit(5)
"""


def program(folder: Path, code: str, *arguments: str, name: str = "part") -> Program:
    return Program(name, (sys.executable, "-I", "-c", code, *arguments), dict(os.environ), folder / f"{name}.log")


def family(folder: Path, stays: bool = True) -> Program:
    return program(folder, FAMILY, str(folder), "stays" if stays else "ends")


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def members(folder: Path) -> list[psutil.Process]:
    """Return the three processes of the family, when they are there."""
    until((folder / "pids").exists)
    return [psutil.Process(int(pid)) for pid in (folder / "pids").read_text().split()]


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_gone(processes: list[psutil.Process]) -> bool:
    return all(is_gone(process) for process in processes)


def test_stopping_leaves_nothing(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(family(tmp_path))
        started = members(tmp_path)
        assert len(started) == 3
        assert not any(is_gone(process) for process in started)
    assert all_gone(started)


def test_a_failure_in_between_leaves_nothing(tmp_path: Path) -> None:
    class Failed(Exception):
        pass

    def deploy() -> None:
        with Processes() as processes:
            processes.start(family(tmp_path))
            members(tmp_path)
            raise Failed

    with pytest.raises(Failed):
        deploy()
    assert all_gone(members_left(tmp_path))


def members_left(folder: Path) -> list[psutil.Process]:
    found = []
    for pid in (folder / "pids").read_text().split():
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


def test_what_outlives_its_program_is_ended_with_it(tmp_path: Path) -> None:
    running = Running(family(tmp_path, stays=False))
    until(lambda: running.code is not None)
    assert running.code == 5
    assert all_gone(members_left(tmp_path))
    running.stop()


@pytest.mark.thorough_except("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_supervisor_that_is_told_to_stop_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    running = Running(family(tmp_path))
    started = members(tmp_path)
    started[0].parent().send_signal(number)  # type: ignore[union-attr]
    until(lambda: running.code is not None)
    assert all_gone(started)
    running.stop()


def test_kill_9_of_who_started_it_leaves_nothing(tmp_path: Path) -> None:
    def start() -> None:
        with Processes() as processes:
            processes.start(family(tmp_path))
            until((tmp_path / "pids").exists)
            os.kill(os.getpid(), 9)

    killed = multiprocessing.get_context("fork").Process(target=start)
    killed.start()
    killed.join(60)
    assert killed.exitcode == -9
    until(lambda: all_gone(members_left(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_kill_9_of_the_supervisor_ends_the_program(tmp_path: Path) -> None:
    running = Running(program(tmp_path, "import os, time; print(os.getpid(), 'up', flush=True); time.sleep(600)"))
    until(lambda: "up" in running.program.log.read_text())
    child = psutil.Process(int(running.program.log.read_text().split()[0]))
    supervisor = child.parent()
    assert supervisor is not None
    assert "supervisor.py" in " ".join(supervisor.cmdline())
    supervisor.kill()
    until(lambda: is_gone(child))
    running.stop()


def test_a_program_may_end_by_itself_when_told(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; from pathlib import Path; "
        f"signal.signal(signal.SIGTERM, lambda *_: (Path({str(tmp_path / 'bye')!r}).touch(), sys.exit(0))); "
        "print('up', flush=True); time.sleep(600)"
    )
    running = Running(program(tmp_path, code))
    until(lambda: "up" in running.program.log.read_text())
    began = time.monotonic()
    running.stop()
    assert (tmp_path / "bye").exists()
    assert time.monotonic() - began < 2.5  # it was not waited for longer than needed


def test_a_process_that_dies_early_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    code = "import sys; print('ERROR :   no such table', flush=True); raise ValueError('private 3.1415')"
    with Processes() as processes:
        processes.start(program(tmp_path, code, name="relay"))
        with pytest.raises(DeploymentError, match=r"^relay ended with exit code 1; its log: .*relay\.log$") as caught:
            processes.wait(lambda: False, 20, "nothing")
    assert caught.value.log == ("ERROR :   no such table", '  File "<string>", line 1, in <module>', "ValueError")


def test_a_process_that_is_killed_is_named_too(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(program(tmp_path, "import os; os.kill(os.getpid(), 9)"))
        with pytest.raises(DeploymentError, match="exit code 137"):
            processes.wait(lambda: False, 20, "nothing")


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="exit code 127") as caught, Processes() as processes:
        processes.run([Program("flwr", ("/no/such/program",), dict(os.environ), tmp_path / "log")], 20)
    assert caught.value.log == ("cannot start /no/such/program: No such file or directory",)


def test_waiting_ends(tmp_path: Path) -> None:
    with Processes() as processes:
        running = processes.start(program(tmp_path, "import time; time.sleep(600)"))
        with pytest.raises(DeploymentError, match=rf"waited 0\.1 s in vain for the relay; .*{running.program.log}$"):
            processes.wait(lambda: False, 0.1, "the relay")


def test_commands_run_side_by_side_and_their_failure_is_an_error(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.run([program(tmp_path, f"open({str(tmp_path / name)!r}, 'w')", name=name) for name in ("a", "b")], 20)
        assert (tmp_path / "a").exists()
        assert (tmp_path / "b").exists()
        with pytest.raises(DeploymentError, match="c ended with exit code 3"):
            processes.run([program(tmp_path, "raise SystemExit(3)", name="c")], 20)


def test_a_taken_port_is_told_and_is_free_again_afterwards(tmp_path: Path) -> None:
    listen = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print('up', flush=True); time.sleep(600)"
    (port,) = free_ports(1)
    with Processes() as processes:
        first = processes.start(program(tmp_path, listen, str(port), name="first"))
        until(lambda: "up" in first.program.log.read_text())
        with pytest.raises(DeploymentError, match="second ended") as caught:
            processes.run([program(tmp_path, listen, str(port), name="second")], 20)
    assert "OSError" in caught.value.log
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_ports_differ() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20


def test_what_is_shown_of_a_log_holds_no_text_of_an_exception(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "\x1b[92mINFO \x1b[0m:      Starting\n"
        "2026-11-21T16:06:03.452Z ERROR [uvicorn.error] [Errno 98] address already in use\n"
        '2026-11-21T16:06:03.452Z INFO [uvicorn.access] 127.0.0.1:1 - "POST /v1 HTTP/1.1" 200\n'
        "weights tensor([0.123, 0.456])\n"
        "Traceback (most recent call last):\n"
        '  File "/app/train.py", line 7, in train\n'
        "    raise ValueError(loss)\n"
        "torch.OutOfMemoryError: 0.789\n"
        "  0.321\n"
        '{"event": "listening", "port": 1}\n'
        "ldpfl: no such \x1b]0;file\n" + "INFO : " + "x" * 500 + "\n",
        encoding="utf-8",
    )
    lines = last_lines(log)
    assert lines[:6] == (
        "INFO :      Starting",
        "2026-11-21T16:06:03.452Z ERROR [uvicorn.error] [Errno 98] address already in use",
        '  File "/app/train.py", line 7, in train',
        "torch.OutOfMemoryError",
        '{"event": "listening", "port": 1}',
        "ldpfl: no such  ]0;file",
    )
    assert len(lines) == 7
    assert len(lines[6]) == 200
    assert last_lines(tmp_path / "none") == ()
