"""Columns that tell whose a row is, by their names alone: what stands in them is private, and would tell too late."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from typing import Literal

Whose = Literal["person", "client", "row"]
"""What a column tells apart: persons, clients as a federation has them, or rows, of which nobody knows more."""


def whose(name: str) -> Whose | None:
    """Return what the column ``name`` tells apart, such as ``person`` for ``Patient-ID``; None where it is a column like any other.

    A word that says what of somebody is told, as in ``patient_age`` or ``account_balance``, makes a column like any other.
    """
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", name) if not unicodedata.combining(letter))
    words = re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", plain).lower())
    joined = "".join(word for word in words if word not in _BETWEEN)
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.fullmatch(joined)), None)


def note_on(left_out: Collection[str], *, person: str, client: str) -> str:
    """Return what is said of the columns ``left_out``, where ``data.person`` and ``data.client`` name these columns, or none."""
    note = f"left out, for their names say whose a row is: {', '.join(left_out)}; data.columns takes what it names"
    named = {"person": person, "client": client}
    hints = [
        hint.format(name=next(name for name in left_out if whose(name) == kind))
        for kind, hint in _HINTS.items()
        if not named[kind] and any(whose(name) == kind for name in left_out)
    ]
    return ". ".join([note, *hints])


_HINTS: dict[Whose, str] = {
    "person": "Where a person may have several rows, --person COLUMN (data.person), such as {name}, protects them together",
    "client": "Where each is a client of the federation, --client COLUMN (data.client), such as {name}, gives it its own rows",
}

_BETWEEN = frozenset({"of", "the", "de", "du", "des", "der"})
_PERSONS = (
    "patient|patientin|person|personne|subject|sujet|participant|proband|teilnehmer|user|benutzer|nutzer|utilisateur|member|mitglied|"
    "customer|kunde|employee|student"
)
_ABBREVIATED = "pat|subj|cust|usr|nhs|insurance|versicherten|kunden|personal|passport|socialsecurity|medicalrecord|national"
_PERSONS_THEMSELVES = "mrn|nhs|ssn|email|emailaddress|mail|courriel|phone|phonenumber|phoneno|telephone|telefon|telefonnummer|pid"
_CLIENTS = "client|account|household|haushalt|menage|device|gerat|geraet"
_CLIENTS_ABBREVIATED = "acct|konto|compte|hh"
_ROWS = "record|case|row|encounter|visit|admission|stay|sample|hadm|icustay|fall|zeile"
_ROWS_THEMSELVES = (
    "id|ids|uid|uuid|guid|name|firstname|lastname|surname|fullname|vorname|nachname|nom|prenom|pseudonym|identifier|identifiant|kennung"
)
_WHAT = (
    "id|ids|uid|uuid|guid|identifier|identifiant|kennung|number|nummer|numero|no|nr|key|hash|pseudonym|name|mrn|email|emailaddress|"
    "phone|phonenumber|phoneno"
)
_WHAT_BEFORE = "id|uid|uuid|guid|identifier|identifiant|numero|key|hash|pseudonym"
"""Not ``no`` or ``number``, which count what stands behind them."""


def _pattern(alone: Sequence[str], with_what: Sequence[str]) -> re.Pattern[str]:
    """Return what matches a joined name: ``alone``, or ``with_what`` before or behind a word for an identifier."""
    whom = "|".join(with_what)
    return re.compile(f"{'|'.join(alone)}|(?:{whom})(?:e?n|s)?(?:{_WHAT})|(?:{_WHAT_BEFORE})(?:{whom})")


_PATTERNS: dict[Whose, re.Pattern[str]] = {
    "person": _pattern((_PERSONS, _PERSONS_THEMSELVES), (_PERSONS, _ABBREVIATED)),
    "client": _pattern((_CLIENTS,), (_CLIENTS, _CLIENTS_ABBREVIATED)),
    "row": _pattern((_ROWS_THEMSELVES,), (_ROWS,)),
}
