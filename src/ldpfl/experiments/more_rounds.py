"""More rounds for a run that has come to its end: what they release is charged on top, with the noise that the run had."""

from __future__ import annotations

from ldpfl.errors import ConfigError
from ldpfl.experiments.build import mechanism_of
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.server import has_stopped
from ldpfl.util.quantities import MAX_ROUNDS


def extended(folder: RunFolder, more: int) -> RunConfig:
    """Return the config under which the run in ``folder`` goes on for ``more`` rounds than it says. Nothing is written.

    The model and all that was released stay. A target for the guarantee was for the rounds before: it is left out, and the ledger
    says what holds after all of them.

    Raises:
        ConfigError: there is no such run, or what was done depended on how many rounds there would be.
    """
    config, last = folder.config(), folder.checkpoint()
    training = config.training
    if more < 1:
        raise ConfigError(f"a run is extended by at least one round, got {more}")
    if last is None or last.state.round < training.rounds:
        raise ConfigError(f"{folder.path} holds a run that is not finished: go on with it before it is extended")
    if training.rounds + more > MAX_ROUNDS:
        had = training.rounds
        raise ConfigError(f"a run has at most {MAX_ROUNDS:,} rounds, and this one has {had:,}: extend it by {MAX_ROUNDS - had:,} at most")
    changed = config.model_copy(
        update={
            "training": training.model_copy(update={"rounds": training.rounds + more, "extended": training.extended + more}),
            "privacy": config.privacy.model_copy(update={"target_epsilon": "off"}),
        }
    )
    depending = {"training.schedule": training.schedule != "constant", "training.server_schedule": training.server_schedule != "constant"}
    depending |= {"clients.once": config.clients.once, "training.method": training.method != "gradient"}
    depending |= {"evaluation.epsilon": config.evaluation.epsilon != "off"}
    depending |= {"training.patience": training.patience > 0 and has_stopped(last.history, training.patience)}
    depending |= {"mechanism": mechanism_of(config, last.state.ranges) != mechanism_of(changed, last.state.ranges)}
    fixed = [name for name, depends in depending.items() if depends]
    if fixed:
        raise ConfigError(f"{', '.join(fixed)} of this run depended on its number of rounds, so it cannot be extended: begin another one")
    return changed
