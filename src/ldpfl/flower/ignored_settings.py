"""Notes for the author of a new Flower app: a recipe's settings that are ignored or refused on Flower, and what each node needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ldpfl.experiments import RunConfig
from ldpfl.experiments.record_sums import is_evaluated
from ldpfl.flower.round_kinds import mean_held_back_records
from ldpfl.mechanisms.dp_sgd import DpSgdSettings
from ldpfl.util.user_code import PRETRAINED, is_pretrained


def setting_notes(config: RunConfig, *, at_nodes: bool) -> Iterator[str]:
    """Yield a line for each setting of ``config`` that is refused or ignored on Flower, or means something else than in a simulation.

    Args:
        at_nodes: whether each node trains on its own table, whatever ``config`` says of its data.
    """
    clients, data, default = config.clients, config.data, RunConfig()
    if clients.self_sampling != "off":
        yield f"clients.self_sampling = {clients.self_sampling}: refused on Flower, which shows who answers: set it to off"
    if clients.once:
        yield "clients.once: refused on Flower, which shows who answers: leave it out"
    if config.training.patience:
        yield f"training.patience = {config.training.patience}: refused on Flower: leave it out, and ask for fewer rounds"
    if config.clipping.is_adaptive and isinstance(config.mechanism, DpSgdSettings):
        yield f"clipping.target_quantile = {config.clipping.target_quantile}: refused on Flower with dp-sgd: set it to off"
    if is_evaluated(config):
        held_back = mean_held_back_records(config)
        keys = "evaluation.records" if config.evaluation.records else "mechanism.records and evaluation.share"
        yield f"evaluation at clients assumes {held_back:,} held-back records a client on average: set {keys} to what the nodes have"
    elif at_nodes and not data.test_path:
        yield "the model is not scored: set data.test_path to rows that the server may read, or evaluation.epsilon to let nodes measure"
    if at_nodes:
        meaning = (
            "a policy's min_clients, and the noise of a sum, are planned for this number of nodes in a round: set it to the number of "
            "your nodes. With ldpfl.nodes = 0 a round waits for this number of nodes"
        )
        yield f"clients.count = {clients.count}: {meaning}"
        partition_settings = ("partition", "alpha", "labels_per_client", "private_label", "private_alpha", "validation")
        for name in partition_settings:
            if getattr(data, name) != getattr(default.data, name):
                yield f"data.{name} = {getattr(data, name)}: has no effect, because each node trains on its own table"
    else:
        yield f"clients.count = {clients.count}: the data are divided into this number of parts: give each node one (partition-id)"
    if config.shuffling.channel not in ("direct", "secure-sum"):
        yield (
            f"shuffling.channel = {config.shuffling.channel}: has no effect: set ldpfl.transport (direct, relay or sum) to choose how "
            "reports travel"
        )
    division = "" if at_nodes else "how the data are divided, "
    yield (
        f"seed = {config.seed}: decides {division}the random initial weights, and which nodes are asked if a round asks only some. "
        "It does not decide the noise, which each node draws from its operating system"
    )
    yield "no model without noise is trained for comparison, and ldpfl attack cannot be used: both need all clients' data"


def node_requirements(config: RunConfig, *, at_nodes: bool) -> Iterator[str]:
    """Yield a line for each thing that a node needs, with the variable that names it in the environment of the node's SuperNode.

    ``at_nodes`` says whether each node trains on its own table.
    """
    yield (
        "LDPFL_POLICY, LDPFL_BUDGET: the node's policy and lifetime budget, made by ldpfl policy init; nodes share a budget only if they "
        "hold data of the same people"
    )
    if at_nodes:
        yield "LDPFL_DATA: the node's table"
    else:
        yield 'LDPFL_DATA_DIR: folder of the data sets, unless bundled; --node-config "partition-id=N num-partitions=M": the node\'s part'
    for name in dict.fromkeys((config.model.name, config.data.features, config.data.tokenizer)):  # each different name once
        if is_pretrained(name) and Path(folder := name.removeprefix(PRETRAINED)).is_dir():
            yield (
                f"{folder}: the folder of the pretrained model, with the same files at the same path on the server and on each node. The "
                "path is written into the app and the policy. For a model of the Hugging Face hub, name it hf:NAME in place of a folder"
            )
    yield "LDPFL_RELAY, LDPFL_RELAY_TOKEN, LDPFL_RELAY_CA, if ldpfl.transport is relay or sum: URL, file of the token, file of the CA"
    yield "LDPFL_SIGNING_KEY, if ldpfl.transport is sum: a key from ldpfl deploy node-key; give its line to aggregator and relay"
    yield "to check all these on a node, and to try a round's local work on its data: ldpfl deploy check-node --app APP --try"
