"""Try one round's local work at a node, for the node's operator. Nothing is charged or sent.

The app's code runs as in a round: in processes of its own, after the node's policy has allowed it. The report is thrown away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict, UserConfig
from torch import Tensor

from ldpfl.data.loading import DATA_DIR_VARIABLE
from ldpfl.deploy.node_set_up import Finding, NodeSetUp, Standing, Trial
from ldpfl.errors import ConfigError, LdpflError, PrivacyError, printable
from ldpfl.experiments.build import initial_ranges
from ldpfl.flower import apps, confined_process
from ldpfl.flower.app_failures import explain_to_operator, raise_nothing_learnt, with_explanation
from ldpfl.flower.arrays import layout_of, to_arrays, to_vector
from ldpfl.flower.client_app import Attempt, LdpClientApp
from ldpfl.flower.client_modules import import_client_app, importable, run_config_of
from ldpfl.flower.federation_setup import check_no_download_needed, data_dir_of, prepare
from ldpfl.flower.internals import local_run, records_to_bytes, unwrap_serialised, wrap_serialised
from ldpfl.flower.policy_init import Offer
from ldpfl.flower.record_trial import RecordsFound, try_records
from ldpfl.flower.records import RecordGradients
from ldpfl.flower.round_kinds import planned_round, statistics_rounds
from ldpfl.flower.sent_vectors import summed_vectors
from ldpfl.flower.terms import ARRAYS, CONFIG, RECORD, RoundTerms, digest_of
from ldpfl.models.layout import ParameterLayout
from ldpfl.privacy.policy import OVER_RELAY
from ldpfl.util.number_format import counted
from ldpfl.util.quantities import cohort_size

_MESSAGE_LIFE_S = 3600.0  # Flower requires a lifetime for messages; this message is never sent

_START_DEVIATION = 0.05
"""Standard deviation of made-up weights for an app with its own training loop. Not 0, because networks have no gradient there."""


def try_round(node: NodeSetUp, offer: Offer, trial: Trial, key: bytes) -> Iterator[Finding]:
    """Do one round's local work at ``node``, and yield the findings. The policy must have allowed the app before.

    Any failure of the app becomes a finding, which repeats no value of a record.

    Args:
        offer: what the app asks of the node.
        key: public key of the aggregator, for which a report over a relay is encrypted.
    """
    local_run()  # Flower creates messages only in a run
    folder = Path(node.app or "")
    app_folder = folder if (folder / "pyproject.toml").is_file() else None
    known_paths = tuple(str(path) for path in (node.data, node.data_dir) if path)
    explain = partial(explain_to_operator, app=app_folder, known_paths=known_paths)
    with _node_environment(node), nullcontext() if app_folder is None else importable(app_folder):
        try:
            app = apps.client_app if app_folder is None else import_client_app(app_folder)
        except (Exception, SystemExit) as error:  # importing the app may raise anything
            yield _failed_trial(f"the app cannot be loaded: {explain(error)}")
            return
        try:
            yield from _try_app(node, offer, trial, key, app_folder, app, explain)
        except LdpflError as error:
            yield _failed_trial(str(error))
        except (Exception, SystemExit) as error:
            yield _failed_trial(f"the app cannot be tried: {explain(error)}")


def _try_app(
    node: NodeSetUp,
    offer: Offer,
    trial: Trial,
    key: bytes,
    app_folder: Path | None,
    app: LdpClientApp,
    explain: Callable[[BaseException], str],
) -> Iterator[Finding]:
    """Do one round's local work with ``app``, and yield the findings.

    The arrays with which the round begins are those of the recipe, of the app's own model, or made up.

    Args:
        key: public key of the aggregator.
        app_folder: folder of the app; None for ldpfl's own app.
        explain: turns an exception into text for the operator.
    """
    run_config = {} if app_folder is None else run_config_of(app_folder)
    node_config: UserConfig = {"num-partitions": offer.config.clients.count}
    if node.partition is not None:
        node_config["partition-id"] = node.partition
    context = Context(0, 0, {**node_config, **trial.node_config}, RecordDict(), run_config)  # 0, 0: made-up ids of run and node
    if app is apps.client_app:
        app = apps.trial_app  # trains alike, but writes nothing to the log or the cache
        start = _initial_arrays_of_recipe(offer, context)
    elif isinstance(app.wrapped, RecordGradients):
        records = _try_records_in_process(app.wrapped, context, offer, explain)
        yield from _findings_on_records(records)
        start = records.arrays
        _check_shapes(start, node)
    else:
        start = _made_up_arrays(node)
    message = _training_message(offer, start, trial, key, run_config)
    # Weights that are equal to those received show that nothing was learnt. Gradients are not comparable with what was received.
    guard = partial(_do_work_of_app, start if offer.config.mechanism.perturbed != "gradient" else None, explain)
    yield _finding_on_attempt(app.attempt(message, context, guard), offer, start, trial)


def _finding_on_attempt(attempt: Attempt, offer: Offer, start: ArrayRecord, trial: Trial) -> Finding:
    """Return the finding about an attempt at the local work."""
    limit = f" of the {offer.reply_s:g} s that a round leaves" if offer.reply_s else ""
    if attempt.report_bytes is None:
        problem = f"{attempt.trouble}{_advice(attempt.trouble, offer, lacks_settings=not trial.train_config)}"
        return _failed_trial(f"a round would send a report without any change, and still be charged: {problem}")
    values = sum(torch.Size(array.shape).numel() for array in start.values())
    training = f"trained {counted(values, 'value')} in {attempt.seconds:.1f} s{limit}"
    size = counted(attempt.report_bytes, "byte")
    return Finding("try", Standing.FINE, f"{training}, and made a report of {size}, which was thrown away: nothing was charged or sent")


def _advice(trouble: str, offer: Offer, *, lacks_settings: bool = False) -> str:
    """Return what the operator can do about the ``trouble``, as text to append; empty if there is no advice.

    Args:
        lacks_settings: whether the app got none of the settings that a server may send with a round.
    """
    if trouble == confined_process.TOO_LONG:
        return f". A round leaves {offer.reply_s:g} s (ldpfl.reply-s): train for less, or ask the server's operator for a longer time"
    if "partition-id" in trouble:
        return ": set it for this check by --partition, and for the SuperNode by --node-config"
    if trouble == confined_process.NO_ANSWER:
        return ". It was killed, perhaps because memory ran out, or it called os._exit"
    if lacks_settings and trouble.startswith(KeyError.__name__):
        return (
            ". If the missing name is a setting that the server sends with each round, give it by --train-config, as in "
            "--train-config 'epochs=20 learning-rate=0.1': none was given"
        )
    return ""


def _do_work_of_app(start: ArrayRecord | None, explain: Callable[[BaseException], str], work: Callable[[], bytes]) -> bytes:
    """Do the ``work`` of the app's process, and return its result. A failure becomes an error that ``explain`` words for the operator.

    The result begins with the trained values. If these are still the values of ``start``, nothing was learnt, which counts as a failure.
    """
    result = with_explanation(work, explain)
    untrained = b"" if start is None else to_vector(start, layout_of(start)).numpy().tobytes()
    if untrained and result[: len(untrained)] == untrained:
        raise_nothing_learnt()
    return result


def _initial_arrays_of_recipe(offer: Offer, context: Context) -> ArrayRecord:
    """Return the initial arrays of the ready ServerApp, which follow from the config."""
    data_dir = data_dir_of(context)
    check_no_download_needed(offer.config.data, data_dir)
    with confined_process.one_thread():  # forks follow, and PyTorch's threads do not survive them
        prepared = prepare(offer.config.to_toml(), data_dir, "cpu", write_cache=False)
    return to_arrays(prepared.start.state.weights, prepared.federation.task.layout)


def _try_records_in_process(
    wrapped: RecordGradients, context: Context, offer: Offer, explain: Callable[[BaseException], str]
) -> RecordsFound:
    """Try the records of the app that ``wrapped`` holds in a process of its own, and return the findings.

    Raises:
        PrivacyError: the process gave no findings; the text has the reason, as ``explain`` words it for the operator.
    """

    def work() -> bytes:
        """Try the records, and return the findings as bytes."""
        return records_to_bytes(try_records(wrapped.records, context, offer.config).to_records())

    with confined_process.one_thread(), confined_process.start_guarded(partial(with_explanation, work, explain)) as child:
        outcome = child.outcome()
    if outcome.value is None:
        raise PrivacyError(f"the app returned no records: {outcome.trouble}{_advice(outcome.trouble, offer)}")
    return RecordsFound.of(unwrap_serialised(wrap_serialised(bytes(outcome.value))))  # wrapped first: only wrapped bytes can be parsed


def _findings_on_records(records: RecordsFound) -> Iterator[Finding]:
    """Yield how many of the app's records training would use, and why it leaves others out."""
    for note in records.notes:
        yield Finding("try", Standing.LOOK, printable(note))
    if not records.left_out:
        yield Finding("try", Standing.FINE, f"the app returned {counted(records.rows, 'record')}, and training uses all of them")
        return
    indices = ", ".join(map(str, records.first_left_out))
    and_others = " and others" if records.left_out > len(records.first_left_out) else ""
    verb = "adds" if records.left_out == 1 else "add"
    adding_nothing = f"{records.left_out:,} of {counted(records.rows, 'record')} {verb} nothing to training"
    problem = f"{adding_nothing}: index {indices}{and_others} (counted from 0)"
    standing = Standing.WRONG if records.left_out >= records.rows else Standing.LOOK
    yield Finding("try", standing, printable(f"{problem}. Reason for the first: {records.reason}"))


def _check_shapes(start: ArrayRecord, node: NodeSetUp) -> None:
    """Raise if the app's model has other arrays than the operator has stated by ``--layers``.

    Errors name only arrays that the operator stated. The app may have chosen other names and sizes by values of records.
    """
    shapes = {name: tuple(array.shape) for name, array in start.items()}
    if node.shapes and shapes != dict(node.shapes):
        differing = {name: shape for name, shape in node.shapes.items() if shapes.get(name) != shape}
        missing = f"lacks an array that --layers states, or has it in another shape: {_shapes_text(differing)}"
        problem = missing if differing else "has more arrays than --layers states"
        raise ConfigError(f"the app's model {problem}. Set --layers to the arrays that the server sends")
    sizes = tuple(torch.Size(shape).numel() for shape in shapes.values())
    if node.layers and sizes != node.layers:
        problem = f"arrays of other sizes than --layers states ({', '.join(map(str, node.layers))})"
        raise ConfigError(
            f"the app's model has {problem}: give the sizes that the server has, as --layers of this check and of ldpfl policy init"
        )


def _made_up_arrays(node: NodeSetUp) -> ArrayRecord:
    """Return arrays with the names and shapes that the operator has stated by ``--layers``, and made-up values."""
    if not node.shapes:
        raise ConfigError(
            "the app has a custom training loop, so it is not known which arrays the server sends to it: give the name and shape of each, "
            "as in --layers weight=1x2,bias=1, and by --train-config the settings that the server sends beside them"
        )
    layout = ParameterLayout(tuple(node.shapes), tuple(node.shapes.values()))
    generator = torch.Generator().manual_seed(0)
    return to_arrays(_START_DEVIATION * torch.randn(layout.dimension, generator=generator), layout)


def _training_message(offer: Offer, start: ArrayRecord, trial: Trial, key: bytes, run_config: UserConfig) -> Message:
    """Return the message by which a server would tell this node to train in the first training round.

    Args:
        offer: what the app asks of the node.
        start: arrays with which the round begins.
        key: public key of the aggregator.
        run_config: the run config that the app gets.
    """
    layout = layout_of(start)
    weights: Tensor = to_vector(start, layout)
    ranges, clients = initial_ranges(offer.config, layout, weights), offer.config.clients
    planned = planned_round(offer.config, statistics_rounds(offer.config) + 1)
    terms = RoundTerms(
        run="check",
        round=planned.number,
        kind=planned.kind,
        size=layout.dimension if planned.kind == "training" else summed_vectors(offer.config, planned.kind).size,
        config=offer.config,
        layers=layout.names,
        center=tuple(ranges.center.tolist()),
        radius=tuple(ranges.radius.tolist()),
        asked=cohort_size(clients.fraction, clients.count),
        min_clients=offer.cohort,
        transport=offer.transport,
        key=key if offer.transport in OVER_RELAY else b"",
        linked=offer.linked,
        reply_s=offer.reply_s,
        run_config=digest_of(run_config),
    )
    config = ConfigRecord({**trial.train_config, "server-round": terms.round})
    content = RecordDict({ARRAYS: start, CONFIG: config, RECORD: terms.to_record()})
    # 1 is the node's id; any number will do, because the message is never sent.
    return Message(content, 1, MessageType.TRAIN, ttl=_MESSAGE_LIFE_S, group_id=str(terms.round))


@contextmanager
def _node_environment(node: NodeSetUp) -> Iterator[None]:
    """Set the environment variables that the SuperNode would have, including settings given by flags, within the block."""
    settings: Mapping[str, object] = {
        "LDPFL_POLICY": node.policy,
        "LDPFL_BUDGET": node.budget,
        "LDPFL_RELAY": node.relay,
        "LDPFL_RELAY_TOKEN": node.token,
        "LDPFL_RELAY_CA": node.relay_ca,
        "LDPFL_DATA": node.data,
        DATA_DIR_VARIABLE: node.data_dir,
        "LDPFL_SIGNING_KEY": node.signing_key,
    }
    earlier = {name: os.environ.get(name) for name in settings}
    os.environ |= {name: str(value) for name, value in settings.items() if value is not None}
    try:
        yield
    finally:
        for name, value in earlier.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _shapes_text(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return names and shapes as ``--layers`` takes them, such as weight=1x2,bias=1."""
    return ",".join(f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items())


def _failed_trial(text: str) -> Finding:
    """Return the finding that the trial failed."""
    return Finding("try", Standing.WRONG, printable(text))
