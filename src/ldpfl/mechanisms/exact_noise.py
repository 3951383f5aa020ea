"""Exact Laplace and Gaussian noise on a lattice: a real noise value is drawn, and only the lattice point that it rounds to is computed.

Noise that is computed in floating point cannot take all values, and which values are missing may depend on the data and reveal them
(Mironov 2012). Here infinitely many random bits define a real number with exactly the stated law. The first 64 bits and floating point,
with a bound on its error, nearly always determine the point of a public lattice to which that number rounds. Otherwise more bits and more
digits are taken until they do. So the lattice point has exactly the law of real noise that is then rounded. Rounding is post-processing:
each guarantee that is proved for the real noise, pure or Gaussian, over any number of adaptive rounds, holds for these integers too.

Assumptions: NumPy's logarithms are right to 16 units in the last place; PyTorch's normal quantiles (Cephes, which states 2^-50) to a
relative 2^-46; its inverse error function to 2^-43 for tails of 2^-12 or more; mpmath to 32 bits less than its precision; and random bits
are uniform and secret. ``tests/mechanisms/test_exact_noise.py`` measures the first three.
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
"""Number of random bits that are drawn first."""

_EXTRA_BITS = 64
"""Bits of mpmath's precision beyond the number of random bits."""

_MAX_BITS = 1 << 9
"""Number of bits after which an undecided number means that the random source is broken."""

_MIN_SIGNIFICANT_TAIL = 2.0**-40
"""Tail probabilities below this are always decided with more bits, since few of their first bits are significant."""

MOST_STEPS = 2.0**34
"""Largest number of lattice points per unit. Up to it floating point nearly always decides."""

_ERROR_BELOW = 2.0**-20
"""Upper bound of the floating-point error of limit * U in :func:`draw_integers_below`, for limits up to 2^31."""

_BLOCK = 1 << 13
"""Number of values that are rounded at once: a few arrays of 64 KiB stay in a core's cache."""


class Law:
    """A symmetric law of real numbers, given by its quantile function.

    The tail of a noise value x is P(X > |x|), in (0, 1/2]. The size of a tail is the |x| that it belongs to.
    """

    relative_error: ClassVar[float]
    """Error of :meth:`size_of_tail`, relative to size + 1."""

    fast_size_limit: ClassVar[float]
    """A lower bound of the size of the tail 2^-12. Sizes below it are computed by :meth:`fast_size`, which is precise enough there."""
    fast_size_unit: ClassVar[float]
    """Unit of the results of :meth:`fast_size`."""
    fast_size_error: ClassVar[float]
    """Error of :meth:`fast_size`, times its unit: the distance from the size of any tail >= 2^-12 that begins with the same bits."""

    def fast_size(self, bits: Floats) -> Floats:
        """Return the sizes of tails, divided by ``fast_size_unit``. ``bits`` are the tails times 2^64 in float64, and are overwritten."""
        raise NotImplementedError

    def size_of_tail(self, tail: Floats) -> Floats:
        """Return the size that is exceeded with probability ``tail`` in (0, 1/2]."""
        raise NotImplementedError

    def tail_beyond(self, size: Any, context: Any) -> Any:
        """Return the probability of exceeding ``size``, to the digits of mpmath's ``context``."""
        raise NotImplementedError

    def size_error(self, size: Floats, tail: Floats) -> Floats:
        """Bound the distance of ``size`` from the size of any real tail that begins with the same bits as ``tail``.

        Both laws have a density of at least 0.79 times the tail. So the size changes by less than 1.3 times the change of log(tail).
        """
        return self.relative_error * (size + 1) + 2.0 ** (1 - WORD) / tail


class _Normal(Law):
    relative_error: ClassVar[float] = 2.0**-46
    fast_size_limit: ClassVar[float] = 3.48
    fast_size_unit: ClassVar[float] = sqrt(2)
    # The argument 1 - 2 tail is off by 2^-53 at most, and the size by 2^9.2 times that where the tail is 2^-12. PyTorch adds 2^-43.
    fast_size_error: ClassVar[float] = 2.0**-42

    def fast_size(self, bits: Floats) -> Floats:
        """Return erfinv(1 - 2 t) in place of ``bits``, t = ``bits`` / 2^64: x / sqrt(2), t = P(normal value > x)."""
        bits *= -(2.0 ** (1 - WORD))
        bits += 1
        argument = torch.from_numpy(bits)
        torch.erfinv(argument, out=argument)
        return bits

    def size_of_tail(self, tail: Floats) -> Floats:
        return np.asarray(torch.special.ndtri(torch.from_numpy(tail)).neg_().numpy())  # minus the quantile of the lower tail

    def tail_beyond(self, size: Any, context: Any) -> Any:
        return context.erfc(size / context.sqrt(2)) / 2  # P(X > size) of a standard normal X


class _Laplace(Law):
    relative_error: ClassVar[float] = 2.0**-48
    fast_size_limit: ClassVar[float] = 7.62
    fast_size_unit: ClassVar[float] = -1.0
    # The tail is off by 2^-51 of itself at most, and so the size by 2^-51; the logarithm adds 2^-48 of size + 1.
    fast_size_error: ClassVar[float] = 2.0**-44

    def fast_size(self, bits: Floats) -> Floats:
        """Return log(2 t) in place of ``bits``, for t = ``bits`` / 2^64: minus the x that a Laplace value exceeds with probability t."""
        bits *= 2.0 ** (1 - WORD)
        return np.log(bits, out=bits)

    def size_of_tail(self, tail: Floats) -> Floats:
        return -np.log(2 * tail)  # the inverse of P(X > size) = e^-size / 2

    def tail_beyond(self, size: Any, context: Any) -> Any:
        return context.exp(-size) / 2  # P(X > size) of a Laplace value X of scale 1


NORMAL: Law = _Normal()
"""The standard normal law."""
LAPLACE: Law = _Laplace()
"""The Laplace law of scale 1."""


def draw_rounded_noise(law: Law, steps: float, source: RandomSource, rows: range, count: int) -> Floats:
    """Draw ``count`` whole numbers for each client in ``rows``, (k, count): ``steps`` times a real number of ``law``, rounded.

    Rounding is exact: a number that 64 random bits leave between two whole numbers gets more bits.

    Args:
        steps: number of lattice points per unit of the law, in (0, 2^34]. The exact value of the float is used.
    """
    if not 0 < steps <= MOST_STEPS:
        raise ValueError(f"steps is {steps}: expected a number above 0 and up to {MOST_STEPS:g}")
    words = draw_words64(source, rows, count)
    points = np.empty(words.shape)
    flat_words, flat_points = words.reshape(-1), points.reshape(-1)  # views
    undecided_in_blocks = [np.empty(0, dtype=np.intp)]  # ``concatenate`` needs one array, even if there are no words
    for start in range(0, flat_words.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        undecided_in_blocks.append(_write_nearest_points(law, steps, flat_words[block], flat_points[block]) + start)
    undecided = np.concatenate(undecided_in_blocks)
    # The last argument is the client of each undecided value, by its index in ``rows``.
    flat_points[undecided] = _decide_with_more_bits(law, steps, flat_words[undecided], source, rows, undecided // max(1, count))
    return points


def _write_nearest_points(law: Law, steps: float, words: Integers, points: Floats) -> NDArray[np.intp]:
    """Write the lattice points of ``words`` (n,) to ``points`` (n,), and return the indices at which they may be wrong.

    The first bit of a word is the sign of a noise value. The others begin its tail, the probability of exceeding its absolute value. One
    error bound is used for all tails >= 2^-12. The indices of smaller tails are always returned.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # a tail of 0 has an infinite or no value, so it is not sure
        values = law.fast_size(_scaled_tails(words))
        values *= law.fast_size_unit * steps  # absolute noise values, in lattice points
        sure = values < law.fast_size_limit * steps  # false for tails below 2^-12
        np.rint(values, out=points)
        values -= points
        # A point is sure if the value is farther from a half, where rounding changes, than its error. The product's own rounding is less
        # than 2^-50 of it.
        sure &= np.abs(values, out=values) < 0.5 - steps * (law.fast_size_error + 2.0**-50 * law.fast_size_limit)
    point_bits = points.view(np.int64)
    point_bits |= words & np.int64(-(2**63))  # copies the sign, which is the first bit of a word and of a float64
    return np.flatnonzero(~sure)


def sizes_and_errors(law: Law, words: Integers) -> tuple[Floats, Floats]:
    """Return the absolute noise values (k, n) that begin with ``words`` (k, n), and bounds of their errors.

    An absolute noise value is called the size of its tail, the probability of exceeding it. A word has the first 63 bits of the tail. The
    error of a size is its distance from that of any tail with these bits.
    """
    tail_sizes, errors = np.empty(words.shape), np.full(words.shape, law.fast_size_error)
    flat_words, flat_sizes, flat_errors = words.reshape(-1), tail_sizes.reshape(-1), errors.reshape(-1)  # views
    for start in range(0, flat_words.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        np.multiply(law.fast_size(_scaled_tails(flat_words[block])), law.fast_size_unit, out=flat_sizes[block])
    small = np.flatnonzero(~(flat_sizes < law.fast_size_limit))  # tails below 2^-12, for which ``fast_size`` is not precise enough
    tail, _ = tails_and_signs(flat_words[small])
    flat_sizes[small] = law.size_of_tail(tail)
    flat_errors[small] = law.size_error(flat_sizes[small], tail)
    return tail_sizes, errors


def _scaled_tails(words: Integers) -> Floats:
    """Return the tails that begin with the last 63 bits of ``words``, times 2^64. The first bit of a word is the noise's sign."""
    return (words & np.int64(2**63 - 1)).astype(np.float64)


def _decide_with_more_bits(law: Law, steps: float, words: Integers, source: RandomSource, rows: range, owner: NDArray[np.intp]) -> Floats:
    """Return the lattice points of ``words`` (n,), drawing as many more bits as needed.

    ``owner`` (n,) is the index in ``rows`` of the client that each word belongs to. This client's stream gives the bits.
    """
    tail, negative = tails_and_signs(words)
    size = law.size_of_tail(tail)  # the absolute noise value
    error = law.size_error(size, tail)
    points, highest_points = _nearest_points((size - error) * steps), _nearest_points((size + error) * steps)
    # If both ends of the error interval round to one point, that point is right, unless the tail has too few significant bits.
    undecided = (points != highest_points) | (tail < _MIN_SIGNIFICANT_TAIL)
    for place in np.flatnonzero(undecided).tolist():
        draw_more_bits = make_bit_drawer(source, rows[int(owner[place])])
        points[place] = _find_exact_point(law, steps, first_tail_bits(words[place]), draw_more_bits)
    return np.where(negative, -points, points).astype(np.float64)


def _positions_of_true(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return (row, column) of each true entry of ``mask`` (k, n), in order."""
    rows, columns = np.divmod(np.flatnonzero(mask), max(1, mask.shape[1]))
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def _nearest_points(values: Floats) -> Integers:
    """Return the lattice points nearest to ``values``, absolute noise values in units of the lattice."""
    return np.floor(values + 0.5).astype(np.int64).clip(0)  # the sum's own rounding lies far within the error


def _find_exact_point(law: Law, steps: float, known_bits: int, draw_more_bits: Callable[[], int]) -> int:
    """Return the lattice point of the tail whose first ``WORD`` bits are ``known_bits``, drawing more bits until only one is possible.

    The tail is the probability of exceeding the noise's absolute value. With ``steps`` lattice points per unit, a smaller tail has a larger
    point.

    Args:
        draw_more_bits: draws the next ``WORD`` bits.
    """
    bits = WORD
    while True:
        context = mpmath.MPContext()  # mpmath's own is shared by all threads
        context.prec = bits + _EXTRA_BITS
        lowest, highest = context.mpf(known_bits) / 2**bits, context.mpf(known_bits + 1) / 2**bits  # bounds of the tail
        # A tail of 0 has no finite size. No candidate near 0 will fit it, so more bits are drawn.
        guess = 0 if known_bits == 0 else floor(float(law.size_of_tail(np.array([float(lowest)]))[0]) * steps + 0.5)
        rounding = context.mpf(2) ** -(bits + _EXTRA_BITS // 2)  # bound of the relative error of a probability

        def largest_tail(point: int, context: Any = context) -> Any:
            """Return the tail of the smallest noise size that rounds to ``point``, (2 point - 1) / (2 steps); 1/2 for point 0."""
            return context.mpf(0.5) if point <= 0 else law.tail_beyond((context.mpf(2 * point) - 1) / (2 * context.mpf(steps)), context)

        for candidate in (guess - 1, guess, guess + 1):
            # The tail belongs to the candidate if it lies between the largest tails of the next point and of the candidate. Only tails that
            # mpmath computed have a rounding error: that of point 0 is exactly 1/2.
            above_next = lowest >= largest_tail(candidate + 1) * (1 + rounding)
            not_too_large = highest <= largest_tail(candidate) * (1 - rounding * (candidate > 0))
            if candidate >= 0 and above_next and not_too_large:
                return candidate
        known_bits, bits = (known_bits << WORD) | draw_more_bits(), bits_after_next_draw(bits)


def bits_after_next_draw(bits: int) -> int:
    """Return ``bits`` + 64, the number of random bits after one more draw.

    Raises:
        PrivacyError: ``bits`` has reached 512, which happens only if the random source is broken.
    """
    if bits >= _MAX_BITS:
        raise PrivacyError("the random source repeats its output, so its bits are not random; nothing was sent: pass another source")
    return bits + WORD


def draw_words64(source: RandomSource, rows: range, count: int) -> Integers:
    """Draw ``count`` int64 values, uniform over all 2^64 values, for each client in ``rows``, (k, count)."""
    return np.asarray(draw_block(source, rows, 2 * count).view(np.int64))


def tails_and_signs(words: Integers) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the tail in (0, 1/2) of each of ``words``, and whether its noise is negative.

    The tail is the probability of exceeding the noise's absolute value. The first bit of a word is the sign. The other 63 bits begin the
    tail. The returned tail is the middle of all that begin with them.
    """
    return ((words & np.int64(2**63 - 1)).astype(np.float64) + 0.5) * 2.0**-WORD, words < 0


def first_tail_bits(word: Any) -> int:
    """Return the first 64 bits of the tail in ``word``. The very first is 0, since a tail is below 1/2: ``word`` has the sign there."""
    return int(word) & (2**63 - 1)


def make_bit_drawer(source: RandomSource, row: int) -> Callable[[], int]:
    """Return a function that draws 64 more bits of the client ``row``, as a number from 0 to 2^64 - 1."""
    return lambda: int(draw_words64(source, range(row, row + 1), 1)[0, 0]) & (2**64 - 1)


def draw_integers_below(limits: Floats, source: RandomSource, rows: range) -> Floats:
    """Draw a uniform integer in 0 ... limit - 1 for each of ``limits`` (k, n), from 1 to 2^31, of the clients in ``rows``. Exact.

    The result is floor(limit * U) for a uniform real U. Floating point and 64 bits of U determine it, except in one draw in 2^19.
    """
    words = draw_words64(source, rows, limits.shape[1])
    # The first 63 bits of U, as a positive int64. A float64 has no digits for the last bit.
    products = (words.view(np.uint64) >> np.uint64(1)).view(np.int64).astype(np.float64)
    products *= limits
    products *= 2.0 ** (1 - WORD)  # limit * U
    drawn = np.floor(products)
    products -= drawn
    products -= 0.5
    # Fractions less 1/2. Those close to -1/2 or 1/2 come from products near an integer, whose floor the error may change.
    near_an_integer = np.abs(products, out=products) >= 0.5 - _ERROR_BELOW
    for row, column in _positions_of_true(near_an_integer):
        known_bits = int(words[row, column]) & (2**64 - 1)
        drawn[row, column] = _floor_of_product(int(limits[row, column]), known_bits, make_bit_drawer(source, rows[row]))
    return drawn


def _floor_of_product(limit: int, known_bits: int, draw_more_bits: Callable[[], int]) -> int:
    """Return floor(limit * U) for a uniform U in [0, 1) whose first 64 bits are ``known_bits``, drawing 64 more until it is certain."""
    bits = WORD
    while (known_bits * limit) >> bits != ((known_bits + 1) * limit - 1) >> bits:  # the smallest and the largest U give two results
        known_bits, bits = (known_bits << WORD) | draw_more_bits(), bits_after_next_draw(bits)
    return (known_bits * limit) >> bits


def largest_probability(odds: Callable[[Any], Any]) -> int:
    """Return the largest integer P < 2^64 with P / (2^64 - P) <= odds, or P - 1. So P / 2^64 is a probability with at most these odds.

    It may be P - 1 because rounding must never make the odds too large.

    Args:
        odds: returns the odds in the precision of the mpmath context that it is given.
    """
    context = mpmath.MPContext()
    context.prec = 256
    probability = 1 / (1 + 1 / odds(context)) * (1 - context.mpf(2) ** -200)  # 2^-200 is more than rounding adds
    return min(2**64 - 1, int(context.floor(probability * 2**64)))
