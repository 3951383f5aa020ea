"""The mean over clients, and over the worst tenth of them."""

from __future__ import annotations

from typing import Any

import pytest

from ldpfl.report.scores import site_heading, site_spread
from ldpfl.report.site_means import site_means


def sites(scores: list[float | None], metric: str = "accuracy") -> list[dict[str, Any]]:
    return [{"name": str(place), "rows": 30, "scores": {metric: score}, "intervals": {}, "note": ""} for place, score in enumerate(scores)]


def test_the_worst_tenth_is_rounded_up_and_each_client_counts_the_same() -> None:
    found = site_means(sites([0.9, 0.2, *[0.8] * 8, 0.4, None]))["accuracy"]
    assert (found.clients, found.worst_clients) == (11, 2)
    assert found.mean == pytest.approx((0.9 + 0.2 + 6.4 + 0.4) / 11)
    assert found.worst == pytest.approx(0.3)


def test_the_worst_of_an_error_is_the_largest() -> None:
    assert site_means(sites([1.0, 2.0, 7.0, *[1.0] * 7], "MAE"))["MAE"].worst == 7.0


def test_fewer_than_ten_clients_and_figures_without_a_worst_have_no_worst_tenth() -> None:
    assert not site_means(sites([0.5] * 9))
    assert not site_means(sites([0.5] * 20, "observed share"))


def test_the_table_of_clients_says_it_in_a_sentence() -> None:
    said = site_spread({"metric": "accuracy", "sites": sites([0.2, *[0.8] * 9])})
    expected = "mean over 10 clients 74.00% (standard deviation 18.00 points), over the worst 1 20.00%."
    assert said == f"accuracy: {expected}"
    assert site_spread({"metric": "accuracy"}) == ""


def test_clients_are_said_to_be_sorted_where_any_has_the_main_score() -> None:
    assert site_heading({"metric": "accuracy", "sites": sites([0.2, None])}) == "By client, the worst first"
    assert site_heading({"metric": "AUROC", "sites": sites([0.2, 0.4])}) == "By client"
