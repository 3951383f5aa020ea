"""The client's end: a wrapper of a Flower ClientApp, out of which nothing but a randomised report comes."""

from __future__ import annotations

import logging
import pkgutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from ldpfl.errors import ConfigError, Declined, NoRecordSums, PrivacyError, ProtocolError
from ldpfl.flower import confined_process
from ldpfl.flower.arrays import only_arrays, to_vector
from ldpfl.flower.internals import APP_RAISED, REFUSED, message_for_app, packed, records_to_bytes, unpacked
from ldpfl.flower.invitation import QUESTION, Question, read_question
from ldpfl.flower.named_by_server import check_mechanism
from ldpfl.flower.operator_node import OperatorNode, operator_node
from ldpfl.flower.records import RecordGradients, Records, check_kind
from ldpfl.flower.round_request import Ask, Asked, Node, read_asked
from ldpfl.flower.terms import RECORD, Answer, RoundTerms, adding_up, digest_of, mechanism_named
from ldpfl.mechanisms import is_built_in, payload_bits
from ldpfl.mechanisms.base import is_finite
from ldpfl.mechanisms.hooks import record_clip_of
from ldpfl.mechanisms.reports.bits import packed_size
from ldpfl.server import client_values
from ldpfl.util.randomness import RandomSource, SecureSource

LOGGER = logging.getLogger("flwr.ldpfl")

DECLINED, FAILED = Declined.public, "failed"
"""What a server is told when there is no report: the client would not, or it could not. Neither depends on data."""

_MARGIN, _SMALLEST_MARGIN_S, _FREED_AFTER_S = 0.05, 1.0, 2.0
"""Part of the time for a reply, at least a second or half of the time, by which the report has to be ready: the rest is for taking it and
stopping its processes, and for the next of the periods over which a container's limit on processor time counts. They are ended some
seconds after the reply."""

_LENGTH_BYTES = 8

_LONGEST_AT_ONCE_S = 3600.0
"""Longest that an app is waited for where the round states no time for replies."""

_LARGEST_STATE = 1 << 24
"""Bytes of an app's state that are kept from round to round: taking them must not take long."""


Guard = Callable[[Callable[[], bytes]], bytes]
"""Does the work of an app's process, and may raise another error in place of the one that the work raises."""


@dataclass(frozen=True)
class Attempt:
    """What came of a round's local work that was done for a look at it.

    Attributes:
        report_bytes: length of the report; None where there was none.
        trouble: then why, for the node's operator; it repeats no value.
        seconds: how long the work took.
    """

    report_bytes: int | None
    trouble: str
    seconds: float


class LdpClientApp(ClientApp):
    """A locally private ClientApp around another one: ``app = LdpClientApp("my_package.training:app")``.

    Or around one's own model and records: ``app = LdpClientApp(records="my_package.training:records")``. Then ldpfl takes the gradients
    and bounds them record by record, as mechanisms that protect records (``dp-sgd``) need it.

    What the app trains, or its change since the broadcast, goes through the mechanism that the server names and the node's policy
    allows. All else that the app does or returns, metrics included, stays on the node. Only ``train`` messages are answered, and
    the question whether this node would take part in a round (:mod:`ldpfl.flower.invitation`).

    Whether it takes part is decided, and the lifetime budget charged, from public facts before the app is called. From then on
    exactly one report leaves. Training that fails, is not finite or takes too long is replaced by the broadcast itself, which is no
    change; only the node's log says so. If the round states ``reply_s``, the reply leaves so many seconds after the charge, whatever
    happens: the app runs in a process of its own, which is ended then, and the report is made in another one that no line of the app
    has run in.

    Guarantee: that of the mechanism for each round's report. Whether a client takes part is not hidden. Assumes that the node
    runs this wrapper: whoever chooses the code on a node can leave it out.

    Args:
        app: the app, or any function of a message and a context; or its import path, ``package.module:name``. A path is imported in
            the app's process, so that nothing of it runs anywhere else, and it may use all of PyTorch's threads; an object gets one.
        records: in place of an app: returns, for Flower's context, the :class:`~ldpfl.flower.RecordTask` of this node; or its import
            path. It takes part where the terms ask for gradients.
        node: returns, for a context, what the node's operator set up.
        persons: whether ``records`` say whose each row is (``RecordTask.persons``). Rounds that protect persons are declined if not: what
            the records say is known when the budget is charged, and not before.
        gradients: whether the app is ours. It gives gradients where the terms ask for them, bounded record by record if they do, and sums
            over records for evaluation and least squares. What another app gives is taken for trained weights, of which nobody knows what
            a single record did to them.
        source: where the random bits come from, for a test; by default the operating system's secure source.

    Raises:
        ConfigError: neither an app nor records are given, or both.
    """

    def __init__(
        self,
        app: ClientAppCallable | str | None = None,
        *,
        records: Records | str | None = None,
        node: Callable[[Context], Node] = operator_node,
        persons: bool = False,
        gradients: bool = False,
        source: Callable[[Ask, Context], RandomSource] = lambda ask, context: SecureSource(),
    ) -> None:
        super().__init__()
        self._app, self._node, self._source = _wrapped(app, records), node, source
        self._by_path = isinstance(app or records, str)
        self._gives_weights, self._gives_gradients = records is None, gradients or records is not None
        self._is_ready = gradients
        self._names_persons = persons or records is None  # an app of ours reads a table by the column that the terms name
        self._last: tuple[RecordDict, tuple[str, str], Asked] | None = None
        self._last_question: tuple[RecordDict, str, Question] | None = None

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer ``message`` with a report, or with an error that does not depend on data."""
        question = message.metadata.message_type == QUESTION  # the operator reads of it in words of its own: nothing leaves or is charged
        try:
            answer = self._answer(message, context)
        except Declined as refusal:
            LOGGER.warning("%s: %s", "would decline" if question else "declined", refusal)
            return Message(Error(REFUSED, refusal.public), reply_to=message)
        except (Exception, SystemExit) as error:
            LOGGER.error("%s: %s", "not answered" if question else "failed", confined_process.place_of(error))
            return Message(Error(APP_RAISED, FAILED), reply_to=message)
        said = "would take part: the server asked about round %d; nothing was charged" if question else "sent: the report of round %d"
        LOGGER.info(said, answer.round)
        return Message(RecordDict({RECORD: answer.to_record()}), reply_to=message)

    @property
    def wrapped(self) -> ClientAppCallable | str:
        """The app, or what takes the gradients of its records; or the app's import path."""
        return self._app

    def attempt(self, message: Message, context: Context, cohort: int, guard: Guard) -> Attempt:
        """Do all the local work that a ``train`` message asks for, in the processes of a real round, and drop the report.

        Nothing is charged or sent, and no refusal is written. For the operator of this node, who sees what nobody else may: how long the
        work took, and why it failed.

        Args:
            cohort: number of clients that the report would be mixed with.
            guard: does the work of the app's process.

        Raises:
            Declined: the round would be declined.
            LdpflError: the message, or the mechanism, cannot be used.
        """
        node = self._node(context)
        if isinstance(node, OperatorNode):  # before anything of it is looked up
            check_mechanism(mechanism_named(message.content), node.policy)
        asked = self._asked(message, context)
        terms = asked.ask.terms
        self._check_given(terms)
        if isinstance(node, OperatorNode):
            node.would_allow(asked.ask, cohort)
        began = time.monotonic()
        with confined_process.one_thread() as threads:
            self._report(asked, node, context, _unchanged(asked))
            allowed = threads if self._by_path else 1
            outcome = self._outcome(asked, node, message, context, allowed, began + (terms.reply_s or _LONGEST_AT_ONCE_S), guard)
        seconds = time.monotonic() - began
        if outcome.value is None:
            return Attempt(None, outcome.trouble, seconds)
        return Attempt(int.from_bytes(outcome.value[:_LENGTH_BYTES], "big"), "", seconds)

    def train(self, *_: object, **__: object) -> NoReturn:
        """Refuse: functions belong to the app that is wrapped.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("LdpClientApp wraps an app: register functions, mods and lifespan with that one, and give it to LdpClientApp")

    evaluate = query = lifespan = train

    def _answer(self, message: Message, context: Context) -> Answer:
        if message.metadata.message_type == QUESTION:
            return self._would_answer(message, context)
        category = message.metadata.message_type.partition(".")[0]
        if category != "train":
            raise Declined(f"a message of type {category!r} asks for what has no noise; only train is answered")
        node = self._node(context)
        if isinstance(node, OperatorNode):  # before anything of it is looked up
            node.check_mechanism(mechanism_named(message.content))
        asked = self._asked(message, context)
        ask, terms = asked.ask, asked.ask.terms
        self._check_given(terms)
        if terms.reply_s >= message.metadata.ttl:
            raise ProtocolError("the message is not valid for as long as clients take to reply; nothing was charged or sent")
        if not is_built_in(ask.mechanism.name):  # one that cannot report no change is found before the charge
            self._payload(asked, context, _unchanged(asked))
        deliverable_s = node.admit(ask)
        admitted = time.monotonic()
        if terms.reply_s:
            report = self._apart(asked, node, message, context, admitted + terms.reply_s)
        elif self._by_path and confined_process.POSSIBLE:  # an object is for simulations
            report = self._apart(asked, node, message, context, admitted + _LONGEST_AT_ONCE_S, wait=False)
        else:
            report = self._at_once(asked, node, message, context)
        if terms.transport == "direct":
            return Answer(terms.run, terms.round, report)
        node.upload(ask, report, admitted + deliverable_s - time.monotonic())
        return Answer(terms.run, terms.round)

    def _would_answer(self, message: Message, context: Context) -> Answer:
        """Return that this node would take part in a round. Neither app nor data are touched; nothing is charged, written or uploaded."""
        node, own = self._node(context), digest_of(context.run_config)
        if isinstance(node, OperatorNode):  # before anything of it is looked up
            check_mechanism(mechanism_named(message.content), node.policy)
        if self._last_question is None or self._last_question[0] is not message.content or self._last_question[1] != own:
            with confined_process.one_thread():  # a fork may follow
                self._last_question = message.content, own, read_question(message.content, own)
        question = self._last_question[2]
        self._check_given(question.ask.terms)
        node.would_admit(question.ask, question.cohort)
        return Answer(question.ask.terms.run, question.ask.terms.round)

    def _check_given(self, terms: RoundTerms) -> None:
        """Raise if the terms ask for what this node's app does not give."""
        if terms.kind != "training" and not self._is_ready:
            raise NoRecordSums(
                f"the round asks for {terms.kind}, and this node's app is one of its own: only ldpfl.flower.apps forms these sums over "
                "records; nothing was charged or sent"
            )
        check_kind(terms.config, weights=self._gives_weights, gradients=self._gives_gradients, persons=self._names_persons)

    def _asked(self, message: Message, context: Context) -> Asked:
        """Read a message. Clients of one process get the same content: it is read for the first of them."""
        own = (message.metadata.message_type, digest_of(context.run_config))
        if self._last is None or self._last[0] is not message.content or self._last[1] != own:
            with confined_process.one_thread():  # a fork may follow
                self._last = message.content, own, read_asked(message.content, *own)
        return self._last[2]

    def _at_once(self, asked: Asked, node: Node, message: Message, context: Context) -> bytes:
        """Return the report as soon as it is made, in this process: for simulations, and systems that cannot fork."""
        before = None if node.keeps_state(asked.ask) else packed(records_to_bytes(context.state))
        try:
            return self._report(asked, node, context, self._trained(asked, message, context))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also what a library in another language raises when it panics
            _log_replaced(asked, confined_process.place_of(error))
            return self._report(asked, node, context, _unchanged(asked))
        finally:
            if before is not None:
                context.state = before

    def _apart(self, asked: Asked, node: Node, message: Message, context: Context, end: float, *, wait: bool = True) -> bytes:
        """Return the report at the time ``end``: the one of the app's process if it is there by then, else one of no change.

        Without ``wait`` it is returned as soon as that process has made it, or has ended.
        """
        with confined_process.one_thread() as threads:
            report = self._report(asked, node, context, _unchanged(asked))
            allowed = threads if self._by_path else 1
            try:
                outcome = self._outcome(asked, node, message, context, allowed, end)
                if outcome.value is None:
                    _log_replaced(asked, outcome.trouble)
                else:
                    length = int.from_bytes(outcome.value[:_LENGTH_BYTES], "big")
                    made, state = outcome.value[_LENGTH_BYTES : _LENGTH_BYTES + length], outcome.value[_LENGTH_BYTES + length :]
                    report = bytes(made)
                    if node.keeps_state(asked.ask):
                        context.state = packed(bytes(state))
                    del made, state
                del outcome  # giving back what is large takes time, and must not come after the end
            except (Exception, SystemExit) as error:  # such as no process or thread being left, for what the app does
                _log_replaced(asked, confined_process.place_of(error))
        if wait:
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(left, 1.0))  # so that a node that is told to stop is not held up
        return report

    def _outcome(
        self, asked: Asked, node: Node, message: Message, context: Context, threads: int, end: float, guard: Guard = lambda work: work()
    ) -> confined_process.Outcome:
        """Return the report, and behind it the app's state, of processes that are over some time before ``end``."""
        reply_s = asked.ask.terms.reply_s
        ready = end - max(min(_SMALLEST_MARGIN_S, reply_s / 2), _MARGIN * reply_s)
        freed = end + _FREED_AFTER_S if reply_s else 0.0
        with (
            confined_process.start_guarded(lambda: guard(lambda: self._train(asked, message, context, threads)), freed) as trainer,
            # Started by this process as well, and so with nothing of the app in it, nor any of its pipes in the app's.
            confined_process.start(lambda: self._encode(asked, node, context, trainer.outcome()), trainer) as encoder,
        ):
            return encoder.outcome(ready)

    def _train(self, asked: Asked, message: Message, context: Context, threads: int) -> bytes:
        """Return the trained weights and the app's state, as bytes: PRIVATE."""
        torch.set_num_threads(threads)
        trained = self._trained(asked, message, context)
        return trained.to(_dtype(asked)).numpy().tobytes() + records_to_bytes(context.state)

    def _encode(self, asked: Asked, node: Node, context: Context, trained: confined_process.Outcome) -> bytes:
        """Return the length of the report, it, and behind it the app's state."""
        if trained.value is None:
            raise PrivacyError(trained.trouble)
        length = _dtype(asked).itemsize * asked.layout.dimension
        values, state = trained.value[:length], trained.value[length:]
        if len(state) > _LARGEST_STATE:
            raise PrivacyError(f"the app's state takes more than {_LARGEST_STATE:,} bytes: keep large things in a file of the node")
        weights = torch.frombuffer(bytearray(values), dtype=_dtype(asked))
        report = self._report(asked, node, context, weights)
        return len(report).to_bytes(_LENGTH_BYTES, "big") + report + state

    def _report(self, asked: Asked, node: Node, context: Context, trained: Tensor) -> bytes:
        """Return what leaves for ``trained`` weights (d,), which are PRIVATE and changed."""
        payload = self._payload(asked, context, trained)
        return payload if asked.ask.terms.transport == "direct" else node.seal(asked.ask, payload)

    def _payload(self, asked: Asked, context: Context, trained: Tensor) -> bytes:
        """Return the randomised report of ``trained`` weights (d,), which are PRIVATE and changed."""
        ask = asked.ask
        values = client_values(trained[None], asked.state, ask.terms.config.mechanism.perturbed)
        if not is_finite(values):
            # All of it, before a random bit is drawn: a mechanism that samples would notice only where it looks, and so tell where.
            raise PrivacyError("the trained values are not finite")
        source = self._source(ask, context)
        if ask.terms.transport == "sum":
            points: bytes = adding_up(ask.mechanism).points(values, ask.ranges, source)[0].astype("<i8").tobytes()
            return points
        payload: bytes = next(iter(ask.mechanism.encode(values, ask.ranges, source).payloads()))
        if len(payload) != packed_size(payload_bits(ask.mechanism, ask.ranges)):
            raise PrivacyError("the mechanism's payload is not as long as it says: its length would tell of the data")
        return payload

    def _trained(self, asked: Asked, message: Message, context: Context) -> Tensor:
        """Return the app's arrays (d,) float32: PRIVATE. Its metrics are left behind here; its state is in ``context``."""
        # Nothing that marks this client: no number that the SuperLink chooses, no order, which digests do not have.
        own = Context(0, 0, context.node_config, unpacked(context.state), dict(sorted(context.run_config.items())))
        reply = self._resolved()(message_for_app(message), own)
        context.state = own.state
        if reply.has_error():
            raise PrivacyError("the app replied with an error")
        return to_vector(only_arrays(reply.content), asked.layout, _dtype(asked))

    def _resolved(self) -> ClientAppCallable:
        app: ClientAppCallable = pkgutil.resolve_name(self._app) if isinstance(self._app, str) else self._app
        return app


def _wrapped(app: ClientAppCallable | str | None, records: Records | str | None) -> ClientAppCallable | str:
    if app is not None and records is None:
        return app
    if records is not None and app is None:
        return RecordGradients(records)
    raise ConfigError("LdpClientApp wraps either an app, which trains, or records, whose gradients it takes: give one of them")


def _dtype(asked: Asked) -> torch.dtype:
    """Return what values are before they are randomised: sums of records' gradients are integers, all else is float32."""
    return torch.float32 if record_clip_of(asked.ask.mechanism) is None else torch.int64


def _unchanged(asked: Asked) -> Tensor:
    """Return what stands for no change (d,), known to everybody: the broadcast weights, or a gradient of 0."""
    if asked.ask.terms.config.mechanism.perturbed == "gradient":
        return torch.zeros(asked.layout.dimension, dtype=_dtype(asked))
    return asked.state.weights.clone()


def _log_replaced(asked: Asked, trouble: str) -> None:
    trouble = trouble.replace("; nothing was sent", "")  # so says who refuses values; in their place a report of no change is sent
    LOGGER.error("replaced: round %d is reported as no change, because training gave nothing to report: %s", asked.ask.terms.round, trouble)
