"""That a file says ldpfl's name is not enough: what no mechanism of ldpfl releases is proved of nobody, by either package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import CommandLine
from grids import each
from ldpfl import mechanisms
from ldpfl.api.certified_lines import _released
from ldpfl.mechanisms.base import Mechanism
from ldpfl.mechanisms.dp_fedavg import DpFedAvg
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.gaussian import (
    AdapLDP,
    Dpa,
    FullDP,
    Gaussian,
    LadpPaper,
    LadpSound,
    LayerSelection,
    LocalSteps,
    NbAFL,
    NoiseSchedule,
    SensitiveDP,
    Sensitivity,
    TimeVarying,
)
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.privacy import BinaryRelease, GaussianRelease, Ledger, PureRelease, Release, RoundEvent
from ldpfl.privacy.authors import BUILT_IN, released
from ldpfl.privacy.events import OURS, USERS_CODE
from ldpfl.privacy.stated_author import DOUBTED, with_checked_author
from ldpfl_verify.stated_author import with_believed_author

_STEPS = LocalSteps(learning_rate=0.1, epochs=2, batch_size=50, clip_norm=1.5)
_CLIPPED, _PER_BATCH = Sensitivity("update_clip", norm=0.5), Sensitivity("per_batch", _STEPS)
SCHEDULES: tuple[NoiseSchedule, ...] = (
    FullDP(0.5, 1e-5, _CLIPPED),
    FullDP(0.5, 1e-5, _PER_BATCH),
    NbAFL(0.5, 1e-5, norm=2.0, samples=10),
    TimeVarying(4.0, 1e-5, _CLIPPED, rounds=10, ratio=0.9),
    TimeVarying(4.0, 1e-5, _PER_BATCH, rounds=10, ratio=0.9),
    Dpa(4.0, 1e-5, _CLIPPED, rounds=10, participations=4, contraction=0.8),
    Dpa(4.0, 1e-5, _PER_BATCH, rounds=10, participations=4, contraction=0.8),
    SensitiveDP(2.0, 1e-5, _CLIPPED, lam=0.0, clip_to_estimate=True),
    SensitiveDP(2.0, 1e-5, _CLIPPED, lam=0.5),
    AdapLDP(1.0, 1e-5, _STEPS),
    LadpPaper(2.0, 1e-5, _CLIPPED, selection=LayerSelection("top_fraction", 0.5)),
    LadpSound(0.5, 1e-5, 0.5, share_rule="kl"),
)
ALONE = [name for name in mechanisms.names(alone=True) if name in BUILT_IN]
EPSILONS = (0.01, 0.3, 0.6, 0.6094, 0.7, 1.0, 2.0, 4.0, 8.0, 12.5, 16.0, 22.0, 25.0, 29.9, 30.0, 31.0, 100.0)
DIMENSIONS = (1, 2, 3, 8, 501)

MADE_UP: dict[str, Release] = {
    "no such mechanism": PureRelease("evil", 8.0, 1, "vector", blanket=0.999, author=OURS),
    "a blanket that its noise has not": PureRelease("laplace", 8.0, 1, "vector", blanket=0.999, author=OURS),
    "another kind of release": BinaryRelease("dp-sgd", 1.0, 1, author=OURS),
    "noise that lacks a proof": GaussianRelease("adapldp", 0.5, alike=True, author=OURS),
    "a record's noise for a whole client": GaussianRelease("dp-sgd", 0.5, alike=True, author=OURS),
    "a client's noise for a record": GaussianRelease("full-dp", 0.5, unit="record", rate=0.1, author=OURS),
    "noise that does not add up": GaussianRelease("full-dp", 0.5, alike=True, integers=True, author=OURS),
    "several vectors": GaussianRelease("dp-fedavg", 0.5, 5, alike=True, author=OURS),
    "bits about layers": BinaryRelease("duchi", 1.0, 3, "layer", author=OURS),
    "a coordinate that nobody drew": BinaryRelease("duchi", 1.0, 3, sampled=9, author=OURS),
    "bits that spend less than they do": BinaryRelease("duchi", 1.0, 3, realised=0.5, author=OURS),
    "a vector's parts": PureRelease("privunit-g", 1.0, 3, "weight", author=OURS),
    "many vectors": PureRelease("laplace", 1.0, 30, "vector", author=OURS),
}

BOUNDS = [
    PureRelease(name, epsilon, 1, unit, blanket=share, author=OURS)  # type: ignore[arg-type]  # mypy widens the unit
    for epsilon in (0.5, 1.0, 4.0, 8.0)
    for name, unit, share in (
        ("laplace", "vector", exp(-epsilon / 2)),
        ("piecewise", "weight", exp(-epsilon / 2)),
        ("hybrid", "vector", exp(-epsilon / 2)),
        ("duchi-vector", "vector", 4 / (3 + exp(epsilon))),
    )
]
"""The largest blankets that these mechanisms have."""


def of(release: Release, rounds: int = 3, clients: int = 1000) -> Ledger:
    return Ledger(tuple(RoundEvent(number, release, clients, clients, number) for number in range(1, rounds + 1)))


def is_believed(release: Release) -> bool:
    """Return whether ``release`` is taken for ldpfl's, on which both packages have to agree."""
    first, second = with_checked_author(release).author == OURS, with_believed_author(_released(release)).author == OURS
    assert first == second or _is_not_charged(release), release
    on_users_code = replace(release, author=USERS_CODE)
    assert (with_checked_author(on_users_code).author == USERS_CODE) == first
    assert (with_believed_author(_released(on_users_code)).author == USERS_CODE) == second
    return first


def _is_not_charged(release: Release) -> bool:
    """Return whether the release differs in ``realised`` alone, which bounds what is known from below, and is in no certificate."""
    return isinstance(release, BinaryRelease) and release.realised is not None


def ranges(dimension: int) -> LayerRanges:
    return LayerRanges(torch.zeros(1), torch.ones(1), (dimension,))


def made(name: str, epsilon: float, **settings: Any) -> Mechanism:
    return mechanisms.create(name, epsilon=epsilon, **settings)


def own_mechanisms(epsilon: float) -> Iterator[Mechanism]:
    for name in ALONE:
        yield mechanisms.with_defaults(name, epsilon)
    for name in ("laplace", "piecewise", "hybrid"):
        yield from (made(name, epsilon, coordinates=taken) for taken in (1, 2, 300, "auto"))
    yield from (made("harmony", epsilon, group=group) for group in (1, 3))
    yield from (made("privunit-g", epsilon, norm=1.0, magnitude_share=share) for share in (0.0, 0.1, 0.5))


@pytest.mark.thorough
@each("epsilon", EPSILONS)
def test_what_our_mechanisms_release_is_believed(epsilon: float) -> None:
    for mechanism in own_mechanisms(epsilon):
        for dimension in DIMENSIONS:
            taken = getattr(mechanism, "coordinates", None) or getattr(mechanism, "group", None)
            if isinstance(taken, int) and taken > dimension:
                continue
            release = released(mechanism, ranges(dimension))
            assert release.author == OURS
            assert is_believed(release), release


def test_what_our_mechanisms_with_gaussian_noise_release_is_believed() -> None:
    clip = RecordClip(0.5)
    own = [*map(Gaussian, SCHEDULES), DpSgd(clip, 2.0), DpSgd(clip, 2.0, sample_rate=0.1, part="person"), DpFedAvg(clip, 2.0, summed=True)]
    assert {*ALONE, *(mechanism.name for mechanism in own)} == BUILT_IN.keys()
    for mechanism in own:
        release = released(mechanism, ranges(8))
        assert release.author == OURS
        assert is_believed(release), release


@each("release", BOUNDS)
def test_a_blanket_is_believed_up_to_the_largest_of_its_mechanism(release: PureRelease) -> None:
    assert release.blanket is not None
    assert is_believed(release)
    assert not is_believed(replace(release, blanket=1.01 * release.blanket))


@each("epsilon", [0.5, 1.0, 4.0, 8.0, 16.0, 30.0])
def test_the_blankets_of_a_direction_and_of_one_bit_are_those_of_the_mechanism(epsilon: float) -> None:
    for mechanism in (made("privunit-g", epsilon, norm=1.0, magnitude_share=0.0), made("hybrid", epsilon)):
        release = released(mechanism, ranges(8))
        assert isinstance(release, PureRelease)
        assert release.blanket is not None
        assert not is_believed(replace(release, blanket=1.01 * release.blanket))


@each("release", [*MADE_UP.values(), PureRelease("laplace", 40.0, 1, "vector", blanket=exp(-20.0), author=OURS)])
def test_what_nobody_releases_is_not_believed(release: Release) -> None:
    assert not is_believed(release)


def test_a_ledger_that_was_doubted_is_written_and_read_as_such() -> None:
    read = Ledger.from_json(of(MADE_UP["no such mechanism"]).to_json())
    assert {event.release.author for event in read.events} == {DOUBTED}
    assert Ledger.from_json(read.to_json()) == read


def test_what_a_paper_claims_of_a_doubted_release_stays_with_it() -> None:
    one, two = (of(BinaryRelease("evil", 1.0, 1, claim=claim, author=OURS)).to_json() for claim in ("it says so", ""))
    assert [Ledger.from_json(text).events[0].release.claimed is None for text in (one, two)] == [False, True]


@pytest.mark.thorough_except("several vectors")
@pytest.mark.parametrize("name", [*list(MADE_UP)[:4], "a client's noise for a record", "several vectors", "bits about layers"])
def test_nothing_is_proved_or_confirmed_of_what_nobody_releases(name: str, tmp_path: Path, ldpfl: CommandLine) -> None:
    file, certificate = tmp_path / "ledger.json", tmp_path / "certificate.json"
    of(MADE_UP[name], rounds=2, clients=20).save(file)  # few, whose figures take less time
    assert json.loads(ldpfl("ledger", file, "--json").out)["status"] == "author's claim"
    assert ldpfl("certify", file, "--out", certificate).code == 0
    for wrong in (False, True):
        if wrong:  # whoever made up the ledger makes up the certificate, too
            certificate.write_text(certificate.read_text().replace(DOUBTED, OURS).replace('"author\'s claim"', '"proved"'))
            assert DOUBTED not in certificate.read_text()
        for arguments in ((certificate,), (certificate, "--ledger", file)):
            outcome = ldpfl("verify", *arguments)
            assert outcome.code == 4, outcome
            assert " confirmed " not in outcome.out
            assert DOUBTED in outcome.out
