"""A round by pfl: federated averaging on its simulated backend; several processes by ``torch.distributed.run``, as its documents say."""

from __future__ import annotations

import os

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import to_tensor
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from round_of import BATCH, RATE, task_from_arguments, time_rounds
from torch import Tensor
from torch.nn import functional as F
from torch_models import CNN, Linear


def with_loss(kind: type) -> type:
    """Return a subclass of the module ``kind`` with the methods that pfl calls: ``loss``, and ``metrics``, which are not used here."""

    class Model(kind):  # type: ignore[misc, valid-type]
        def loss(self, images: Tensor, labels: Tensor, eval: bool = False) -> Tensor:
            self.eval() if eval else self.train()
            return F.cross_entropy(self(images), labels)

        def metrics(self, images: Tensor, labels: Tensor, eval: bool = True) -> dict[str, Weighted]:
            return {"loss": Weighted(0.0, len(images))}

    return Model


def main() -> None:
    """Time the rounds."""
    task = task_from_arguments()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, task.threads // processes))
    module = with_loss(CNN if task.model == "cnn" else Linear)()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    images, labels = to_tensor(task.images), torch.from_numpy(task.labels)

    def dataset_of(user: int) -> Dataset:
        rows = torch.from_numpy(np.random.permutation(task.clients[user]))
        return Dataset([images[rows], labels[rows]], user_id=str(user), train_kwargs={"eval": False}, eval_kwargs={"eval": True})

    users = list(range(len(task.clients)))
    dataset = FederatedDataset(dataset_of, get_user_sampler("minimize_reuse", users))
    backend = SimulatedBackend(training_data=dataset, val_data=dataset)
    training = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=min(BATCH, len(task.clients[0])))

    def run_round(number: int) -> None:
        FederatedAveraging().run(
            NNAlgorithmParams(central_num_iterations=1, evaluation_frequency=1000, train_cohort_size=len(users), val_cohort_size=None),
            backend,
            model,
            training,
            NNEvalHyperParams(local_batch_size=1000),
            send_metrics_to_platform=False,
        )

    time_rounds(task, run_round, prints=os.environ.get("RANK", "0") == "0")


if __name__ == "__main__":
    main()
