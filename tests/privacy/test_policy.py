"""Nothing that a server asks for weakens a client's policy: what is accepted keeps every bound, as the client itself computes it."""

from __future__ import annotations

import base64
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, example, given, settings, strategies as st

from ldpfl import LayerRanges, mechanisms
from ldpfl.errors import BudgetExhausted, ConfigError, Declined, Exhausted, LdpflError, PrivacyError
from ldpfl.mechanisms import Mechanism, guarantee_of
from ldpfl.privacy import BinaryRelease, GaussianRelease, PureRelease, UnprotectedRelease
from ldpfl.privacy.accountants.gaussian import gaussian_delta, gaussian_epsilon
from ldpfl.privacy.accountants.randomized_response import composed_delta
from ldpfl.privacy.accountants.registry import epsilon_of, unit_epsilon
from ldpfl.privacy.policy import Limit, Policy, Request, read_policy

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
RANGES = LayerRanges(center=0.0, radius=0.1, sizes=(6, 4))


def text_of(key: bytes) -> str:
    return base64.b64encode(key).decode()


POLICY = Policy(
    mechanisms=("duchi",),
    epsilon_per_unit=1.0,
    epsilon_per_round=10.0,
    lifetime_epsilon=50.0,
    rounds=5,
    min_clients=20,
    aggregator_keys=(text_of(KEY),),
    linked=2,
)


def request(mechanism: Mechanism | None = None, **changes: Any) -> Request:
    asked: dict[str, Any] = {"run": "mnist-1", "round": 3, "cohort": 20, "transport": "relay", "key": KEY, "linked": 2}
    return Request.of(mechanism or mechanisms.create("duchi", epsilon=1.0), RANGES, **asked | changes)


def with_policy(**changes: Any) -> Policy:
    return Policy.model_validate(POLICY.model_dump() | changes)


def refusal(asked: Request, policy: Policy = POLICY) -> str:
    """Expect refusal in one line, and return it."""
    with pytest.raises(Declined) as caught:
        policy.check(asked)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith("run mnist-1, round 3: ")
    assert message.endswith("; nothing was sent")
    return message


def test_a_request_at_every_bound_is_accepted() -> None:
    POLICY.check(request())


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"mechanism": mechanisms.create("harmony", epsilon=1.0)}, "mechanism 'harmony' is not among the policy's mechanisms (duchi)"),
        ({"mechanism": mechanisms.create("duchi", epsilon=1.0001)}, "1.0001 exceeds the policy's epsilon_per_unit = 1"),
        ({"cohort": 19}, "a cohort of 19 is below min_clients = 20"),
        ({"transport": "direct"}, "transport 'direct' is not among the policy's transports"),
        ({"key": OTHER_KEY}, "the aggregator's key is not among the policy's aggregator_keys"),
        ({"key": b""}, "aggregator_keys"),
        ({"linked": 3}, "3 exceeds the policy's linked = 2"),
    ],
)
def test_a_request_beyond_a_bound_is_refused_with_the_settings_name(asked: dict[str, Any], named: str) -> None:
    assert named in refusal(request(**asked))


def test_a_message_that_is_dearer_than_a_round_may_be_is_refused() -> None:
    assert "exceeds the policy's epsilon_per_round = 5" in refusal(request(), with_policy(epsilon_per_round=5.0))


def test_an_aggregators_key_does_not_matter_where_nothing_is_sealed() -> None:
    with_policy(transports=("direct",)).check(request(transport="direct", key=b""))


@pytest.mark.parametrize("setting", ["mechanisms", "epsilon_per_unit", "epsilon_per_round", "min_clients", "aggregator_keys"])
def test_what_is_not_stated_is_not_allowed(setting: str) -> None:
    stated = POLICY.model_dump(exclude={setting})
    assert setting in refusal(request(), Policy.model_validate(stated))


def test_what_protects_nothing_needs_its_name_and_a_second_word() -> None:
    asked = request(mechanisms.create("none"))
    assert "mechanism 'none'" in refusal(asked, with_policy(allow_unprotected=True))
    assert "allow_unprotected = true" in refusal(asked, with_policy(mechanisms=("duchi", "none")))
    with_policy(mechanisms=("duchi", "none"), allow_unprotected=True).check(asked)


def test_a_delta_of_the_servers_choice_does_not_make_noise_cheaper() -> None:
    """At delta 0.4 a server may call epsilon 0.01 what costs thirty times as much at the policy's delta."""
    cheap = mechanisms.create("full-dp", epsilon=0.01, delta=0.4)
    assert guarantee_of(cheap, RANGES).epsilon == pytest.approx(0.01)
    policy = with_policy(mechanisms=("full-dp",), epsilon_per_unit=0.1, epsilon_per_round=0.1)
    assert "epsilon_per_unit" in refusal(request(cheap), policy)


@pytest.mark.parametrize("name", mechanisms.names(alone=True))
def test_every_mechanism_says_the_same_of_itself_in_both_ways(name: str) -> None:
    mechanism = mechanisms.with_defaults(name, 0.5)
    asked = request(mechanism)
    assert asked.mechanism == mechanism.name == name
    assert asked.protected == (name != "none")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"round": 0}, "cannot have joined"),
        ({"round": -1}, "cannot have joined"),
        ({"cohort": 0}, "cohort of 0"),
        ({"cohort": 10**13}, "population and round must be at most"),
        ({"linked": 0}, "linked = 0"),
        ({"run": ""}, "name of the run"),
        ({"run": "a\nb"}, "name of the run"),
        ({"run": "a\x1b[2J"}, "name of the run"),
        ({"run": "=cmd()"}, "name of the run"),
        ({"run": "a" * 101}, "name of the run"),
        ({"transport": "pigeon"}, "transport must be one of relay, sum, direct"),
    ],
)
def test_what_cannot_be_is_no_request(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(Declined, match=named) as caught:
        request(**changes)
    assert len(str(caught.value).splitlines()) == 1


def test_the_server_is_told_a_setting_at_most() -> None:
    for kind, setting, public in (
        (Declined, "", "declined"),
        (Declined, "min_clients", "declined: its policy's min_clients does not allow the round"),
        (Exhausted, "", "declined: its lifetime budget does not allow the round"),
        (Exhausted, "rounds", "declined: its policy's rounds does not allow the round"),
    ):
        error = request().declined("the policy's reason", kind, setting=setting)
        assert (error.public, str(error)) == (public, "run mnist-1, round 3: the policy's reason; nothing was sent")
        assert isinstance(error, PrivacyError)
    assert issubclass(Exhausted, BudgetExhausted)


# --- what releases cost -----------------------------------------------------------------------------------------------


@given(st.floats(0.01, 8.0), st.integers(1, 40), st.integers(1, 9), st.sampled_from([1e-9, 1e-5, 0.01, 0.3]))
@settings(max_examples=60)
def test_equal_reports_cost_what_they_cost_exactly(epsilon: float, units: int, times: int, delta: float) -> None:
    found = epsilon_of([(BinaryRelease("duchi", epsilon, units), times)], delta)
    assert found <= epsilon * units * times
    assert composed_delta(epsilon, units * times, found) <= delta * (1 + 1e-4)  # what rounding leaves
    if found > 1e-6:
        assert composed_delta(epsilon, units * times, found * (1 - 1e-6)) >= delta * (1 - 1e-3)
    assert epsilon_of([(BinaryRelease("duchi", epsilon, units), times)], 0.0) == pytest.approx(epsilon * units * times)


def test_different_releases_add_up() -> None:
    binary, pure, noise = BinaryRelease("duchi", 0.5, 10), PureRelease("laplace", 2.0, 3, "weight"), GaussianRelease("full-dp", 0.3)
    assert epsilon_of([], 1e-5) == 0.0
    assert epsilon_of([(binary, 4), (pure, 2)], 0.0) == pytest.approx(0.5 * 40 + 2.0 * 6)
    assert epsilon_of([(noise, 16)], 1e-5) == pytest.approx(gaussian_epsilon(1.2, 1e-5))
    assert epsilon_of([(noise, 1)], 0.0) == inf
    assert epsilon_of([(binary, 4), (noise, 16)], 1e-5) > max(epsilon_of([(binary, 4)], 1e-5), epsilon_of([(noise, 16)], 1e-5))
    assert epsilon_of([(binary, 4), (UnprotectedRelease("none", "all of it"), 1)], 1e-5) == inf


def test_a_great_many_reports_are_charged_their_sum() -> None:
    assert epsilon_of([(BinaryRelease("duchi", 1.0, 10**12), 10)], 1e-5) == 1e13


def test_a_unit_costs_its_own_epsilon() -> None:
    assert unit_epsilon(PureRelease("laplace", 2.0, 7, "weight"), 1e-5) == 2.0
    assert unit_epsilon(GaussianRelease("full-dp", 0.3), 1e-5) == pytest.approx(gaussian_epsilon(0.3, 1e-5))
    assert unit_epsilon(UnprotectedRelease("none", "all of it"), 1e-5) == inf


# --- whatever is asked ------------------------------------------------------------------------------------------------

EPSILONS = st.sampled_from([1e-3, 0.1, 0.5, 1.0, 1.0001, 3.0, 40.0])
NAMES = ["duchi", "harmony", "laplace", "duchi-vector", "privunit-g", "full-dp", "none"]
POLICIES = st.builds(
    Policy,
    mechanisms=st.lists(st.sampled_from(NAMES), max_size=7, unique=True).map(tuple),
    allow_unprotected=st.booleans(),
    epsilon_per_unit=st.sampled_from([0.0, 0.1, 1.0, 50.0]),
    epsilon_per_round=st.sampled_from([0.0, 1.0, 5.0, 100.0]),
    delta=st.sampled_from([0.0, 1e-9, 1e-5, 0.1]),
    min_clients=st.integers(1, 4),
    transports=st.sampled_from([(), ("relay",), ("direct",), ("relay", "direct")]),
    aggregator_keys=st.sampled_from([(), (text_of(KEY),), (text_of(KEY), text_of(OTHER_KEY))]),
    linked=st.integers(1, 3),
)
GENEROUS = Policy(
    mechanisms=tuple(NAMES),
    allow_unprotected=True,
    epsilon_per_unit=50.0,
    epsilon_per_round=400.0,
    min_clients=1,
    transports=("relay", "direct"),
    aggregator_keys=(text_of(KEY),),
    linked=3,
)


@given(
    policy=st.one_of(st.just(GENEROUS), POLICIES),
    name=st.sampled_from(NAMES),
    epsilon=EPSILONS,
    delta=st.sampled_from([1e-12, 1e-5, 0.4]),
    dimension=st.sampled_from([1, 10, 333]),
    cohort=st.sampled_from([-1, 0, 1, 2, 4, 9, 9, 9]),
    transport=st.sampled_from(["relay", "relay", "relay", "direct", "direct", "post"]),
    key=st.sampled_from([KEY, KEY, KEY, OTHER_KEY, b"", KEY + b"\0"]),
    linked=st.sampled_from([-1, 0, 1, 1, 1, 2, 3, 4]),
    number=st.sampled_from([-1, 0, 1, 2, 3, 4, 5]),
)
@example(GENEROUS, "duchi", 1.0, 1e-5, 10, 2, "relay", KEY, 1, 1)
@settings(max_examples=3 * settings().max_examples)
@pytest.mark.slow
def test_what_is_accepted_keeps_every_bound(
    policy: Policy,
    name: str,
    epsilon: float,
    delta: float,
    dimension: int,
    cohort: int,
    transport: Any,
    key: bytes,
    linked: int,
    number: int,
) -> None:
    ranges = LayerRanges(center=0.0, radius=0.1, sizes=(dimension,))
    mechanism = mechanisms.create(name, epsilon=epsilon, delta=delta) if name == "full-dp" else mechanisms.with_defaults(name, epsilon)
    try:
        asked = Request.of(mechanism, ranges, run="r", round=number, cohort=cohort, transport=transport, key=key, linked=linked)
        policy.check(asked)
    except Declined:
        event("declined")
        return
    event(f"accepted {name}")
    assert name in policy.mechanisms
    assert transport in policy.transports
    assert transport == "direct" or text_of(key) in policy.aggregator_keys
    assert cohort >= policy.min_clients
    assert 1 <= linked <= policy.linked
    release = mechanism.release(ranges)
    match release:
        case UnprotectedRelease():
            assert policy.allow_unprotected
        case GaussianRelease(mu=mu):
            for bound in (policy.epsilon_per_unit, policy.epsilon_per_round):
                assert gaussian_delta(mu, bound) <= policy.delta * (1 + 1e-9)
        case BinaryRelease(epsilon=kept) | PureRelease(epsilon=kept):
            assert kept == epsilon
            assert kept <= policy.epsilon_per_unit
            if kept * release.units > policy.epsilon_per_round:
                assert composed_delta(kept, release.units, policy.epsilon_per_round) <= policy.delta * (1 + 1e-4)


# --- the file ---------------------------------------------------------------------------------------------------------

FILE = f"""
mechanisms = ["duchi", "harmony"]
epsilon_per_unit = 1
epsilon_per_round = 22_000.0
lifetime_epsilon = 1e5
delta = 1e-6
rounds = 10
min_clients = 50
transports = ["relay"]
aggregator_keys = ["{text_of(KEY)}"]
linked = 4
"""


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "policy.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_states_the_policy(tmp_path: Path) -> None:
    policy = read_policy(written(tmp_path, FILE))
    assert (policy.mechanisms, policy.epsilon_per_unit, policy.rounds) == (("duchi", "harmony"), 1.0, 10)
    assert policy.lifetime == Limit(1e5, 1e-6)
    assert not policy.allow_unprotected


def test_an_empty_file_allows_nothing(tmp_path: Path) -> None:
    policy = read_policy(written(tmp_path, ""))
    for name in mechanisms.names(alone=True):
        assert "(none)" in refusal(request(mechanisms.with_defaults(name, 1e-5)), policy)
    assert (policy.lifetime.epsilon, policy.rounds) == (0.0, 0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("epsilon_per_unt = 1.0", "unknown setting 'epsilon_per_unt' in policy"),
        ("epsilon_per_unt = 1.0", "did you mean 'epsilon_per_unit'?"),
        ("[lifetime]\nepsilon = 1", "unknown setting 'lifetime'"),
        ("epsilon_per_unit = inf", "setting 'epsilon_per_unit'"),
        ("epsilon_per_unit = nan", "setting 'epsilon_per_unit'"),
        ("epsilon_per_unit = -1", "setting 'epsilon_per_unit'"),
        ("epsilon_per_round = '1'", "setting 'epsilon_per_round'"),
        ("lifetime_epsilon = true", "setting 'lifetime_epsilon'"),
        ("delta = 1.0", "setting 'delta'"),
        ("delta = 1e-30", "a delta above 0 must be at least 1e-25"),
        ("rounds = 1.5", "setting 'rounds'"),
        ("rounds = -1", "setting 'rounds'"),
        ("min_clients = 0", "setting 'min_clients'"),
        ("mechanisms = 'duchi'", "setting 'mechanisms'"),
        ("mechanisms = [1]", "setting 'mechanisms'"),
        ("transports = ['pigeon']", "setting 'transports'"),
        ("aggregator_keys = ['abc']", "a public key must be 32 bytes in base64"),
        ("allow_unprotected = 1", "setting 'allow_unprotected'"),
        ("allow_unprotected = 'yes'", "setting 'allow_unprotected'"),
        ("linked = 0", "setting 'linked'"),
        ("rounds = 1\nrounds = 2", "not valid TOML"),
        ("rounds =", "not valid TOML"),
        (b"\xff\xfe", "cannot be read"),
        ("x = " + "[" * 5000, "not valid TOML"),
        ("rounds = " + "9" * 5000, "not valid TOML"),
        ("min_clients = 100\ncolluding = 100", "colluding = 100"),
    ],
)
def test_a_file_with_a_mistake_lets_nothing_leave(text: str | bytes, named: str, tmp_path: Path) -> None:
    with pytest.raises(Declined) as caught:
        read_policy(written(tmp_path, text))
    message = str(caught.value)
    assert named in message
    assert "policy.toml" in message
    assert "nothing leaves this client" in message
    assert len(message.splitlines()) == 1


def test_without_a_file_nothing_leaves(tmp_path: Path) -> None:
    with pytest.raises(Declined, match=r"there is no policy at .* without one nothing leaves"):
        read_policy(tmp_path / "policy.toml")
    with pytest.raises(Declined, match="cannot be read, so nothing leaves"):
        read_policy(tmp_path)


@given(
    st.dictionaries(st.sampled_from(list(Policy.model_fields)), st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()))
)
@pytest.mark.slow
def test_a_policy_is_refused_or_keeps_its_types(tree: dict[str, Any]) -> None:
    try:
        policy = Policy.model_validate(tree)
    except (ValueError, LdpflError):
        return
    for name in ("epsilon_per_unit", "epsilon_per_round", "lifetime_epsilon"):
        assert 0 <= getattr(policy, name) < inf
    assert 0 <= policy.delta < 1
    assert type(policy.rounds) is type(policy.min_clients) is int


@pytest.mark.parametrize(("epsilon", "delta"), [(-1.0, 1e-5), (nan, 1e-5), (inf, 1e-5), (1.0, 1.0), (1.0, 1e-30), (1.0, nan), (1.0, -0.1)])
def test_a_budget_is_finite_and_its_delta_computable(epsilon: float, delta: float) -> None:
    with pytest.raises(ConfigError, match="a budget's"):
        Limit(epsilon, delta)
