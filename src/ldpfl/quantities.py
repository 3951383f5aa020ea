"""Types of the numbers that people write in settings: what pydantic checks of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat

Positive = Annotated[FiniteFloat, Field(gt=0)]
NotNegative = Annotated[FiniteFloat, Field(ge=0)]
Share = Annotated[FiniteFloat, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Repeats = Annotated[int, Field(ge=1, le=10**6)]
"""What is gone through one by one."""
