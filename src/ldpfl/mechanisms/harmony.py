"""One sampled weight a group, sent as one randomised bit: the Adaptive-Harmony mechanism of Optimal LDP-FL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from ldpfl.errors import ConfigError
from ldpfl.mechanisms.base import Mechanism, require_shape
from ldpfl.mechanisms.duchi import Duchi
from ldpfl.mechanisms.noise import TwoValueNoise
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.indexed import IndexedBitReports, unit_bits
from ldpfl.mechanisms.reports.units import Units
from ldpfl.mechanisms.sampled_groups import GroupCounts, Groups, sample_places
from ldpfl.mechanisms.settings import EpsilonSettings, none_if_word
from ldpfl.privacy import BinaryRelease
from ldpfl.privacy.guarantee import Unit
from ldpfl.util.lazy_imports import torch
from ldpfl.util.quantities import Count
from ldpfl.util.randomness import RandomSource, as_source

if TYPE_CHECKING:
    from torch import Tensor

_CLAIM = 'Optimal LDP-FL, section 4: the "framework satisfies eps-LDP"; epsilon is spent once a layer and round, and these add up'


@dataclass(frozen=True)
class Harmony(Mechanism):
    """Sample one weight of each group uniformly, and send its place and its sign as ``duchi`` would.

    Guarantee: epsilon-LDP (pure) for each group of each round's report, replacing all of the group's weights at once. A report of
    G groups costs G * epsilon. Assumes public ranges and random bits nobody can guess, even from the places.

    A layer is cut into consecutive groups of ``group`` weights, of which the last may be smaller. A layer with fewer weights is one
    group. Without ``group`` every layer is one group, as in the paper. With ``group=1`` the bits are those of ``duchi``.

    The estimate is c + s r A * sign at the sampled weight of a group of s weights (c: center, r: radius, A: :attr:`gain`), and c at the
    others. Only this fill value is unbiased: equations (11) and (12) have 0 instead, which adds -c (1 - 1/s) to every mean. The sampled
    index does not depend on the values, so it costs no epsilon. Values that are not sampled are not even checked for NaN.

    Source: Optimal LDP-FL, Algorithm 2 and equation (10), after Nguyen et al. 2016; clipping is missing there. The paper spends epsilon on
    each layer, and states it for the whole model.
    """

    epsilon: float
    group: int | None = None
    name: ClassVar[str] = "harmony"

    def __post_init__(self) -> None:
        Duchi(self.epsilon)  # raises if ``epsilon`` is invalid
        if self.group is not None and (isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 1):
            raise ConfigError(f"group must be a positive whole number of weights, got {self.group!r}")

    @property
    def epsilon_realised(self) -> float:
        """The epsilon that the integer thresholds really have; never above ``epsilon``."""
        return Duchi(self.epsilon).epsilon_realised

    @property
    def properties(self) -> Properties:
        return Properties(caveats=Duchi(self.epsilon).properties.caveats)

    @property
    def gain(self) -> float:
        """A, as in ``duchi``: the estimate of a sampled weight is center +- s A radius, for a group of s weights."""
        return Duchi(self.epsilon).gain

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> IndexedBitReports:
        """Sample one weight of each group for each client, and randomise it to a sign as ``duchi`` does."""
        values = require_shape(values, ranges)
        source, groups = as_source(generator), Groups.of(ranges, self.group)
        index = sample_places(source, values.shape[0], groups.sizes)
        columns = torch.from_numpy(index + groups.starts).to(values.device)
        # From here on it is ``duchi`` on one weight of each group. It checks the sampled values for NaN.
        bits = Duchi(self.epsilon).encode(values.gather(1, columns), groups.ranges, source)
        return IndexedBitReports(index, bits.unpack().view(np.bool_), groups.sizes)

    def decode(self, reports: IndexedBitReports, ranges: LayerRanges) -> Tensor:
        """Return estimates (K, d): center plus or minus the group's step at each sampled weight, and the center at the others.

        The step is group size x radius x :attr:`gain`.
        """
        groups = Groups.of(ranges, self.group)
        groups.count_clients([reports], ranges)
        center, step = groups.centers_and_steps(self.gain)
        estimates = _centers(ranges).repeat(reports.clients, 1)  # changed through ``numpy()``, which is a view
        for rows, columns, signs in groups.entries([reports]):
            np.put_along_axis(estimates.numpy()[rows], columns, (center + step * signs).astype(np.float32), axis=1)
        return estimates

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> IndexedBitReports:
        return IndexedBitReports.from_payloads(payloads, Groups.of(ranges, self.group).sizes)

    def aggregate(self, reports: Sequence[IndexedBitReports], ranges: LayerRanges) -> Tensor:
        """Return the mean estimate (d,): add up the signs of each sampled weight; weights that nobody sampled keep the center."""
        groups = Groups.of(ranges, self.group)
        clients = groups.count_clients(reports, ranges)
        center, step = groups.centers_and_steps(self.gain / clients)
        # Left uninitialised, which saves time for a large model: only the entries of sampled weights are set and read.
        sums = torch.empty(ranges.dimension, dtype=torch.int64).numpy()
        for _, columns, _ in groups.entries(reports):
            sums[columns] = 0
        for _, columns, signs in groups.entries(reports):
            np.add.at(sums, columns.ravel(), signs.ravel())
        mean = _centers(ranges)  # changed through ``numpy()``, which is a view
        for _, columns, _ in groups.entries(reports):  # a weight that two clients sampled is written twice, with the same value
            mean.numpy()[columns] = center + step * sums[columns]
        return mean

    def noise(self, ranges: LayerRanges) -> TwoValueNoise:
        """Return the error of Optimal LDP-FL, equation (18), where s is the size of the weight's group."""
        groups = Groups.of(ranges, self.group)
        return TwoValueNoise(ranges, self.gain, groups.sizes, groups.largest)

    def units(self, ranges: LayerRanges) -> Units:
        """Return one unit for each group: the sampled index and the sign."""
        groups = GroupCounts.of(ranges, self.group)
        return Units(unit_bits(groups.sizes), groups.sizes, groups.counts, reader=self._reader_of_part)

    def _reader_of_part(self, part: LayerRanges) -> Harmony:
        """Return the mechanism that reads reports about the weights in ``part``. Its group size may not exceed the part's largest layer."""
        return self if self.group is None else replace(self, group=min(self.group, max(part.sizes)))

    def release(self, ranges: LayerRanges) -> BinaryRelease:
        """Return the release: one bit for each group, about a secretly sampled weight."""
        if self.group == 1:
            return replace(Duchi(self.epsilon).release(ranges), mechanism=self.name, claim=_CLAIM)
        groups = GroupCounts.of(ranges, self.group)
        return BinaryRelease(self.name, self.epsilon, groups.groups, self._unit, self.epsilon_realised, groups.largest, _CLAIM)

    @property
    def _unit(self) -> Unit:
        """The part of a report that epsilon protects: a whole layer, one weight, or a group of weights."""
        if self.group is None:
            return "layer"
        return "weight" if self.group == 1 else "group"


class HarmonySettings(EpsilonSettings):
    """Settings of ``harmony``."""

    name: Literal["harmony"] = "harmony"
    group: Count | Literal["layer"] = "layer"
    """Size of a group of weights. A client sends one weight of each group. ``layer``: each layer is one group, as in Optimal LDP-FL."""
    sends_bits: ClassVar[bool] = True

    def at(self, epsilon: float) -> Harmony:
        return Harmony(epsilon, none_if_word(self.group, "layer"))


def _centers(ranges: LayerRanges) -> Tensor:
    """Return the center of each weight's range, (d,) float32. The caller may write to it, unlike to that of ``ranges.expand``."""
    centers = torch.empty(ranges.dimension, dtype=torch.float32)
    for layer, center in zip(centers.split_with_sizes(list(ranges.sizes)), ranges.center.tolist(), strict=True):
        layer.fill_(center)
    return centers
