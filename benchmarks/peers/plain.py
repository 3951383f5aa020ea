"""A round by a plain loop: one client after another, PyTorch's SGD, and the mean of the weights."""

from __future__ import annotations

import torch
from round_of import BATCH, RATE, task_from_arguments, time_rounds
from torch.nn import functional as F
from torch_models import model_of


def main() -> None:
    """Time the rounds."""
    task = task_from_arguments()
    torch.set_num_threads(task.threads)
    images, labels = torch.from_numpy(task.images), torch.from_numpy(task.labels)
    model = model_of(task.model)
    weights = [parameter.detach().clone() for parameter in model.parameters()]

    def run_round(number: int) -> None:
        total = [torch.zeros_like(weight) for weight in weights]
        for rows in task.clients:
            with torch.no_grad():
                for parameter, weight in zip(model.parameters(), weights, strict=True):
                    parameter.copy_(weight)
            optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
            order = torch.from_numpy(rows)[torch.randperm(len(rows))]
            for batch in order.split(BATCH):
                optimiser.zero_grad()
                F.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimiser.step()
            for sum_, parameter in zip(total, model.parameters(), strict=True):
                sum_ += parameter.detach()
        for weight, sum_ in zip(weights, total, strict=True):
            weight.copy_(sum_ / len(task.clients))

    time_rounds(task, run_round)


if __name__ == "__main__":
    main()
