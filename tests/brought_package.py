"""Somebody else's package that brings a mechanism, as pip would install it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ldpfl.mechanisms import settings_of

NAME = "careless"

_MODULE = '''
"""A mechanism that sends the sign of each value as it is, and says that this is epsilon-LDP."""

import functools
import zlib
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from ldpfl.mechanisms import BitReports, Duchi, Identity
from ldpfl.mechanisms.settings import EpsilonSettings, MechanismSettings
from ldpfl.privacy import UnprotectedRelease


@dataclass(frozen=True)
class Careless(Duchi):
    name: ClassVar[str] = "careless"

    def encode(self, values, ranges, generator):
        center, _ = ranges.expand()
        return BitReports(np.packbits((values.cpu() > center).numpy(), axis=1, bitorder="little"), ranges.dimension)


@dataclass(frozen=True)
class Short(Duchi):
    """Packs its bits: how long a report is depends on them, and so on the data."""

    name: ClassVar[str] = "short"

    def encode(self, values, ranges, generator):
        made = super().encode(values, ranges, generator)
        return Packed(made)


class Packed:
    def __init__(self, made):
        self._made = made

    def payloads(self):
        return (zlib.compress(bytes(payload)) for payload in self._made.payloads())


class ShortSettings(EpsilonSettings):
    name: Literal["short"] = "short"

    def at(self, epsilon):
        return Short(epsilon)


@dataclass(frozen=True)
class Halved(Duchi):
    """A bit a weight, at half of what its settings say."""

    name: ClassVar[str] = "halved"


class HalvedSettings(EpsilonSettings):
    name: Literal["halved"] = "halved"

    def at(self, epsilon):
        return Halved(epsilon / 2)


class WrappedSettings(EpsilonSettings):
    """A mechanism of ldpfl's with a method that spends more, and says of itself that it is ldpfl's."""

    name: Literal["wrapped"] = "wrapped"

    def at(self, epsilon):
        mechanism = Duchi(epsilon)

        @functools.wraps(Duchi.encode)
        def encode(values, ranges, generator):
            return Duchi(20.0).encode(values, ranges, generator)

        mechanism.__dict__.update(name="wrapped", encode=encode)
        return mechanism


class Open(Identity):
    name: ClassVar[str] = "open"

    def release(self, ranges):
        return UnprotectedRelease(self.name, "everything")


class OpenSettings(MechanismSettings):
    name: Literal["open"] = "open"

    def build(self, facts):
        return Open()


class Nameless(EpsilonSettings):
    def at(self, epsilon):
        return Duchi(epsilon)


class CarelessSettings(EpsilonSettings):
    name: Literal["careless"] = "careless"
    haste: int = Field(default=1, ge=1)

    def at(self, epsilon):
        return Careless(epsilon)
'''


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, place: str = "careless_package:CarelessSettings", name: str = NAME) -> None:
    """Install the package for the rest of the test; ``place`` is what its entry point says."""
    described = folder / "careless_package-1.0.dist-info"
    described.mkdir(parents=True)
    (folder / "careless_package.py").write_text(_MODULE, encoding="utf-8")
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: careless-package\nVersion: 1.0\n", encoding="utf-8")
    (described / "entry_points.txt").write_text(f"[ldpfl.mechanisms]\n{name} = {place}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    settings_of.cache_clear()
