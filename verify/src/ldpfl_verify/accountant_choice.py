"""Whether the lines of a certificate hold, by the accountants of this room."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, inf, sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ldpfl.errors import DataError
from ldpfl.verifying.certificate_file import INFINITE, OURS, Certificate, Charged, Line, Statement
from ldpfl.verifying.charged_rounds import check_charged
from ldpfl.verifying.composition import Release, composed_epsilon, convolved_epsilon
from ldpfl.verifying.exact import gaussian_delta, least_epsilon, pure_sum, randomised_response_delta
from ldpfl.verifying.hidden import HiddenBits, HiddenVector, common_share
from ldpfl.verifying.laws import BlanketedReport, ClonedReport, CountedBit, CountedRound, GaussianReport, PureReport

Status = Literal["confirmed", "nearly", "author's claim", "not confirmed", "not checked"]

TOLERANCE = 0.02
"""What the second opinion may be above the first for the two to be called nearly the same."""

_REPLACED = {
    "client": "replace one client's data",
    "person": "replace all records of one person at one client",
    "record": "replace one record of one client",
}
_PUBLISHED = {"client": "all data of one client", "person": "all records of one person", "record": "one whole record"}
_PARTS = {"record", "person"}
"""Units that are a part of what a client holds."""

_SAME = 1 + 1e-9
_MOST_REPORTS, _MOST_SUMMED = 10**10, 10**7
_MOST_KINDS, _MOST_BUDGETS = 16, 256
"""Of rounds behind a shuffler, some 70 MB each among a million clients; and of reports that nobody hides."""
_LARGEST_CROWD = 10**6
_HUGE, _HIDES_NOTHING = 700.0, 60.0
_MOST_LINKED, _MOST_MESSAGES, _MANY_CLIENTS = 1 << 12, 3000, 2000
_LARGEST_HIDDEN, _VARIED = 30.0, 0.01
"""Epsilon of vectors beyond which nobody hides them; and part of delta that pays for what they have not in common."""
_POINTS = 2049
_FEW, _FAR, _MANY = 2_000, 1.15, 10**5
"""Reports whose exact sum is short, wherever it begins; how far two accountants may be apart for more than so many terms to be added."""


@dataclass(frozen=True)
class Verdict:
    """What is found of one line.

    Attributes:
        line: of the certificate.
        second: the epsilon that is proved here; None where nothing is.
        status: ``confirmed`` where that is no larger, ``nearly`` where it is by no more than :data:`TOLERANCE`; ``author's claim`` where
            either would be so, but what was released is known from a mechanism's author alone: only the arithmetic is right.
        why: what was done, or why nothing was.
    """

    line: Line
    second: float | None
    status: Status
    why: str


@dataclass(frozen=True)
class SecondOpinion:
    """What is found of a certificate.

    Attributes:
        run: its name, as the certificate has it.
        lines: what is found of each guarantee.
        notes: what was not looked at, who signed it, and what the run says against its figures.
    """

    run: str
    lines: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether all lines are confirmed, or nearly."""
        return all(verdict.status in ("confirmed", "nearly") for verdict in self.lines)

    @property
    def contradicted(self) -> bool:
        """Whether some line promises more than what is proved here; where none does, and not all hold, some were not checked."""
        return any(verdict.status == "not confirmed" for verdict in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        lines = [
            {**verdict.line.model_dump(mode="json"), "second": _number(verdict.second), "status": verdict.status, "why": verdict.why}
            for verdict in self.lines
        ]
        return {"run": self.run, "holds": self.holds, "contradicted": self.contradicted, "lines": lines, "notes": list(self.notes)}


def _number(value: float | None) -> float | str | None:
    return INFINITE if value == inf else value


def second_opinion(certificate: Certificate, ledger: Path | None = None, signed_by: str | None = None) -> SecondOpinion:
    """Return what is found of ``certificate``; it must be of ``ledger`` and ``signed_by`` somebody, where these are given.

    Raises:
        DataError: it is not.
    """
    signer = certificate.signature.public_key if certificate.signature else None
    if signed_by is not None and signed_by != signer:
        raise DataError(f"the certificate is signed by {signer or 'nobody'}, and not by {signed_by[:64]!r}")
    if ledger is not None:
        check_charged(certificate.statement, ledger)
    notes = [] if ledger else ["that the rounds it charges are those of the run was not checked: give the run's ledger for that"]
    notes.append(f"signed by {signer}" if signer else "nobody signed it")
    if signer and signed_by is None:
        notes[-1] += ": whose key that is, you have to know"
    notes += _large_deltas(certificate.statement)
    return SecondOpinion(certificate.statement.run, tuple(verdicts(certificate.statement)), (*notes, *certificate.statement.caveats))


def _large_deltas(statement: Statement) -> Iterator[str]:
    """Yield a remark for each delta that a mechanism keeps which publishes the data of one client, or one of its records, at random."""
    clients = max(one.population for one in statement.charged)
    for delta, protects in dict.fromkeys((line.delta, line.protects) for line in statement.guarantees):
        if clients > 1 and delta >= 1 / clients:
            allowed = f"it allows {_PUBLISHED[protects]} to be published"
            yield f"a delta of {delta:g} is not smaller than one over the {clients:,} clients: {allowed}"


Opinion = tuple[float | None, str]


def verdicts(statement: Statement) -> Iterator[Verdict]:
    """Yield what is found of each line of ``statement``; a line takes from a moment to a minute on one core."""
    for line in statement.guarantees:
        stated = inf if line.epsilon == "infinity" else line.epsilon
        try:
            second, why = _opinion(line, statement.charged, stated)
        except OverflowError:
            second, why = None, "its figures are beyond what can be computed"
        yield _believed(Verdict(line, second, _status(stated, second), why), statement.charged)


def _believed(found: Verdict, charged: Sequence[Charged]) -> Verdict:
    """Return ``found``, or that only its arithmetic is right, where some mechanism is not this project's code."""
    others = dict.fromkeys(one.release.author for one in charged if one.release.author != OURS)
    if found.status not in ("confirmed", "nearly") or not (others or found.line.status != "proved"):
        return found
    whose = ", ".join(others) or "a mechanism"
    why = f"{found.why}; the arithmetic is right if what the author of {whose} claims is true, which a certificate cannot show"
    return replace(found, status="author's claim", why=why)


def _status(stated: float, second: float | None) -> Status:
    if stated == inf:
        return "confirmed"  # it promises nothing
    if second is None:
        return "not checked"
    if second <= stated * _SAME:
        return "confirmed"
    return "nearly" if second <= stated * (1 + TOLERANCE) else "not confirmed"


def _opinion(line: Line, charged: Sequence[Charged], stated: float) -> Opinion:
    if any(one.release.kind == "unprotected" for one in charged):
        return inf, "something left without protection"
    units = {one.release.unit for one in charged}
    if line.protects == "client" and units & _PARTS:
        return inf, f"what protects one {'record' if 'record' in units else 'person'} bounds nothing for its client"
    if line.protects == "person" and "record" in units:
        return inf, "what protects one record bounds nothing for a person with several"
    if line.protects == "record":
        charged = [_for_one_record(one) for one in charged]
    if line.adjacency != _REPLACED[line.protects]:
        return inf, "what is protected and what may be replaced are not the same"
    if line.trusted == "local":
        return _local(charged, line.delta, stated)
    channels = {one.channel for one in charged}
    if line.trusted != ("summed" if channels == {"secure-sum"} else "shuffled") or channels & {"direct", "random-delay"}:
        local, _ = _local(charged, line.delta, stated)
        return local, "as without anybody in between: reports did not travel as the line says"
    hidden, how = _hidden(charged, line.delta, stated)
    if hidden is not None and hidden <= stated * _SAME:
        return hidden, how
    local, _ = _local(charged, line.delta, stated)
    if local is not None and (hidden is None or local < hidden) and local <= stated * (1 + TOLERANCE):
        return local, "as without the shuffler"
    return hidden, how


def _for_one_record(one: Charged) -> Charged:
    """Return ``one`` as it counts for a record: that of a person in the place of another's changes two persons' vectors, by mu each."""
    if one.release.unit != "person" or one.release.parameter is None:
        return one
    # Whatever coins the two persons have, the distance between the sums is 2 mu at most: so the rate does not count.
    return one.model_copy(
        update={"release": one.release.model_copy(update={"unit": "record", "parameter": 2 * one.release.parameter, "rate": 1.0})}
    )


def _local(charged: Sequence[Charged], delta: float, stated: float) -> Opinion:
    """Say what all that a client sends costs against one who knows its sender."""
    pure = [(_parameter(one), one.release.units * one.rounds) for one in charged if one.release.kind != "gaussian"]
    noise = [one for one in charged if one.release.kind == "gaussian"]
    if delta == 0:
        return (inf, "Gaussian noise has no pure epsilon") if noise else (float(pure_sum(pure)), "the exact sum")
    if any(one.release.rate < 1 for one in noise):
        return None, "records that take part by chance are accounted once only"
    mu = sqrt(sum(_parameter(one) ** 2 * one.release.units * one.rounds for one in noise))
    if not pure:
        return _at_most(stated, lambda epsilon: gaussian_delta(mu, epsilon), delta), "in closed form, to 150 digits"
    alike, number = {epsilon for epsilon, _ in pure}, sum(count for _, count in pure)
    if number > _MOST_REPORTS or max(alike) > _HUGE:
        return (None if noise else float(pure_sum(pure))), "the exact sum: there are very many reports, or huge budgets"
    if len(alike) == 1 and not noise and number <= _MOST_SUMMED:
        (epsilon0,) = alike
        return _alike(epsilon0, number, delta, stated)
    if len(alike) > _MOST_BUDGETS:
        return None, f"more than {_MOST_BUDGETS} different budgets take too long here"
    kinds: list[tuple[Release, int]] = [(PureReport(epsilon), count) for epsilon, count in pure]
    kinds += [(GaussianReport(mu), 1)] if noise else []
    return composed_epsilon(kinds, delta, stated), "by convolution and Renyi divergences"


def _alike(epsilon0: float, number: int, delta: float, stated: float) -> Opinion:
    """Say what ``number`` reports at ``epsilon0`` cost: exactly, where that is not many terms far from what is stated."""

    def exact(epsilon: float) -> float:
        return randomised_response_delta(epsilon0, number, epsilon)

    if number <= _FEW:
        return _at_most(stated, exact, delta), "exactly, in intervals"
    found = composed_epsilon([(PureReport(epsilon0), number)], delta, min(stated, epsilon0 * number))
    if found <= stated * _SAME:
        return found, "by convolution and Renyi divergences"
    share = 1 / (1 + exp(-epsilon0))
    terms = number * (share - 0.5) - stated / epsilon0 / 2 + 40 * sqrt(number * share * (1 - share))
    if found > stated * _FAR and terms > _MANY:
        return found, "by convolution and Renyi divergences: it is far from what is stated"
    if exact(stated) <= delta * _SAME:
        return stated, "exactly, in intervals"
    return found, "by convolution and Renyi divergences; what is stated does not hold, exactly"


def _hidden(charged: Sequence[Charged], delta: float, stated: float) -> Opinion:
    """Say what it costs against one who sees what a shuffler or a sum lets through."""
    if any(one.channel == "secure-sum" and one.release.kind == "gaussian" and not _are_integers(one) for one in charged):
        return None, "floats that are rounded one by one do not add up as their noise does"
    if all(one.channel == "secure-sum" and one.release.kind == "gaussian" and one.release.rate == 1 for one in charged):
        mu = sqrt(sum(_parameter(one) ** 2 * one.release.units * one.rounds / one.cohort for one in charged))
        # Rounded Gaussians add up to one but for so little: decision 23.
        return _at_most(stated, lambda epsilon: gaussian_delta(mu, epsilon), delta * (1 - 1e-9)), "in closed form, to 150 digits"
    if len(charged) > _MOST_KINDS:
        return None, f"more than {_MOST_KINDS} kinds of rounds behind a shuffler take too long here"
    if any(_parameter(one) * _in_a_message(one) > _HIDES_NOTHING for one in charged if one.release.kind != "gaussian"):
        return None, "nobody hides what has so large a budget"
    if max(one.cohort for one in charged) > _LARGEST_CROWD:
        return None, f"more than {_LARGEST_CROWD:,} clients take too long here"
    if all(one.channel == "ideal-shuffler" and _lies_in_a_ball(one) for one in charged):
        return _vectors(charged, delta, stated)
    if all(map(_is_counted, charged)):
        return _counted(charged, delta, stated)
    if all(one.channel == "ideal-shuffler" and _in_common(one) for one in charged):
        return _blanketed(charged, delta, stated)
    if all(map(_are_bits, charged)):
        return _linked(charged, delta, stated)
    one = charged[0]
    at_random = one.sampling == "once" and one.release.units == 1
    if (
        len(charged) == 1
        and one.channel == "ideal-shuffler"
        and (one.release.kind == "pure" or (one.release.kind == "binary" and at_random))
    ):
        linked = min(one.linked, one.release.units)
        report = ClonedReport(_parameter(one) * linked, one.cohort)
        messages = ceil(one.release.units / linked) * one.rounds
        if messages == 1:
            return _at_most(stated, lambda epsilon: _single(report, epsilon), delta, report.limit), "by clones, in extended precision"
        return composed_epsilon([(report, messages)], delta, stated), "by clones, and convolution"
    return None, "there is one accountant only for what is behind a shuffler here"


def _are_integers(one: Charged) -> bool:
    return one.release.integers or one.release.unit in _PARTS


def _counted(charged: Sequence[Charged], delta: float, stated: float) -> Opinion:
    bits = [(CountedBit(_parameter(one), one.cohort), one) for one in charged]
    if len(charged) == 1 and charged[0].release.units * charged[0].rounds == 1:
        return _at_most(
            stated, lambda epsilon: _single(bits[0][0], epsilon), delta, bits[0][0].limit
        ), "every worst case, in extended precision"
    found = composed_epsilon([(bit, one.release.units * one.rounds) for bit, one in bits], delta, stated)
    if found > stated * _SAME:
        rounds = [(CountedRound(bit, one.release.units), one.rounds) for bit, one in bits]
        found = min(found, convolved_epsilon(rounds, delta, stated))
    return found, "each worst case, by convolution, and round by round"


def _blanketed(charged: Sequence[Charged], delta: float, stated: float) -> Opinion:
    kinds: list[tuple[Release, int]] = []
    for one in charged:
        report = BlanketedReport(_parameter(one) * one.linked, _in_common(one), one.cohort)
        if report.takes_long:
            return None, f"reports of {one.cohort:,} clients that tell so little take too long here"
        kinds.append((report, ceil(one.release.units / one.linked) * one.rounds))
    if sum(times for _, times in kinds) == 1:
        return _least(kinds[0][0], delta, stated), "by what reports have in common, number by number"
    return composed_epsilon(kinds, delta, stated), "by what reports have in common, and convolution"


def _vectors(charged: Sequence[Charged], delta: float, stated: float) -> Opinion:
    """Say what vectors of one ball cost; what is not in common is paid for as if epsilon were what is ``stated``, or a little more."""
    how, highest = "by what vectors of one ball have in common, number by number, and convolution", stated * (1 + TOLERANCE)
    local, _ = _local(charged, delta, stated)
    others = sum(one.rounds * (one.cohort - 1) for one in charged)
    if local is None or min(stated, local) > _LARGEST_HIDDEN or others == 0:
        return None, "nobody hides it"
    found = inf
    for most in (highest, min(local, _LARGEST_HIDDEN)):
        found = _of_one_ball(charged, (1 - _VARIED) * delta, stated, _VARIED * delta / (1 + exp(most)) / others)
        if found <= most:
            return found, how
    return local, "as without the shuffler"


def _of_one_ball(charged: Sequence[Charged], delta: float, stated: float, variation: float) -> float:
    """Return what vectors cost if replacing one costs ``variation``; infinity where they have next to nothing in common."""
    kinds: list[tuple[Release, int]] = []
    for one in charged:
        share = common_share(_parameter(one), variation)
        if share is None:
            return inf
        kinds.append((HiddenVector(_parameter(one), one.cohort, share), one.rounds))
    return convolved_epsilon(kinds, delta, stated)


def _least(release: Release, delta: float, stated: float) -> float:
    """Return ``stated`` where it holds, and else what does: by a curve of many points at once, and another between two of them."""
    if _single(release, stated) <= delta * _SAME:
        return stated
    low, high = 0.0, release.limit
    for _ in range(2):
        places = np.linspace(low, high, _POINTS, dtype=np.longdouble)
        enough = np.flatnonzero(release.delta(places) <= delta)
        if not enough.size:
            return high  # the pure sum
        first = int(enough[0])
        low, high = float(places[max(first - 1, 0)]), float(places[first])
    return high


def _linked(charged: Sequence[Charged], delta: float, stated: float) -> Opinion:
    kinds: list[tuple[Release, int]] = []
    for one in charged:
        together = _together(one)
        if together > _MOST_LINKED:
            return None, f"more than {_MOST_LINKED:,} bits that stay together take too long here"
        kinds.append((HiddenBits(_parameter(one), together, one.cohort), ceil(one.release.units / together) * one.rounds))
    found, how = composed_epsilon(kinds, delta, stated), "by what bits that stay together have in common, number by number, and convolution"
    many = sum(times for _, times in kinds) > _MOST_MESSAGES or max(one.cohort for one in charged) > _MANY_CLIENTS
    if found > stated * (1 + TOLERANCE) and many:
        return None, f"{how}: of so many messages, or clients, it is too coarse to say that what is stated does not hold"
    return found, how


def _are_bits(one: Charged) -> bool:
    """Tell whether these are bits of clients that others know to be there; which coordinate one is about may be a secret of its client."""
    everyone = one.sampling != "secret" or one.rate == 1
    in_order = one.sampling == "once" and one.release.units == 1
    return one.release.kind == "binary" and one.channel in ("ideal-shuffler", "secure-sum") and everyone and not in_order


def _together(one: Charged) -> int:
    return 1 if one.channel == "secure-sum" else min(one.linked, one.release.units)  # a sum takes apart what travels together


def _lies_in_a_ball(one: Charged) -> bool:
    return one.release.kind == "gaussian" and one.release.alike and one.release.unit == "vector" and one.release.units == 1


def _in_a_message(one: Charged) -> int:
    return one.linked if one.release.kind == "pure" else 1


def _in_common(one: Charged) -> float:
    """Return the share that all messages have in common; 0 where none is stated that messages at this budget can have.

    A bit about a coordinate that its client drew in secret has its place, which is uniform, and as much as its rarer value in common.
    """
    if one.release.kind == "binary" and one.release.sampled > 1 and min(one.linked, one.release.units) == 1:
        return 2 / (1 + exp(_parameter(one))) if one.sampling != "secret" or one.rate == 1 else 0.0
    if one.release.kind != "pure" or not one.release.blanket:
        return 0.0
    return one.release.blanket**one.linked if one.release.blanket >= exp(-_parameter(one)) else 0.0


def _single(release: Release, epsilon: float) -> float:
    return float(release.delta(np.array([epsilon], dtype=np.longdouble))[0])


def _at_most(stated: float, delta_at: Callable[[float], float], delta: float, most: float = inf) -> float:
    """Return ``stated`` where it holds, and else what does: to find that takes many times as long."""
    return stated if stated < inf and delta_at(stated) <= delta * _SAME else least_epsilon(delta_at, delta, min(stated, 1.0), most)


def _is_counted(one: Charged) -> bool:
    """Tell whether all that is seen of each bit is how many were 1, among clients that others know to be there."""
    return _are_bits(one) and one.release.sampled == 1 and _together(one) == 1


def _parameter(one: Charged) -> float:
    if one.release.parameter is None:
        raise ValueError("what is not protected has no parameter")
    return one.release.parameter
