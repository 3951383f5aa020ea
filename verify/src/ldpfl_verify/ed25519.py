"""Check Ed25519 signatures (RFC 8032) in plain Python. It takes some milliseconds, which is enough for one file.

Nothing secret is computed here, so that it does not matter how long a step takes.
"""

from __future__ import annotations

import hashlib

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT_OF_MINUS_ONE = pow(2, (_P - 1) // 4, _P)
"""Prime p of the field, order of the curve's generator, constant d of the curve, and a square root of -1 modulo p (RFC 8032)."""

Point = tuple[int, int, int, int]
"""Extended coordinates (X, Y, Z, T) of the point x = X / Z, y = Y / Z, with T = X Y / Z."""


def signature_fits(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether ``signature`` (64 bytes) of ``message`` was made with the key of ``public_key`` (32 bytes); RFC 8032, 5.1.7."""
    point = _decoded(public_key)
    scalar = int.from_bytes(signature[32:], "little")
    if point is None or len(signature) != 64 or scalar >= _ORDER:
        return False
    digest = hashlib.sha512(signature[:32] + public_key + message).digest()
    challenge = int.from_bytes(digest, "little") % _ORDER
    negated = (-point[0] % _P, point[1], point[2], -point[3] % _P)
    return _encoded(_add(_times(scalar, _BASE), _times(challenge, negated))) == signature[:32]


def has_small_order(public_key: bytes) -> bool:
    """Return whether a public key is one of the points of order 1, 2, 4 or 8: anybody can make up signatures that fit such a key.

    The y coordinate of such a point is 1, -1 or 0, or doubling the point gives y = 0, which means d y^4 + 2 y^2 = 1.
    """
    y = int.from_bytes(public_key, "little") % 2**255 % _P
    return y in (0, 1, _P - 1) or (_D * pow(y, 4, _P) + 2 * y * y - 1) % _P == 0


def _decoded(encoded: bytes) -> Point | None:
    """Return the point that 32 bytes encode, or None if they encode no point of the curve (RFC 8032, section 5.1.3)."""
    if len(encoded) != 32:
        return None
    number = int.from_bytes(encoded, "little")
    sign, y = number >> 255, number % 2**255
    if y >= _P:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _ROOT_OF_MINUS_ONE % _P
    if (x * x - square) % _P or (x == 0 and sign):
        return None
    if x % 2 != sign:
        x = _P - x
    return x, y, 1, x * y % _P


def _encoded(point: Point) -> bytes:
    """Return the 32 bytes that encode ``point``: y, and the lowest bit of x in the highest bit."""
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x % 2) << 255).to_bytes(32, "little")


def _add(first: Point, second: Point) -> Point:
    """Add two points by the formulas of RFC 8032, section 5.1.4, which hold for equal points as well."""
    a = (first[1] - first[0]) * (second[1] - second[0])
    b = (first[1] + first[0]) * (second[1] + second[0])
    c, d = 2 * first[3] * second[3] * _D, 2 * first[2] * second[2]
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times(scalar: int, point: Point) -> Point:
    """Return ``scalar`` times ``point``, by doubling and adding."""
    total: Point = (0, 1, 1, 0)
    while scalar:
        if scalar & 1:
            total = _add(total, point)
        point, scalar = _add(point, point), scalar >> 1
    return total


_BASE_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
_BASE_Y = 46316835694926478169428394003475163141307993866256225615783033603165251855960
_BASE: Point = (_BASE_X, _BASE_Y, 1, _BASE_X * _BASE_Y % _P)
"""The generator of the standard, of order :data:`_ORDER`."""
