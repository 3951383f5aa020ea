"""Metrics of a node for its operator: the budget, charges and refusals, and the outcomes in the SuperNode's log.

The metrics are for the operator alone. The number of failed trainings depends on the node's data and has no noise, so only the node's
own monitoring should read it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ldpfl.errors import ConfigError
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import Books, Charged, read_books, read_charges
from ldpfl.privacy.policy import read_policy
from ldpfl.relay.telemetry import metric_lines

OUTCOMES = {
    "sent": "left, in a reply or over the relay",
    "replaced": "left as no change, because training gave nothing to report",
    "unusable": "left, but training found no or few records to use",
    "declined": "did not leave: the operator does not allow it",
    "failed": "did not leave: something went wrong, before or after the charge",
}
"""Outcomes of a report, by the word with which the line in the log of ``flwr.ldpfl`` begins."""

QUESTIONS = {"would take part": "yes", "would decline": "no", "not answered": "failed"}
"""Answers to the question before a round, by the words with which the line in the log of ``flwr.ldpfl`` begins."""

_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")
_OUTCOME_LINE = re.compile(rf"(?:^|\s)(?:INFO|WARNING|ERROR)\s*:\s+({'|'.join((*OUTCOMES, *QUESTIONS))}): ")


def count_outcomes(lines: Iterable[str]) -> Counter[str]:
    """Return how often each of :data:`OUTCOMES` and :data:`QUESTIONS` stands in the ``lines`` of a SuperNode's log.

    A report that is logged as "replaced" or "unusable" has left as well, so the log also has a line "sent" for it.
    """
    matches = (_OUTCOME_LINE.search(_COLOUR_CODE.sub("", line)) for line in lines)
    return Counter(match[1] for match in matches if match)


def metrics_text(budget: Path, log: Path | None = None, policy: Path | None = None) -> str:
    """Return the metrics in the text format of Prometheus. No label names a run, a round or a reason.

    Raises:
        Declined: the budget file or the policy cannot be trusted.
        ConfigError: the log cannot be read.
    """
    budget_with_policy = None if policy is None else Budget(budget, read_policy(policy))
    books = read_books(budget, budget_with_policy.policy.protects if budget_with_policy else "client")
    limit, charges = books.limit, read_charges(budget)
    lines = [
        *metric_lines("ldpfl_node_budget_epsilon", "gauge", "Lifetime budget.", {"": limit.epsilon}),
        *metric_lines("ldpfl_node_spent_epsilon", "gauge", "Epsilon spent of the lifetime budget.", {"": books.spent(limit.delta)}),
        *metric_lines("ldpfl_node_reports_charged_total", "counter", "Reports charged to the budget.", {"": books.charges}),
        *metric_lines("ldpfl_node_refusals_total", "counter", "Requests refused.", {"": books.refusals.times if books.refusals else 0}),
        *_rounds_left_lines(books, charges, budget_with_policy),
        *([] if budget_with_policy is None else _policy_lines(budget_with_policy)),
    ]
    if log is not None:
        try:
            with log.open(encoding="utf-8", errors="replace") as opened:
                counts = count_outcomes(opened)
        except OSError as error:
            raise ConfigError(f"the SuperNode's log {log} cannot be read: {error.strerror}") from None
        outcomes = {f'{{outcome="{name}"}}': counts[name] for name in OUTCOMES}
        answers = {f'{{answer="{answer}"}}': counts[name] for name, answer in QUESTIONS.items()}
        lines += metric_lines("ldpfl_node_outcomes_total", "counter", "By the log: what became of reports.", outcomes)
        lines += metric_lines("ldpfl_node_questions_total", "counter", "By the log: whether the node would take part.", answers)
    return "\n".join(lines) + "\n"


def _rounds_left_lines(books: Books, charges: tuple[Charged, ...], budget_with_policy: Budget | None) -> list[str]:
    """Return the metric of how many rounds like the last charged round are allowed, by the budget and by the policy if there is one.

    The list of lines is empty if no round was charged, or if the last one was not protected.

    Args:
        books, charges: contents of the budget file, and the charged rounds in it.
        budget_with_policy: the budget under the node's policy; None if no policy is given.
    """
    if not charges or not charges[-1].release.protected:
        return []
    if budget_with_policy is None:
        left, limited_by = books.rounds_left(charges[-1].release), "the budget; the policy may allow fewer"
    else:
        left, limited_by = budget_with_policy.rounds_left(charges[-1]), "the budget and the policy"
    return metric_lines("ldpfl_node_rounds_left", "gauge", f"Rounds like the last that still fit {limited_by}.", {"": left})


def _policy_lines(budget: Budget) -> list[str]:
    """Return the metrics of the policy's lifetime bounds, and of what was spent of them."""
    spends = budget.spent_of_policy()
    allowed = {f'{{setting="{spend.setting}"}}': spend.allowed for spend in spends}
    spent = {f'{{setting="{spend.setting}"}}': spend.epsilon for spend in spends}
    return [
        *metric_lines("ldpfl_node_policy_epsilon", "gauge", "Lifetime bounds of the policy.", allowed),
        *metric_lines("ldpfl_node_policy_spent_epsilon", "gauge", "Epsilon spent of the lifetime bounds.", spent),
    ]
