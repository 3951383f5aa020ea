"""Decide for each guarantee of a certificate whether it is confirmed, and collect what a reader has to know beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from ldpfl_verify.accountant_choice import SAME, TOLERANCE, second_bound
from ldpfl_verify.certificate_file import INFINITY, OURS, USERS_CODE, Certificate, ChargedRounds, StatedGuarantee, Statement, epsilon_of
from ldpfl_verify.errors import CertificateError, quoted
from ldpfl_verify.field_checks import to_tree
from ldpfl_verify.ledger_comparison import check_charged
from ldpfl_verify.signature import check_signature, read_certificate
from ldpfl_verify.stated_author import with_believed_author

Status = Literal["confirmed", "nearly", "author's claim", "not confirmed", "not checked"]

_ASSUMPTION_OF_TRUST = {
    "shuffled": "shuffler hold only if an ideal shuffler shows the mixed reports and nothing else",
    "summed": "sum hold only if nobody learns more than the sum over all clients",
}
"""Assumptions that a guarantee needs, by whom it trusts. The list in a certificate is not used, because its author may leave some out."""

_PUBLISHED = {"client": "all data of one client", "person": "all records of one person", "record": "one whole record"}


@dataclass(frozen=True)
class Verdict:
    """The result for one guarantee.

    Attributes:
        line: the guarantee as the certificate states it.
        second: upper bound on epsilon that is proved here; None if no accountant here covers the case.
        status: ``confirmed`` if ``second`` is no larger than the stated epsilon. ``nearly`` if it is larger by at most 2 %. ``author's
            claim`` if one of these is true, but the mechanism, or the model whose gradients it protects, is not the ldpfl project's code:
            then only the arithmetic is checked.
            ``not confirmed`` if ``second`` is larger by more. ``not checked`` if ``second`` is None.
        why: how ``second`` was computed, or why it was not.
    """

    line: StatedGuarantee
    second: float | None
    status: Status
    why: str


@dataclass(frozen=True)
class SecondOpinion:
    """The result for a certificate.

    Attributes:
        run: name of the run, as the certificate has it.
        lines: a verdict for each guarantee.
        notes: what was not checked, who signed the certificate, and what the run itself says against its figures.
    """

    run: str
    lines: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether all guarantees are confirmed, or nearly."""
        return all(verdict.status in ("confirmed", "nearly") for verdict in self.lines)

    @property
    def contradicted(self) -> bool:
        """Whether some guarantee promises more than is proved here. If none does and not all hold, some could not be checked."""
        return any(verdict.status == "not confirmed" for verdict in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        lines = [
            {
                **to_tree(verdict.line),
                "second": INFINITY if verdict.second == inf else verdict.second,
                "status": verdict.status,
                "why": verdict.why,
            }
            for verdict in self.lines
        ]
        return {"run": self.run, "holds": self.holds, "contradicted": self.contradicted, "lines": lines, "notes": list(self.notes)}


def verify(certificate: Certificate | str | Path, *, ledger: str | Path | None = None, signed_by: str | None = None) -> SecondOpinion:
    """Compute the guarantees of a certificate again, by accountants that share no line with those that made it.

    A guarantee takes from a moment to some minutes on one core.

    Args:
        certificate: the certificate, or the path of its file. Its signature is checked if it has one.
        ledger: the run's ledger, or the run's folder. The certificate must be about this ledger and charge all that it holds.
        signed_by: the public key, in hexadecimal digits, that must have signed the certificate.

    Raises:
        CertificateError: the certificate was changed, is signed by another key, is about another ledger, or charges less than the ledger.
    """
    if isinstance(certificate, Certificate):
        check_signature(certificate)
    else:
        certificate = read_certificate(Path(certificate))
    signer = certificate.signature.public_key if certificate.signature else None
    if signed_by is not None and signed_by != signer:
        raise CertificateError(f"the certificate is signed by {signer or 'nobody'}, expected the key {quoted(signed_by)}")
    statement = certificate.statement
    if ledger is not None:
        check_charged(statement, Path(ledger))
    notes = _notes_on_signer_and_ledger(signer, signer_was_expected=signed_by is not None, with_ledger=ledger is not None)
    return SecondOpinion(
        statement.run,
        tuple(_verdicts(statement)),
        (*notes, *_notes_on_trust(statement), *_notes_on_large_deltas(statement), *_caveats_of(statement)),
    )


def _notes_on_signer_and_ledger(signer: str | None, *, signer_was_expected: bool, with_ledger: bool) -> Iterator[str]:
    """Yield notes on whether the ledger was compared, and on who signed the certificate."""
    if not with_ledger:
        yield "whether the run released what the certificate charges was not checked: give the run's ledger with --ledger"
    if signer is None:
        yield "nobody signed the certificate"
    else:
        yield f"signed by {signer}" + ("" if signer_was_expected else ": make sure that you know whose key this is")


def _notes_on_trust(statement: Statement) -> Iterator[str]:
    """Yield a note for each kind of trust, with the assumptions of its guarantees, which the certificate may leave out."""
    kinds = dict.fromkeys(line.trusted for line in statement.guarantees if line.trusted != "local")
    secret = {group.sampling for group in statement.charged} & {"secret", "once"}
    hidden = ", and nobody learns in which rounds a client takes part" if secret else ""
    for kind in kinds:
        yield f"rows that trust a {_ASSUMPTION_OF_TRUST[kind]}, the other clients are honest{hidden}"
    if all(line.trusted != "local" for line in statement.guarantees):
        yield "no row says what holds where nobody is trusted: what reports reveal before they are mixed or added up is left out"


def _notes_on_large_deltas(statement: Statement) -> Iterator[str]:
    """Yield a note for each delta of one over the number of clients or more. It allows to publish all data of a client drawn at random.

    A certificate does not say how many records or persons there are. :data:`_USUAL_RECORDS` stands for their number.
    """
    clients = max(group.population for group in statement.charged)
    for delta, protects in dict.fromkeys((line.delta, line.protects) for line in statement.guarantees):
        allowed = f"it allows {_PUBLISHED[protects]} to be published"
        if clients > 1 and delta >= 1 / clients:
            yield f"a delta of {delta:g} is not smaller than one over the {clients:,} clients: {allowed}"
        elif protects != "client" and delta >= 1 / _USUAL_RECORDS:
            yield f"a delta of {delta:g} is not smaller than one over {_USUAL_RECORDS:,}, and data have mostly more {protects}s: {allowed}"


_USUAL_RECORDS = 1000
"""Number of records, or persons, that data have mostly at least."""


def _caveats_of(statement: Statement) -> Iterator[str]:
    """Yield the certificate's own caveats, marked as such: whoever made the certificate can write anything there."""
    for caveat in statement.caveats:
        yield f"the certificate says: {caveat}"


def _verdicts(statement: Statement) -> Iterator[Verdict]:
    """Yield the verdict on each guarantee of ``statement``."""
    for line in statement.guarantees:
        try:
            second, why = second_bound(line, statement.charged)
        except (ArithmeticError, ValueError, RuntimeError, MemoryError):  # the other guarantees are computed all the same
            second, why = None, "its figures are too large or too small to compute with"
        yield _with_authors_claim(Verdict(line, second, _status(epsilon_of(line), second), why), statement.charged)


def _status(stated: float, second: float | None) -> Status:
    """Return how the ``stated`` epsilon compares with the ``second`` one, which was computed here."""
    if stated == inf:
        return "confirmed"  # it promises nothing
    if second is None:
        return "not checked"
    if second <= stated * SAME:
        return "confirmed"
    return "nearly" if second <= stated * (1 + TOLERANCE) else "not confirmed"


def _with_authors_claim(verdict: Verdict, charged: Sequence[ChargedRounds]) -> Verdict:
    """Return ``verdict``. A confirmed one becomes an ``author's claim`` if a mechanism, or the model, is not the ldpfl project's code."""
    authors = (with_believed_author(group.release).author for group in charged)
    others = dict.fromkeys(author for author in authors if author != OURS)
    if verdict.status not in ("confirmed", "nearly") or not (others or verdict.line.status != "proved"):
        return verdict
    whose = ", ".join(others) or "a mechanism"
    claim = f"what the author of {whose} claims is true"
    if set(others) == {USERS_CODE}:
        claim = f"the {USERS_CODE} treats each {verdict.line.protects} by itself and keeps nothing of it for another"
    return replace(
        verdict,
        status="author's claim",
        why=f"{verdict.why}; the arithmetic is right, and the guarantee holds if {claim}, which a certificate cannot show",
    )
