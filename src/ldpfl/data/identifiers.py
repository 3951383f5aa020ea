"""Recognise identifier columns, such as a patient's number, by their names alone. Their cells are private and are not looked at."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from typing import Literal

from ldpfl.errors import listed_names

IdentifierKind = Literal["person", "client", "row"]
"""What an identifier column identifies: persons, clients of a federation, or single rows."""


def identifier_kind(name: str) -> IdentifierKind | None:
    """Return what the column ``name`` identifies, such as ``person`` for ``Patient-ID``; None if it is not an identifier.

    A column of an attribute, such as ``patient_age`` or ``account_balance``, is not an identifier.
    """
    joined = _joined_words(name)
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.fullmatch(joined)), None)


def _joined_words(name: str) -> str:
    """Return the words of ``name`` joined to one word, in lower case, without accents, digits and words such as "of"."""
    without_accents = "".join(letter for letter in unicodedata.normalize("NFKD", name) if not unicodedata.combining(letter))
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", without_accents)  # PatientId becomes Patient Id
    words = re.findall(r"[^\W\d_]+", spaced.lower())
    return "".join(word for word in words if word not in _LINKING_WORDS)


def identifier_note(left_out: Collection[str], *, person: str, client: str) -> str:
    """Return a note on the identifier columns ``left_out``, with hints on the settings that could use them.

    ``person`` and ``client`` are the settings ``data.person`` and ``data.client``, "" if they are not set.
    """
    note = f"columns left out, because their names suggest identifiers: {listed_names(left_out)}; list them in data.columns to use them"
    settings = {"person": person, "client": client}
    hints = []
    for kind, hint in _HINTS.items():
        candidates = [name for name in left_out if identifier_kind(name) == kind]
        if candidates and not settings[kind]:
            hints.append(hint.format(name=candidates[0]))
    return ". ".join([note, *hints])


_HINTS: dict[IdentifierKind, str] = {
    "person": "Where a person may have several rows, --person COLUMN (data.person), such as {name}, protects them together, and keeps them "
    "either all in training or all in the test: otherwise scores and intervals are too good",
    "client": "Where each value is a client of the federation, --client COLUMN (data.client), such as {name}, gives each client its rows",
}


def note_on_possible_sites(inputs: Collection[str], *, at_nodes: bool) -> str:
    """Return a note on columns among ``inputs`` whose names suggest the site that a row is from; "" if there are none.

    A site is often the client of a federation. It may also be an input, so it is not left out. ``at_nodes`` says whether each client reads
    a table of its own.
    """
    names = [name for name in inputs if _SITE.fullmatch(_joined_words(name))]
    if not names:
        return ""
    advice = (
        "Where a node holds the rows of one site, such an input is the same in all its rows and tells nothing of new sites: leave it out, "
        f"with --client {names[0]}, or list the columns to use in data.columns"
        if at_nodes
        else f"Rows are not divided by them: where each value is a client of the federation, set --client {names[0]} (data.client)"
    )
    return f"inputs whose names suggest the site that a row is from: {listed_names(names)}. {advice}"


_LINKING_WORDS = frozenset({"of", "the", "de", "du", "des", "der"})
_PERSONS = (
    "patient|patientin|person|personne|subject|sujet|participant|proband|teilnehmer|user|benutzer|nutzer|utilisateur|member|mitglied|"
    "customer|kunde|employee|student"
)
_ABBREVIATED = (
    "pat|subj|cust|usr|nhs|kv|insurance|versicherten|krankenversicherten|kunden|personal|passport|socialsecurity|medicalrecord|national"
)
_PERSONS_THEMSELVES = "mrn|nhs|ssn|email|emailaddress|mail|courriel|phone|phonenumber|phoneno|telephone|telefon|telefonnummer|pid"
_CLIENTS = "client|account|household|haushalt|menage|device|gerat|geraet"
_CLIENTS_ABBREVIATED = "acct|konto|compte|hh"
_ROWS = "record|case|row|encounter|visit|admission|stay|sample|hadm|icustay|fall|zeile"
_ROWS_THEMSELVES = (
    "id|ids|uid|uuid|guid|name|firstname|lastname|surname|fullname|vorname|nachname|nom|prenom|pseudonym|identifier|identifiant|kennung"
)
_SITES = (
    "hospital|site|center|centre|clinic|klinik|krankenhaus|spital|zentrum|hopital|clinique|institution|institute|facility|einrichtung|"
    "etablissement|organisation|organization"
)
_IDENTIFIER_AFTER = (
    "id|ids|uid|uuid|guid|identifier|identifiant|kennung|number|nummer|numero|no|nr|key|hash|pseudonym|name|mrn|email|emailaddress|"
    "phone|phonenumber|phoneno"
)
_IDENTIFIER_BEFORE = "id|uid|uuid|guid|identifier|identifiant|numero|key|hash|pseudonym"
"""Words for an identifier that may come first, as in "id of patient". Not ``no`` or ``number``: "number of visits" is a count."""


def _pattern(alone: Sequence[str], beside_identifier: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern that finds an identifier in a column's name whose words are joined, such as ``patientid``.

    It finds a word of ``alone``, or one of ``beside_identifier`` directly before or after a word such as "id".
    """
    owner = "|".join(beside_identifier)
    # Between both, "n", "en" and "s" may join the words, as in the German ``patientenid``.
    return re.compile(f"{'|'.join(alone)}|(?:{owner})(?:e?n|s)?(?:{_IDENTIFIER_AFTER})|(?:{_IDENTIFIER_BEFORE})(?:{owner})")


_PATTERNS: dict[IdentifierKind, re.Pattern[str]] = {
    "person": _pattern((_PERSONS, _PERSONS_THEMSELVES), (_PERSONS, _ABBREVIATED)),
    "client": _pattern((_CLIENTS,), (_CLIENTS, _CLIENTS_ABBREVIATED)),
    "row": _pattern((_ROWS_THEMSELVES,), (_ROWS,)),
}

_SITE = _pattern((_SITES,), (_SITES,))
