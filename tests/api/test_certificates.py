"""Certificates: what they say is confirmed by other accountants, and whoever changes one is found out."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, strategies as st

from conftest import CommandLine
from ldpfl import ConfigError, DataError, certify, verify
from ldpfl.api.certified_lines import _charged_rounds, certified
from ldpfl.api.certifying import signed
from ldpfl.privacy import BinaryRelease, GaussianRelease, Ledger, PureRelease, Release, RoundEvent, UnprotectedRelease
from ldpfl.privacy.charged_rounds import charged_groups
from ldpfl.privacy.events import OURS
from ldpfl_verify import Certificate, CertificateError, read_certificate
from ldpfl_verify.ed25519 import signature_fits
from ldpfl_verify.field_checks import to_tree

pytestmark = pytest.mark.xdist_group("certificates")  # which are made once a process

GOLDEN = Path(__file__).parents[2] / "verify" / "tests" / "golden"

SMALL_EIGHT = "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"
"""A point of order 8."""

BITS = BinaryRelease("duchi", 1.0, 500, author=OURS)
VECTOR = PureRelease("privunit-g", 4.0, 1, "vector", author=OURS)
LAPLACE = PureRelease("laplace", 1.0, 30, "weight", blanket=exp(-0.5), author=OURS)
NOISE = GaussianRelease("dp-sgd", 0.5, 1, "record", author=OURS)
WHOLE = GaussianRelease("dp-fedavg", 0.5, alike=True, integers=True, author=OURS)
BALL = GaussianRelease("full-dp", 0.3, alike=True, author=OURS)


def ledger(release: Release, rounds: int = 3, cohort: int = 100, **changes: Any) -> Ledger:
    population = changes.pop("population", cohort)
    joined = changes.pop("joined", None)
    events = (RoundEvent(number, release, cohort, population, joined or number, **changes) for number in range(1, rounds + 1))
    return Ledger(tuple(events))


def mixed(*ledgers: Ledger) -> Ledger:
    events = [event for one in ledgers for event in one.events]
    return Ledger(tuple(replace(event, round=place, joined=place) for place, event in enumerate(events, start=1)))


RUNS: dict[str, Ledger] = {
    "bits behind a shuffler": ledger(BITS),
    "one round": ledger(BITS, 1),
    "one bit": ledger(BinaryRelease("duchi", 1.0, 1, author=OURS), 1),
    "tiny bits of many clients": ledger(BinaryRelease("rotated-sign", 0.1, 16, "coordinate", author=OURS), 2, 1100),
    "bits that are summed": ledger(BITS, channel="secure-sum"),
    "bits that senders are known of": ledger(BITS, channel="direct"),
    "a part of the clients": ledger(BITS, cohort=50, population=200, joined=1, sampling="visible"),
    "cohorts of two sizes": mixed(ledger(BITS, 2, sampling="visible"), ledger(BITS, 2, 60, population=100, sampling="visible")),
    "two budgets": mixed(ledger(BITS, 2), ledger(replace(BITS, epsilon=0.5), 1)),
    "three budgets of nearly one size": mixed(
        *(ledger(replace(BITS, epsilon=epsilon, units=40), 1, channel="direct") for epsilon in (0.1, 0.1001, 0.12))
    ),
    "vectors behind a shuffler": ledger(VECTOR, 4, 5000),
    "vectors with something in common": ledger(replace(VECTOR, blanket=0.2), 4, 5000),
    "one of them in all": ledger(replace(VECTOR, epsilon=8.0, blanket=0.09), 3, 1000, population=3000, joined=1, sampling="once"),
    "bits about drawn coordinates": ledger(BinaryRelease("harmony", 1.0, 8, "layer", sampled=1000, author=OURS), 5, 147),
    "noise on weights": ledger(LAPLACE, 4),
    "linked bits": ledger(replace(BITS, epsilon=0.01), linked=10),
    "noise on linked weights": ledger(replace(LAPLACE, epsilon=0.1, blanket=exp(-0.05)), 4, linked=3),
    "noise of two budgets": mixed(ledger(LAPLACE, 2), ledger(replace(LAPLACE, epsilon=0.5, blanket=exp(-0.25)), 2)),
    "a vector once": ledger(VECTOR, 3, 1000, population=3000, joined=1, sampling="once"),
    "a bit once": ledger(BinaryRelease("duchi", 2.0, 1, author=OURS), 3, 1000, population=3000, joined=1, sampling="once"),
    "a bit once, where some collude": ledger(
        BinaryRelease("duchi", 2.0, 1, author=OURS), 3, 1000, population=3000, joined=1, sampling="once", colluding=40
    ),
    "records": ledger(NOISE, channel="direct"),
    "noise of one ball": ledger(BALL, 10),
    "of two balls": mixed(ledger(BALL, 2), ledger(replace(BALL, mu=0.5), 1, 60, population=100, sampling="visible")),
    "summed noise": ledger(NOISE, channel="secure-sum"),
    "whole clients that are summed": ledger(WHOLE, channel="secure-sum"),
    "records and whole clients that are summed": mixed(ledger(NOISE, channel="secure-sum"), ledger(WHOLE, 2, channel="secure-sum")),
    "sums of which some collude": ledger(WHOLE, channel="secure-sum", colluding=40),
    "sums of two sizes of which some collude": mixed(
        ledger(WHOLE, 2, channel="secure-sum", colluding=40),
        ledger(WHOLE, 2, 60, channel="secure-sum", population=100, sampling="visible", colluding=40),
    ),
    "reports and noise": mixed(
        ledger(VECTOR, 2, channel="direct"), ledger(GaussianRelease("full-dp", 0.3, author=OURS), 2, channel="direct")
    ),
    "a faint report and noise": mixed(
        ledger(replace(VECTOR, epsilon=1e-4), 2, channel="direct"),
        ledger(GaussianRelease("full-dp", 0.05, author=OURS), 2, channel="direct"),
    ),
    "without protection": ledger(UnprotectedRelease("adapldp", "its history", author=OURS), channel="direct"),
}
RUNS["noise of one ball in secret"] = ledger(BALL, 3, 5, population=20, joined=1, sampling="secret", rate=0.25)
RUNS["noise in secret"] = ledger(NOISE, 3, 5, population=20, joined=1, sampling="secret", rate=0.25, channel="direct")
RUNS["noise of two balls in secret"] = mixed(
    RUNS["noise of one ball in secret"],
    ledger(replace(BALL, mu=0.5), 2, 7, population=20, joined=1, sampling="secret", rate=0.25),
)
NOT_CHECKED: dict[str, Ledger] = {
    "in secret": ledger(replace(BITS, units=20), cohort=5, population=20, joined=1, sampling="secret", rate=0.25),
    "linked bits of many clients": ledger(replace(BITS, epsilon=0.3, units=5_000), 3, 100_000, linked=8),
    "records by chance": ledger(replace(NOISE, rate=0.1), channel="direct"),
}


def write(path: Path, made: Ledger) -> Path:
    made.save(path)
    return path


@cache
def certificate_of(made: Ledger) -> Certificate:
    return signed(certified(made.to_json(), "run", 1e-5, {"ldpfl": "1"}), None)


@pytest.mark.parametrize(("delta", "remarked"), [(0.009, False), (0.01, True), (0.5, True)])
def test_a_delta_that_lets_a_whole_client_or_record_be_published_is_remarked_on(delta: float, remarked: bool) -> None:
    for made, published in (
        (ledger(BITS, 1, channel="direct"), "all data of one client"),
        (ledger(NOISE, 1, channel="direct"), "one whole record"),
    ):
        notes = verify(signed(certified(made.to_json(), "run", delta, {"ldpfl": "1"}), None)).notes
        said = f"a delta of {delta:g} is not smaller than one over the 100 clients: it allows {published} to be published"
        assert (said in notes) == remarked


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.slow
@pytest.mark.thorough_except(
    "sums of which some collude",
    "records and whole clients that are summed",
    "summed noise",
    "a bit once",
    "one bit",
    "a faint report and noise",
)
def test_every_line_is_confirmed_by_a_figure_near_to_it(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "ledger.json", RUNS[name])
    found = verify(certificate_of(RUNS[name]), ledger=file)
    nearly = {"nearly"} if name == "linked bits" else set()  # where the second accountant rounds a little more
    assert {verdict.status for verdict in found.lines} - nearly == {"confirmed"}, found
    assert found.holds
    assert len(found.lines) >= 2
    for verdict in found.lines:
        assert verdict.second is not None
        assert verdict.second >= 0.9 * float(verdict.line.epsilon)


@pytest.mark.parametrize("name", ["one bit", "a bit once", "vectors behind a shuffler", "reports and noise", "without protection"])
@pytest.mark.thorough_for("vectors behind a shuffler", "a bit once")
def test_a_tenth_less_is_not_confirmed(name: str) -> None:
    made = certificate_of(RUNS[name])
    lines = [line if line.epsilon == "infinity" else replace(line, epsilon=0.9 * float(line.epsilon)) for line in made.statement.guarantees]
    less = verify(Certificate(statement=replace(made.statement, guarantees=tuple(lines))))
    assert [verdict.status == "not confirmed" for verdict in less.lines] == [line.epsilon != "infinity" for line in lines]
    assert less.holds == all(line.epsilon == "infinity" for line in lines)


@pytest.mark.parametrize("name", NOT_CHECKED)
@pytest.mark.slow
@pytest.mark.thorough
def test_what_has_no_second_accountant_is_said_not_to_be_checked(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "ledger.json", NOT_CHECKED[name])
    found = verify(certificate_of(NOT_CHECKED[name]), ledger=file)
    assert "not checked" in {verdict.status for verdict in found.lines}
    assert not found.holds
    assert not found.contradicted


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "epsilon": lambda statement: statement["guarantees"][0].update(epsilon=0.5),
    "delta": lambda statement: statement["guarantees"][1].update(delta=1e-3),
    "trust": lambda statement: statement["guarantees"][2].update(trusted="local"),
    "rounds": lambda statement: statement["charged"][0].update(rounds=2),
    "name": lambda statement: statement.update(run="another"),
    "ledger": lambda statement: statement.update(ledger="0" * 64),
    "assumption": lambda statement: statement["guarantees"][0]["assumptions"].pop(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_changed_after_signing_is_found_out(change: str, tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(signed(certificate_of(RUNS["one bit"]).statement, Ed25519PrivateKey.generate()).to_json())
    assert read_certificate(path).signature is not None
    tree = json.loads(path.read_text())
    CHANGES[change](tree["statement"])
    path.write_text(json.dumps(tree))
    with pytest.raises(CertificateError, match="was changed after it was signed"):
        read_certificate(path)


@pytest.mark.parametrize("low", ["01", "ec" + "ff" * 30 + "7f", "00", "ed" + "ff" * 30 + "7f", "01" + "00" * 30 + "80", SMALL_EIGHT])
def test_a_key_that_fits_whatever_is_signed_is_nobody_s(low: str, tmp_path: Path) -> None:
    """Keys of small order: under the first of them the point of order 1 and the number 0 sign anything."""
    made = certificate_of(RUNS["one bit"]).to_dict()
    key = low.ljust(64, "0")
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps({**made, "signature": {"public_key": key, "value": key + "00" * 32}}))
    with pytest.raises(CertificateError, match="anybody can make up signatures"):
        read_certificate(path)


@pytest.mark.thorough
@given(st.binary(min_size=32, max_size=32), st.binary(max_size=100), st.integers(0, 511))
def test_signatures_fit_as_another_implementation_says(secret: bytes, message: bytes, flipped: int) -> None:
    key = Ed25519PrivateKey.from_private_bytes(secret)
    public, made = key.public_key(), bytearray(key.sign(message))
    assert signature_fits(public.public_bytes_raw(), message, bytes(made))
    made[flipped // 8] ^= 1 << flipped % 8
    try:
        public.verify(bytes(made), message)
        fits = True
    except InvalidSignature:
        fits = False
    assert signature_fits(public.public_bytes_raw(), message, bytes(made)) == fits


@pytest.mark.thorough
def test_the_golden_certificate_of_the_verifier_is_what_is_certified_of_its_ledger() -> None:
    golden = read_certificate(GOLDEN / "certificate.json").statement
    made = certified((GOLDEN / "ledger.json").read_text(), "ledger.json", 1e-5, golden.software)
    assert [line.epsilon for line in made.guarantees] == pytest.approx([line.epsilon for line in golden.guarantees], rel=1e-9)
    pairs = zip(made.guarantees, golden.guarantees, strict=True)
    # ``computed`` is a sentence for readers, which may be worded anew.
    lines = tuple(replace(line, epsilon=other.epsilon, computed=other.computed) for line, other in pairs)
    assert replace(made, guarantees=lines) == golden


def test_a_signature_is_its_signer_s(tmp_path: Path) -> None:
    """The key is made once, for its owner alone; who signs anew what he changed is not who was asked for."""
    file, key = write(tmp_path / "ledger.json", RUNS["one bit"]), tmp_path / "key.pem"
    made = certify(file, key=key)
    assert key.stat().st_mode & 0o777 == 0o600
    assert made.signature is not None
    again = certify(file, key=key).signature
    assert again is not None
    assert again.public_key == made.signature.public_key
    assert verify(made, signed_by=made.signature.public_key).holds
    with pytest.raises(DataError, match="is signed by"):
        verify(certify(file, key=tmp_path / "other.pem"), signed_by=made.signature.public_key)
    with pytest.raises(DataError, match="signed by nobody"):
        verify(certify(file), signed_by=made.signature.public_key)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by other users"):
        certify(file, key=key)


LESS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a round is left out": ("records", {"rounds": 2}, "some client joined 3 rounds, but only 2 are charged"),
    "a larger crowd": (
        "one bit",
        {"cohort": 101, "population": 101},
        "it has no round like the charged one with mechanism duchi and a cohort of 101",
    ),
    "a smaller budget": ("records", {"release": {"parameter": 0.4}}, "it has no round like the charged one with mechanism dp-sgd"),
    "a larger crowd of the whole run": ("a vector once", {"cohort": 3001, "population": 3001}, "its rounds are of another kind"),
    "those who collude in the crowd of the whole run": ("a bit once, where some collude", {"cohort": 2961}, "at most 2,960"),
    "as many rounds of noise as a client joined": (
        "noise of one ball in secret",
        {"rounds": 1},
        "there were 3 rounds, but only 1 are charged",
    ),
    "rounds that nobody joined": ("in secret", {"rounds": 2}, "there were 3 rounds, but only 2 are charged"),
    "everybody in place of some in secret": ("in secret", {"sampling": "everyone", "rate": 1.0, "cohort": 900}, "of another kind"),
    "a larger cohort of the second kind": (
        "noise of two balls in secret",
        {"cohort": 8},
        "a cohort of 8 is charged, but its smallest cohort has",
    ),
    "more in secret than there were": ("in secret", {"cohort": 6}, "a cohort of 6 is charged, but its smallest cohort has 5"),
    "those who collude as a crowd": (
        "sums of which some collude",
        {"cohort": 100, "population": 100},
        "it has no round like the charged one with mechanism dp-fedavg",
    ),
    "the smaller cohort": ("cohorts of two sizes", {"rounds": 1}, "some client joined 4 rounds, but only 3 are charged"),
}


def charging(made: Ledger) -> dict[str, Any]:
    """Return what a certificate charges for ``made``; its lines are those of one bit, for the charges are looked at before them."""
    tree = certificate_of(RUNS["one bit"]).to_dict()
    tree["statement"]["ledger"] = hashlib.sha256(made.to_json().encode()).hexdigest()
    tree["statement"]["charged"] = [to_tree(_charged_rounds(group)) for group in charged_groups(made)]
    return tree


@pytest.mark.parametrize("case", LESS)
def test_a_certificate_that_charges_less_than_its_ledger_holds_is_refused(case: str, tmp_path: Path) -> None:
    name, change, said = LESS[case]
    made = {**RUNS, **NOT_CHECKED}[name]
    file, tree = write(tmp_path / "ledger.json", made), charging(made)
    first = tree["statement"]["charged"][0]
    first.update({**change, "release": {**first["release"], **change.get("release", {})}})
    with pytest.raises(DataError, match=said):
        verify(Certificate.from_dict(tree), ledger=file)


@pytest.mark.slow
def test_rounds_that_nobody_joined_in_secret_are_charged_also_at_the_end(tmp_path: Path) -> None:
    event = RUNS["noise of one ball in secret"].events[0]
    later = (replace(event, round=2, joined=2), *(replace(event, round=number, cohort=0, joined=2) for number in (3, 4)))
    file = write(tmp_path / "ledger.json", Ledger((event, *later)))
    made = certify(file)
    assert [one.rounds for one in made.statement.charged] == [4]
    fewer = [replace(one, rounds=2) for one in made.statement.charged]
    with pytest.raises(DataError, match="there were 4 rounds, but only 2 are charged"):
        verify(Certificate(statement=replace(made.statement, charged=tuple(fewer))), ledger=file)


def test_rounds_of_a_kind_that_costs_less_do_not_stand_for_others_in_secret(tmp_path: Path) -> None:
    made = RUNS["noise of two balls in secret"]
    file, tree = write(tmp_path / "ledger.json", made), charging(made)
    first, second = tree["statement"]["charged"]
    first["rounds"], second["rounds"] = first["rounds"] - 1, second["rounds"] + 1
    with pytest.raises(DataError, match="several kinds are compared only with a certificate that charges each of them"):
        verify(Certificate.from_dict(tree), ledger=file)


def test_missing_rounds_in_secret_are_charged_as_the_round_after_them(tmp_path: Path) -> None:
    strong, faint = RUNS["noise of two balls in secret"].events[-1], RUNS["noise of two balls in secret"].events[0]
    made = Ledger((replace(faint, round=1, joined=1), replace(strong, round=40, joined=2)))
    file, tree = write(tmp_path / "ledger.json", made), charging(made)
    by_mu = {one["release"]["parameter"]: one for one in tree["statement"]["charged"]}
    cheap, dear = by_mu[min(by_mu)], by_mu[max(by_mu)]
    assert (cheap["rounds"], dear["rounds"]) == (1, 39)
    cheap["rounds"], dear["rounds"] = 39, 1
    with pytest.raises(DataError, match="several kinds are compared only with a certificate that charges each of them"):
        verify(Certificate.from_dict(tree), ledger=file)


def test_the_smallest_cohort_in_secret_counts_for_rounds_of_all_kinds(tmp_path: Path) -> None:
    made = RUNS["noise of two balls in secret"]
    file, tree = write(tmp_path / "ledger.json", made), charging(made)
    assert {one["cohort"] for one in tree["statement"]["charged"]} == {5}
    tree["statement"]["charged"][-1]["cohort"] = 7
    with pytest.raises(DataError, match="a cohort of 7 is charged, but its smallest cohort has 5"):
        verify(Certificate.from_dict(tree), ledger=file)


@pytest.mark.slow
def test_what_would_take_too_long_is_not_checked() -> None:
    """Seventeen kinds of rounds behind a shuffler: what holds without it is looked at still."""
    tree = certificate_of(RUNS["one bit"]).to_dict()
    (one,) = tree["statement"]["charged"]
    tree["statement"]["charged"] = [{**one, "release": {**one["release"], "parameter": number / 100}} for number in range(1, 18)]
    for line in tree["statement"]["guarantees"]:
        line["epsilon"] = 10.0 if line["trusted"] == "local" else 0.1
    found = verify(Certificate.from_dict(tree))
    assert {(verdict.line.trusted, verdict.status) for verdict in found.lines} == {("local", "confirmed"), ("shuffled", "not checked")}


def test_a_ledger_that_was_edited_confirms_nothing(tmp_path: Path) -> None:
    """Its events follow from each other no longer, as where it is accounted."""
    file = write(tmp_path / "ledger.json", RUNS["one bit"])
    edited = file.read_text().replace('"epsilon": 1.0', '"epsilon": 0.5')
    assert edited != file.read_text()
    file.write_text(edited)
    tree = certificate_of(RUNS["one bit"]).to_dict()
    tree["statement"]["charged"][0]["release"]["parameter"] = 0.5
    tree["statement"]["ledger"] = hashlib.sha256(edited.encode()).hexdigest()
    forged = Certificate.from_dict(tree)
    assert verify(forged).holds  # what it charges costs no more than it says
    with pytest.raises(DataError, match="changed"):
        verify(forged, ledger=file)


def test_a_certificate_warns_as_its_ledger_does(tmp_path: Path) -> None:
    file = write(tmp_path / "ledger.json", RUNS["one bit"])
    assert any("delta 0.5" in caveat for caveat in certify(file, delta=0.5).statement.caveats)
    assert not certify(file).statement.caveats


@pytest.mark.slow
@pytest.mark.thorough
def test_rounds_of_larger_cohorts_may_stand_for_smaller_ones_nowhere(tmp_path: Path) -> None:
    """A client that joined two of four rounds is charged the two that hide it least."""
    cohorts = enumerate((90, 50, 80, 60), start=1)
    events = [RoundEvent(number, BITS, cohort, 200, min(number, 2), "visible") for number, cohort in cohorts]
    file = write(tmp_path / "ledger.json", Ledger(tuple(events)))
    made = certify(file)
    assert sorted(one.cohort for one in made.statement.charged) == [50, 60]
    assert verify(made, ledger=file).holds
    swapped = [replace(one, cohort=90 if one.cohort == 50 else one.cohort) for one in made.statement.charged]
    with pytest.raises(DataError, match="a round with a cohort of 50 is not charged, and a round that may cost less is charged instead"):
        verify(Certificate(statement=replace(made.statement, charged=tuple(swapped))), ledger=file)


def test_floats_of_whole_clients_are_not_taken_for_integers() -> None:
    made = certificate_of(RUNS["whole clients that are summed"])
    floats = [replace(one, release=replace(one.release, integers=False)) for one in made.statement.charged]
    found = verify(Certificate(statement=replace(made.statement, charged=tuple(floats))))
    assert {verdict.status for verdict in found.lines if verdict.line.trusted == "summed"} == {"not checked"}


@pytest.mark.parametrize(("name", "trusted"), [("summed noise", "shuffled"), ("one bit", "summed"), ("records", "summed")])
def test_nobody_is_trusted_with_what_he_did_not_do(name: str, trusted: Any) -> None:
    """Noise that a sum adds up is each client's own behind a shuffler; and what came with its sender hides behind nobody."""
    made = certificate_of(RUNS[name])
    best = min(made.statement.guarantees, key=lambda line: float("inf") if line.epsilon == "infinity" else line.epsilon)
    lines = [replace(best, trusted=trusted, epsilon=0.9 * float(best.epsilon))]
    assert not verify(Certificate(statement=replace(made.statement, guarantees=tuple(lines)))).holds


def test_a_record_s_guarantee_is_none_of_its_client() -> None:
    made, client = certificate_of(RUNS["records"]), "replace one client's data"
    changes: list[dict[str, Any]] = [{"protects": "client"}, {"adjacency": client}, {"protects": "client", "adjacency": client}]
    for change in changes:
        lines = [replace(line, **change) for line in made.statement.guarantees if line.delta > 0]
        assert not verify(Certificate(statement=replace(made.statement, guarantees=tuple(lines)))).holds


@pytest.mark.parametrize(
    "change",
    [
        {"release": {"units": 10**12}},
        {"release": {"units": 10**9}},
        {"release": {"parameter": 1e-9, "units": 10**12}},
        {"release": {"parameter": 1e9}},
        {"cohort": 10**12, "population": 10**12},
        {"cohort": 1},
        {"release": {"kind": "pure", "blanket": 0.999}, "cohort": 10**6, "population": 10**6},
        {"release": {"kind": "pure", "blanket": 1e-300}, "cohort": 10**6, "population": 10**6},
        {"release": {"kind": "pure", "blanket": 0.7, "units": 10**12}, "linked": 10**12},
        {"release": {"kind": "pure", "blanket": 0.9, "parameter": 0.2, "units": 10**9}, "cohort": 10**6, "population": 10**6},
        {"delta": 1e-25, "release": {"parameter": 0.05}, "cohort": 326, "population": 326},
        {"delta": 1e-25, "release": {"parameter": 1.99}, "cohort": 1, "population": 1, "linked": 2_436_201, "sampling": "once"},
    ],
)
@pytest.mark.slow
@pytest.mark.thorough_for("change1", "change2", "change6", "change7", "change0", "change10")
def test_no_certificate_takes_for_ever(change: dict[str, Any]) -> None:
    tree = certificate_of(RUNS["one bit"]).to_dict()
    first, delta = tree["statement"]["charged"][0], change.get("delta", 1e-5)
    charged = {name: value for name, value in change.items() if name != "delta"}
    first.update({**charged, "release": {**first["release"], **change.get("release", {})}})
    for line in tree["statement"]["guarantees"]:
        line.update(epsilon=1e-3, delta=delta if line["delta"] else 0.0)
    assert not verify(Certificate.from_dict(tree)).holds


@pytest.mark.slow
@pytest.mark.thorough
def test_a_certificate_from_before_blankets_is_still_its_signer_s(tmp_path: Path) -> None:
    """A field that is not there is not in what was signed; nor in the chain of a ledger."""
    made = certified(RUNS["vectors behind a shuffler"].to_json(), "run", 1e-5, {})
    assert "blanket" not in Certificate(statement=made).to_json()
    assert "blanket" not in RUNS["vectors behind a shuffler"].to_json()
    key = Ed25519PrivateKey.generate()
    file = tmp_path / "certificate.json"
    for name in ("vectors behind a shuffler", "noise on weights"):
        text = RUNS[name].to_json()
        assert Ledger.from_json(text) == RUNS[name]
        file.write_text(signed(certified(text, "run", 1e-5, {}), key).to_json())
        assert read_certificate(file).statement.ledger == hashlib.sha256(text.encode()).hexdigest()
    with pytest.raises(ConfigError, match=r"blanket is 0\.3, expected 0\.3679 \(e\^-epsilon\) or more, and below 1"):
        ledger(replace(LAPLACE, blanket=0.3))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"delta"', '"delta": 0.5, "delta"', "given twice"),
        ('"parameter": 1.0', '"parameter": null', "needs a parameter"),
    ],
)
def test_a_certificate_says_everything_once(old: str, new: str, said: str, tmp_path: Path, ldpfl: CommandLine) -> None:
    file = tmp_path / "certificate.json"
    text = certificate_of(RUNS["one bit"]).to_json()
    assert old in text
    file.write_text(text.replace(old, new))
    assert said in ldpfl.refused("verify", file)


@pytest.mark.parametrize(("number", "epsilon0"), [(10**7, 29.9), (10**7, 1e-4), (10**5, 0.5), (10**6, 29.9)])
@pytest.mark.parametrize("stated", [1e-6, 1e300])
@pytest.mark.slow
@pytest.mark.thorough_for("1e+300-100000-0.5", "1e+300-10000000-0.0001", "1e-06-10000000-0.0001", "1e-06-100000-0.5")
def test_a_figure_far_from_the_truth_takes_no_sum_of_all_terms(number: int, epsilon0: float, stated: float) -> None:
    made = certificate_of(ledger(PureRelease("laplace", epsilon0, number, "weight", author=OURS), 1, channel="direct"))
    lines = [replace(line, epsilon=stated, delta=1e-5) for line in made.statement.guarantees[:1]]
    (found,) = verify(Certificate(statement=replace(made.statement, guarantees=tuple(lines)))).lines
    assert found.status == ("not confirmed" if stated < 1e300 else "confirmed") or found.second is None


def test_another_ledger_is_refused(tmp_path: Path) -> None:
    file, other = (write(tmp_path / f"{name}.json", RUNS[name]) for name in ("one bit", "records"))
    with pytest.raises(DataError, match="is not the ledger that was certified"):
        verify(certify(file), ledger=other)


def test_nothing_released_is_nothing_certified(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to certify"):
        certify(write(tmp_path / "ledger.json", Ledger()))


@given(st.data())
def test_a_damaged_certificate_is_one_line(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    text = bytearray(certificate_of(RUNS["one bit"]).to_json().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("certificate") / "certificate.json"
    path.write_bytes(bytes(text))
    with contextlib.suppress(CertificateError):  # whose message is one line whatever it says
        assert read_certificate(path).statement.guarantees


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"format": "ldpfl-ledger"}', "[" * 100_000])
def test_what_is_no_certificate_is_named(text: str, tmp_path: Path, ldpfl: CommandLine) -> None:
    (tmp_path / "file.json").write_text(text)
    assert "is not a certificate" in ldpfl.refused("verify", tmp_path / "file.json")


@pytest.mark.slow
@pytest.mark.thorough
def test_what_is_not_checked_does_not_pass(tmp_path: Path, ldpfl: CommandLine) -> None:
    file = write(tmp_path / "ledger.json", NOT_CHECKED["linked bits of many clients"])
    ldpfl("certify", file, "--out", tmp_path / "certificate.json")
    outcome = ldpfl("verify", tmp_path / "certificate.json", "--ledger", file)
    assert (outcome.code, "not checked" in outcome.out) == (4, True)


@pytest.mark.slow
def test_commands(tmp_path: Path, ldpfl: CommandLine) -> None:
    file = write(tmp_path / "ledger.json", RUNS["one bit"])
    made = tmp_path / "certificate.json"
    said = ldpfl("certify", file, "--out", made, "--key", tmp_path / "key.pem").out
    assert "3 guarantees, signed" in said
    outcome = ldpfl("verify", made, "--ledger", file)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count(" confirmed ") == 3
    found = json.loads(ldpfl("verify", made, "--json").out)
    assert found["holds"]
    assert any("was not checked" in note for note in found["notes"])
    tree = json.loads(made.read_text())
    tree["signature"] = None
    tree["statement"]["guarantees"][2]["epsilon"] *= 0.5
    made.write_text(json.dumps(tree))
    outcome = ldpfl("verify", made)
    assert outcome.code == 3
    assert "not confirmed" in outcome.out


@pytest.mark.slow
def test_a_run_is_certified_by_its_folder(tiny_data: Path, tmp_path: Path, ldpfl: CommandLine, config_file: Path) -> None:
    folder = tmp_path / "run"
    assert ldpfl("run", config_file, "--data-dir", tiny_data, "--out", folder, "--no-baseline").code == 0
    made = certify(folder)
    assert made.statement.software.keys() >= {"ldpfl", "torch", "duchi"}
    assert verify(made, ledger=folder).holds
    (folder / "result.json").unlink()
    assert any("rounds were meant to be run" in caveat for caveat in certify(folder).statement.caveats)


def test_a_certificate_that_is_written_leaves_its_ledger_as_it_was(tmp_path: Path) -> None:
    ledger, out = tmp_path / "ledger.json", tmp_path / "certificate.json"
    Ledger().charge(RoundEvent(1, BinaryRelease("duchi", 1.0, 1, author=OURS), 10, 10, 1)).save(ledger)
    before = ledger.read_bytes()
    made = certify(ledger, out=out)
    assert out.read_text(encoding="utf-8") == made.to_json()
    assert ledger.read_bytes() == before
