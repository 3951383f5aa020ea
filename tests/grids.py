"""Many cheap settings in one test: a case of its own costs each of them ten times as long as what it checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each of ``values``, as ``pytest.mark.parametrize`` would, but as one test; what fails says with which.

    For tests that keep nothing from one setting to the next: they share their fixtures.
    """
    keys, cases = ((names,), [(value,) for value in values]) if isinstance(names, str) else (names, [*values])

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def over(**given: Any) -> None:
            for case in cases:
                own = dict(zip(keys, case, strict=True))
                try:
                    test(**given, **own)
                except BaseException as error:
                    error.add_note(f"with {own}")
                    raise

        left = [parameter for name, parameter in inspect.signature(test).parameters.items() if name not in keys]
        over.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return over

    return decorate
