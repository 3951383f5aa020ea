"""Add rounds to a finished run. They have the noise of the run, and are charged in addition."""

from __future__ import annotations

from ldpfl.errors import ConfigError
from ldpfl.experiments.build import mechanism_of
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.server import has_stopped
from ldpfl.util.quantities import MAX_ROUNDS


def config_with_more_rounds(folder: RunFolder, more: int) -> RunConfig:
    """Return the config with which the finished run in ``folder`` trains for ``more`` further rounds. Nothing is written.

    The target epsilon was for the original rounds, so it becomes ``privacy.original_target``. The ledger says what the guarantee is after
    all rounds.

    Raises:
        ConfigError: there is no finished run, it would have too many rounds, or a setting of it depends on the number of rounds.
    """
    config, checkpoint = folder.config(), folder.checkpoint_needed()
    training = config.training
    if more < 1:
        raise ConfigError(f"more_rounds is {more}, expected at least 1")
    if checkpoint is None or checkpoint.state.round < training.rounds:
        raise ConfigError(f"{folder.path} contains a run that is not finished: finish it with --resume before you extend it")
    if training.rounds + more > MAX_ROUNDS:
        now = training.rounds
        raise ConfigError(f"a run has at most {MAX_ROUNDS:,} rounds, and this one has {now:,}: extend it by {MAX_ROUNDS - now:,} at most")
    target, original = config.privacy.target_epsilon, config.privacy.original_target
    # In a run that was extended before, the target is "off" and ``original`` holds it already.
    privacy = {"target_epsilon": "off", "original_target": original if target == "off" else target}
    changed = config.model_copy(
        update={
            "training": training.model_copy(update={"rounds": training.rounds + more, "extended": training.extended + more}),
            "privacy": config.privacy.model_copy(update=privacy),
        }
    )
    # For each setting that may depend on the number of rounds: whether the finished rounds would have been different with more rounds.
    depends_on_rounds = {
        "training.schedule": training.schedule != "constant",
        "training.server_schedule": training.server_schedule != "constant",
        "clients.once": config.clients.once,
        "training.method": training.method != "gradient",
        "evaluation.epsilon": config.evaluation.epsilon != "off",
        "training.patience": training.patience > 0 and has_stopped(checkpoint.history, training.patience),
        "mechanism": mechanism_of(config, checkpoint.state.ranges) != mechanism_of(changed, checkpoint.state.ranges),
    }
    keys = [key for key, is_dependent in depends_on_rounds.items() if is_dependent]
    if keys:
        raise ConfigError(f"these settings depend on the number of rounds, so no rounds can be added: {', '.join(keys)}; begin another run")
    return changed
