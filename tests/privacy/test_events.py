"""An event is a fact: it cannot be changed, and one that contradicts itself cannot be made."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from ldpfl.errors import ConfigError
from ldpfl.privacy import BinaryRelease, GaussianRelease, PureRelease, Release, RoundEvent, UnprotectedRelease

RELEASES: list[Release] = [
    BinaryRelease("duchi", 1.0, 7),
    PureRelease("laplace", 0.5, 3, "layer"),
    GaussianRelease("gaussian", 0.1),
    UnprotectedRelease("none", "values leave as they are", 7, "weight"),
    UnprotectedRelease("ladp", "layers leave without noise", claimed_epsilon=0.9, claimed_delta=1e-5),
]


def event(**changes: Any) -> RoundEvent:
    return replace(RoundEvent(3, RELEASES[0], cohort=5, population=9, joined=2), **changes)


@pytest.mark.parametrize("release", RELEASES)
def test_events_and_releases_are_frozen_and_equal_by_value(release: Release) -> None:
    first, second = event(release=release), event(release=replace(release))
    assert first == second
    assert hash(first) == hash(second)
    for thing in (first, release):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, fields(thing)[0].name, None)


@pytest.mark.parametrize("kind", [RoundEvent, *map(type, RELEASES)])
def test_every_field_of_every_event_is_documented(kind: type) -> None:
    documented = (kind.__doc__ or "") + (BinaryRelease.__doc__ or "")
    for field in fields(kind):
        assert field.name in documented, f"{kind.__name__}.{field.name}"


@pytest.mark.parametrize(
    "possible",
    [
        {"cohort": 9},
        {"cohort": 1},
        {"joined": 3},
        {"rate": 0.1, "sampling": "secret"},
        {"linked": 7, "channel": "random-delay"},
        {"population": 10**12},
    ],
)
def test_what_can_happen_can_be_recorded(possible: dict[str, Any]) -> None:
    for name, value in possible.items():
        assert getattr(event(**possible), name) == value


@pytest.mark.parametrize(
    ("impossible", "named"),
    [
        ({"cohort": 10}, "cohort of 10 out of 9"),
        ({"cohort": 0}, "cohort of 0"),
        ({"cohort": -1}, "cohort of -1"),
        ({"population": 4}, "cohort of 5 out of 4"),
        ({"joined": 0}, "joined 0"),
        ({"joined": 4}, "joined 4"),
        ({"round": 0, "joined": 1}, "joined 1"),
        ({"round": -1, "joined": -1}, "joined -1"),
        ({"linked": 0}, "linked = 0"),
        ({"linked": -1}, "linked = -1"),
        ({"rate": 0.0}, "rate"),
        ({"rate": -0.5}, "rate"),
        ({"rate": 1.5}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": float("inf")}, "rate"),
        ({"population": 10**12 + 1}, "1e\\+12"),
        ({"round": 10**13}, "1e\\+12"),
        ({"linked": 10**30}, "1e\\+12"),
    ],
)
def test_figures_that_contradict_each_other_are_refused_with_the_round(impossible: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^round -?\d+: .*{named}") as caught:
        event(**impossible)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("parameter", [0.0, -1.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_privacy_parameter_is_positive_and_finite(index: int, parameter: float) -> None:
    name = "mu" if index == 2 else "epsilon"
    release: Any = replace(RELEASES[index], **{name: parameter})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be positive and finite"):
        event(release=release)


@pytest.mark.parametrize("units", [0, -1, 10**12 + 1])
@pytest.mark.parametrize("index", range(len(RELEASES)))
def test_a_release_has_a_countable_number_of_units(index: int, units: int) -> None:
    with pytest.raises(ConfigError, match="round 3"):
        event(release=replace(RELEASES[index], units=units))


@pytest.mark.parametrize(("epsilon", "delta"), [(None, None), (0.9, 1e-5), (1e-300, 1e-300), (1e300, 1 - 1e-12), (1, 0.5)])
def test_a_paper_may_claim_both_figures_or_none(epsilon: float | None, delta: float | None) -> None:
    claim = UnprotectedRelease("ladp", "why", claimed_epsilon=epsilon, claimed_delta=delta)
    assert event(release=claim).release == claim


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [
        (0.9, None),
        (None, 1e-5),
        (0.0, 1e-5),
        (-1.0, 1e-5),
        (float("nan"), 1e-5),
        (float("inf"), 1e-5),
        (0.9, 0.0),
        (0.9, 1.0),
        (0.9, -1e-5),
        (0.9, float("nan")),
    ],
)
def test_a_claim_that_is_none_is_refused(epsilon: float | None, delta: float | None) -> None:
    with pytest.raises(
        ConfigError, match=r"^round 3, release of the mechanism 'ladp': claimed_epsilon must be above 0 and claimed_delta in \(0, 1\)"
    ) as caught:
        event(release=UnprotectedRelease("ladp", "why", claimed_epsilon=epsilon, claimed_delta=delta))
    assert len(str(caught.value).splitlines()) == 1
