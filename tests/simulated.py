"""A small simulated federation that several tests share."""

from __future__ import annotations

import numpy as np

from ldpfl import LayerRanges, ParameterLayout, mechanisms, models
from ldpfl.data import Dataset, partition
from ldpfl.mechanisms.ranges import Denoised
from ldpfl.server import Checkpoint, ServerOptimiser, initial_checkpoint
from ldpfl.simulation import Federation, LocalTask, VectorizedTrainer
from ldpfl.simulation.federation import Evaluation, LocalWork, Participation
from ldpfl.simulation.local_steps import LocalOptimiser

CLIENTS = 9


def federation_of(
    data: Dataset,
    *,
    model: str = "logistic-regression",
    mechanism: str = "duchi",
    scheme: str = "iid",
    seed: int = 5,
    batch_size: int = 5,
    learning_rate: float = 0.05,
    clients: int = CLIENTS,
) -> tuple[Federation, Checkpoint]:
    """A small federation over ``data``, and its state before the first round."""
    module = models.create(model, data.shape, data.outputs, seed=1)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: p.detach() for name, p in module.named_parameters()})
    samples = partition(data.train.targets.numpy(), clients, np.random.default_rng(2), scheme=scheme)  # type: ignore[arg-type]
    task = LocalTask(module, layout, data.train, data.mean, data.std, LocalOptimiser(learning_rate))
    parameters = {"epsilon": 2.0} if mechanism == "duchi" else {}
    federation = Federation(
        seed=seed,
        secret_seed=seed,
        coin_seed=seed,
        task=task,
        trainer=VectorizedTrainer(task),
        samples=samples,
        evaluation=Evaluation(data.test),
        mechanism=mechanisms.create(mechanism, **parameters),
        perturbed="update",
        rule=Denoised(floor=0.005),
        optimiser=ServerOptimiser(),
        participation=Participation(1.0),
        work=LocalWork(1, batch_size),
        chunk_size=4,
    )
    return federation, initial_checkpoint(weights, LayerRanges(0.0, 0.02, layout.sizes))
