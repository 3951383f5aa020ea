"""Many cheap settings in one test: a case of its own costs each of them ten times as long as what it checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each of ``values``, as ``pytest.mark.parametrize`` would, but as one test; what fails says with which.

    All are tried, whichever fail, until one takes too long or skips the test. For tests that keep nothing from one setting to the
    next: they share their fixtures, as parametrised tests would not.

    Raises:
        ValueError: there are no ``values``, so the test would pass whatever it says.
    """
    keys, cases = ((names,), [(value,) for value in values]) if isinstance(names, str) else (names, [*values])
    if not cases:
        raise ValueError(f"a grid over {', '.join(keys)} needs a value")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def over(**given: Any) -> None:
            failed: list[BaseException] = []
            for case in cases:
                own = dict(zip(keys, case, strict=True))
                try:
                    test(**given, **own)
                except _FAILURES as error:
                    error.add_note(f"with {own}")
                    failed.append(error)
                    if str(error).startswith("Timeout"):  # of pytest-timeout, which rings once: nothing would stop the next
                        break
            if len(failed) == 1:
                raise failed[0]
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(cases)} settings", failed)

        left = [parameter for name, parameter in inspect.signature(test).parameters.items() if name not in keys]
        over.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return over

    return decorate


_FAILURES = (Exception, pytest.fail.Exception, BaseExceptionGroup)
"""What a failed setting raises, a loop in the loop too; not what ends a test: an interrupt, a skip."""
