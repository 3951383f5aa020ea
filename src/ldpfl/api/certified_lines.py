"""Compute the signed part of a certificate from a ledger: the rounds that are charged, and their privacy cost over the whole run."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from math import isfinite

from ldpfl.errors import ConfigError
from ldpfl.privacy.accountants.registry import accountant, behind_shuffler
from ldpfl.privacy.accounting import account
from ldpfl.privacy.charged_rounds import RoundGroup, charged_groups
from ldpfl.privacy.events import KIND_NAMES, BinaryRelease, GaussianRelease, PureRelease, Release, UnprotectedRelease
from ldpfl.privacy.guarantee import HOLDS, Guarantee
from ldpfl.privacy.ledger import Ledger
from ldpfl_verify import certificate_file


def certified(
    text: str, name: str, delta: float, versions: Mapping[str, str], caveats: Sequence[str] = (), origin: str = "ledger"
) -> certificate_file.Statement:
    """Return the statement of a certificate about the ledger in ``text``.

    The statement holds the guarantees over the whole run that are proved, or that rest on the claim of a mechanism's author.

    Args:
        text: content of the ledger's file.
        name: name of the run.
        delta: failure probability of the guarantees that are not pure.
        versions: versions of the software, by name.
        caveats: the run's own reservations about its figures.
        origin: name of the ledger in error messages.

    Raises:
        ConfigError: nothing was released, or delta is out of range.
        DataError: ``text`` is no ledger.
    """
    ledger = Ledger.from_json(text, origin)
    groups = charged_groups(ledger)  # each of equal rounds
    if not groups:
        raise ConfigError(f"{origin}: the ledger is empty, so there is nothing to certify: finish a round first")
    accounted = account(ledger, delta)
    # In training, later inputs depend on earlier reports, so a guarantee that is not adaptive does not hold over the run.
    rows = [row for row in accounted.rows if row.status in HOLDS and row.scope == "run" and row.adaptive]
    return certificate_file.Statement(
        run=name,
        ledger=hashlib.sha256(text.encode()).hexdigest(),
        charged=tuple(_charged_rounds(group) for group in groups),
        guarantees=tuple(_stated_guarantee(row, groups) for row in rows),
        caveats=(*caveats, *accounted.warnings),
        software=dict(versions),
    )


def _stated_guarantee(row: Guarantee, groups: Sequence[RoundGroup]) -> certificate_file.StatedGuarantee:
    """Return a guarantee over the whole run as the certificate states it, with the accountant that computed it."""
    local_accountant = accountant((group.release, group.rounds) for group in groups)
    used_accountant = local_accountant if row.trust_model == "local" else behind_shuffler(groups)
    about_accountant, *_ = (inspect.getdoc(type(used_accountant)) or "").splitlines()
    return certificate_file.StatedGuarantee(
        protects=row.unit,  # type: ignore[arg-type]  # a guarantee over a run is about a client, a person or a record
        adjacency=row.adjacency,  # type: ignore[arg-type]  # one of three, over a run
        trusted=row.trust_model,  # type: ignore[arg-type]  # no guarantee over a run trusts the server
        epsilon=row.epsilon if isfinite(row.epsilon) else certificate_file.INFINITY,  # type: ignore[arg-type]
        delta=row.delta,
        status=row.status,  # type: ignore[arg-type]  # one of the two in HOLDS
        computed=f"{type(used_accountant).__name__}: {about_accountant}",
        assumptions=tuple(row.assumptions),
    )


def _charged_rounds(group: RoundGroup) -> certificate_file.ChargedRounds:
    """Return a group of equal rounds, which the guarantee counts, as the certificate states it."""
    return certificate_file.ChargedRounds(
        release=_released(group.release),
        cohort=group.cohort,
        population=group.population,
        rounds=group.rounds,
        sampling=group.sampling,
        rate=float(group.rate),
        channel=group.channel,
        linked=group.linked,
    )


def _released(release: Release) -> certificate_file.ClientRelease:
    """Return one client's release in a round as the certificate states it. Raise a ConfigError if it can describe no such release."""
    kind = KIND_NAMES.get(type(release))
    if kind is None:
        raise ConfigError(
            f"the ledger has a release of the type {type(release).__name__}, which no certificate can describe: compute the guarantee with "
            "ldpfl ledger instead"
        )
    unprotected = isinstance(release, UnprotectedRelease)
    return certificate_file.ClientRelease(
        kind=kind,  # type: ignore[arg-type]
        mechanism=release.mechanism,
        author=release.author,
        parameter=None if unprotected else float(release.parameter),
        units=release.units,
        unit=release.unit,
        sampled=release.sampled if isinstance(release, BinaryRelease) else 1,
        rate=float(release.rate) if isinstance(release, GaussianRelease) else 1.0,
        blanket=release.blanket if isinstance(release, PureRelease) else None,
        alike=isinstance(release, GaussianRelease) and release.alike,
        integers=isinstance(release, GaussianRelease) and release.integers,
    )
