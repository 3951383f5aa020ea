"""A paragraph about a run for a paper or an ethics board, from its config, ledger and guarantee; nothing in it is private."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import ldpfl
from ldpfl.data.holding_out import scored_part
from ldpfl.errors import printable
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.run_folder import Kind
from ldpfl.privacy import Ledger
from ldpfl.privacy.events import OURS, USERS_CODE, BinaryRelease, GaussianRelease, PureRelease, RoundEvent, UnprotectedRelease
from ldpfl.privacy.guarantee import AUTHORS_CLAIM, Guarantee, Statement
from ldpfl.util.number_format import counted, number
from ldpfl.util.user_code import public_name
from ldpfl.version import YEAR

_UNITS = {
    "record": (
        "The unit of protection is one record of one client: two data sets are adjacent if one becomes the other by replacing one record "
        "of one client, so that the number of a client's records is public."
    ),
    "person": (
        "The unit of protection is one person at one client: two data sets are adjacent if one becomes the other by replacing all records "
        "of one person at one client by the records, more or fewer, of another person there who is trained on too, so that the number of a "
        "client's persons is public. Records of persons who are not trained on are not protected."
    ),
    "client": (
        "The unit of protection is one client: two data sets are adjacent if one becomes the other by replacing all data of one client."
    ),
}
_AGAINST = {
    "local": "an adversary who sees every message of the client, so that no party is trusted",
    "shuffled": "an adversary who sees the messages of all clients in a random order, without their senders (a trusted shuffler)",
    "summed": "an adversary who sees only the sum over all clients (a trusted aggregation)",
}


def citation() -> str:
    """Return the citation of the software, as text."""
    return f"ldpfl maintainers ({YEAR}). ldpfl: federated learning under local differential privacy. Version {ldpfl.__version__}."


def bibtex(name: str) -> str:
    """Return the software's citation for BibTeX, with the ``name`` of a run."""
    fields = {
        "author": "{ldpfl maintainers}",  # in braces, BibTeX does not split it into a first and a last name
        "title": "ldpfl: federated learning under local differential privacy",
        "year": YEAR,
        "version": ldpfl.__version__,
        "note": f"run {name}",
    }
    lines = [f"  {key:<7} = {{{value}}}," for key, value in fields.items()]
    return "\n".join(["@software{ldpfl,", *lines, "}"])


def methods(config: RunConfig, result: Mapping[str, Any], ledger: Ledger, statement: Statement, kind: Kind) -> str:
    """Return the paragraph about a finished run.

    The number of records is stated only where it is public: where records are protected one by one, or the data set is built in. No
    score is stated: whether a score may be published depends on the rows that it was measured on.
    """
    return " ".join(
        [
            *_training_sentence(config, result, ledger, kind),
            *_data_sentence(config, result, statement),
            *_guarantee_sentences(ledger, statement),
            *_mechanism_sentences(config, ledger),
            *_measurement_sentences(config, ledger),
            *_not_covered_sentence(config, kind),
            f"Software: {citation()}",
        ]
    )


def _training_sentence(config: RunConfig, result: Mapping[str, Any], ledger: Ledger, kind: Kind) -> Iterator[str]:
    """Yield the sentence on the model, the size of the training and the software."""
    version = result.get("versions", {}).get("ldpfl", ldpfl.__version__)
    name = public_name(config.model.name).rpartition(":")[2]  # the model's name, without the file that defines it
    model = "A model" if kind is Kind.OWN_APP else f"A model ({printable(name)})"
    clients = max((event.population for event in ledger.events), default=result["clients"])
    sizes = f"in {counted(result['rounds'], 'round')} with {counted(clients, 'client')}"
    start = f"{model} was trained by federated learning {sizes}, with ldpfl {printable(version)}"
    if kind.on_flower:
        yield f"{start} on Flower."
        return
    yield f"{start}, in a simulation: the guarantee is that of a deployment in which each client draws noise of its own."


def _data_sentence(config: RunConfig, result: Mapping[str, Any], statement: Statement) -> Iterator[str]:
    """Yield the sentence on which numbers count as public."""
    records, built_in = result.get("records"), not (config.data.brought or config.data.at_nodes)
    if isinstance(records, int) and (statement.protected != "client" or built_in):
        units = "persons" if statement.protected == "person" else "records"
        about = "about " if config.data.at_nodes else ""  # the run's terms state a mean number, and nobody counts
        yield f"The clients held {about}{records:,} training {units} in all; the numbers of clients and of {units} count as public."
    else:
        yield "The number of clients counts as public."


def _guarantee_sentences(ledger: Ledger, statement: Statement) -> Iterator[str]:
    """Yield the sentences on the unit of protection, the guarantees over the whole run, and their assumptions."""
    finite = [row for row in (statement.find("local", "run"), statement.find("hidden", "run")) if row is not None and isfinite(row.epsilon)]
    if not finite:
        yield "No finite epsilon is proved over the whole run."
        return
    yield _UNITS.get(finite[0].unit, f"The unit of protection is one {finite[0].unit} (adjacency: {finite[0].adjacency}).")
    if AUTHORS_CLAIM in {row.status for row in finite}:
        authors = {event.release.author for event in ledger.events} - {OURS}
        if USERS_CODE in authors:
            yield (
                f"What follows is not proved by ldpfl: it assumes that the {USERS_CODE} treats each {finite[0].unit} by itself and keeps "
                "nothing of it for another."
            )
        if others := ", ".join(sorted(map(printable, authors - {USERS_CODE}))):
            yield f"What follows is claimed by the author of the mechanism ({others}), and not proved by ldpfl."
    yield from map(_guarantee_sentence, finite)
    assumptions = "; ".join(dict.fromkeys(assumption for row in finite for assumption in row.assumptions))
    yield f"These are upper bounds by composition over all {len(ledger.events):,} releases, each of which may depend on those before it."
    if assumptions:
        yield f"They assume the following: {assumptions}."


def _guarantee_sentence(row: Guarantee) -> str:
    """Return the sentence on one guarantee."""
    protected = "all that a client sends" if row.unit == "client" else f"what a client sends of one {row.unit}"
    parameters = f"epsilon = {number(row.epsilon)} and delta = {row.delta:g} against {_AGAINST[row.trust_model]}"
    return f"Over the whole run, {protected} is (epsilon, delta)-differentially private with {parameters}."


def _mechanism_sentences(config: RunConfig, ledger: Ledger) -> Iterator[str]:
    """Yield the sentences on who sent reports in each round, and how they were randomised."""
    events = [event for event in ledger.events if not event.histograms]  # the rounds of training, without measurements
    if not events:
        return
    name = printable(events[-1].release.mechanism)
    claimed = "" if events[-1].release.author in (OURS, USERS_CODE) else ", as its author claims"
    yield f"Each round, {_participants(events[-1])} sent one report by the mechanism {name}: {_noise_clause(events)}{claimed}."
    if config.clipping.is_adaptive:
        quantile, rate = config.clipping.target_quantile, config.clipping.learning_rate
        yield (
            f"The bound followed the quantile {quantile} of these norms, with learning rate {rate:g}, by a bit beside each vector that "
            "says whether it was shortened. Vector and bit together keep to the bound, so that the noise protects both (Andrew et al. "
            "2021)."
        )
    if config.training.method == "least-squares":
        yield (
            "In the place of gradients, records gave the products of their features with each other and with the target, weighted so that "
            "any two differ by no more than two gradients may; the model is the solution of least squares by the released sums."
        )


def _participants(last_round: RoundEvent) -> str:
    """Return who took part in a round, as the subject of a sentence. The last round of a run stands for all of them."""
    match last_round.sampling:
        case "everyone":
            return "every client"
        case "secret":
            return f"each client with probability {last_round.rate:g}, decided in secret,"
        case "once":
            return "a part of the clients, each client in one round alone and in a secret order,"
        case _:
            return "a sample of the clients, which is not secret,"


def _noise_clause(events: Sequence[RoundEvent]) -> str:
    """Return the clause on how the mechanism protects values. If its epsilon or noise differs between rounds, state the range."""
    releases = [event.release for event in events]
    last = releases[-1]
    if any(isinstance(release, UnprotectedRelease) for release in releases):
        reason = next(release.why_unprotected for release in releases if isinstance(release, UnprotectedRelease))
        return f"without a proved protection ({printable(reason)})"
    if isinstance(last, GaussianRelease):
        # Replacing one unit changes the sum by at most twice the bound, and mu is this change divided by the standard deviation.
        noise = _range_text([2 / release.mu for release in releases if isinstance(release, GaussianRelease)])
        person_mean = "the mean gradient of each person's records"
        bounded = {"record": "each record's gradient", "person": person_mean}.get(last.unit, "its vector")
        sampling = f", and each {last.unit} took part with probability {last.rate:g}" if last.rate < 1 else ""
        return f"it bounds the L2 norm of {bounded} and adds Gaussian noise whose standard deviation is {noise} times that bound{sampling}"
    epsilon = _range_text([release.parameter for release in releases])
    unit = "bit" if isinstance(last, BinaryRelease) else "value"
    kind = "" if isinstance(last, BinaryRelease | PureRelease) else "protected "
    return f"{counted(last.units, kind + unit)}, each of which is {epsilon}-locally differentially private on its own"


def _range_text(values: Sequence[float]) -> str:
    """Return the smallest and the largest of ``values``, or one number if both look the same."""
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"


def _measurement_sentences(config: RunConfig, ledger: Ledger) -> Iterator[str]:
    """Yield the sentences on measurements beside training: of the model at clients, and of columns beforehand."""
    measured = ledger.events[: ledger.measured]  # columns are measured before the first round of training
    evaluations = [event for event in ledger.events[ledger.measured :] if event.histograms]  # later histograms are of the model's scores
    if evaluations:
        release = "sums of what they measured were released by that mechanism with noise"
        if isinstance(evaluations[0].release, BinaryRelease):
            release = "randomised bits about the mean of each client were released"
        yield (
            f"Clients held a share of {config.evaluation.share:g} of their records back from training and measured the model on them "
            f"{'once' if len(evaluations) == 1 else f'{len(evaluations)} times'}; {release} for "
            f"epsilon = {config.evaluation.epsilon} in all, which the guarantee includes."
        )
    if not measured:
        return
    times = "once" if len(measured) == 1 else f"{len(measured)} times"
    yield (
        f"Before the first round, histograms of the table's columns were measured {times} by that mechanism, with noise of its own size; "
        f"the guarantee includes them, and they take a share of {config.privacy.measuring_share:g} of the squared privacy parameter (mu^2)."
    )


def _not_covered_sentence(config: RunConfig, kind: Kind) -> Iterator[str]:
    """Yield the sentence on what the guarantee does not cover, for a run on a user's own data, here or at nodes."""
    data = config.data
    if kind is Kind.OWN_APP or not (data.brought or data.at_nodes):
        return
    uncovered = [
        "names and kinds of columns",
        *([] if data.classes else ["names of classes"]),  # classes that the config names are not taken from the data
        f"scores on {scored_part(data.evaluate_on)} rows",
        *(["the choice of the round whose model is kept"] if config.training.patience else []),
    ]
    yield f"The guarantee does not cover {', '.join(uncovered[:-1])} and {uncovered[-1]}."
