"""Each number that a mechanism states of its release, and that accountants use, is tested: planted faults are found, ours pass.

An audit of a sound mechanism fails with probability at most 1e-4, whatever it states; seeds are fixed. Of the faults each stands out by
so much that another seed would miss it less than once in a thousand times.
"""

from __future__ import annotations

import pytest
from planted_faults import FAULTS, HardlyTelling

from ldpfl import mechanisms
from ldpfl.auditing import audit_mechanism
from ldpfl.mechanisms.duchi import Duchi

FOUND_BY = (
    *("blanket of a unit", "sign of a report", "realised epsilon", "units and epsilon", "coordinates", "one bit a unit"),
    *("probabilities of bits", "mu", "noise alike", "rate of records", "order in the pool", "units apart in the pool", "units apart"),
)
OF_CLAIMS = [name for name, planted in FAULTS.items() if planted.found in FOUND_BY or name == "half of its epsilon"]


@pytest.mark.parametrize("name", OF_CLAIMS)
@pytest.mark.slow
@pytest.mark.thorough_except("one unit for all weights")
def test_a_number_that_is_not_so_is_found(name: str) -> None:
    mechanism, found = FAULTS[name]
    audit = audit_mechanism(mechanism, trials=20_000 if "blanket" in name else 2_000, seed=11)
    assert found in {check.name.split(",")[0] for check in audit.failures}


@pytest.mark.slow
def test_a_blanket_that_is_too_large_is_named_with_what_it_is_at_most() -> None:
    audit = audit_mechanism(HardlyTelling(1.0), trials=20_000, seed=11)
    check = next(check for check in audit.failures if check.name == "blanket of a unit")
    assert check.figure == 0.999
    # e^-1/2 is true of Laplace noise at epsilon 1, and some 5,000 trials for each input tell it from 0.999 at the least.
    assert 0.6065 <= check.bound < 0.9
    assert "claimed: a share of 0.999 of each report" in check.sentence


@pytest.mark.parametrize("name", [name for name in mechanisms.names(alone=True) if mechanisms.is_built_in(name)])
@pytest.mark.slow
@pytest.mark.thorough_except("duchi")
def test_what_our_mechanisms_state_is_not_contradicted(name: str) -> None:
    audit = audit_mechanism(mechanisms.with_defaults(name, 1.0), trials=2_000, seed=5)
    assert audit.passed, audit.verdict


@pytest.mark.slow
def test_all_numbers_of_bits_are_looked_at() -> None:
    audit = audit_mechanism(Duchi(1.0), trials=1000, seed=2)
    looked_at = {check.name.split(",")[0] for check in audit.checks}
    assert looked_at >= {"units and epsilon", "blanket", "probabilities of bits", "realised epsilon", "one bit a unit", "coordinates"}
    assert looked_at >= {"order in the pool", "units apart in the pool", "units apart"}
