"""A run that stops by public rows, and clients that count by how many records they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ldpfl import ConfigError, api
from ldpfl.api.results import RunResult
from ldpfl.data import Dataset, Samples
from ldpfl.data.holding_out import split_off_validation

ROUNDS = 20
STOPPING = {"training.patience": 2, "data.validation": 0.5}


def points(count: int, seed: int) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return Samples(inputs, (inputs[:, 0] > 0).long())


def data(sizes: tuple[int, ...] = (40, 40, 40)) -> Dataset:
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return Dataset("points", points(sum(sizes), 1), points(100, 2), 2, (), (), "points", clients=owners)


def run(*, settings: dict[str, Any], folder: Path | None = None, resume: bool = False, **more: Any) -> RunResult:
    """A run so noisy that its model soon becomes worse."""
    noise = {"privacy.target_epsilon": "off", "mechanism.noise_multiplier": 400.0}
    usual = {"seed": 1, "training.rounds": ROUNDS, **noise, "training.server_learning_rate": 3.0, "training.average": 0.0}
    return api.run(data=data(), settings={**usual, **settings}, folder=folder, resume=resume, baseline=False, progress=False, **more)


def test_a_run_stops_when_public_rows_say_so_and_keeps_its_best_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a run that does not, with the same noise: two runs of one's own data have none in common otherwise."""
    monkeypatch.setattr("ldpfl.experiments.build.secret_seed", lambda config, task, secret: config.seed)
    whole, stopped = run(settings={"data.validation": 0.5, "training.patience": ROUNDS}), run(settings=STOPPING)
    losses = [metrics.validation for metrics in whole.history]
    found = [metrics.validation for metrics in stopped.history]
    last = found.index(None)
    assert last < ROUNDS - 2
    assert found == [*losses[:last], *[None] * (ROUNDS - last)]
    best = min(range(last), key=lambda place: losses[place] or 0.0)
    assert last - 1 - best == 2
    assert [metrics.clients for metrics in stopped.history] == [3] * last + [0] * (ROUNDS - last)
    shorter = run(settings={"data.validation": 0.5, "training.patience": ROUNDS, "training.rounds": best + 1})
    ours, theirs = stopped.module().state_dict(), shorter.module().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert stopped.score == shorter.score


@pytest.mark.thorough
def test_rounds_after_the_stop_are_charged_for_when_to_stop_was_no_secret() -> None:
    whole, stopped = run(settings={}), run(settings=STOPPING)
    assert stopped.ledger == whole.ledger
    (said,) = (one for one in stopped.to_dict()["caveats"] if "and the guarantee counts all" in one)
    assert said.endswith("decided by the loss on the rows of data.validation, which are not protected: the guarantee does not cover it")
    assert stopped.to_dict()["stopped_after"] < ROUNDS
    assert run(settings={"data.validation": 0.5, "training.patience": ROUNDS}).to_dict()["stopped_after"] is None


@pytest.mark.thorough
def test_a_stopped_run_is_resumed_as_one_and_not_extended(tmp_path: Path) -> None:
    once = run(settings=STOPPING)

    def interrupt(metrics: Any) -> None:
        if metrics.round in (2, once.to_dict()["stopped_after"] + 1):
            raise KeyboardInterrupt

    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            run(settings=STOPPING, folder=tmp_path / "run", resume=resume, on_round=interrupt)
    again = run(settings=STOPPING, folder=tmp_path / "run", resume=True)
    assert [metrics.reproducible() for metrics in again.history] == [metrics.reproducible() for metrics in once.history]
    ours, theirs = again.module().state_dict(), once.module().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(ConfigError, match=r"depend on the number of rounds.*: training\.patience;"):
        api.run(folder=tmp_path / "run", resume=True, more_rounds=2, progress=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"training.patience": 3}, "set both, or neither"),
        ({"data.validation": 0.5}, "set both, or neither"),
        ({**STOPPING, "data.validation": 0.001}, "0 of 100 test rows"),
    ],
)
def test_what_stops_and_by_what_go_together(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(settings=settings)


def test_rows_that_say_when_to_stop_are_not_measured_on() -> None:
    task = data()
    left, stopping = split_off_validation(task, 0.3)
    assert stopping is not None
    measured, chosen, every = ({row[0] for row in torch.as_tensor(part.inputs).tolist()} for part in (left.test, stopping, task.test))
    assert (len(measured), len(chosen), len(every)) == (70, 30, 100)
    assert measured | chosen == every


# --- clients that count by their records ------------------------------------------------------------------------------

WEIGHED = {"seed": 1, "mechanism.name": "none", "privacy.target_epsilon": "off", "training.rounds": 1, "training.average": 0.0}


def change(sizes: tuple[int, ...], **settings: Any) -> Tensor:
    """The mean change of one round without noise."""
    result = api.run(data=data(sizes), settings={**WEIGHED, **settings}, baseline=False, progress=False)
    return torch.cat([value.flatten() for value in result.module().state_dict().values()])


@pytest.mark.thorough_except("update")
@pytest.mark.parametrize("perturbed", ["update", "gradient"])
def test_a_client_with_few_records_counts_for_less(perturbed: str) -> None:
    sizes, own = (10, 40, 40), {"mechanism.perturbed": perturbed}
    start = change(sizes, **own, **{"training.server_learning_rate": 1e-30})
    alone = change(sizes, **own, **{"clients.full_weight": 10}) - start  # all have as many, and count in full
    assert torch.equal(alone, change(sizes, **own) - start)
    scaled_by_size, scaled = (change(sizes, **own, **{"clients.full_weight": most}) - start for most in (40, 400))
    assert not torch.allclose(scaled_by_size, alone, atol=1e-6)
    torch.testing.assert_close(scaled, scaled_by_size / 10, rtol=1e-3, atol=1e-6)


@pytest.mark.thorough_except("settings1-clients.full_weight scales updates")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (['mechanism.name="dp-sgd"'], "where all records count the same"),
        (['mechanism.name="duchi"', 'mechanism.perturbed="weights"'], "clients.full_weight scales updates"),
    ],
)
def test_only_changes_are_scaled(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        api.run(data=data(), settings=[*settings, "clients.full_weight=10"], baseline=False, progress=False)
