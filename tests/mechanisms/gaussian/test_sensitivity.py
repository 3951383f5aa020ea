"""Sensitivities, constants, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ldpfl import ConfigError
from ldpfl.mechanisms.gaussian import LocalSteps, Sensitivity
from ldpfl.mechanisms.gaussian.sensitivity import noise_constant, require_usable

STEPS = LocalSteps(learning_rate=0.1, epochs=3, batch_size=50, clip_norm=2.0)


def test_each_mode_is_its_formula() -> None:
    assert Sensitivity("theorem", STEPS).value == pytest.approx(1.2, rel=1e-15)
    assert Sensitivity("per_batch", STEPS).value == pytest.approx(1.2 / 50, rel=1e-15)
    assert Sensitivity("per_dataset", STEPS, samples=500).value == pytest.approx(1.2 / 500, rel=1e-15)
    assert Sensitivity("update_clip", norm=0.7).value == 1.4


def test_only_clipping_is_proved() -> None:
    assert Sensitivity("update_clip", norm=0.7).proved
    assert Sensitivity("update_clip", norm=0.7).reason == ""
    for mode in ("theorem", "per_batch", "per_dataset"):
        sensitivity = Sensitivity(mode, STEPS, samples=500)
        assert not sensitivity.proved
        assert mode in sensitivity.reason


def test_the_constants() -> None:
    assert noise_constant("theorem3", 0.2, 0.02) == pytest.approx(2.75157, abs=5e-6)
    assert noise_constant("exact", 0.2, 0.02) == pytest.approx(0.97048, abs=5e-6)
    assert noise_constant("classical", 0.2, 0.02) == pytest.approx(math.sqrt(2 * math.log(1.25 / 0.02)), rel=1e-14)
    assert noise_constant("exact", 0.5, 1e-5) / 0.5 == pytest.approx(7.0318, abs=6e-5)
    with pytest.raises(ConfigError, match="proved for epsilon < 1"):
        noise_constant("classical", 1.0, 0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "update_clip"}, "needs norm"),
        ({"mode": "update_clip", "norm": 0.0}, "norm must be positive"),
        ({"mode": "update_clip", "norm": -1.0}, "norm must be positive"),
        ({"mode": "update_clip", "norm": math.nan}, "norm must be positive"),
        ({"mode": "theorem"}, "needs steps"),
        ({"mode": "per_dataset", "steps": STEPS}, "needs samples"),
        ({"mode": "per_dataset", "steps": STEPS, "samples": 0}, "samples must be positive"),
        ({"mode": "guess", "steps": STEPS}, "unknown sensitivity mode"),
    ],
)
def test_an_incomplete_sensitivity_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        Sensitivity(**settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["learning_rate", "epochs", "batch_size", "clip_norm"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True])
def test_impossible_local_steps_are_refused(name: str, value: float) -> None:
    settings: dict[str, Any] = {"learning_rate": 0.1, "epochs": 1, "batch_size": 50, "clip_norm": 1.0, name: value}
    with pytest.raises(ConfigError, match=f"{name} must be positive and finite"):
        LocalSteps(**settings)


def test_an_unknown_constant_and_unusable_noise_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown noise constant"):
        noise_constant("best", 0.2, 0.02)
    for sigma in (0.0, 1e-30, 1e30, math.inf, math.nan):
        with pytest.raises(ConfigError, match="expected 1e-20 to 1e20"):
            require_usable(sigma)
