"""Make the certificate of a run, and sign it.

``api.certified_lines`` computes its guarantees. The package ``ldpfl_verify`` has the form of the file, and checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import ldpfl
from ldpfl import mechanisms
from ldpfl.api.accounting import folder_of_ledger
from ldpfl.api.arguments import checked
from ldpfl.api.certified_lines import certified
from ldpfl.errors import ConfigError
from ldpfl.experiments.figures import assumption_caveats
from ldpfl.experiments.public_figures import public_caveats
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.privacy import Ledger
from ldpfl.privacy.accounting import DELTA
from ldpfl.util.files import MAX_ROUNDS_BYTES, check_suffix, read_text, write_text
from ldpfl.util.key_files import load_key, save_key
from ldpfl_verify.certificate_file import Certificate, Signature, Statement


@checked
def certify(what: str | Path, *, delta: float | None = None, key: str | Path | None = None, out: str | Path | None = None) -> Certificate:
    """Return the certificate of a run's guarantee, which others can check: see :func:`verify`.

    Args:
        what: folder of the run, or file of its ledger.
        delta: failure probability; by default that of the run, or 1e-5.
        key: file of the private key (Ed25519) that signs the certificate; created if missing. None: the certificate is not signed.
        out: file to write the certificate to; None: nothing is written.

    Raises:
        ConfigError: there is no such run, it is a trial of a tuning, it is not finished, or delta is out of range.
        DataError: a file is damaged, or a link.
        WriteError: ``out`` cannot be written.
    """
    if out is not None:
        check_suffix(Path(out), "a certificate in JSON", ".json")
    path = Path(folder_of_ledger(what))  # a folder, or the file of a ledger outside of a run's folder
    folder = RunFolder(path) if path.is_dir() else None
    (folder or RunFolder(path.parent)).check_may_be_handed_on()  # the file of a ledger may lie in the folder of a tuning's trial
    file = path if folder is None else folder.ledger_path
    ledger = Ledger.load(file) if folder is None else folder.ledger()
    default_delta = DELTA if folder is None else folder.config().privacy.delta
    try:
        text = read_text(file, MAX_ROUNDS_BYTES)
    except OSError as error:
        raise ConfigError(f"ledger {file} cannot be read: {error.strerror}") from None
    if Ledger.from_json(text, str(file)) != ledger:  # a folder's ledger has the checkpoint's last rounds, which the file may lack
        raise ConfigError(f"the run in {path} is not finished: resume it and let it finish before you certify it")
    result = (folder.result() if folder else None) or {}  # empty for a ledger alone, or if the run ended early
    mechanism_versions = {event.release.mechanism: mechanisms.version_of(event.release.mechanism) for event in ledger.events}
    run_versions = {str(name): str(version) for name, version in result.get("versions", {}).items()}
    versions = {"ldpfl": ldpfl.__version__, **run_versions, **mechanism_versions}
    name = str(result.get("name", path.resolve().name))
    caveats = [] if folder is None else _run_caveats(folder, result, releases=len(ledger.events))
    statement = certified(text, name, default_delta if delta is None else delta, versions, caveats, str(file))
    certificate = signed(statement, None if key is None else _signing_key(Path(key)))
    if out is not None:
        write_text(Path(out), certificate.to_json())
    return certificate


def signed(statement: Statement, key: Ed25519PrivateKey | None) -> Certificate:
    """Return the certificate of ``statement``, signed with ``key`` unless that is None."""
    if key is None:
        return Certificate(statement)
    signature = Signature(key.public_key().public_bytes_raw().hex(), key.sign(statement.signed_bytes()).hex())
    return Certificate(statement, signature)


def _run_caveats(folder: RunFolder, result: Mapping[str, Any], *, releases: int) -> list[str]:
    """Return the run's own reservations about its figures. Without a ``result``, one is that it ended after this number of releases."""
    config = folder.config()
    if result:
        return public_caveats(config, [str(caveat) for caveat in result.get("caveats", ())])
    unfinished = f"{config.training.rounds} rounds were meant to be run, and {releases} releases were made when this was certified"
    return [unfinished, *assumption_caveats(config)]


def _signing_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key in the file ``path``. If there is no such file, it is written with a new key."""
    if not path.exists():
        save_key(Ed25519PrivateKey.generate(), path)
    return load_key(path, Ed25519PrivateKey)  # type: ignore[type-abstract]  # only compared with the loaded key's class
