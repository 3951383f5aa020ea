"""What all forms of reports offer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

COORDINATE_BLOCK = 1 << 15
"""Coordinates handled at once: their working set stays inside a core's cache. Even, so that a seeded
stream, which yields two 32-bit values a word, gives the same bits whatever the block size."""


class Reports(Protocol):
    """The reports of ``clients`` clients about ``dimension`` weights; each form is a file beside this one.

    ``bytes_per_client`` is the length of what is there; a mechanism's ``payload_bits`` says it beforehand.
    """

    @property
    def clients(self) -> int: ...

    @property
    def dimension(self) -> int: ...

    @property
    def bytes_per_client(self) -> int: ...

    def payloads(self) -> Iterable[bytes]: ...

    @classmethod
    def mix(cls, batches: Sequence[Any], generator: np.random.Generator) -> Reports:
        """Return all reports of ``batches``, at least one, in an order that says nothing about clients: uniformly random.

        What a client's guarantee covers as one unit stays together; units that are protected apart are reordered apart.

        Raises:
            PrivacyError: reports of different shapes, or none.
        """
        ...
