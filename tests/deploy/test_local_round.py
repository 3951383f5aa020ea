"""``ldpfl deploy check-node --try``: an operator's mistakes are found before a round is charged, and nothing leaves or is written."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import CommandLine, digits, write_split
from ldpfl.deploy.node_check import check_node
from ldpfl.deploy.node_set_up import Finding, NodeSetUp, Standing, Trial
from ldpfl.flower.policy_init import fitting_policy, offer_of, policy_text, ranges_for
from ldpfl.privacy.budget_file import set_limit
from ldpfl.transport.shuffling.sealing import generate_key, public_text
from ldpfl.transport.sums.node_keys import make_key

SECRET = "80713"
"""A value in a table, which no message may repeat."""

PROJECT = """
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "own_app.server_app:app"
clientapp = "own_app.client_app:app"
[tool.flwr.app.config.ldpfl]
transport = "{transport}"
min-clients = 3
reply-s = {reply_s}
"""
OF_RECORDS = '[mechanism]\nname = "dp-sgd"\nrecords = 40\nperturbed = "gradient"\n[clients]\ncount = 3\n'
OF_LOOP = '[mechanism]\nname = "duchi"\nepsilon = 2.0\nperturbed = "update"\n[ranges]\nradius = 0.2\n[clients]\ncount = 3\n'
RECORDS = """
import os
import numpy as np
import torch
from torch.nn.functional import cross_entropy
from ldpfl.flower import RecordTask

def records(context):
    table = np.loadtxt(os.environ["LDPFL_DATA"], delimiter=",", skiprows=1, dtype=np.float32)
    return RecordTask(torch.nn.Linear(2, 3), torch.from_numpy(table[:, :2]), torch.from_numpy(table[:, 2]).long(), cross_entropy)
"""
LOOP = """
import os
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    table = np.loadtxt(os.environ["LDPFL_DATA"], delimiter=",", skiprows=1, dtype=np.float32)
    inputs, targets = table[:, :2], table[:, 2:]
    weight, bias = (message.content["arrays"][name].numpy().copy() for name in ("weight", "bias"))
    for _ in range(message.content["config"]["epochs"]):
        wrong = inputs @ weight.T + bias - targets
        weight -= np.float32(0.1) * (wrong.T @ inputs) / len(table)
        bias -= np.float32(0.1) * wrong.mean(axis=0)
    return Message(RecordDict({"arrays": ArrayRecord({"weight": Array(weight), "bias": Array(bias)})}), reply_to=message)
"""
LOOP_TRIAL = Trial(train_config={"epochs": 5})


def table_text() -> str:
    generator = np.random.default_rng(7)
    rows = [f"{a:.3f},{b:.3f},{c}" for a, b, c in zip(*generator.normal(size=(2, 40)), generator.integers(0, 3, 40), strict=True)]
    return "\n".join(["a,b,c", *rows]) + "\n"


def equipped(folder: Path, training: str, config: str, client: str, *, transport: str = "direct", reply_s: float = 60.0) -> NodeSetUp:
    """Write an own app, a table, and the policy and budget of a node; return the node."""
    app = folder / "own-app"
    (app / "own_app").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT.format(transport=transport, reply_s=reply_s), encoding="utf-8")
    for name, text in (("__init__", ""), ("training", training), ("client_app", client)):
        (app / "own_app" / f"{name}.py").write_text(text, encoding="utf-8")
    (app / "own_app" / "config.toml").write_text(config, encoding="utf-8")
    node = NodeSetUp(
        folder / "policy.toml",
        folder / "budget.sqlite",
        data=str(folder / "table.csv"),
        app=str(app),
        config=app / "own_app" / "config.toml",
        layers=(2, 1),
        shapes={"weight": (1, 2), "bias": (1,)},
    )
    (folder / "table.csv").write_text(table_text(), encoding="utf-8")
    (folder / "table.csv").chmod(0o600)
    offer = offer_of(str(app), node.config)
    keys = [] if transport == "direct" else [public_text(generate_key())]
    policy = fitting_policy(offer, ranges_for(offer, () if "records=" in client else node.layers), keys)
    (folder / "policy.toml").write_text(policy_text(policy, "a test"), encoding="utf-8")
    set_limit(folder / "budget.sqlite", policy.lifetime_epsilon, policy.delta)
    return node


@pytest.fixture
def of_records(tmp_path: Path) -> NodeSetUp:
    node = equipped(
        tmp_path, RECORDS, OF_RECORDS, 'from ldpfl.flower import LdpClientApp\napp = LdpClientApp(records="own_app.training:records")\n'
    )
    return replace(node, layers=(), shapes={})


@pytest.fixture
def of_loop(tmp_path: Path) -> NodeSetUp:
    return equipped(tmp_path, LOOP, OF_LOOP, 'from ldpfl.flower import LdpClientApp\napp = LdpClientApp("own_app.training:app")\n')


def tried(node: NodeSetUp, trial: Trial = LOOP_TRIAL) -> list[Finding]:
    """Return what a trial finds; whatever is written, or repeats a value of the table, fails the test."""
    folder = (node.policy or Path()).parent
    before = contents(folder)
    findings = list(check_node(node, trial=trial))
    assert contents(folder) == before
    assert not any(SECRET in finding.said for finding in findings)
    return findings


def contents(folder: Path) -> dict[str, str]:
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.rglob("*")) if file.is_file()}


def said(node: NodeSetUp, trial: Trial = LOOP_TRIAL) -> str:
    """Return what is wrong or to be looked at, a line a finding."""
    found = [one for one in tried(node, trial) if one.standing is not Standing.FINE]
    return "\n".join(f"{one.standing.value} {one.what}: {one.said}" for one in found)


def change(node: NodeSetUp, old: str, new: str) -> None:
    """Change the node's copy of the app."""
    file = Path(node.app or "") / "own_app" / "training.py"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def spoil(node: NodeSetUp, line: int, cells: str) -> None:
    """Put ``cells`` in the place of a row of the table, or with line 0 of its header."""
    file = Path(node.data or "")
    lines = file.read_text(encoding="utf-8").splitlines()
    lines[line] = cells
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.thorough
def test_apps_in_order_make_a_report_of_which_nothing_stays(
    of_records: NodeSetUp, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a trial connects to nobody")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    loop = equipped(
        tmp_path_factory.mktemp("loop"),
        LOOP,
        OF_LOOP,
        'from ldpfl.flower import LdpClientApp\napp = LdpClientApp("own_app.training:app")\n',
    )
    for node, values in ((of_records, "9 values"), (loop, "3 values")):
        assert said(node) == ""
        last = tried(node)[-1]
        assert (last.what, last.standing) == ("try", Standing.FINE)
        assert f"trained {values}" in last.said
        assert "thrown away: nothing was charged or sent" in last.said


BROKEN_RECORDS = {
    "a column that is not there": ("table[:, 2]", "table[:, 3]", "IndexError at training.py:10, in: return RecordTask("),
    "a dtype": (
        "torch.from_numpy(table[:, :2])",
        "torch.from_numpy(table[:, :2]).double()",
        "`inputs` has torch.float64 and shape (40, 2), expected",
    ),
    "fewer targets": ("table[:, 2]).long()", "table[1:, 2]).long()", "`inputs` has 40 rows and `targets` has 39"),
    "a shape": (
        "torch.nn.Linear(2, 3)",
        "torch.nn.Linear(5, 3)",
        "RuntimeError at linear.py:",
    ),
    "batch normalisation": (
        "torch.nn.Linear(2, 3)",
        "torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 3))",
        "the app's model is refused: it cannot be trained privately: buffers: "
        "batch normalisation mixes private samples and stores their statistics, use torch.nn.GroupNorm instead",
    ),
    "dropout": (
        "torch.nn.Linear(2, 3)",
        "torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(0.5))",
        "dropout draws random numbers from a generator that all clients share: set it to 0",
    ),
    "no task": ("return RecordTask(", "return list(", "TypeError at training.py"),
    "another file": ('os.environ["LDPFL_DATA"]', '"elsewhere.csv"', "a file that the line opens does not exist"),
    "a module": ("import torch\n", "import torch\nimport not_there_at_all\n", "'not_there_at_all', which cannot be imported here"),
    "a loss": (", cross_entropy)", ", lambda found, targets: found.sum(1, 2))", "TypeError at training.py:10, in: "),
    "a death": ("    return RecordTask", "    os._exit(3)\n    return RecordTask", "ended without a result. It was killed"),
    "the end": ("    return RecordTask", "    raise SystemExit\n    return RecordTask", "the app has ended its process"),
    "no records": (
        "table[:, :2]), torch.from_numpy(table[:, 2])",
        "table[:0, :2]), torch.from_numpy(table[:0, 2])",
        "RecordTask has no records",
    ),
}


@pytest.mark.thorough_except("a dtype")
@pytest.mark.parametrize("case", BROKEN_RECORDS)
def test_what_is_wrong_with_records_of_one_s_own_is_said(case: str, of_records: NodeSetUp) -> None:
    old, new, words = BROKEN_RECORDS[case]
    change(of_records, old, new)
    found = said(of_records)
    assert found.startswith("wrong try: ")
    assert words in found


def test_a_device_that_is_not_there_is_named(of_records: NodeSetUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LDPFL_DEVICE", "cudo")
    assert "LDPFL_DEVICE: unknown device 'cudo': known: auto, cpu, cuda" in said(of_records)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ("0.5,0.5,7", "is its target outside the classes"),
        ("nan,0.5,1", "its inputs hold NaN or infinity"),
        ("1e39,0.5,1", "its inputs hold NaN or infinity"),
    ],
)
def test_records_that_add_nothing_are_counted_and_the_first_is_explained(cells: str, words: str, of_records: NodeSetUp) -> None:
    spoil(of_records, 4, cells)
    found = said(of_records)
    assert "1 of 40 records adds nothing to training: index 3 (counted from 0). Reason for the first: " in found
    assert words in found
    assert tried(of_records)[-1].standing is Standing.FINE  # the others train


BROKEN_LOOPS = {
    "raises": ("    inputs, targets", "    raise ValueError(f'bad {table[0, 0]}')\n    inputs, targets", "the app's own `raise` statement"),
    "a name of the server's": ('("weight", "bias"))', '("weights", "bias"))', "KeyError at training.py:13, in: weight, bias = "),
    "a setting": ('["epochs"]', '["steps"]', 'KeyError at training.py:14, in: for _ in range(message.content["config"]["steps"])'),
    "a column": (
        "    inputs, targets",
        "    dict()['crp']\n    inputs, targets",
        "KeyError about 'crp' at training.py:12",
    ),
    "another shape": (
        "Array(weight)",
        "Array(weight.T.copy())",
        "array weight must be float32 of shape (1, 2), got float32 of shape (2, 1)",
    ),
    "another dtype": (
        "Array(bias)",
        "Array(bias.astype('float64'))",
        "array bias must be float32 of shape (1,), got float64 of shape (1,)",
    ),
    "another name": ('"bias": Array', '"offset": Array', "1 missing, 1 unknown"),
    "no arrays": ('{"arrays": ArrayRecord(', '{"arrays": ArrayRecord({}) if 1 else ArrayRecord(', "2 missing, 0 unknown"),
    "NaN": ("wrong.mean(axis=0)", "np.float32('nan')", "trained values have NaN or infinity"),
    "nothing learnt": ('["epochs"]', '["epochs"] * 0', "returned the arrays that it received, unchanged"),
}


@pytest.mark.thorough_except("raises")
@pytest.mark.parametrize("case", BROKEN_LOOPS)
def test_what_is_wrong_with_a_loop_of_one_s_own_is_said(case: str, of_loop: NodeSetUp) -> None:
    old, new, words = BROKEN_LOOPS[case]
    change(of_loop, old, new)
    assert words in said(of_loop)


def test_a_value_that_an_exception_repeats_is_not_said(of_loop: NodeSetUp) -> None:
    spoil(of_loop, 3, f"0.5,x{SECRET},1")
    found = said(of_loop)
    assert "ValueError at training.py:11, in: table = np.loadtxt(" in found
    assert "text instead of a number" in found


VALUES = {
    "a file's name": (
        'np.load(os.path.join(os.path.dirname(os.environ["LDPFL_DATA"]), "John-Smith-HIV" + ".npy"))',
        "a file that no setting of this node names: No such file or directory",
    ),
    "a file's name below": (
        'np.load(os.path.join(os.environ["LDPFL_DATA_DIR"], "".join(("John", "-Smith")) + ".npy"))',
        "a file or folder below {data_dir}: No such file or directory",
    ),
    "a text of ldpfl's": (
        "from ldpfl.data import partition as p; p(table[:, 2].astype(int), 3, None, isolated=type('I', (), {'label': 7}))",
        "ldpfl rejects an argument that the line passes to it",
    ),
    "a name that a record chose": ("{'none': 0}['hiv' if table[0, 0] > -99 else 'none']", "KeyError at training.py:12"),
    "a name that a record is": ("{}[['hiv'][0]] == 'none'", "KeyError at training.py:12"),
    "a module that a record chose": ("__import__('h' + 'iv')", "ModuleNotFoundError at training.py:12"),
}


@pytest.mark.thorough_except("a name that a record is")
@pytest.mark.parametrize("case", VALUES)
def test_no_path_name_or_text_that_a_record_chose_is_said(case: str, of_loop: NodeSetUp, tmp_path: Path) -> None:
    code, words = VALUES[case]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "some.txt").write_text("some", encoding="utf-8")
    change(of_loop, "    inputs, targets", f"    {code}\n    inputs, targets")
    found = said(replace(of_loop, data_dir=tmp_path / "data"))
    assert words.format(data_dir=tmp_path / "data") in found
    outside = found.replace(f"in: {code}"[:104], "")  # the app's line is code
    assert not any(word in outside for word in ("hiv'", "Smith", "labels from"))


MODEL = "    return RecordTask(torch.nn.Linear(2, 3)"
VALUE = "{table[0, 1]:.0f}"
FORWARD = f"    class Own(torch.nn.Linear):\n        def forward(self, x): {{}}\n{MODEL.replace('torch.nn.Linear', 'Own')}"
SECRETS_OF_RECORDS = {
    "a text of an OSError": f"    raise OSError(22, f'bad {VALUE}', os.environ['LDPFL_DATA'])\n{MODEL}",
    "a text about another file": f"    raise OSError(22, f'bad {VALUE}', 'elsewhere')\n{MODEL}",
    "a number of an OSError": f"    raise OSError(int(table[0, 1]), 'bad', 'elsewhere')\n{MODEL}",
    "a module": f"    import importlib; importlib.import_module(f'm{VALUE}')\n{MODEL}",
    "a type": f"    raise type(f'E{VALUE}', (Exception,), {{}})()\n{MODEL}",
    "a record task's type": f"    return type(f'E{VALUE}', (), {{}})()\n{MODEL}",
    "a file of code": f"    exec(compile('1 / 0', f'f{VALUE}', 'exec'))\n{MODEL}",
    "an error of the model": FORWARD.format(f"raise ValueError(f'value {VALUE}')"),
    "an error of ldpfl's in the model": FORWARD.format(f"raise __import__('ldpfl').errors.PrivacyError(f'value {VALUE}')"),
    "an error under vmap": FORWARD.format(
        f"return super().forward(x) if not torch._C._functorch.is_batchedtensor(x) else (_ for _ in ()).throw(RuntimeError(f'v {VALUE}'))"
    ),
    "a layer's name": MODEL.replace("torch.nn.Linear(2, 3)", f"torch.nn.ModuleDict({{f'v{VALUE}': torch.nn.BatchNorm1d(2)}})"),
    "a layer's width": MODEL.replace("Linear(2, 3)", "Linear(int(table[0, 1]), 3)"),
    "a frozen layer's name": (
        f"    model = torch.nn.Linear(2, 3); model.register_parameter(f'v{VALUE}', torch.nn.Parameter(torch.ones(2)))\n"
        f"{MODEL.replace('torch.nn.Linear(2, 3)', 'model')}"
    ),
}


@pytest.mark.thorough_except("a record task's type")
@pytest.mark.parametrize("case", SECRETS_OF_RECORDS)
def test_no_text_name_or_size_that_an_app_makes_of_its_records_is_said(case: str, of_records: NodeSetUp) -> None:
    spoil(of_records, 1, f"{SECRET}.5,{SECRET},1")
    change(of_records, MODEL, SECRETS_OF_RECORDS[case])
    assert said(of_records)  # `tried` has looked for the value


def test_arrays_are_named_only_as_layers_state_them(of_records: NodeSetUp) -> None:
    spoil(of_records, 1, f"{SECRET}.5,{SECRET},1")
    change(
        of_records,
        MODEL,
        MODEL.replace(
            "torch.nn.Linear(2, 3)", f"torch.nn.Sequential(__import__('collections').OrderedDict({{f'v{VALUE}': torch.nn.Linear(2, 3)}}))"
        ),
    )
    assert "weight=3x2. Set --layers" in said(replace(of_records, layers=(6,), shapes={"weight": (3, 2)}))


def test_a_text_of_ldpfl_s_that_importing_the_app_raises_is_not_said(of_loop: NodeSetUp) -> None:
    client = Path(of_loop.app or "") / "own_app" / "client_app.py"
    code = "from ldpfl.data import Isolation, partition\nimport numpy as np\npartition(np.arange(3), 3, None, isolated=Isolation(7, 0.1))\n"
    client.write_text(code + client.read_text(encoding="utf-8"), encoding="utf-8")
    found = said(of_loop)
    assert "the app cannot be loaded: " in found
    assert "at client_app.py:3" in found
    assert "labels from" not in found


def test_a_loop_that_takes_too_long_is_ended_as_in_a_round(tmp_path: Path) -> None:
    client = 'from ldpfl.flower import LdpClientApp\napp = LdpClientApp("own_app.training:app")\n'
    node = equipped(tmp_path, LOOP, OF_LOOP, client, reply_s=2.0)
    change(node, "    inputs, targets", "    __import__('time').sleep(60)\n    inputs, targets")
    assert "the app took too long. A round leaves 2 s (ldpfl.reply-s)" in said(node)


def test_an_own_loop_needs_names_and_shapes(of_loop: NodeSetUp) -> None:
    assert "--layers weight=1x2,bias=1" in said(replace(of_loop, shapes={}))


def test_a_model_that_is_not_the_one_that_layers_say_is_named(of_records: NodeSetUp) -> None:
    other = replace(of_records, layers=(6, 4), shapes={"weight": (3, 2), "bias": (4,)})
    assert "lacks an array that --layers states, or has it in another shape: bias=4" in said(other)


@pytest.mark.thorough
def test_reports_of_a_sum_are_masked_sealed_and_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = 'from ldpfl.flower import LdpClientApp\napp = LdpClientApp(records="own_app.training:records")\n'
    node = replace(equipped(tmp_path, RECORDS, OF_RECORDS, client, transport="sum"), layers=(), shapes={})
    (tmp_path / "token").write_text("t" * 43, encoding="utf-8")
    (tmp_path / "token").chmod(0o600)
    make_key(tmp_path / "signing.key")
    node = replace(node, relay="http://127.0.0.1:9", token=tmp_path / "token", signing_key=tmp_path / "signing.key")
    found = tried(node)  # nobody listens there: the relay is found wrong, and the trial needs none
    assert [one.what for one in found if one.standing is Standing.WRONG] == ["relay"]
    assert found[-1].said.startswith("trained 9 values")
    assert "LDPFL_SIGNING_KEY" not in os.environ


def test_nothing_is_tried_where_the_policy_would_decline(of_loop: NodeSetUp) -> None:
    policy = of_loop.policy or Path()
    policy.write_text(
        policy.read_text(encoding="utf-8").replace('mechanisms = [\n    "duchi",\n]', 'mechanisms = ["harmony"]'), encoding="utf-8"
    )
    change(of_loop, "app = ClientApp()", "raise AssertionError('this code is not run')")
    assert (
        said(of_loop).splitlines()[-1]
        == "look try: no round was tried, because a check above failed: correct what it names, and check again"
    )


def test_an_app_without_protection_is_wrong_without_a_trial(of_loop: NodeSetUp) -> None:
    app = Path(of_loop.app or "")
    assert [one for one in check_node(of_loop) if one.standing is Standing.WRONG] == []
    client = app / "own_app" / "client_app.py"
    client.write_text(f"import numpy\nDATA = numpy.loadtxt('table.csv')\n{client.read_text(encoding='utf-8')}", encoding="utf-8")
    (loud,) = (one for one in check_node(of_loop) if one.standing is Standing.WRONG)
    assert loud.what == "app"
    assert "Flower runs own_app/client_app.py:1, own_app/client_app.py:2 of this app outside of the policy's control" in loud.said
    change_project = (app / "pyproject.toml").read_text(encoding="utf-8").replace("own_app.client_app:app", "own_app.training:app")
    (app / "pyproject.toml").write_text(change_project, encoding="utf-8")
    (bare,) = (one for one in check_node(of_loop) if one.standing is Standing.WRONG)
    assert bare.what == "app"
    assert "the clientapp 'own_app.training:app' is a ClientApp without a wrapper, so its replies leave without noise" in bare.said
    assert 'wrap it in LdpClientApp. In another module write app = LdpClientApp("own_app.training:app")' in bare.said


def test_settings_that_a_trial_lacks_are_asked_for(of_loop: NodeSetUp) -> None:
    words = said(of_loop, Trial())
    assert "KeyError at training.py" in words
    assert "give it by --train-config, as in --train-config 'epochs=20 learning-rate=0.1': none was given" in words


def test_a_client_that_no_policy_limits_is_refused(of_loop: NodeSetUp) -> None:
    (Path(of_loop.app or "") / "own_app" / "client_app.py").write_text("from own_app.training import app\n", encoding="utf-8")
    assert "is a ClientApp, whose replies a node's policy cannot limit" in said(of_loop)


def test_images_that_are_decoded_for_a_trial_are_not_kept(tmp_path: Path, cache: Path) -> None:
    for split in ("train", "test"):
        write_split(tmp_path / "data", "mnist", split, *digits(30, seed=1, shape=(28, 28)))
    config = tmp_path / "config.toml"
    config.write_text(
        '[data]\nname = "mnist"\nfeatures = "scattering"\n[model]\nname = "logistic-regression"\n'
        '[mechanism]\nname = "duchi"\nepsilon = 1.0\n[clients]\ncount = 3\n',
        encoding="utf-8",
    )
    offer = offer_of(str(config))
    policy = fitting_policy(offer, ranges_for(offer, ()))
    (tmp_path / "policy.toml").write_text(policy_text(policy, "a test"), encoding="utf-8")
    set_limit(tmp_path / "budget.sqlite", policy.lifetime_epsilon, policy.delta)
    node = NodeSetUp(tmp_path / "policy.toml", tmp_path / "budget.sqlite", data_dir=tmp_path / "data", app=str(config), partition=0)
    assert tried(node)[-1].said.startswith("trained ")
    assert contents(cache) == {}


@pytest.mark.thorough
def test_a_ready_app_of_a_table_is_tried_from_the_command_line(ldpfl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["age,ward,outcome", *(f"{20 + place},{'icu' if place % 3 else 'cardio'},{'yes' if place % 2 else 'no'}" for place in range(60))]
    table = Path("table.csv")
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    table.chmod(0o600)
    bounds = ("--set", "data.bounds={age=[0,100]}", "--set", "mechanism.records=60")
    assert ldpfl("init", "--flower", "ready", "--data", table, "--target", "outcome", *bounds).code == 0
    for variable, name in (("POLICY", "ready/policy.toml"), ("BUDGET", "ready/budget.sqlite"), ("DATA", "table.csv")):
        monkeypatch.setenv(f"LDPFL_{variable}", str(Path(name).absolute()))
    before = contents(Path.cwd())
    outcome = ldpfl("deploy", "check-node", "--app", "ready", "--try")
    assert outcome.code == 0, outcome.out
    assert "thrown away: nothing was charged or sent" in outcome.out
    assert contents(Path.cwd()) == before
    table.write_text("\n".join([rows[0], *("1" + row for row in rows[1:])]) + "\n", encoding="utf-8")
    assert "the column 'age' has 60 of 60 values outside its data.bounds" in ldpfl("deploy", "check-node", "--app", "ready", "--try").out
    assert "name the app's folder with --app" in ldpfl.refused("deploy", "check-node", "--try")
    assert "--train-config is 'epochs'" in ldpfl.refused("deploy", "check-node", "--app", "ready", "--try", "--train-config", "epochs")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_table_that_pytorch_scales_by_several_threads_is_tried(ldpfl: CommandLine) -> None:
    """In a process of its own with two threads: a process that has used several cannot compute in those that it forks."""
    rows = ["age,weight,outcome", *(f"{20 + place % 60},{40 + place % 50},{'yes' if place % 2 else 'no'}" for place in range(20_000))]
    table = Path("table.csv")
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    table.chmod(0o600)
    bounds = ("--set", "data.bounds={age=[0,100],weight=[0,200]}", "--set", "mechanism.records=20000")
    assert ldpfl("init", "--flower", "ready", "--data", table, "--target", "outcome", *bounds).code == 0
    of_node = {"LDPFL_POLICY": "ready/policy.toml", "LDPFL_BUDGET": "ready/budget.sqlite", "LDPFL_DATA": "table.csv"}
    environment = {**os.environ, "OMP_NUM_THREADS": "2", **{name: str(Path(file).absolute()) for name, file in of_node.items()}}
    check = [sys.executable, "-m", "ldpfl", "deploy", "check-node", "--app", "ready", "--try"]
    done = subprocess.run(check, env=environment, capture_output=True, text=True, check=False)
    assert "thrown away: nothing was charged or sent" in done.stdout, done.stdout[-1000:]
