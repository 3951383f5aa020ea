"""What an operator watches: figures of the budget file, and of the log no more than how often which outcome is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import CommandLine
from ldpfl import LayerRanges, mechanisms
from ldpfl.deploy.node_metrics import metrics_text
from ldpfl.errors import Declined
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import set_limit
from ldpfl.privacy.policy import Policy, Request

FILE = Path("budget.sqlite")
LOG = """\
\x1b[92mINFO \x1b[0m:      would take part: the server asked about round 1 of run r; nothing was charged
\x1b[92mINFO \x1b[0m:      Receiving: train message (ID: dbe97)
\x1b[92mINFO \x1b[0m:      sent: the report of round 1 of run r
\x1b[91mERROR \x1b[0m:     replaced: round 2 is reported as no change, because training gave nothing to report: ValueError
\x1b[92mINFO \x1b[0m:      sent: the report of round 2
\x1b[93mWARNING \x1b[0m:   declined: run secret-run, round 3: a cohort of 1 is below min_clients = 2; nothing was sent
\x1b[93mWARNING \x1b[0m:   would decline: run secret-run, round 4: a cohort of 1 is below min_clients = 2; nothing was sent
\x1b[93mWARNING \x1b[0m:   would decline: no policy
\x1b[93mWARNING \x1b[0m:   unusable: none of this node's rows can be used
\x1b[93mWARNING \x1b[0m:   Connection attempt failed, retrying in 0.30 seconds
a patient's note: failed: everything
2026-01-01 INFO :      sent: the report of round 4
"""


def test_figures_of_budget_and_log_are_counted_and_nothing_names_a_run_or_a_reason(ldpfl: CommandLine) -> None:
    policy = Policy(mechanisms=("duchi",), epsilon_per_unit=1, epsilon_per_round=10, lifetime_epsilon=99, rounds=9, transports=("direct",))
    ranges = LayerRanges(center=0.0, radius=0.1, sizes=(10,))
    set_limit(FILE, 40.0, 0.0)

    def charge(cohort: int) -> None:
        duchi = mechanisms.create("duchi", epsilon=0.5)
        Budget(FILE, policy).charge(Request.of(duchi, ranges, run="secret-run", round=1, cohort=cohort, transport="direct"))

    assert "rounds_left" not in metrics_text(FILE)
    charge(200)
    charge(200)
    with pytest.raises(Declined):
        charge(1)
    Path("node.log").write_text(LOG, encoding="utf-8")
    text = ldpfl("deploy", "node-metrics", "--budget", FILE, "--log", "node.log").out
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert figures == {
        "ldpfl_node_budget_epsilon": "40",
        "ldpfl_node_spent_epsilon": "10",
        "ldpfl_node_reports_charged_total": "2",
        "ldpfl_node_refusals_total": "1",
        "ldpfl_node_rounds_left": "6",
        'ldpfl_node_outcomes_total{outcome="sent"}': "3",
        'ldpfl_node_outcomes_total{outcome="replaced"}': "1",
        'ldpfl_node_outcomes_total{outcome="unusable"}': "1",
        'ldpfl_node_outcomes_total{outcome="declined"}': "1",
        'ldpfl_node_outcomes_total{outcome="failed"}': "0",
        'ldpfl_node_questions_total{answer="yes"}': "1",
        'ldpfl_node_questions_total{answer="no"}': "2",
        'ldpfl_node_questions_total{answer="failed"}': "0",
    }
    assert "secret-run" not in text
    assert "cannot be read" in ldpfl.refused("deploy", "node-metrics", "--budget", FILE, "--log", "missing.log")
