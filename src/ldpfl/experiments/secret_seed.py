"""The secret seed of the noise on a user's own rows. It is in one file of the run's folder, and nowhere else."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path

from ldpfl.errors import DataError
from ldpfl.experiments.config import RunConfig
from ldpfl.util.files import read_text, replace_atomically

FILE = "SECRET-seed"
_BITS = 128
"""Length of a secret in bits, too long for anybody to try all secrets."""

_WARNING = (
    "# Keep this file to yourself: with it, the noise on the rows of this run can be computed. Only --resume and --more-rounds need it.\n"
)


def new_secret(config: RunConfig) -> int | None:
    """Return a new secret for a run of ``config``; None if the noise follows from the config's own seed."""
    return secrets.randbits(_BITS) if config.secret_noise else None


def shared_seed_warnings(configs: Iterable[RunConfig]) -> tuple[str, ...]:
    """Return a warning if two runs of the ``configs`` share secret randomness, because they have the same seed; else an empty tuple."""
    seeds = [seed for config in configs if (seed := _shared_seed(config)) is not None]
    warning = "two of these runs are simulations with one seed, and so with the same noise: together they hide less than this table says"
    return (warning,) if len(set(seeds)) < len(seeds) else ()


def _shared_seed(config: RunConfig) -> int | None:
    """Return the seed of a run's noise or secret sampling; None if other runs with that seed do not share its randomness.

    On a user's own data, the noise depends on all settings as well as the seed, so no two runs share it. They may still share the choice of
    the clients or records that take part.
    """
    samples_in_secret = config.clients.once or config.clients.self_sampling != "off" or getattr(config.mechanism, "sample_rate", 1.0) != 1.0
    shares_randomness = samples_in_secret or not config.data.brought
    return config.seed if shares_randomness and not config.secret_noise else None


def save(secret: int, path: Path) -> None:
    """Write a secret to a file that its owner alone may read; errors as in :func:`ldpfl.util.files.replace_atomically`."""
    with replace_atomically(path, 0o600) as temporary:
        temporary.write_text(f"{_WARNING}{secret:0{_BITS // 4}x}\n", encoding="utf-8")


def load(path: Path) -> int | None:
    """Return the secret in a file that :func:`save` wrote; None if there is no such file.

    Raises:
        DataError: the file is damaged.
    """
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"the secret seed {path} cannot be read: {reason}; make the file readable, or restore it from a backup") from None
    digits = lines[-1] if lines else ""
    if len(digits) != _BITS // 4 or not set(digits) <= set("0123456789abcdef"):
        raise DataError(f"{path} is damaged: expected {_BITS // 4} hexadecimal digits in its last line; restore it from a backup")
    return int(digits, 16)
