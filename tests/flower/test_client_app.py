"""What leaves a client: one randomised report, or an error that tells nothing."""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from flower_parts import (
    EXAMPLES,
    SECRET,
    START,
    OpenNode,
    Train,
    app_of,
    ask,
    config_of,
    instruction,
    shift,
    simulator_bits,
    start_arrays,
    start_vector,
    terms_of,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from ldpfl import LayerRanges, SeededStreams, mechanisms
from ldpfl.errors import ConfigError, DataError, Declined, Exhausted, GivesWeights, NotSetUp, OtherRunConfig, OtherVersion
from ldpfl.flower import InProcessGrid, LdpClientApp, LdpStrategy, apps
from ldpfl.flower.arrays import layout_of, to_arrays, to_vector
from ldpfl.flower.client_app import DECLINED, FAILED
from ldpfl.flower.internals import unwrap_serialised
from ldpfl.flower.round_request import read_request
from ldpfl.flower.terms import VERSION, agreement_of, digest_of
from ldpfl.util.randomness import SecureSource


def wire(message: Message) -> bytes:
    """All bytes of a reply, as Flower would send them."""
    parts = [message.deflate()]
    if message.has_content():
        for record in message.content.values():
            parts += [record.deflate(), *(child.deflate() for child in (record.children or {}).values())]
    return b"".join(parts)


def report_of(reply: Message) -> bytes:
    report = reply.content.config_records["ldpfl"]["report"]
    assert isinstance(report, bytes)
    return report


def refused(reply: Message, text: str) -> bool:
    return reply.has_error() and reply.error.reason == text and not reply.has_content()


def with_reply(change: Callable[[Message], None]) -> Train:
    """Train as ``shift`` does, and change the reply before the mod sees it."""

    def train(message: Message, context: Context) -> Message:
        reply = shift(message, context)
        change(reply)
        return reply

    return train


def set_array(name: str, value: np.ndarray) -> Callable[[Message], None]:
    return lambda reply: reply.content.array_records["arrays"].__setitem__(name, Array(value))


def test_the_report_is_what_the_mechanism_makes_of_the_update() -> None:
    reply = ask(app_of())
    ranges = LayerRanges(torch.tensor(0.0), torch.tensor(0.5), (12, 3))
    expected = mechanisms.create("duchi", epsilon=2.0).encode(
        ((start_vector() + 0.1) - start_vector())[None], ranges, SeededStreams.for_clients(4, 1, [0])
    )
    assert dict(reply.content.config_records["ldpfl"]) == {
        "version": VERSION,
        "run": "run",
        "round": 1,
        "report": next(iter(expected.payloads())),
    }


def test_with_weights_the_trained_weights_are_perturbed_and_not_their_change() -> None:
    reply = ask(app_of(), instruction(terms_of(config=config_of("mechanism.perturbed=weights", "mechanism.epsilon=30"))))
    payload = report_of(reply)
    bits = np.unpackbits(np.frombuffer(payload, np.uint8), count=15, bitorder="little")
    trained = start_vector() + 0.1
    clear = trained.abs() > 0.5  # clamped, so at this epsilon the sign is sent
    assert clear.sum() > 3
    assert np.array_equal(bits[clear.numpy()], (trained > 0).numpy()[clear.numpy()])


def test_nothing_but_the_report_is_in_the_reply() -> None:
    reply = ask(app_of())
    assert list(reply.content) == ["ldpfl"]
    sent = wire(reply)
    assert struct.pack("<d", SECRET) not in sent
    for value in (SECRET, EXAMPLES):
        assert str(value).encode() not in sent
    assert b"num-examples" not in sent


def test_a_deployed_client_draws_from_the_secure_source(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    class Watched(SecureSource):
        def block(self, rows: range, count: int) -> NDArray[np.int32]:
            drawn.append(len(rows) * count)
            return super().block(rows, count)

    monkeypatch.setattr("ldpfl.flower.client_app.SecureSource", Watched)
    node = OpenNode()
    app = LdpClientApp(shift, node=lambda context: node)
    reports = {report_of(ask(app)) for _ in range(6)}
    assert drawn == [8] * 6  # 16 bits for each of 15 weights
    assert len(reports) > 1


def test_the_node_decides_and_charges_before_the_data_are_touched() -> None:
    node = OpenNode()

    def train(message: Message, context: Context) -> Message:
        node.steps.append("train")
        return shift(message, context)

    ask(app_of(train, node))
    assert node.steps == ["admit", "train"]
    node.steps.clear()
    reply = ask(app_of(train, node), instruction(terms_of(transport="relay", key=b"k" * 32)))
    assert node.steps == ["admit", "train", "seal", "upload"]
    assert dict(reply.content.config_records["ldpfl"]) == {"version": VERSION, "run": "run", "round": 1}
    assert len(node.uploads) == 1


@pytest.mark.parametrize("error", [Exhausted("1.5 of 1.5 are spent"), Declined("not among the mechanisms"), NotSetUp("no policy")])
def test_a_refusal_is_told_to_the_operator_and_to_the_server_as_declined(
    error: Declined, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    trained: list[str] = []

    def train(message: Message, context: Context) -> Message:
        trained.append("yes")
        return shift(message, context)

    node = OpenNode(refuse="admit", error=error)
    reply = ask(app_of(train, node), instruction(terms_of(transport="relay")))
    assert refused(reply, error.public)
    assert str(error) in caplog.text
    assert not node.uploads
    assert not trained  # what is not allowed is not even trained for


def test_an_upload_that_fails_is_charged_and_tells_nothing() -> None:
    node = OpenNode(refuse="upload", error=RuntimeError("relay at 10.0.0.1 said no"))
    reply = ask(app_of(node=node), instruction(terms_of(transport="relay")))
    assert refused(reply, FAILED)
    assert node.steps == ["admit", "seal", "upload"]


def no_node(context: Context) -> OpenNode:
    raise Declined("no policy is set up")


@pytest.mark.parametrize("name", ["dp-sgd", "rotated-sign"])
def test_an_app_that_gives_trained_weights_is_asked_for_no_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing bounds what one record does to trained weights: they are not taken for the gradients that the node's budget counts."""
    trained: list[str] = []

    def train(message: Message, context: Context) -> Message:
        trained.append(name)
        return shift(message, context)

    records = ["mechanism.records=5"] if name == "dp-sgd" else []
    terms = terms_of(config=config_of(f"mechanism.name={name}", "mechanism.perturbed=gradient", *records))
    node = OpenNode()
    assert refused(ask(app_of(train, node), instruction(terms)), GivesWeights.public)
    assert (node.steps, trained) == ([], [])
    monkeypatch.setattr(apps, "train", train)
    assert ask(LdpClientApp(train, node=lambda context: node, source=simulator_bits), instruction(terms)).has_content()
    assert (node.steps, trained) == (["admit"], [name])  # so all that was missing is that `train` is ldpfl's own function


def test_an_app_is_not_ldpfls_own_because_it_has_its_name() -> None:
    terms = instruction(terms_of(config=config_of("mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "mechanism.records=5")))
    for app in (functools.wraps(apps.train)(shift), "mine.apps:train"):
        assert refused(ask(LdpClientApp(app, node=lambda context: OpenNode()), terms), GivesWeights.public)


def test_without_a_node_nothing_leaves() -> None:
    assert refused(ask(LdpClientApp(shift, node=no_node)), DECLINED)


BAD_REPLIES: dict[str, Callable[[Message], None]] = {
    "0-d": set_array("bias", np.array(7.25, dtype=np.float32)),
    "counter": set_array("steps", np.array([50], dtype=np.int64)),
    "integers": set_array("bias", np.array([1, 2, 3], dtype=np.int64)),
    "doubles": set_array("bias", np.array([1.0, 2.0, 3.0])),
    "halves": set_array("bias", np.array([1.0, 2.0, 3.0], dtype=np.float16)),
    "another shape": set_array("weight", np.zeros((4, 3), dtype=np.float32)),
    "flat": set_array("weight", np.zeros(12, dtype=np.float32)),
    "NaN": set_array("bias", np.array([0, np.nan, 0], dtype=np.float32)),
    "infinity": set_array("weight", np.full((3, 4), np.inf, dtype=np.float32)),
    "unknown array": set_array("extra", np.zeros(3, dtype=np.float32)),
    "array missing": lambda reply: reply.content.array_records["arrays"].__delitem__("bias"),
    "no arrays": lambda reply: reply.content.__delitem__("arrays"),
    "empty arrays": lambda reply: reply.content.__setitem__("arrays", ArrayRecord()),
    "second record of arrays": lambda reply: reply.content.__setitem__("more", start_arrays()),
    "config record": lambda reply: reply.content.__setitem__("notes", ConfigRecord({"note": "secret"})),
    "bytes that are no array": lambda reply: reply.content.array_records["arrays"].__setitem__(
        "bias", Array("float32", (3,), "numpy.ndarray", b"secret")
    ),
    "a record that lies about its shape": lambda reply: reply.content.array_records["arrays"].__setitem__(
        "bias", Array("float32", (3,), "numpy.ndarray", Array(np.zeros(4, dtype=np.float32)).data)
    ),
}


@pytest.mark.parametrize("name", ["PATIENT-4711", "weight"])
def test_what_is_wrong_with_an_app_s_arrays_is_said_without_what_is_in_them(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither their names nor their shapes nor their bytes: an app may have put there what is private, and the message is in the log."""
    array = Array("float32", (47, 11), "numpy.ndarray", Array(np.full((47, 11), SECRET, dtype=np.float32)).data)
    spoilt = array if name == "weight" else Array(np.zeros(3, dtype=np.float32))

    def change(reply: Message) -> None:
        reply.content.array_records["arrays"][name] = spoilt
        reply.content["PATIENT-metrics"] = MetricRecord({"PATIENT-loss": SECRET})

    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    assert ask(app_of(with_reply(change))).has_content()
    said, _ = caplog.messages  # that it was sent, as well
    assert ("array weight must be float32 of shape (3, 4)" if name == "weight" else "0 missing, 1 unknown") in said
    assert not any(private in said for private in ("PATIENT", "47", str(SECRET)))


def test_a_log_does_not_say_that_nothing_was_sent_where_a_report_of_no_change_was(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(reply: Message) -> None:
        reply.content["more"] = ArrayRecord(dict(reply.content.array_records["arrays"]))

    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    assert ask(app_of(with_reply(change))).has_content()
    replaced, sent = caplog.messages
    assert "the message holds 2 records of arrays, expected one" in replaced
    assert "nothing was sent" not in replaced
    assert sent.startswith("sent: ")


@pytest.mark.parametrize(
    ("app", "said"),
    [
        (lambda message, context: None, "the wrapped app returned no Message: let it return"),
        ("nothere.x:app", "LdpClientApp names 'nothere.x:app', but this node finds no app or function there: correct the path"),
        ("flower_parts:nothere", "LdpClientApp names 'flower_parts:nothere', but this node finds"),
        ("imports_in_vain:app", "ModuleNotFoundError at imports_in_vain.py:2. On this node"),
    ],
)
def test_an_app_that_is_not_found_or_returns_nothing_is_explained(
    app: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_in_vain.py").write_text("# an app\nimport PATIENT_4711\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    assert ask(LdpClientApp(app, node=lambda context: OpenNode())).has_content()
    replaced = caplog.messages[0]
    assert f"training failed: {said}" in replaced
    assert "PATIENT" not in replaced


def raising(message: Message, context: Context) -> Message:
    raise ValueError(f"loss was {SECRET}")


def exiting(message: Message, context: Context) -> Message:
    raise SystemExit(f"loss was {SECRET}")


def answering_error(message: Message, context: Context) -> Message:
    return Message(Error(0, f"loss was {SECRET}"), reply_to=message)


def staying(message: Message, context: Context) -> Message:
    """Train to no change at all."""
    return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)


def with_lifespan(before: bool) -> ClientApp:
    """An app whose lifespan fails, before or after training."""
    app = ClientApp()
    app.train()(shift)

    @app.lifespan()
    def lifespan(context: Context) -> Iterator[None]:
        if before:
            raise ValueError(f"PATIENT-4711 hba1c={SECRET}")
        yield
        raise ValueError(f"PATIENT-4711 hba1c={SECRET}")

    return app


FAILING: dict[str, ClientAppCallable] = {
    **{case: with_reply(change) for case, change in BAD_REPLIES.items()},
    "raises": raising,
    "asks to exit": exiting,
    "answers an error": answering_error,
    "lifespan fails before": with_lifespan(True),
    "lifespan fails after": with_lifespan(False),
    "has no train function": ClientApp(),
}
TIMES = {"at once": 0.0, "at a stated time": 1.0}


@pytest.mark.parametrize("perturbed", ["update", "weights"])
@pytest.mark.parametrize("case", FAILING)
def test_training_that_gives_nothing_to_report_is_reported_as_no_change(case: str, perturbed: str) -> None:
    """The very bytes that a client sends whose training changes nothing, from the same random bits; and the node is not asked again."""
    node = OpenNode()
    terms = terms_of(config=config_of(f"mechanism.perturbed={perturbed}"))
    failed = ask(LdpClientApp(FAILING[case], node=lambda context: node, source=simulator_bits), instruction(terms))
    assert failed.content == ask(app_of(staying), instruction(terms)).content
    assert node.steps == ["admit"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["NaN", "another shape", "raises", "asks to exit", "lifespan fails after"])
@pytest.mark.parametrize("transport", ["direct", "relay"])
@pytest.mark.thorough_except("direct-NaN")
def test_the_same_at_a_stated_time(case: str, transport: str) -> None:
    node = OpenNode()
    terms = terms_of(reply_s=1.0, transport=transport)
    failed = ask(LdpClientApp(FAILING[case], node=lambda context: node, source=simulator_bits), instruction(terms))
    calm = OpenNode()
    assert failed.content == ask(app_of(staying, calm), instruction(replace(terms, reply_s=0.0))).content
    assert node.uploads == calm.uploads


@pytest.mark.slow
@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("case", ["raises", "asks to exit", "answers an error", "lifespan fails before", "lifespan fails after"])
@pytest.mark.thorough_for(
    "answers an error-at a stated time",
    "asks to exit-at a stated time",
    "lifespan fails before-at a stated time",
    "raises-at a stated time",
    "lifespan fails after-at a stated time",
)
def test_an_app_that_fails_repeats_nothing_private(
    case: str, when: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.DEBUG)  # of every logger there is
    app = LdpClientApp(FAILING[case], node=lambda context: OpenNode(), source=simulator_bits)
    reply = ask(app, instruction(terms_of(reply_s=TIMES[when])))
    shown = caplog.text + "".join(capfd.readouterr()) + repr(reply)
    assert str(SECRET) not in shown
    assert "PATIENT" not in shown
    assert "replaced: round 1 is reported as no change" in caplog.text
    if case == "raises" and when == "at once":  # at a stated time a busy machine may not come so far
        assert "ValueError at test_client_app.py" in caplog.text
        assert "On this node, ldpfl deploy check-node --app APP --try says more" in caplog.text


def oracle(message: Message, context: Context) -> Message:
    """Train by a step that is not finite if, and only if, a private value is large: what a server's choice of weights can bring about."""
    arrays = message.content.array_records["arrays"]
    layout = layout_of(arrays)
    gradient = to_vector(arrays, layout) * (3e38 if context.node_config["private"] else 1e-3)
    return Message(RecordDict({"arrays": to_arrays(to_vector(arrays, layout) + gradient * 1e3, layout)}), reply_to=message)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["direct", "relay"])
@pytest.mark.parametrize("when", TIMES)
@pytest.mark.thorough_for("at a stated time-direct", "at a stated time-relay")
def test_overflow_that_depends_on_data_changes_nothing_that_leaves(transport: str, when: str) -> None:
    """The yes/no oracle: same steps, same form, same length, whatever the data; only the noise differs."""
    seen = []
    for private in (0, 1):
        node = OpenNode()
        app = LdpClientApp(oracle, node=lambda context, node=node: node)  # type: ignore[misc]
        grid = InProcessGrid(app, 3, node_config={"private": private})
        (reply,) = grid.send_and_receive([instruction(terms_of(transport=transport, reply_s=TIMES[when]))])
        record = reply.content.config_records["ldpfl"]
        lengths = [len(value) for value in (record.get("report", b""), *node.uploads) if isinstance(value, bytes)]
        seen.append((node.steps, sorted(record), lengths, reply.has_error()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", ["harmony", "laplace", "piecewise", "hybrid"])
@pytest.mark.slow
@pytest.mark.thorough
def test_overflow_in_one_weight_is_seen_whichever_weights_are_sampled(name: str) -> None:
    """Noticed only where it is sampled, and sampled anew then, it would tell by the places of the weights that are sent."""
    change = with_reply(set_array("bias", np.array([0, np.inf, 0], dtype=np.float32)))
    config = config_of(f"mechanism.name={name}", *([] if name == "harmony" else ["mechanism.coordinates=1"]))
    for number in range(1, 60):  # other random bits in each
        terms = terms_of(config=config, round=number)
        assert ask(app_of(change), instruction(terms)).content == ask(app_of(staying), instruction(terms)).content


@pytest.mark.parametrize("value", [3.4e38, -3.4e38, 1e-45])
@pytest.mark.parametrize("name", ["duchi", "harmony", "laplace", "piecewise", "hybrid", "duchi-vector", "privunit-g", "full-dp"])
def test_no_finite_value_makes_a_mechanism_fail(name: str, value: float) -> None:
    """What it fails at could be replaced only after it has drawn random bits, and so tell of them."""
    terms = terms_of(config=config_of(f"mechanism.name={name}", *(["ranges.radius=1.0"] if name == "full-dp" else [])))
    asked = read_request(instruction(terms).content, "train", terms.run_config).ask
    values = torch.full((1, 15), value)
    for seed in range(20):
        (payload,) = asked.mechanism.encode(values.clone(), asked.ranges, SeededStreams.for_clients(seed, 1, [0])).payloads()
        assert asked.mechanism.read([payload], asked.ranges).clients == 1


@pytest.mark.parametrize("name", ["duchi", "harmony", "laplace", "piecewise", "hybrid", "duchi-vector", "privunit-g", "full-dp", "none"])
def test_every_mechanism_can_report_no_change(name: str) -> None:
    terms = terms_of(config=config_of(f"mechanism.name={name}", *(["ranges.radius=1.0"] if name == "full-dp" else [])))
    lengths = {len(report_of(ask(app_of(train), instruction(terms)))) for train in (raising, shift)}
    assert len(lengths) == 1


def dying(message: Message, context: Context) -> Message:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def killing_its_parent(message: Message, context: Context) -> Message:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
    raise AssertionError


def stopping_its_parent(message: Message, context: Context) -> Message:
    os.kill(os.getppid(), signal.SIGSTOP)
    return staying(message, context)


def exiting_at_once(message: Message, context: Context) -> Message:
    os._exit(3)


def endless(message: Message, context: Context) -> Message:
    while True:
        time.sleep(0.01)


def leaving_processes(message: Message, context: Context) -> Message:
    """Start a process that outlives training, and tell its number in a file."""
    how = str(context.node_config["how"])
    if how.startswith("an orphan"):
        script = "setsid sleep 600 >/dev/null 2>&1 & echo $!"
        number = subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout
    else:
        number = str(subprocess.Popen(["sleep", "600"], start_new_session=how == "a session").pid)
    Path(str(context.node_config["file"])).write_text(number, encoding="ascii")
    return killing_its_parent(message, context) if how.endswith("and its parent killed") else shift(message, context)


@pytest.mark.slow
@pytest.mark.parametrize("train", [dying, killing_its_parent, stopping_its_parent, exiting_at_once, endless, shift])
@pytest.mark.thorough_except("dying")
def test_a_reply_comes_at_the_stated_time_whatever_training_does(train: Train) -> None:
    began, reply_s = time.monotonic(), 3.0 if train is shift else 1.0  # in which a busy machine comes to train, too
    reply = ask(app_of(train), instruction(terms_of(reply_s=reply_s)))
    assert time.monotonic() - began >= reply_s
    expected = ask(app_of(shift if train is shift else staying), instruction(terms_of(reply_s=0.0)))
    assert reply.content == expected.content


@pytest.mark.parametrize("what", ["no thread", "no process"])
@pytest.mark.slow
@pytest.mark.thorough_except("no process")
def test_an_app_that_leaves_no_thread_or_process_changes_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThread:
        def __init__(self, **_: object) -> None: ...

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    def no_process(work: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        if what == "no thread":
            patched.setattr("ldpfl.flower.confined_process.threading.Thread", NoThread)
        else:
            patched.setattr("ldpfl.flower.confined_process.start", no_process)
        began, reply_s = time.monotonic(), 3.0 if what == "no thread" else 1.0
        reply = ask(app_of(), instruction(terms_of(reply_s=reply_s)))
        assert time.monotonic() - began >= reply_s
    assert reply.content == ask(app_of(shift if what == "no thread" else staying)).content


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    "how", ["a child", "a session", "an orphan in a session of its own", "an orphan in a session of its own, and its parent killed"]
)
def test_what_training_started_ends_with_it(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    if how.startswith("an orphan") and sys.platform != "linux":
        pytest.skip("orphans are found on Linux only")
    app = LdpClientApp(leaving_processes, node=lambda context: OpenNode())
    ask(app, instruction(terms_of(reply_s=2.0)), node_config={"file": str(tmp_path / "pid"), "how": how})
    number = int((tmp_path / "pid").read_text(encoding="ascii"))
    for _ in range(1000):
        if not (is_alive(number) or list((tmp_path / "scratch").iterdir())):
            return
        time.sleep(0.02)
    raise AssertionError("a process or a scratch folder is left over")


@pytest.mark.slow
@pytest.mark.thorough
def test_at_the_time_of_the_reply_nothing_of_the_app_runs_or_is_taken_down(tmp_path: Path) -> None:
    """Either takes processor time: where that has a limit, the reply would be late, and say that training was still running."""

    def train(message: Message, context: Context) -> Message:
        (tmp_path / "pid").write_text(str(os.getpid()), encoding="ascii")
        if os.fork() == 0:
            os.setsid()
            (tmp_path / "child").write_text(str(os.getpid()), encoding="ascii")
        while True:
            pass

    ask(app_of(train), instruction(terms_of(reply_s=4.0)))
    numbers = [int((tmp_path / name).read_text(encoding="ascii")) for name in ("pid", "child")]
    assert [psutil.Process(number).status() for number in numbers] == [psutil.STATUS_STOPPED] * 2
    for _ in range(1000):
        if not any(is_alive(number) for number in numbers):
            return
        time.sleep(0.02)
    raise AssertionError("a process is left over")


@pytest.mark.slow
def test_exceptions_that_nobody_catches_are_logged_without_their_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Freed:
        def __del__(self) -> None:
            raise ValueError(f"PATIENT {SECRET}")

    def fail() -> None:
        raise ValueError(f"PATIENT {SECRET}")

    def train(message: Message, context: Context) -> Message:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        Freed()
        return shift(message, context)

    ask(app_of(train), instruction(terms_of(reply_s=4.0)))  # in which a busy machine comes to train, too
    shown = capfd.readouterr().err
    assert "PATIENT" not in shown
    assert shown.count("not caught: ValueError at test_client_app.py") == 2


def is_alive(number: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(number).status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="counts processes by /proc")
def test_many_processes_that_go_on_starting_others_end_with_the_app(tmp_path: Path) -> None:
    """By the time of the reply they are gone: Flower needs room for a thread then."""

    def train(message: Message, context: Context) -> Message:
        for _ in range(12):
            if os.fork() == 0:
                (tmp_path / str(os.getpid())).touch()
                while True:
                    if os.fork() == 0:
                        time.sleep(0.3)
                        os._exit(0)
                    time.sleep(0.05)
                    with suppress(ChildProcessError):
                        os.waitpid(-1, os.WNOHANG)
        time.sleep(60)
        return shift(message, context)

    ask(app_of(train), instruction(terms_of(reply_s=4.0)))
    started = [int(file.name) for file in tmp_path.iterdir()]
    assert len(started) > 1
    for _ in range(500):
        if not any(psutil.pid_exists(number) for number in started):
            return
        time.sleep(0.02)
    raise AssertionError("processes are left over")


@pytest.mark.slow
def test_noise_is_added_where_no_line_of_the_app_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an app does to its own process, by mistake or not, is not there when values are randomised."""

    def spoiling(message: Message, context: Context) -> Message:
        torch.set_default_dtype(torch.float64)
        monkeypatch.setattr(SeededStreams, "block", lambda *_: np.zeros(1))
        return shift(message, context)

    assert ask(app_of(spoiling), instruction(terms_of(reply_s=4.0))).content == ask(app_of(shift)).content


@pytest.mark.slow
@pytest.mark.thorough
def test_an_app_named_by_its_path_is_imported_where_it_trains_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app_of_a_user.py").write_text("raise ValueError('PATIENT-4711')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    app = LdpClientApp("app_of_a_user:app", node=lambda context: OpenNode(), source=simulator_bits)
    assert ask(app, instruction(terms_of(reply_s=1.0))).content == ask(app_of(staying)).content
    assert "app_of_a_user" not in sys.modules
    path = LdpClientApp("flower_parts:shift", node=lambda context: OpenNode(), source=simulator_bits)
    assert ask(path, instruction(terms_of(reply_s=4.0))).content == ask(app_of(shift)).content


@pytest.mark.slow
@pytest.mark.thorough
def test_what_an_app_remembers_lasts_though_its_process_does_not() -> None:
    def train(message: Message, context: Context) -> Message:
        rounds = int(context.state.metric_records["memory"]["rounds"]) if "memory" in context.state else 0  # type: ignore[arg-type]
        if rounds == 1:
            raise ValueError  # and what it changed before that is gone with it
        context.state["memory"] = MetricRecord({"rounds": rounds + 1})
        return shift(message, context)

    grid = InProcessGrid(app_of(train), 1)
    for _ in range(2):
        list(grid.send_and_receive([instruction(terms_of(reply_s=4.0))]))
    (context,) = grid._contexts.values()
    assert unwrap_serialised(context.state).metric_records["memory"]["rounds"] == 1


MANY = """
import sys
import numpy as np
import torch
torch.set_num_threads(2)
import flower_parts
from flwr.app import Array, ArrayRecord
from ldpfl.flower import LdpClientApp
size = 100_000  # PyTorch shares operations of more than 32,768 values out over its threads
config = flower_parts.config_of("mechanism.name=none")
terms = flower_parts.terms_of(config=config, size=size, layers=("w",), center=(0.0,), radius=(0.5,), reply_s=10.0)
arrays = ArrayRecord({"w": Array(np.zeros(size, np.float32))})
app = LdpClientApp("flower_parts:in_parallel", node=lambda context: flower_parts.OpenNode())
reply = flower_parts.ask(app, flower_parts.instruction(terms, arrays))
sent = np.frombuffer(reply.content.config_records["ldpfl"]["report"], np.float32)
sys.exit(0 if sent.size == size and (sent == 1).all() else 1)
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_of_many_weights_trains_on_several_threads() -> None:
    """In a process of its own: once PyTorch has used several threads, no forked process can."""
    done = subprocess.run([sys.executable, "-c", MANY], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]


class Unpickled:
    """Ends the process that reads it, if anybody does."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (7,)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("state", [{"mine": Unpickled()}, RecordDict({"x": ConfigRecord({"y": bytes(1 << 25)})})])
def test_what_an_app_leaves_as_its_state_does_nothing_to_the_reply(state: Any) -> None:
    def train(message: Message, context: Context) -> Message:
        context.state = state
        return shift(message, context)

    grid = InProcessGrid(app_of(train), 1)
    (reply,) = grid.send_and_receive([instruction(terms_of(reply_s=2.0))])
    assert reply.content == ask(app_of(staying)).content
    (context,) = grid._contexts.values()
    assert not unwrap_serialised(context.state)


@pytest.mark.parametrize("when", TIMES)
@pytest.mark.slow
@pytest.mark.thorough_for("at a stated time")
def test_errors_of_ours_that_an_app_raises_are_not_told_by_their_text(
    when: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An app may raise them, and loaders quote what a file holds."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)

    def train(message: Message, context: Context) -> Message:
        raise DataError(f"record 7: PATIENT {SECRET}")

    ask(app_of(train), instruction(terms_of(reply_s=4 * TIMES[when])))
    assert "PATIENT" not in caplog.text
    assert "DataError at test_client_app.py" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("signalled", ["itself", "its parent"])
@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.thorough_except("10-its parent")
def test_handlers_of_signals_speak_for_the_node_s_own_process_alone(signalled: str, number: signal.Signals, tmp_path: Path) -> None:
    """Flower's report that the task has failed; in a process of the app they would say so for a task that goes on."""

    def handler(*_: object) -> None:
        (tmp_path / "heard").touch()

    def train(message: Message, context: Context) -> Message:
        os.kill(os.getpid() if signalled == "itself" else os.getppid(), number)
        time.sleep(0.2)
        return shift(message, context)

    before = signal.signal(number, handler)
    try:
        reply = ask(app_of(train), instruction(terms_of(reply_s=1.0)))
    finally:
        signal.signal(number, before)
    assert len(report_of(reply)) == len(report_of(ask(app_of())))
    assert not (tmp_path / "heard").exists()


@pytest.mark.slow
@pytest.mark.thorough
def test_what_training_leaves_in_its_scratch_folder_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw data may be decoded there, by an app that is ended in the middle of it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def train(message: Message, context: Context) -> Message:
        folder = Path(tempfile.mkdtemp())
        (folder / "raw").write_text("PATIENT", encoding="ascii")
        folder.chmod(0o500)  # as unpacked archives have it
        time.sleep(60)
        return shift(message, context)

    ask(app_of(train), instruction(terms_of(reply_s=1.5)))
    for _ in range(500):
        if not list(tmp_path.iterdir()):
            return
        time.sleep(0.02)
    raise AssertionError(list(tmp_path.rglob("*")))


@pytest.mark.slow
def test_an_app_cannot_write_where_its_wrapper_listens() -> None:
    """It finds no pipe but its own, through which its weights go to be randomised."""

    def train(message: Message, context: Context) -> Message:
        said = b"+" + b"RAW" * 1000
        for number in range(3, 64):
            with suppress(OSError):
                if stat.S_ISFIFO(os.fstat(number).st_mode):
                    os.write(number, len(said).to_bytes(8, "big") + said)
        return shift(message, context)

    reply = ask(app_of(train), instruction(terms_of(reply_s=1.0)))
    assert b"RAW" not in wire(reply)
    assert len(report_of(reply)) == len(report_of(ask(app_of())))


def test_an_app_sees_nothing_that_is_not_compared() -> None:
    """Two messages that agree give an app the same: neither an order of records or settings nor a message's own name tells it more."""
    told = []

    def train(message: Message, context: Context) -> Message:
        seen = [(name, list(record.items())) for name, record in message.content.items() if name != "arrays"]
        told.append((seen, message.metadata.message_id, message.metadata.group_id, message.metadata.ttl))
        return shift(message, context)

    settings: list[dict[str, Any]] = [{"clip": 0.1, "scale": 3.0}, {"scale": 3.0, "clip": 0.1}]
    agreed = set()
    for number, own in enumerate(settings):
        message = instruction()
        records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {**message.content, "steps": ConfigRecord(own)}
        content = RecordDict(dict(reversed(records.items()) if number else records.items()))
        agreed.add(agreement_of(content, "train"))
        assert ask(app_of(train), Message(content, 2, "train", group_id=str(number), ttl=60.0 + number)).has_content()
    assert len(agreed) == 1
    assert told[0] == told[1]


def test_an_app_s_context_holds_nothing_that_marks_its_client() -> None:
    """No number that the SuperLink chose, and no order of settings: the node's own config and state, and what was compared."""
    told = []

    def train(message: Message, context: Context) -> Message:
        told.append((context.run_id, context.node_id, context.node_config, dict(context.state), list(context.run_config.items())))
        return shift(message, context)

    settings: list[UserConfig] = [{"clip": 0.1, "scale": 3.0}, {"scale": 3.0, "clip": 0.1}]
    for number, own in enumerate(settings):
        context = Context(70 + number, 90 + number, {"partition-id": 0}, RecordDict({"own": MetricRecord({"rounds": 7})}), own)
        assert app_of(train)(instruction(terms_of(run_config=digest_of(own))), context).has_content()
    assert told == [(0, 0, {"partition-id": 0}, {"own": MetricRecord({"rounds": 7})}, [("clip", 0.1), ("scale", 3.0)])] * 2


@pytest.mark.parametrize("value", [[1, 2], ["1", "2"], [True], 1, 1.0, True, "1", b"1", 0.0, -0.0])
def test_settings_that_differ_in_any_bit_do_not_agree(value: Any) -> None:
    others = [[1, 2], ["1", "2"], [True], 1, 1.0, True, "1", b"1", 0.0, -0.0]
    digests = [agreement_of(RecordDict({"c": ConfigRecord({"x": other})}), "train") for other in (value, *others)]
    assert digests.count(digests[0]) == 2


def test_functions_belong_to_the_app_that_is_wrapped() -> None:
    app = app_of()
    for register in (app.train, app.evaluate, app.query, app.lifespan):
        with pytest.raises(ConfigError, match="takes no functions, mods or lifespan"):
            register()
    with pytest.raises(ConfigError, match="takes no functions, mods or lifespan"):
        LdpClientApp("a:b", mods=[])


def tampering(message: Message, context: Context) -> Message:
    """Try to send by the metadata of the message that is answered."""
    reply = shift(message, context)
    for own in (message, reply):
        own.metadata.group_id = str(SECRET)
        own.metadata.message_type = "train.secret"
    message.content.array_records["arrays"]["bias"] = Array(np.zeros(3, dtype=np.float32))
    return reply


def test_metadata_that_the_app_sets_do_not_leave() -> None:
    reply = ask(app_of(tampering))
    assert reply.metadata.group_id == "1"
    assert reply.metadata.message_type == "train"
    assert report_of(reply) == report_of(ask(app_of()))


@pytest.mark.parametrize("message_type", ["evaluate", "query"])
def test_what_has_no_noise_is_not_answered(message_type: str) -> None:
    node = OpenNode()
    assert refused(ask(app_of(node=node), instruction(message_type=message_type)), DECLINED)
    assert node.steps == []


def with_stated_shape(shape: tuple[int, ...]) -> Callable[[Message], None]:
    """Let the message's bias state this ``shape``, over the bytes of its three values."""

    def change(message: Message) -> None:
        arrays = message.content.array_records["arrays"]
        arrays["bias"] = Array("float32", shape, "numpy.ndarray", arrays["bias"].data)

    return change


BAD_TERMS = {
    "no terms": lambda message: message.content.__delitem__("ldpfl"),
    "another version": lambda message: message.content.config_records["ldpfl"].__setitem__("version", VERSION + 1),
    "unknown field": lambda message: message.content.config_records["ldpfl"].__setitem__("skip-noise", True),
    "missing field": lambda message: message.content.config_records["ldpfl"].__delitem__("radius"),
    "round 0": lambda message: message.content.config_records["ldpfl"].__setitem__("round", 0),
    "round as text": lambda message: message.content.config_records["ldpfl"].__setitem__("round", "1"),
    "bool as count": lambda message: message.content.config_records["ldpfl"].__setitem__("asked", True),
    "unknown transport": lambda message: message.content.config_records["ldpfl"].__setitem__("transport", "pigeon"),
    "no config": lambda message: message.content.config_records["ldpfl"].__setitem__("config", "mechanism = 3"),
    "unknown mechanism": lambda message: message.content.config_records["ldpfl"].__setitem__("config", '[mechanism]\nname = "trust-me"'),
    "epsilon below 0": lambda message: message.content.config_records["ldpfl"].__setitem__("config", "[mechanism]\nepsilon = -1.0"),
    "noise by private data": lambda message: message.content.config_records["ldpfl"].__setitem__(
        "config", '[mechanism]\nname = "ladp"\nperturbed = "update"'
    ),
    "unproved noise": lambda message: message.content.config_records["ldpfl"].__setitem__(
        "config", '[mechanism]\nname = "nbafl"\nperturbed = "update"'
    ),
    "radius 0": lambda message: message.content.config_records["ldpfl"].__setitem__("radius", [0.0, 0.5]),
    "infinite radius": lambda message: message.content.config_records["ldpfl"].__setitem__("radius", [float("inf"), 0.5]),
    "integer radius": lambda message: message.content.config_records["ldpfl"].__setitem__("radius", [1, 1]),
    "too few ranges": lambda message: message.content.config_records["ldpfl"].__setitem__("center", [0.0]),
    "other layers": lambda message: message.content.config_records["ldpfl"].__setitem__("layers", ["weight", "other"]),
    "a layer twice": lambda message: message.content.config_records["ldpfl"].__setitem__("layers", ["weight", "weight"]),
    "integer model": lambda message: message.content.array_records["arrays"].__setitem__("bias", Array(np.arange(3))),
    "0-d model": lambda message: message.content.array_records["arrays"].__setitem__("bias", Array(np.array(1, dtype=np.float32))),
    "a model that is not finite": lambda message: message.content.array_records["arrays"].__setitem__(
        "bias", Array(np.array([0, np.nan, 0], dtype=np.float32))
    ),
    "another run config than the node's": lambda message: message.content.config_records["ldpfl"].__setitem__("run-config", "0" * 64),
    "no possible time": lambda message: message.content.config_records["ldpfl"].__setitem__("reply-s", float("nan")),
    "a time below 0": lambda message: message.content.config_records["ldpfl"].__setitem__("reply-s", -1.0),
    "an endless config": lambda message: message.content.config_records["ldpfl"].__setitem__("config", "#" * 200_000),
    "rounds without end": lambda message: message.content.config_records["ldpfl"].__setitem__(
        "config", '[mechanism]\nname = "time-varying"\nperturbed = "update"\n[training]\nrounds = 1000000000000000'
    ),
    "two models": lambda message: message.content.__setitem__("more", start_arrays()),
    "evaluation beside noise of no kind": lambda message: message.content.config_records["ldpfl"].__setitem__(
        "config", '[mechanism]\nname = "none"\n[evaluation]\nepsilon = 1.0'
    ),
    "ranges that the mechanism does not use": lambda message: message.content.config_records["ldpfl"].__setitem__(
        "config", '[mechanism]\nname = "dp-sgd"\nclip_norm = 1.0\n[ranges]\ncenter = 0.5'
    ),
    "more values than bytes": with_stated_shape((10**9, 10**9)),
    "a few more values than bytes": with_stated_shape((40,)),
    "a shape below 0": with_stated_shape((-1, -1)),
    "values of another shape": with_stated_shape((1, 3)),
}


@pytest.mark.parametrize("case", BAD_TERMS)
def test_terms_that_do_not_fit_are_refused_before_training(
    case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator reads why, since no data have been read that a text could repeat. The server does not."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    trained: list[str] = []

    def train(message: Message, context: Context) -> Message:
        trained.append("yes")
        return shift(message, context)

    node = OpenNode()
    message = instruction()
    BAD_TERMS[case](message)
    reply = ask(app_of(train, node), message)
    assert not trained
    told = {"another run config than the node's": OtherRunConfig.public, "another version": OtherVersion.public}
    assert refused(reply, told.get(case, FAILED))
    assert node.steps == []
    (line,) = caplog.messages
    assert re.search(r"Error\b|\.py:\d", line) is None, line
    assert len(line) < 1100


def test_an_array_that_claims_more_values_than_it_has_is_refused_with_a_text(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    message = instruction()
    BAD_TERMS["more values than bytes"](message)
    ask(app_of(), message)
    assert "failed: array bias has 140 bytes, fewer than its shape (1000000000, 1000000000) needs" in caplog.text


def test_errors_of_other_code_that_reads_terms_are_logged_by_their_place_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even ldpfl's own, raised elsewhere: nobody knows what that code has read."""

    def read(*_: object) -> None:
        raise ConfigError("PATIENT")

    monkeypatch.setattr("ldpfl.flower.client_app.read_request", read)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    assert refused(ask(app_of(), instruction()), FAILED)
    assert "failed: ConfigError at test_client_app.py" in caplog.text
    assert "PATIENT" not in caplog.text


def test_layers_are_taken_in_the_order_of_the_terms_whatever_that_of_the_arrays() -> None:
    turned = ArrayRecord({name: Array(START[name].numpy()) for name in reversed(START)})
    assert ask(app_of(), instruction(arrays=turned)).content["ldpfl"] == ask(app_of()).content["ldpfl"]


@pytest.mark.parametrize("name", ["duchi", "harmony", "laplace", "piecewise", "hybrid", "duchi-vector", "privunit-g", "full-dp", "none"])
def test_every_mechanism_sends_a_payload_that_its_reader_accepts(name: str) -> None:
    terms = terms_of(config=config_of(f"mechanism.name={name}", *(["ranges.radius=1.0"] if name == "full-dp" else [])))
    reply = ask(app_of(), instruction(terms))
    ranges = LayerRanges(torch.tensor(0.0), torch.tensor(0.5), (12, 3))
    report = report_of(reply)
    assert terms.mechanism(ranges).read([report], ranges).clients == 1


def test_the_environment_of_these_tests_sends_no_telemetry() -> None:
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"


def test_metrics_alone_are_no_reason_to_fail() -> None:
    more = with_reply(lambda reply: reply.content.__setitem__("more-metrics", MetricRecord({"loss": SECRET})))
    assert list(ask(app_of(more)).content) == ["ldpfl"]


def test_a_client_of_a_grid_keeps_its_state_between_rounds() -> None:
    seen: list[int] = []

    def train(message: Message, context: Context) -> Message:
        seen.append(len(context.state))
        context.state["memory"] = RecordDict().metric_records.get("x") or MetricRecord({"round": 1})
        return shift(message, context)

    grid = InProcessGrid(app_of(train), 3)
    for _ in range(2):
        list(grid.send_and_receive([instruction()]))
    assert seen == [0, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_app_that_changes_its_message_changes_no_other_client_s(workers: int) -> None:
    """All of them are sent one content; were it changed, the un-noised change of one client would stand in the reports of others."""

    def train(message: Message, context: Context) -> Message:
        content = message.content
        arrays, layout = content.array_records["arrays"], layout_of(content.array_records["arrays"])
        trained = to_arrays(to_vector(arrays, layout) + 0.1, layout)
        for name in list(arrays):
            arrays[name].data = trained[name].data
            arrays[name] = trained[name]
        content["arrays"] = trained
        center: Any = content.config_records["ldpfl"]["center"]
        center.append(1.0)
        return Message(RecordDict({"arrays": trained}), reply_to=message)

    strategy = LdpStrategy(config_of("mechanism.name=none"))
    strategy.start(InProcessGrid(app_of(train), 4, workers=workers), start_arrays(), 1)
    moved = strategy.checkpoint.state.weights - start_vector()
    assert strategy.checkpoint.history[-1].clients == 4
    torch.testing.assert_close(moved, torch.full_like(moved, 0.1), atol=1e-6, rtol=0)


@pytest.mark.thorough
def test_a_long_list_in_a_message_takes_no_hundred_times_its_bytes_to_agree_on() -> None:
    """A number takes 14 bytes in the agreement, which is made at most three times over, and some 140 as an object of its own."""
    content = RecordDict({"c": ConfigRecord({"x": [1] * 500_000})})
    tracemalloc.start()
    agreement_of(content, "train")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 * 2**20
