"""Small public and private states that the tests of noise schedules share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ldpfl.mechanisms.base import PublicState
from ldpfl.mechanisms.gaussian import ClientState, LocalSteps, NoiseSchedule, Sensitivity

SIZES = (40, 4, 300, 6)
STEPS = LocalSteps(learning_rate=0.1, epochs=2, batch_size=50, clip_norm=1.5)
THEOREM = Sensitivity("theorem", STEPS)
CLIPPED = Sensitivity("update_clip", norm=0.5)


def public_state(round_number: int = 2, *, seed: int = 0, step: float = 1e-3, sizes: tuple[int, ...] = SIZES) -> PublicState:
    """Weights of size 0.1 that moved by ``step`` in the round before."""
    generator = torch.Generator().manual_seed(seed)
    weights = 0.1 * torch.randn(sum(sizes), generator=generator)
    previous = weights - step * torch.randn(sum(sizes), generator=generator)
    return PublicState(round_number, weights, previous if round_number > 1 else None, sizes)


def client_state(
    public: PublicState, clients: int = 3, *, seed: int = 1, step: float = 1e-2, joined: int = 1, memory: Mapping[str, Tensor] | None = None
) -> ClientState:
    """Clients whose training moved each weight by about ``step``."""
    generator = torch.Generator().manual_seed(seed)
    trained = public.weights + step * torch.randn(clients, len(public.weights), generator=generator)
    return ClientState(trained, torch.full((clients,), 500), torch.full((clients,), joined), memory or {})


def fresh_clients(schedule: NoiseSchedule, public: PublicState, clients: int = 3, *, seed: int = 1, step: float = 1e-2) -> ClientState:
    """Clients in their first round, with the memory that ``schedule`` gives them."""
    memory = schedule.initial_memory(clients, len(public.weights))
    return client_state(public, clients, seed=seed, step=step, joined=0, memory=memory)
