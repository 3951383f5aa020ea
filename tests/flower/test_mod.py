"""What leaves a client: one randomised report, or an error that tells nothing."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
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
    mod_of,
    shift,
    start_arrays,
    start_vector,
    terms_of,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from ldpfl import LayerRanges, SeededStreams, mechanisms
from ldpfl.flower import InProcessGrid, LdpMod, LdpStrategy
from ldpfl.flower.arrays import layout_of, to_arrays, to_vector
from ldpfl.flower.mod import DECLINED, FAILED, NOT_OUTERMOST
from ldpfl.privacy.policy import Declined, Exhausted
from ldpfl.randomness import SecureSource


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
        "version": 1,
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
        def int32(self, row: int, count: int) -> torch.Tensor:
            drawn.append(count)
            return super().int32(row, count)

    monkeypatch.setattr("ldpfl.flower.mod.SecureSource", Watched)
    node = OpenNode()
    app = ClientApp(mods=[LdpMod(lambda context: node)])
    app.train()(shift)
    reports = {report_of(ask(app)) for _ in range(6)}
    assert drawn == [15] * 6
    assert len(reports) > 1


def test_policy_and_budget_are_asked_in_order_and_before_anything_is_sent() -> None:
    node = OpenNode()
    ask(app_of(node=node))
    assert node.steps == ["admit", "charge"]
    node = OpenNode()
    reply = ask(app_of(node=node), instruction(terms_of(transport="relay", key=b"k" * 32)))
    assert node.steps == ["admit", "seal", "charge", "upload"]
    assert dict(reply.content.config_records["ldpfl"]) == {"version": 1, "run": "run", "round": 1}
    assert len(node.uploads) == 1


@pytest.mark.parametrize("step", ["admit", "charge"])
@pytest.mark.parametrize("error", [Exhausted("1.5 of 1.5 are spent"), Declined("not among the mechanisms")])
def test_a_refusal_is_told_to_the_operator_and_to_the_server_as_declined(
    step: str, error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    trained: list[str] = []

    def train(message: Message, context: Context) -> Message:
        trained.append("yes")
        return shift(message, context)

    node = OpenNode(refuse=step, error=error)
    reply = ask(app_of(train, node), instruction(terms_of(transport="relay")))
    assert refused(reply, DECLINED)
    assert str(error) in caplog.text
    assert not node.uploads
    assert trained == ([] if step == "admit" else ["yes"])  # what is not allowed is not even trained for


def test_an_upload_that_fails_is_charged_and_tells_nothing() -> None:
    node = OpenNode(refuse="upload", error=RuntimeError("relay at 10.0.0.1 said no"))
    reply = ask(app_of(node=node), instruction(terms_of(transport="relay")))
    assert refused(reply, FAILED)
    assert node.steps[-2:] == ["charge", "upload"]


def no_node(context: Context) -> OpenNode:
    raise Declined("no policy is set up")


def test_without_a_node_nothing_leaves() -> None:
    app = ClientApp(mods=[LdpMod(no_node)])
    app.train()(shift)
    assert refused(ask(app), DECLINED)


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


@pytest.mark.parametrize("case", BAD_REPLIES)
def test_what_no_mechanism_can_protect_stops_the_report(case: str) -> None:
    node = OpenNode()
    reply = ask(app_of(with_reply(BAD_REPLIES[case]), node))
    assert refused(reply, FAILED)
    assert node.steps == ["admit"]  # nothing was sent, so nothing is charged


def raising(message: Message, context: Context) -> Message:
    raise ValueError(f"loss was {SECRET}")


def answering_error(message: Message, context: Context) -> Message:
    return Message(Error(0, f"loss was {SECRET}"), reply_to=message)


@pytest.mark.parametrize("train", [raising, answering_error])
def test_an_app_that_fails_repeats_nothing_private(
    train: Train, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    reply = ask(app_of(train))
    assert refused(reply, FAILED)
    shown = caplog.text + "".join(capfd.readouterr()) + repr(reply)
    assert str(SECRET) not in shown
    if train is raising:
        assert "ValueError at test_mod.py" in caplog.text


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


def forwarding(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    return call_next(message, context)


class Lookalike(ClientApp):
    """Not what Flower calls."""

    def __call__(self, message: Message, context: Context) -> Message:
        return self._mods[0](message, context, shift)


def not_outermost() -> dict[str, ClientApp]:
    own = mod_of()
    apps = {
        "another mod first": ClientApp(mods=[forwarding, own]),
        "inside another mod": ClientApp(mods=[lambda message, context, call_next: own(message, context, call_next)]),
        "only around train": ClientApp(),
        "around train, behind an app-wide one": ClientApp(mods=[forwarding]),
        "called by other code": Lookalike(mods=[own]),
    }
    for name, app in apps.items():
        app.train(mods=[own] if "around" in name else None)(shift)
    return apps


@pytest.mark.parametrize("case", not_outermost())
def test_a_mod_that_is_not_outermost_says_so_and_sends_nothing(case: str) -> None:
    assert refused(ask(not_outermost()[case]), NOT_OUTERMOST)


def test_further_mods_run_inside() -> None:
    seen: list[list[str]] = []

    def watching(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        seen.append(list(reply.content))
        return reply

    app = ClientApp(mods=[mod_of(), watching])
    app.train()(shift)
    assert ask(app).has_content()
    assert seen == [["arrays", "metrics"]]


BAD_TERMS = {
    "no terms": lambda message: message.content.__delitem__("ldpfl"),
    "another version": lambda message: message.content.config_records["ldpfl"].__setitem__("version", 2),
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
    "two models": lambda message: message.content.__setitem__("more", start_arrays()),
}


@pytest.mark.parametrize("case", BAD_TERMS)
def test_terms_that_do_not_fit_are_refused_before_training(case: str) -> None:
    def train(message: Message, context: Context) -> Message:
        raise AssertionError("trained")

    node = OpenNode()
    message = instruction()
    BAD_TERMS[case](message)
    reply = ask(app_of(train, node), message)
    assert refused(reply, FAILED)
    assert node.steps == []


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
