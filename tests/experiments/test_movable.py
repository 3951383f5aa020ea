"""Parameters that no step can change are found, and those that are only idle on made-up samples are not."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from ldpfl import ConfigError, api
from ldpfl.experiments.build import build
from ldpfl.experiments.dataset import CallerObjects, load_dataset

ROWS = pd.DataFrame({"age": [float(row % 50) for row in range(80)], "sick": ["no", "yes", "yes", "no"] * 20})
OWN = {
    **{"data.name": "given", "data.target": "sick", "data.bounds": {"age": [0, 100]}, "clients.count": 4, "training.rounds": 1},
    **{"model.name": "mlp", "model.options": {"hidden": 3}, "privacy.target_epsilon": "off", "mechanism.clip_norm": 1.0},
}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_small_mlp_is_not_refused_for_units_that_are_idle_on_the_made_up_samples() -> None:
    """Of seeds 0 to 59 some begin with three units that are 0 for each of a few samples."""
    for seed in range(60):
        config = api.configure("own", settings={**OWN, "seed": seed})
        build(config, load_dataset(config, None, caller_objects=CallerObjects(ROWS, None)), torch.device("cpu"), None, secret=1)


class Unused(torch.nn.Module):
    """A classifier one of whose layers no sample passes."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(1, 2), torch.nn.Linear(1, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.used(rows))


def test_a_layer_that_no_sample_passes_is_refused_by_name() -> None:
    model = Unused()
    config = api.configure("own", settings={**OWN, "model.name": "given", "model.options": {}})
    with pytest.raises(ConfigError, match=r"cannot train parameter unused\.weight and 1 others: its outputs do not depend on it"):
        build(config, load_dataset(config, None, caller_objects=CallerObjects(ROWS, model)), torch.device("cpu"), model, secret=1)
