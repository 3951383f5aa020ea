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
    x, y, z, t = point
    negated = (-x % _P, y, z, -t % _P)
    # The signature fits if scalar * base - challenge * point is the point that its first half encodes.
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
    # On the curve x^2 = (y^2 - 1) / (d y^2 + 1). If this has a root, it is the power below, or that times the root of -1.
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
    projective_x, projective_y, z, _ = point
    inverse = pow(z, -1, _P)
    x, y = projective_x * inverse % _P, projective_y * inverse % _P
    return (y | (x % 2) << 255).to_bytes(32, "little")


def _add(first: Point, second: Point) -> Point:
    """Add two points by the formulas of RFC 8032, section 5.1.4, which hold for equal points as well."""
    (x1, y1, z1, t1), (x2, y2, z2, t2) = first, second
    a, b = (y1 - x1) * (y2 - x2), (y1 + x1) * (y2 + x2)
    c, d = 2 * t1 * t2 * _D, 2 * z1 * z2
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
