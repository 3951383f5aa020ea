"""A client's policy and lifetime budget: write both for an app, change keys and limits, and read the charges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ldpfl.errors import ConfigError, printable
from ldpfl.privacy import Release
from ldpfl.privacy.accountants.adaptive import filtered_epsilon
from ldpfl.privacy.budget import Budget as _LifetimeBudget, PolicySpend
from ldpfl.privacy.budget_file import Books, Charged, charge_lost, read_books, read_charges, set_limit as _set_limit
from ldpfl.privacy.budget_move import move as move_budget, refuse_moved
from ldpfl.privacy.events import OURS, for_one_record
from ldpfl.privacy.guarantee import json_number
from ldpfl.privacy.policy import OVER_RELAY, Policy, read_policy
from ldpfl.privacy.policy_keys import add_key, remove_key
from ldpfl.util.files import write_text

__all__ = ["Books", "Budget", "Charged", "FittedPolicy", "Policy", "PolicySpend", "Release", "Rows", "RunCharges"]
__all__ += [
    "add_key",
    "charge_lost",
    "fit_policy",
    "json_number",
    "move_budget",
    "read_budget",
    "read_policy",
    "remove_key",
    "rounds_left",
    "set_limit",
    "spent_of_policy",
    "why_unbounded",
]


@dataclass(frozen=True)
class RunCharges:
    """Charges of one run.

    Attributes:
        run: name of the run, as a server gave it.
        mechanisms: names of its mechanisms, in the order of their first charge.
        rounds, reports: number of rounds and of reports that were charged.
        epsilon: epsilon of all its reports, at the budget's delta.
        pure_sum: the same at delta 0.
    """

    run: str
    mechanisms: tuple[str, ...]
    rounds: int
    reports: int
    epsilon: float
    pure_sum: float


@dataclass(frozen=True)
class Budget:
    """A client's lifetime budget.

    Attributes:
        books: limits, sums and refusals.
        charges: every report that the client was about to send, in order.
    """

    books: Books
    charges: tuple[Charged, ...]

    @property
    def claims(self) -> tuple[str, ...]:
        """Mechanisms of other authors, or on models of others, as ``name (author)``. The budget counts them by what these authors claim."""
        names = [f"{release.mechanism} ({release.author})" for release in self.books.counts if release.author != OURS]
        return tuple(dict.fromkeys(names))  # each name once, in order

    def by_run(self) -> tuple[RunCharges, ...]:
        """Return the charges of each run, in the order of the runs' first charges."""
        runs: dict[str, list[Charged]] = {}
        for charge in self.charges:
            runs.setdefault(charge.run, []).append(charge)
        return tuple(self._run_charges(run, charges) for run, charges in runs.items())

    def _run_charges(self, run: str, charges: Sequence[Charged]) -> RunCharges:
        """Return the number and the cost of the ``charges`` of one ``run``. The cost is computed by the budget's privacy filter."""
        books, by_record = self.books, self.books.protected == "record"
        # Number of charges of each release. Under protection of records, a release is counted by what it costs one record.
        counts = Counter(for_one_record(charge.release) if by_record else charge.release for charge in charges)
        names = tuple(dict.fromkeys(release.mechanism for release in counts))  # each name once, in order
        epsilon, pure_sum = (filtered_epsilon(counts.items(), books.order, delta) for delta in (books.limit.delta, 0.0))
        return RunCharges(run, names, len({charge.round for charge in charges}), len(charges), epsilon, pure_sum)


def read_budget(file: Path, policy: Policy | None = None) -> Budget:
    """Return the budget in ``file``, counted for the unit that ``policy`` protects, or for a client without a policy.

    Raises:
        ConfigError, DataError: ``file`` is missing, or damaged.
    """
    return Budget(read_books(file, policy.protects if policy else "client"), tuple(read_charges(file)))


def spent_of_policy(file: Path, policy: Policy) -> tuple[PolicySpend, ...]:
    """Return, for each lifetime bound that ``policy`` sets, how much of it the charges in ``file`` have spent.

    Raises:
        Declined: ``file`` is missing, or damaged.
    """
    return _LifetimeBudget(file, policy).spent_of_policy()


def why_unbounded(file: Path, policy: Policy) -> str:
    """Return why the charges in ``file`` have no epsilon for the unit that ``policy`` protects; empty if they have one.

    Raises:
        ConfigError, DataError: ``file`` is missing, or damaged.
    """
    return _LifetimeBudget(file, policy).why_unbounded(read_books(file, policy.protects))


def rounds_left(file: Path, policy: Policy | None = None) -> int | None:
    """Return how many more rounds like the last one are allowed by the budget in ``file``, and by ``policy`` if one is given.

    The result is None if nothing was charged, or if the last release was unprotected.

    Raises:
        Declined: ``file`` is missing, or damaged.
    """
    charges = read_charges(file)
    if not charges or not charges[-1].release.protected:
        return None
    last_charge = charges[-1]
    if policy is None:
        return read_books(file).rounds_left(last_charge.release)
    return _LifetimeBudget(file, policy).rounds_left(last_charge)


def set_limit(file: Path, epsilon: float, delta: float | None = None) -> Books:
    """Set the lifetime budget in ``file`` and return the books. A missing file is made.

    Raises:
        ConfigError: a number is out of range, or the budget was moved to another file.
    """
    refuse_moved(file)
    return _set_limit(file, epsilon, delta)


@dataclass(frozen=True)
class Rows:
    """Whether an app can train on a node's table.

    Attributes:
        count: rows of the table.
        useless: number of rows that cannot be trained on.
        misfit: message about the first value that does not fit; empty if all values fit.
    """

    count: int
    useless: int
    misfit: str


@dataclass(frozen=True)
class FittedPolicy:
    """The policy that was written for an app.

    Attributes:
        policy: the policy.
        budget_was_there: whether the budget's file existed before. It was then left unchanged.
        rows: whether the app can train on the node's table; None if no table was given.
        code_warning: warning of code of the app that runs outside of the policy's control, see
            :func:`ldpfl.flower.app_imports.unwrapped_code`; empty if there is no such code.
        claimed: names of mechanisms that are not part of ldpfl.
        on_users_code: whether records or persons are protected only if other code than ldpfl's (model, loss, features) keeps them apart.
    """

    policy: Policy
    budget_was_there: bool
    rows: Rows | None
    code_warning: str
    claimed: tuple[str, ...]
    on_users_code: bool


def fit_policy(
    app: str,
    *,
    out: Path,
    budget: Path,
    keys: Sequence[str] = (),
    config: Path | None = None,
    data: Path | None = None,
    layers: tuple[int, ...] = (),
) -> FittedPolicy:
    """Write the policy, and the lifetime budget, that an app needs. None of the app's code is run.

    Args:
        app: folder of a Flower app; or the name of a recipe (a config that ldpfl ships), or a config file.
        out: policy file to write.
        budget: budget file. It is written if it does not exist.
        keys: public keys of aggregators.
        config: config of the app's own ServerApp, if it has one.
        data: this node's table, to check whether the app can train on it.
        layers: number of values in each of the model's arrays, if the model is the app's own code.

    Raises:
        ConfigError: Flower is missing, ``out`` exists, a key is needed, or no policy fits.
        DataError: a file is damaged.
    """
    from ldpfl.flower.app_imports import unwrapped_code, unwrapped_code_text
    from ldpfl.flower.policy_init import check_table_fits, fitting_policy, offer_of, policy_text, ranges_for
    from ldpfl.mechanisms import is_built_in

    offer = offer_of(app, config)
    if offer.transport in OVER_RELAY and not keys:
        raise ConfigError(
            "the app sends reports over a relay, encrypted for the aggregator, but --key is missing: ask the aggregator's operator for the "
            "public key, and give it with --key"
        )
    if out.exists():
        raise ConfigError(f"{out} already exists and is not overwritten: give another --out")
    policy = fitting_policy(offer, ranges_for(offer, layers), keys)
    rows = None if data is None else Rows(*check_table_fits(offer.config, data))
    is_app = (Path(app) / "pyproject.toml").is_file()  # a recipe or a config has no code of its own
    places = tuple(unwrapped_code(Path(app))) if is_app else ()
    code_warning = printable(unwrapped_code_text(places)) if places else ""  # a stranger may have put control characters into names
    write_text(out, policy_text(policy, f"What {app} asks of a client. Judge it before you use it."))
    budget_was_there = budget.exists()
    if not budget_was_there:
        _set_limit(budget, policy.lifetime_epsilon, policy.delta)
    claimed = tuple(name for name in policy.mechanisms if not is_built_in(name))
    on_users_code = policy.protects != "client" and (offer.own_model or bool(offer.config.users_code))
    return FittedPolicy(policy, budget_was_there, rows, code_warning=code_warning, claimed=claimed, on_users_code=on_users_code)


def leaves_over_relay(policy: Policy) -> bool:
    """Whether the policy allows reports over a relay, which need a key of the aggregator."""
    return bool(set(OVER_RELAY) & set(policy.transports))
