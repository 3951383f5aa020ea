"""Every accountant against the reference vectors in ``accounting_vectors.json``.

The vectors were computed apart from this library: 50-digit sums, enumeration, importance sampling. Brackets are one-sided:
an upper bound may never be below what a data set attains, and must not be worse than what is known to be reachable.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ldpfl import ConfigError
from ldpfl.mechanisms.duchi import BITS, Duchi, thresholds
from ldpfl.privacy.accountants.clones import clone_delta, clone_epsilon, clone_probability, clone_probability_for_bits
from ldpfl.privacy.accountants.closed_forms import central_limit_epsilon
from ldpfl.privacy.accountants.gaussian import classical_sigma, composed_mu, gaussian_epsilon, gaussian_sigma
from ldpfl.privacy.accountants.moments import epsilon_from_log_moment
from ldpfl.privacy.accountants.participation import self_sampled_round_delta
from ldpfl.privacy.accountants.randomized_response import composed_delta, composed_epsilon, report_delta
from ldpfl.privacy.accountants.shuffled_bits import shuffled_losses, single_delta, single_epsilon
from ldpfl.privacy.accountants.shuffled_composition import ShuffledRounds
from oracles import (
    advanced_composition_epsilon,
    amplified_epsilon,
    clone_closed_form,
    composed_rdp_epsilon,
    gaussian_mironov_epsilon,
    gaussian_rdp_epsilon,
    optimal_composition_epsilon,
    report_rdp,
    report_zcdp,
    self_sampled_delta,
    self_sampled_delta_exact,
    shuffled_epsilon,
    zcdp_epsilon,
)

Values = dict[str, Any]
VECTORS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("accounting_vectors.json").read_text(encoding="utf-8"))["vectors"]


def agree(found: Values, outputs: Values, rtol: float) -> set[str]:
    """Check ``found`` entry by entry and return what was checked."""
    for name, value in found.items():
        assert value == pytest.approx(outputs[name], rel=rtol, abs=0), name
    return set(found)


def rr_delta(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    return agree({"delta": report_delta(inputs["eps0"], inputs["eps"])}, outputs, rtol)


def rr_rdp(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    return agree({"rdp": float(report_rdp(inputs["eps0"], inputs["alpha"]))}, outputs, rtol)


def rr_zcdp(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    return agree({"rho": report_zcdp(inputs["eps0"])}, outputs, rtol)


def rr_compose(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    epsilon0, count, delta = inputs["eps0"], inputs["k"], inputs["delta"]
    # Where epsilon is large, delta says more than epsilon does: it moves by e^-(order * difference).
    assert composed_delta(epsilon0, count, outputs["eps"]) == pytest.approx(delta, rel=1e-4)
    found = {
        "eps": composed_epsilon(epsilon0, count, delta),
        "eps_pure": composed_epsilon(epsilon0, count, 0.0),
        "eps_kov_closed": optimal_composition_epsilon(epsilon0, count, delta),
        "eps_zcdp_closed": zcdp_epsilon(epsilon0, count, delta),
        "eps_rdp_cks": composed_rdp_epsilon(epsilon0, count, delta),
        "eps_drv": advanced_composition_epsilon(epsilon0, count, delta),
    }
    return agree(found, outputs, rtol)


def shuffle_single(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    epsilon0, clients, delta = inputs["eps0"], inputs["n"], inputs["delta"]
    found = {
        "eps_exact": single_epsilon(epsilon0, clients, delta),
        "eps_clone_rr": clone_epsilon(epsilon0, clients, delta, clone_probability_for_bits(epsilon0)),
        "eps_clone_fmt21": clone_epsilon(epsilon0, clients, delta, clone_probability(epsilon0)),
        "eps_fmt21_closed": clone_closed_form(epsilon0, clients, delta),
    }
    return agree(found, outputs, rtol)


def shuffle_single_delta(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    epsilon0, clients, epsilon = inputs["eps0"], inputs["n"], inputs["eps"]
    found = {
        "delta_exact": single_delta(epsilon0, clients, epsilon),
        "delta_clone_rr": clone_delta(epsilon0, clients, epsilon, clone_probability_for_bits(epsilon0)),
        "delta_clone_fmt21": clone_delta(epsilon0, clients, epsilon, clone_probability(epsilon0)),
    }
    return agree(found, outputs, rtol)


def shuffle_single_large_n(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    epsilon0, clients, delta = inputs["eps0"], inputs["n"], inputs["delta"]
    # The count alone gives less away than a clone does, even where neighbouring worst cases are taken together.
    assert single_epsilon(epsilon0, clients, delta) <= outputs["eps_clone_rr"]
    found = {
        "eps_fmt21_closed": clone_closed_form(epsilon0, clients, delta),
        "eps_clone_fmt21": clone_epsilon(epsilon0, clients, delta, clone_probability(epsilon0)),
        "eps_clone_rr": clone_epsilon(epsilon0, clients, delta, clone_probability_for_bits(epsilon0)),
    }
    return agree(found, outputs, rtol)


def shuffle_compose(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    epsilon0, clients, count, delta = inputs["eps0"], inputs["n"], inputs["k"], inputs["delta"]
    bracket = shuffled_epsilon([ShuffledRounds(epsilon0, clients, count)], delta)
    sound: float = outputs["eps_lower"] * (1 - rtol)
    reachable: float = outputs["eps_upper_adaptive"] if "eps_upper_adaptive" in outputs else outputs["eps_upper"]
    assert bracket.lower == pytest.approx(outputs["eps_lower"], rel=rtol)
    assert sound <= bracket.upper <= outputs["eps_upper"] * (1 + rtol)
    assert sound <= bracket.adaptive <= reachable * (1 + rtol)
    checked = {"eps_lower", "eps_upper", "eps_upper_adaptive", "eps_tilted"}  # eps_tilted is eps_upper again
    assert outputs.get("eps_tilted", outputs["eps_upper"]) == outputs["eps_upper"]
    if "eps_sup_pld" in outputs:
        losses = shuffled_losses(epsilon0, clients)
        composed = losses.dominating.composed(count, delta)
        assert composed is not None
        assert composed.epsilon(delta) == pytest.approx(outputs["eps_sup_pld"], rel=rtol)
        by_moments = epsilon_from_log_moment(lambda order: count * losses.log_moment(order), delta)
        assert by_moments == pytest.approx(outputs["eps_rdp"], rel=rtol)
        checked |= {"eps_sup_pld", "eps_rdp"}
    if "eps_clt" in outputs:
        checked |= agree({"eps_clt": central_limit_epsilon(epsilon0, clients, count, delta)}, outputs, 1e-6)
    return checked & outputs.keys()


def subsample_eps(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    return agree({"eps_amplified": amplified_epsilon(inputs["eps"], inputs["gamma"])}, outputs, rtol)


def selfsample_single(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    arguments = inputs["eps0"], inputs["n"], inputs["q"], inputs["eps"]
    found = {"delta_exact": self_sampled_delta_exact(*arguments), "delta_upper": self_sampled_delta(*arguments)}
    return agree(found, outputs, rtol)


def selfsample_vector(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    setting = ShuffledRounds(inputs["eps0"], inputs["n"], inputs["d"])
    bound = self_sampled_round_delta(setting, inputs["q"], inputs["eps"])
    assert outputs["delta_lower_approx"] * (1 - rtol) <= bound <= outputs["delta_upper"] * (1 + rtol)
    return {"delta_lower_approx", "delta_upper"}


def check_gaussian_sigma(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    arguments = inputs["eps"], inputs["delta"], inputs["sensitivity"]
    if outputs["classical_valid"]:
        agree({"sigma_classical": classical_sigma(*arguments)}, outputs, rtol)
    else:
        with pytest.raises(ConfigError, match="proved for epsilon < 1"):
            classical_sigma(*arguments)
    return agree({"sigma_analytic": gaussian_sigma(*arguments)}, outputs, rtol) | {"sigma_classical", "classical_valid"}


def gaussian_compose(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    one, rounds, delta = inputs["sensitivity"] / inputs["sigma"], inputs["T"], inputs["delta"]
    mu = composed_mu([one] * rounds)
    found = {
        "eps_exact": gaussian_epsilon(mu, delta),
        "eps_rdp_cks": gaussian_rdp_epsilon(mu, delta),
        "eps_rdp_mironov": gaussian_mironov_epsilon(mu, delta),
        "eps_naive_exact": rounds * gaussian_epsilon(one, delta / rounds),
    }
    return agree(found, outputs, rtol)


def rr_int_threshold(inputs: Values, outputs: Values, rtol: float) -> set[str]:
    assert inputs["bits"] == BITS
    assert thresholds(inputs["eps0"]) == (int(outputs["lo"]), int(outputs["hi"]))
    realised = Duchi(inputs["eps0"]).epsilon_realised
    assert realised == pytest.approx(outputs["eps_effective"], rel=1e-12)
    assert realised <= inputs["eps0"]
    return {"lo", "hi", "eps_effective"}


CHECKS: dict[str, Callable[[Values, Values, float], set[str]]] = {
    "rr_delta": rr_delta,
    "rr_rdp": rr_rdp,
    "rr_zcdp": rr_zcdp,
    "rr_compose": rr_compose,
    "shuffle_single": shuffle_single,
    "shuffle_single_delta": shuffle_single_delta,
    "shuffle_single_large_n": shuffle_single_large_n,
    "shuffle_compose": shuffle_compose,
    "subsample_eps": subsample_eps,
    "selfsample_single": selfsample_single,
    "selfsample_vector": selfsample_vector,
    "gaussian_sigma": check_gaussian_sigma,
    "gaussian_compose": gaussian_compose,
    "rr_int_threshold": rr_int_threshold,
}


@pytest.mark.slow
@pytest.mark.parametrize("vector", VECTORS, ids=[f"{vector['id']}-{vector['mechanism']}" for vector in VECTORS])
@pytest.mark.thorough_for(
    "039-shuffle_compose",
    "041-shuffle_compose",
    "045-shuffle_compose",
    "047-shuffle_compose",
    "049-shuffle_compose",
    "074-shuffle_single_large_n",
    "029-shuffle_single",
    "037-shuffle_compose",
    "056-selfsample_vector",
    "043-shuffle_compose",
)
def test_vector(vector: dict[str, Any]) -> None:
    checked = CHECKS[vector["mechanism"]](vector["inputs"], vector["outputs"], vector["rtol"])
    assert checked == vector["outputs"].keys(), "an output of this vector is compared with nothing"


def test_no_kind_of_vector_is_skipped() -> None:
    assert len(VECTORS) == 39
    assert {vector["mechanism"] for vector in VECTORS} == CHECKS.keys()
