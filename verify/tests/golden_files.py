"""The certificate and the ledger in ``golden/``, and changed copies of them.

They are of three rounds in which 100 clients send 500 bits each through a shuffler. In the golden folder, ``ldpfl certify ledger.json --key
KEY`` wrote the certificate; the key was thrown away.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
CERTIFICATE, LEDGER = GOLDEN / "certificate.json", GOLDEN / "ledger.json"
PUBLIC_KEY = json.loads(CERTIFICATE.read_text())["signature"]["public_key"]

Change = Callable[[dict[str, Any]], object]


def keep_local_lines(statement: dict[str, Any]) -> None:
    """Leave out of ``statement`` the figure behind a shuffler: it takes seconds to compute again, and the others next to nothing."""
    statement["guarantees"] = [line for line in statement["guarantees"] if line["trusted"] == "local"]


def write_unsigned(folder: Path, change: Change = lambda statement: None) -> Path:
    """Write a copy of the certificate without its signature, with its statement changed by ``change``. Return its path."""
    tree = json.loads(CERTIFICATE.read_text())
    tree["signature"] = None
    change(tree["statement"])
    path = folder / "certificate.json"
    path.write_text(json.dumps(tree))
    return path


def write_chained(folder: Path, change: Change) -> Path:
    """Write a copy of the ledger, changed by ``change``, with all hashes computed anew, as a forger does. Return its path."""
    tree = json.loads(LEDGER.read_text())
    change(tree)
    link = ""
    for event in tree["events"]:
        event.pop("chain", None)
        link = hashlib.sha256(f"{link}{json.dumps(event, sort_keys=True)}".encode()).hexdigest()[:16]
        event["chain"] = link
    path = folder / "ledger.json"
    path.write_text(json.dumps(tree))
    return path


def write_certificate_of(folder: Path, ledger: Path, change: Change = lambda statement: None) -> Path:
    """Write a copy of the certificate without its signature that states the hash of ``ledger``. Return its path."""

    def name_ledger(statement: dict[str, Any]) -> None:
        statement["ledger"] = hashlib.sha256(ledger.read_bytes()).hexdigest()
        change(statement)

    return write_unsigned(folder, name_ledger)
