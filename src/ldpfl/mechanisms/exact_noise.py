"""Noise that is exact in the bits that leave: a real number is drawn, and no more of it is looked at than where on a lattice it rounds to.

A number that is computed in floating point has gaps, and gaps that depend on the data tell them apart (Mironov 2012). Here a real
number with exactly the stated law is fixed by infinitely many random bits. The first 64 of them and floating point, with a bound on its
error, nearly always say to which point of a public lattice it rounds; where they do not, more bits and more digits are taken until
they do. So the lattice point has the law of "real noise, then rounded", and rounding is post-processing: each guarantee that is
proved for the real noise, pure or Gaussian, over any number of adaptive rounds, holds for these integers with the same parameter.

What this rests on: logarithms of NumPy to 16 units in the last place, normal quantiles of PyTorch (Cephes, which states 2^-50) to
2^-46 of themselves, and its inverse error function to 2^-43 where the tail is 2^-12 or more, mpmath to 32 bits fewer than it works with,
and secret uniform bits. ``tests/mechanisms/test_exact_noise.py`` measures the first three.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor, sqrt
from typing import Any, ClassVar

import mpmath
import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import PrivacyError
from ldpfl.util.lazy_imports import torch
from ldpfl.util.randomness import RandomSource, draw_block

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

WORD = 64
"""Random bits that are looked at first."""

_GUARD = 64
_MOST_BITS = 1 << 9
"""Bits after which a number that is still undecided is a broken source's."""

_RARE = 2.0**-40
"""Tails below it are decided exactly, so that the first bits of one need not be few."""

MOST_STEPS = 2.0**34
"""Lattice points to a unit, up to which floating point nearly always decides."""

_DOUBT = 2.0**-20
"""By how much less than this floating point is wrong about a part of 2^31."""

_PIECE = 1 << 13
"""Values that are rounded at once: their 64 KiB, several times, stay in a core's cache."""


class Law:
    """A law of real numbers, symmetric around 0, by the size that is exceeded on one side with a given probability, the tail."""

    relative: ClassVar[float]
    """Part of size + 1 by which :meth:`size` may be wrong."""

    far: ClassVar[float]
    """At most the size of the tail 2^-12."""
    unit: ClassVar[float]
    """What :meth:`quick` returns sizes over."""
    slack: ClassVar[float]
    """How far the size by :meth:`quick` may be from that of any real tail, from 2^-12 on, that begins with the same bits."""

    def quick(self, bits: Floats) -> Floats:
        """Return the sizes of tails over ``unit``. ``bits`` are the tails times 2^64, rounded to float64, and are overwritten."""
        raise NotImplementedError

    def size(self, tail: Floats) -> Floats:
        """Return the size exceeded with probability ``tail`` in (0, 1/2]."""
        raise NotImplementedError

    def tail(self, size: Any, context: Any) -> Any:
        """Return the probability of exceeding ``size``, to the digits of mpmath's ``context``."""
        raise NotImplementedError

    def error(self, size: Floats, tail: Floats) -> Floats:
        """Bound how far ``size`` is from that of any real tail that begins with the same bits as ``tail``.

        Both laws here have a density of at least 0.79 times the tail, so the size moves by less than 1.3 times the tail's logarithm.
        """
        return self.relative * (size + 1) + 2.0 ** (1 - WORD) / tail


class _Normal(Law):
    relative: ClassVar[float] = 2.0**-46
    far: ClassVar[float] = 3.48
    unit: ClassVar[float] = sqrt(2)
    # The argument 1 - 2 tail is off by 2^-53 at most, and the size by 2^9.2 times that where the tail is 2^-12. PyTorch adds 2^-43.
    slack: ClassVar[float] = 2.0**-42

    def quick(self, bits: Floats) -> Floats:
        bits *= -(2.0 ** (1 - WORD))
        bits += 1
        argument = torch.from_numpy(bits)
        torch.erfinv(argument, out=argument)
        return bits

    def size(self, tail: Floats) -> Floats:
        size: Floats = torch.special.ndtri(torch.from_numpy(tail)).neg_().numpy()
        return size

    def tail(self, size: Any, context: Any) -> Any:
        return context.erfc(size / context.sqrt(2)) / 2


class _Laplace(Law):
    relative: ClassVar[float] = 2.0**-48
    far: ClassVar[float] = 7.62
    unit: ClassVar[float] = -1.0
    # The tail is off by 2^-51 of itself at most, and so the size by 2^-51; the logarithm adds 2^-48 of size + 1.
    slack: ClassVar[float] = 2.0**-44

    def quick(self, bits: Floats) -> Floats:
        bits *= 2.0 ** (1 - WORD)
        return np.log(bits, out=bits)

    def size(self, tail: Floats) -> Floats:
        return -np.log(2 * tail)

    def tail(self, size: Any, context: Any) -> Any:
        return context.exp(-size) / 2


NORMAL: Law = _Normal()
"""The standard normal law."""
LAPLACE: Law = _Laplace()
"""The Laplace law of scale 1."""


def rounded(law: Law, steps: float, source: RandomSource, rows: range, count: int) -> Floats:
    """Return ``count`` whole numbers for each of the clients in ``rows``, (k, count): ``steps`` times a real number of ``law``, rounded.

    Exact.

    Args:
        steps: lattice points to a unit of the law, in (0, 2^34]; the very value of the float counts.
    """
    if not 0 < steps <= MOST_STEPS:
        raise ValueError(f"{steps} steps a unit are not drawn")
    words = words64(source, rows, count)
    points = np.empty(words.shape)
    given, found = words.reshape(-1), points.reshape(-1)
    undecided = [np.empty(0, dtype=np.intp)]
    for start in range(0, given.size, _PIECE):
        piece = slice(start, start + _PIECE)
        undecided.append(_round(law, steps, given[piece], found[piece]) + start)
    place = np.concatenate(undecided)
    found[place] = _decided(law, steps, given[place], source, rows, place // max(1, count))
    return points


def _round(law: Law, steps: float, words: Integers, points: Floats) -> NDArray[np.intp]:
    """Write the lattice points of ``words`` (n,) to ``points`` (n,), and return the places at which they may be others.

    There is one bound of the error, for all tails from 2^-12 on; smaller ones are among the places that are returned.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # a tail of 0 is not sure
        exact = law.quick(_tail_of(words))
        exact *= law.unit * steps
        sure = exact < law.far * steps
        np.rint(exact, out=points)
        exact -= points
        # The product's own rounding is less than 2^-50 of it.
        sure &= np.abs(exact, out=exact) < 0.5 - steps * (law.slack + 2.0**-50 * law.far)
    signed = points.view(np.int64)
    signed |= words & np.int64(-(2**63))  # the first bit of a float64 is its sign
    return np.flatnonzero(~sure)


def sizes(law: Law, words: Integers) -> tuple[Floats, Floats]:
    """Return the sizes of the tails that begin with ``words`` (k, n), and bounds of their errors, as :meth:`Law.error` states them."""
    found, error = np.empty(words.shape), np.full(words.shape, law.slack)
    given, size, bound = words.reshape(-1), found.reshape(-1), error.reshape(-1)
    for start in range(0, given.size, _PIECE):
        piece = slice(start, start + _PIECE)
        np.multiply(law.quick(_tail_of(given[piece])), law.unit, out=size[piece])
    small = np.flatnonzero(~(size < law.far))
    tail, _ = tails(given[small])
    size[small] = law.size(tail)
    bound[small] = law.error(size[small], tail)
    return found, error


def _tail_of(words: Integers) -> Floats:
    """Return the tails that begin with ``words``, times 2^64."""
    return (words & np.int64(2**63 - 1)).astype(np.float64)


def _decided(law: Law, steps: float, words: Integers, source: RandomSource, rows: range, row: NDArray[np.intp]) -> Floats:
    """Return the lattice points of ``words`` (n,), each of the client in a ``row`` of ``rows``: with as many more bits as that takes."""
    tail, negative = tails(words)
    size = law.size(tail)
    error = law.error(size, tail)
    least, most = _nearest((size - error) * steps), _nearest((size + error) * steps)
    for place in np.flatnonzero((least != most) | (tail < _RARE)).tolist():
        least[place] = _point(law, steps, tail_bits(words[place]), more_bits(source, rows[int(row[place])]))
    return np.where(negative, -least, least).astype(np.float64)


def _places(chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the row and the place of each of the ``chosen`` (k, n), in order."""
    rows, places = np.divmod(np.flatnonzero(chosen), max(1, chosen.shape[1]))
    return list(zip(rows.tolist(), places.tolist(), strict=True))


def _nearest(values: Floats) -> Integers:
    return np.floor(values + 0.5).astype(np.int64).clip(0)  # the sum's own rounding lies far within the error


def _point(law: Law, steps: float, first: int, more: Callable[[], int]) -> int:
    """Return the lattice point of the tail whose first bits are ``first``, the number of those being ``WORD``: the only one possible."""
    bits = WORD
    while True:
        context = mpmath.MPContext()  # mpmath's own is shared by all threads
        context.prec = bits + _GUARD
        low, high = context.mpf(first) / 2**bits, context.mpf(first + 1) / 2**bits
        point = 0 if first == 0 else floor(float(law.size(np.array([float(low)]))[0]) * steps + 0.5)
        slack = context.mpf(2) ** -(bits + _GUARD // 2)

        def at_least(point: int, context: Any = context) -> Any:
            """The probability of ``point`` or a larger one."""
            return context.mpf(0.5) if point <= 0 else law.tail((context.mpf(2 * point) - 1) / (2 * context.mpf(steps)), context)

        for candidate in (point - 1, point, point + 1):
            if (
                candidate >= 0
                and high <= at_least(candidate) * (1 - slack * (candidate > 0))
                and low >= at_least(candidate + 1) * (1 + slack)
            ):
                return candidate
        first, bits = (first << WORD) | more(), longer(bits)


def longer(bits: int) -> int:
    """Return how many bits there are with 64 more.

    Raises:
        PrivacyError: there are hundreds already.
    """
    if bits >= _MOST_BITS:
        raise PrivacyError("the random source repeats itself; nothing was sent")
    return bits + WORD


def words64(source: RandomSource, rows: range, count: int) -> Integers:
    """Return ``count`` int64 values, uniform over all 2^64, for each of the clients in ``rows``, (k, count)."""
    words: Integers = draw_block(source, rows, 2 * count).view(np.int64)
    return words


def tails(words: Integers) -> tuple[Floats, NDArray[np.bool_]]:
    """Return for each of ``words`` the middle of the tails in (0, 1/2) that begin with its bits, and whether it is a negative number's."""
    return ((words & np.int64(2**63 - 1)).astype(np.float64) + 0.5) * 2.0**-WORD, words < 0


def tail_bits(word: Any) -> int:
    """Return the first 64 bits of the tail that ``word`` begins, the first of which is 0."""
    return int(word) & (2**63 - 1)


def more_bits(source: RandomSource, row: int) -> Callable[[], int]:
    """Return what draws 64 more bits of the client in ``row``."""
    return lambda: int(words64(source, range(row, row + 1), 1)[0, 0]) & (2**64 - 1)


def below(limits: Floats, source: RandomSource, rows: range) -> Floats:
    """Return for each of ``limits`` (k, n) of the clients in ``rows``, from 1 to 2^31, an integer uniform over 0 ... limit - 1. Exact.

    floor(limit * U) for a real U: floating point and 64 bits of U say that, but for one draw in 2^19.
    """
    words = words64(source, rows, limits.shape[1])
    real = (words.view(np.uint64) >> np.uint64(1)).view(np.int64).astype(np.float64)
    real *= limits
    real *= 2.0 ** (1 - WORD)
    drawn = np.floor(real)
    real -= drawn
    real -= 0.5
    for row, place in _places(np.abs(real, out=real) >= 0.5 - _DOUBT):
        drawn[row, place] = _part_of(int(limits[row, place]), int(words[row, place]) & (2**64 - 1), more_bits(source, rows[row]))
    return drawn


def _part_of(limit: int, first: int, more: Callable[[], int]) -> int:
    bits = WORD
    while (first * limit) >> bits != ((first + 1) * limit - 1) >> bits:
        first, bits = (first << WORD) | more(), longer(bits)
    return (first * limit) >> bits


def largest_probability(odds: Callable[[Any], Any]) -> int:
    """Return the largest P below 2^64 for which P / (2^64 - P) is at most ``odds``, or one less.

    Args:
        odds: returns them to the digits of the mpmath context that it is given.
    """
    context = mpmath.MPContext()
    context.prec = 256
    share = 1 / (1 + 1 / odds(context)) * (1 - context.mpf(2) ** -200)
    return min(2**64 - 1, int(context.floor(share * 2**64)))
