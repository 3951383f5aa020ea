"""A node is looked over before it starts: each mistake of a set-up is one line, and of the data nothing is sent."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.utils import formatdate
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pyarrow
import pytest
from pyarrow import parquet

from conftest import CommandLine
from ldpfl import LayerRanges, mechanisms
from ldpfl.deploy.certificates import issue
from ldpfl.deploy.demo_files import write_node_key
from ldpfl.deploy.node_check import check_node
from ldpfl.deploy.node_set_up import Finding, NodeSetUp, Standing
from ldpfl.flower.policy_init import offer_of, ranges_for, releases_of
from ldpfl.privacy.accountants.adaptive import filtered_epsilon
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import set_limit
from ldpfl.privacy.budget_move import move
from ldpfl.privacy.policy import Request, read_policy
from ldpfl.relay import Patience, RelayClient
from ldpfl.transport.shuffling.sealing import generate_key, public_text
from ldpfl.transport.sums import signer_of
from ldpfl.transport.sums.node_keys import load_key, make_key

POLICY = f"""
mechanisms = ["duchi"]
epsilon_per_unit = 1.0
epsilon_per_round = 100.0
lifetime_epsilon = 1000.0
rounds = 10
min_clients = 2
aggregator_keys = ["{public_text(generate_key())}"]
"""
APP = """
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
clientapp = "ldpfl.flower.apps:client_app"
[tool.flwr.app.config.ldpfl]
transport = "relay"
min-clients = 100
reply-s = 30
set = '''
data.name="node";
data.target="died";
data.columns=["age"];
data.bounds={age=[0, 100]};
data.classes=["no", "yes"];
model.name="logistic-regression";
mechanism.epsilon=0.5;
training.rounds=4'''
"""
TABLE = "age,died\n40,no\n70,yes\nold,perhaps\n"


@pytest.fixture
def node(tmp_path: Path) -> NodeSetUp:
    """A node in order, but for the relay, which is asked for by what a test puts in its place."""
    (tmp_path / "policy.toml").write_text(POLICY, encoding="utf-8")
    set_limit(tmp_path / "budget.sqlite", 1000.0)
    for name, text in (("relay.token", "t" * 43), ("table.csv", TABLE)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o600)
    write_node_key(tmp_path / "node.key")
    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(APP, encoding="utf-8")
    return NodeSetUp(
        tmp_path / "policy.toml",
        tmp_path / "budget.sqlite",
        "http://127.0.0.1:8473",
        tmp_path / "relay.token",
        data=str(tmp_path / "table.csv"),
        node_key=tmp_path / "node.key",
        app=str(app),
    )


def found(node: NodeSetUp, status: int = 200, signer: str | None = None) -> list[Finding]:
    """Return what is found where the relay answers with ``status``, and has a token for ``signer``; it may be sent the token alone."""

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.read() == b""
        assert "table" not in str(request.url)
        return httpx.Response(status, json={"signer": signer} if status == 200 else {})

    def connect(url: str, token: str, verify: Any) -> RelayClient:
        return RelayClient(url, token, transport=httpx.MockTransport(answer), patience=Patience(tries=1))

    return list(check_node(node, connect))


def said(node: NodeSetUp, what: str, status: int = 200, signer: str | None = None) -> str:
    """Return what is wrong or to be looked at, of one part of a set-up."""
    (one,) = [one for one in found(node, status, signer) if one.what == what and one.standing is not Standing.FINE]
    return f"{one.standing.value}: {one.said}"


def test_a_node_in_order_has_nothing_wrong_and_says_which_rows_do_not_fit(node: NodeSetUp) -> None:
    findings = found(node)
    assert [one for one in findings if one.standing is Standing.WRONG] == []
    assert {one.what for one in findings} == {"policy", "budget", "token", "relay", "node key", "app", "data"}
    assert "3 rows, 2 of which can be trained on" in said(node, "data")
    fine = {one.what: one.said for one in findings}
    assert "each of its 4 rounds; reports are mixed by the relay" in fine["app"]
    assert "A client that took part before needs its old file" in fine["budget"]


@pytest.mark.parametrize(
    ("what", "change", "words"),
    [
        ("policy", {"policy": None}, "no file is set for the policy: set LDPFL_POLICY"),
        ("budget", {"budget": Path("missing.sqlite")}, "make it with ldpfl budget set"),
        ("token", {"token": None}, "set LDPFL_RELAY_TOKEN"),
        ("relay", {"relay": None}, "set LDPFL_RELAY to its URL"),
        ("relay", {"relay": "https://127.0.0.1:1"}, "127.0.0.1:1 cannot be reached with TLS"),
        ("data", {"data": None}, "set LDPFL_DATA to its file"),
        ("data", {"data": "missing.csv"}, "missing.csv"),
        ("node key", {"node_key": Path("missing.key")}, "cannot be read"),
        ("app", {"app": "missing"}, "missing"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(what: str, change: dict[str, Any], words: str, node: NodeSetUp) -> None:
    line = said(replace(node, **change), what)
    assert line.startswith("wrong: ")
    assert words in line


def test_files_that_others_can_read_are_found(node: NodeSetUp) -> None:
    paths = (node.token, node.node_key, node.budget, Path(node.data or ""))
    for what, path in zip(("token", "node key", "budget"), paths, strict=False):
        assert path is not None
        path.chmod(0o644)
        assert "can be read by other users" in said(node, what)
        path.chmod(0o600)
    Path(node.data or "").chmod(0o644)
    assert any("can be read by other users" in one.said for one in found(node) if one.what == "data")
    assert node.policy is not None
    node.policy.chmod(0o666)
    assert "can be changed by other users" in said(node, "policy")


def test_a_node_of_sums_learns_whether_its_token_is_for_its_signing_key(node: NodeSetUp, tmp_path: Path) -> None:
    policy, key = tmp_path / "policy.toml", tmp_path / "signing.key"
    policy.write_text(f'{POLICY}transports = ["sum"]\nsum_epsilon = 900.0\n', encoding="utf-8")
    make_key(key)
    own = signer_of(load_key(key).public_key()).hex()
    sums = replace(node, signing_key=key, app=None)
    assert f"accepts this node's signatures for sums, by the key {own}" in [one.said for one in found(sums, signer=own)]
    assert "is for no signing key" in said(sums, "relay")
    assert f"is for the signing key {'0' * 16}, but the node signs with {own}: send the line" in said(sums, "relay", signer="0" * 16)
    assert [one.standing for one in found(replace(sums, signing_key=None)) if one.what == "relay"] == [Standing.FINE]


def test_the_line_about_the_policy_says_against_whom_each_epsilon_is(node: NodeSetUp) -> None:
    assert node.policy is not None
    more = 'transports = ["sum"]\nsum_epsilon = 4.0\n'
    node.policy.write_text(f"{POLICY}{more}", encoding="utf-8")
    line = next(one.said for one in found(node) if one.what == "policy" and one.standing is Standing.FINE)
    assert line.startswith("allows 10 reports of duchi at most, added up by relay and aggregator; epsilon of all reports")
    assert line.endswith("against whoever keeps all of them, 4 against whoever sees sums alone")


@pytest.mark.parametrize(("status", "words"), [(401, "does not know this token"), (403, "expected a client's"), (500, "relay")])
def test_a_relay_that_refuses_says_why(status: int, words: str, node: NodeSetUp) -> None:
    assert words in said(node, "relay", status)


@pytest.mark.parametrize(("ahead_s", "words"), [(30, "s ahead of the relay's"), (-400, "s behind the relay's"), (2, ""), (-200, "")])
def test_a_clock_that_flower_would_refuse_is_named(ahead_s: float, words: str, node: NodeSetUp) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"signer": None}, headers={"Date": formatdate(time.time() - ahead_s, usegmt=True)})

    def connect(url: str, token: str, verify: Any) -> RelayClient:
        return RelayClient(url, token, transport=httpx.MockTransport(answer), patience=Patience(tries=1))

    lines = [one.said for one in check_node(node, connect) if one.what == "clock"]
    assert len(lines) == bool(words)
    assert words in "".join(lines)


def test_a_url_or_key_of_the_wrong_kind_is_named_with_the_right_one(node: NodeSetUp) -> None:
    assert "expected HOST:PORT, without https://" in said(replace(node, superlink="https://superlink.example:8000"), "SuperLink")
    public_half = Path(f"{node.node_key}.pub")
    assert f"is the public half: name the private key, {node.node_key}" in said(replace(node, node_key=public_half), "node key")

    def connect(url: str, token: str, verify: Any) -> RelayClient:
        def answer(request: httpx.Request) -> httpx.Response:
            raise httpx.RemoteProtocolError("TLS")

        return RelayClient(url, token, transport=httpx.MockTransport(answer), patience=Patience(tries=1))

    lines = [one.said for one in check_node(node, connect) if one.what == "relay"]
    assert lines[-1] == "if the relay uses TLS, its URL is https://127.0.0.1:8473"


def test_a_policy_that_would_decline_the_app_is_found_before_it_does(node: NodeSetUp) -> None:
    assert node.policy is not None
    for before, after, words in (
        ("epsilon_per_unit = 1.0", "epsilon_per_unit = 0.1", "epsilon_per_unit = 0.1"),
        ("min_clients = 2", "min_clients = 101", "below min_clients = 101"),
        ('["duchi"]', '["laplace"]', "not among the policy's mechanisms"),
    ):
        node.policy.write_text(POLICY.replace(before, after), encoding="utf-8")
        line = said(node, "app")
        assert words in line
        assert "run check" not in line  # there is no run of that name
        assert "nothing was sent" not in line
    node.policy.write_text('mechanisms = ["duchi"]\n', encoding="utf-8")
    assert "allows nothing: set rounds, lifetime_epsilon" in said(node, "policy")


@pytest.mark.parametrize(("clients", "window", "wrong"), [(200, 59, True), (200, 60, False), (100, 31, False)])
def test_a_window_that_leaves_no_time_for_the_upload_is_found(clients: int, window: int, wrong: bool, node: NodeSetUp) -> None:
    text = APP.replace("reply-s", f"window-s = {window}.0\nreply-s").replace(
        "training.rounds=4", f"training.rounds=4;\nclients.count={clients}"
    )
    (Path(node.app or "") / "pyproject.toml").write_text(text, encoding="utf-8")
    if wrong:
        assert "make the window at least 60 s" in said(node, "app")
    else:
        assert [one.said for one in found(node) if one.what == "app" and one.standing is not Standing.FINE] == []


def test_a_budget_that_is_moved_spent_or_too_small_for_the_app_is_found(node: NodeSetUp) -> None:
    assert node.policy is not None
    assert node.budget is not None
    set_limit(node.budget, 1.5)
    assert "the app's next round would be declined: " in said(node, "budget")
    assert "above the budget set in" in said(node, "budget")
    set_limit(node.budget, 2.5)
    assert "above the budget = 2.5: later rounds are declined" in said(node, "budget")
    policy = read_policy(node.policy).model_copy(update={"transports": ("direct",)})
    ranges = LayerRanges(center=0.0, radius=0.1, sizes=(3,))
    asked = Request.of(mechanisms.create("duchi", epsilon=0.5), ranges, run="run", round=1, cohort=3, transport="direct")
    Budget(node.budget, policy).charge(asked)
    set_limit(node.budget, 0.5)
    assert any("is spent" in one.said for one in found(node))
    move(node.budget, node.budget.with_name("new.sqlite"))
    moved = next(one.said for one in found(node) if "is 0, so nothing leaves (this budget was moved to" in one.said)
    assert moved.endswith("): set LDPFL_BUDGET to the file in use")  # `budget set` would refuse the moved budget
    set_limit(new := node.budget.with_name("stopped.sqlite"), 0.0)
    assert any("or set a budget (ldpfl budget set)" in one.said for one in found(replace(node, budget=new)))


def test_an_app_that_is_checked_while_it_runs_is_counted_once(node: NodeSetUp) -> None:
    assert node.policy is not None
    assert node.budget is not None
    offer = offer_of(str(node.app))
    planned = releases_of(offer, ranges_for(offer, ()))
    set_limit(node.budget, filtered_epsilon([(planned[0], 4)], inf, 0.0), 0.0)  # for the app's four rounds, and no more
    node.policy.write_text(POLICY.replace("rounds = 10", "rounds = 4").replace("min_clients", "delta = 0.0\nmin_clients"), encoding="utf-8")
    policy = read_policy(node.policy)
    key = base64.b64decode(policy.aggregator_keys[0])
    notes = {}
    for number in range(1, 5):
        lines = [(one.standing, one.said) for one in found(node) if one.what == "budget"]
        assert not any("later rounds are declined" in line for _, line in lines), number
        assert {standing for standing, _ in lines} == {Standing.FINE}
        notes[number] = [line for _, line in lines if "has charged" in line]
        Budget(node.budget, policy).charge(Request("run-a", number, planned[number - 1], 100, "relay", key))
    assert notes[1] == []
    assert notes[3] == ["run run-a, probably of this app, has charged 2 of 4 rounds: only the other 2 are counted below"]
    assert "this node takes part no more" in next(
        one.said for one in found(node) if one.what == "budget"
    )  # a run that is over is not gone on with
    assert any("the app's next round would be declined" in one.said for one in found(node))


def test_charges_of_another_app_are_no_rounds_of_this_one(node: NodeSetUp) -> None:
    assert node.policy is not None
    assert node.budget is not None
    node.policy.write_text(POLICY.replace("rounds = 10", "rounds = 6"), encoding="utf-8")
    policy = read_policy(node.policy)
    key = base64.b64decode(policy.aggregator_keys[0])
    ranges = LayerRanges(center=0.0, radius=0.1, sizes=(3,))
    for number in range(1, 4):
        asked = Request.of(mechanisms.create("duchi", epsilon=0.25), ranges, run="b", round=number, cohort=100, transport="relay", key=key)
        Budget(node.budget, policy).charge(asked)
    assert "3 reports and the app's 4 exceed the policy's rounds = 6" in said(node, "budget")


def test_all_rounds_of_an_app_are_compared_with_what_the_policy_allows_behind_the_relay(node: NodeSetUp) -> None:
    assert node.policy is not None
    for allowed, is_enough in ((4.0, False), (20.0, True)):  # the next round alone fits into both
        node.policy.write_text(f"{POLICY}delta = 1e-5\nrelay_epsilon = {allowed}\n", encoding="utf-8")
        lines = [one.said for one in found(node) if one.what == "budget" and one.standing is not Standing.FINE]
        named = f"for whoever sees only what the relay has mixed, above the policy's relay_epsilon = {allowed:g}: later rounds are declined"
        assert [named in line for line in lines] == ([] if is_enough else [True])


def test_a_budget_at_another_delta_than_the_policy_s_is_looked_at(node: NodeSetUp) -> None:
    assert node.budget
    set_limit(node.budget, 1000.0, 1e-7)
    both = "look: has delta 1e-07, but the policy has delta 1e-05"
    assert said(node, "budget").startswith(both)


def test_a_node_without_the_app_s_folder_sees_that_its_table_can_be_read(node: NodeSetUp) -> None:
    (line,) = [one.said for one in found(replace(node, app=None)) if one.what == "data"]
    assert "3 rows and 2 columns" in line


@contextmanager
def serving(folder: Path) -> Iterator[int]:
    """Shake hands with whoever calls on loopback, and hang up; yields the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    with socket.create_server(("0.0.0.0", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    plain = listening.accept()[0]
                except OSError:
                    return
                try:
                    context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    plain.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_certificates_are_checked_by_authority_name_and_end(node: NodeSetUp, tmp_path: Path) -> None:
    issue(tmp_path / "tls", ["localhost,127.0.0.1"], 90)
    issue(tmp_path / "soon", ["127.0.0.1"], 5)
    issue(tmp_path / "other", ["else.example"], 90)
    issue(tmp_path / "ended", ["127.0.0.1"], -1)
    with serving(tmp_path / "ended" / "127.0.0.1") as port:
        ended = replace(node, superlink=f"127.0.0.1:{port}", superlink_ca=tmp_path / "ended" / "ca.crt")
        assert "has expired): check this machine's clock, and the certificate's dates" in said(ended, "SuperLink")
    with serving(tmp_path / "tls" / "localhost") as port:
        fine = replace(node, superlink=f"127.0.0.1:{port}", superlink_ca=tmp_path / "tls" / "ca.crt")
        (one,) = [one for one in found(fine) if one.what == "SuperLink"]
        assert one.standing is Standing.FINE, one.said
        assert "not trusted here" in said(replace(fine, superlink_ca=tmp_path / "other" / "ca.crt"), "SuperLink")
        assert "expected a certificate in PEM format" in said(replace(fine, superlink_ca=node.policy), "SuperLink")
    with serving(tmp_path / "soon" / "127.0.0.1") as port:
        late = replace(node, superlink=f"127.0.0.1:{port}", superlink_ca=tmp_path / "soon" / "ca.crt")
        assert "look: its certificate ends on" in said(late, "SuperLink")
    with serving(tmp_path / "other" / "else.example") as port:
        misnamed = replace(node, relay=f"https://127.0.0.2:{port}", relay_ca=tmp_path / "other" / "ca.crt")
        assert "not trusted here" in said(misnamed, "relay")


def test_the_command_prints_a_line_a_finding_and_ends_with_code_3(
    node: NodeSetUp, ldpfl: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node.policy is not None
    monkeypatch.setenv("LDPFL_POLICY", str(node.policy))
    outcome = ldpfl("deploy", "check-node", "--data", str(node.data))
    assert outcome.code == 3
    lines = outcome.out.splitlines()
    assert lines[0].startswith("ok    policy")
    assert lines[1] == "wrong budget    no file is set for the budget: set LDPFL_BUDGET to its path"
    assert {line.split()[0] for line in lines} <= {"ok", "look", "wrong"}
    node.policy.write_text(POLICY + 'transports = ["direct"]\n', encoding="utf-8")
    assert ldpfl("deploy", "check-node", "--budget", str(node.budget)).code == 0


HEADLESS = {
    "no header": {"table.csv": "80713,hiv-positive,yes\n517093,healthy,no\n"},
    "a value twice": {"table.csv": "80713,hiv-positive,hiv-positive\n517093,healthy,no\n"},
    "parts": {"a.csv": "80713,hiv-positive\n1,2\n", "b.csv": "517093,healthy\n1,2\n"},
}


@pytest.mark.parametrize("case", HEADLESS)
@pytest.mark.parametrize("own", [False, True])
def test_the_first_record_of_a_table_without_a_header_is_not_shown(case: str, own: bool, node: NodeSetUp, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    folder.mkdir(mode=0o700)
    for name, text in HEADLESS[case].items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o600)
    data = folder if len(HEADLESS[case]) > 1 else folder / "table.csv"
    lines = own_data(node, data) if own else [one.said for one in found(replace(node, data=str(data))) if one.what == "data"]
    assert not any(word in line for line in lines for word in ("80713", "hiv", "517093", "healthy"))
    if not own or case != "no header":  # an own app may read such a table
        assert "(is its first line a header?)" in lines[0]
    if not own and case == "no header":
        assert lines == ["the table has no column 'age', which data.columns names (is its first line a header?)"]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("case", ["names", "numbers", "nested", "damaged"])
def test_no_column_of_a_parquet_file_is_named_that_the_app_does_not_name(case: str, own: bool, node: NodeSetUp, tmp_path: Path) -> None:
    """A file that was made of a table without a header has a record in the place of names."""
    cells: dict[str, list[object]] = {"names": ["a", "b"], "numbers": [1.0, float("inf")], "nested": [[1], [2]], "damaged": [1, 2]}
    data = tmp_path / "table.parquet"
    parquet.write_table(pyarrow.table({"80713": [1, 2], "hiv-positive": cells[case]}), data)
    if case == "damaged":
        data.write_bytes(data.read_bytes().replace(b"hiv-positive", b"hiv-pos\xff\xfe\xff\xfee"))
    data.chmod(0o600)
    lines = own_data(node, data) if own else [one.said for one in found(replace(node, data=str(data))) if one.what == "data"]
    assert lines
    assert not any(word in line for line in lines for word in ("80713", "hiv"))
    if own and case in ("numbers", "nested"):
        assert "column number 2" in lines[0]


def own_data(node: NodeSetUp, data: Path, classes: str = "") -> list[str]:
    """Return what is found of ``data``, which an app of one's own reads."""
    folder = data.parent / "config"
    folder.mkdir(exist_ok=True)
    config = folder / "config.toml"
    config.write_text(f'[mechanism]\nname = "duchi"\nepsilon = 0.5\n{classes}', encoding="utf-8")
    found_ = found(replace(node, data=str(data), config=config, layers=(2,)))
    return [f"{one.standing.value}: {one.said}" for one in found_ if one.what == "data"]


def test_data_of_an_own_app_may_be_any_file(node: NodeSetUp, tmp_path: Path) -> None:
    arrays = tmp_path / "rows.npz"
    arrays.write_bytes(b"")
    arrays.chmod(0o600)
    assert f"wrong: {arrays} is empty, expected the node's data" in own_data(node, arrays)
    arrays.write_bytes(b"something")
    (line,) = own_data(node, arrays)
    assert line == f"ok: {arrays} is there. Only --try shows whether the app can read it"
    assert "(did you mean 'rows.npz'?)" in own_data(node, tmp_path / "row.npz")[0]
    headless = tmp_path / "headless.csv"
    headless.write_text("1,1,2\n3,4,5\n", encoding="utf-8")
    headless.chmod(0o600)
    assert "look: " in own_data(node, headless)[0]
    assert "two columns are called the same (is its first line a header?)" in own_data(node, headless)[0]


def test_a_folder_of_images_is_looked_over_by_class(node: NodeSetUp, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir(mode=0o700)
    assert "is empty" in own_data(node, images)[0]
    for name in ("cat/1.png", "cat/2.png", "dgo/1.png"):
        (images / name).parent.mkdir(exist_ok=True)
        (images / name).write_bytes(b"pixels")
    (images / "bird").mkdir()
    (images / "loose.png").write_bytes(b"pixels")
    (images / "cat" / "3.png").touch()
    lines = own_data(node, images, '[data]\nclasses = ["cat", "dog"]\n')
    for words in (
        "look: 1 of the 5 files",
        f"ok: {images} has 5 images in 2 folders, among them cat",
        f"look: 1 of the images lies in {images} itself",
        f"look: {images} has 1 folder without images",
        f"wrong: {images} has 1 folder whose name is not one of the app's classes: data.classes has cat, dog, and no folder is called dog.",
    ):
        assert any(words in line for line in lines), (words, lines)
    for told in (lines, own_data(node, images)):  # a folder may be called as a patient, and a file too
        assert not any(word in line for line in told for word in ("dgo", "bird", "1.png", "3.png", "loose"))


def test_a_file_or_folder_that_this_user_cannot_read_is_said(node: NodeSetUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = tmp_path / "images"
    images.mkdir(mode=0o700)
    (images / "1.png").write_bytes(b"pixels")
    monkeypatch.setattr("os.access", lambda *_: False)  # whoever runs the tests may be one who can read everything
    assert f"wrong: the folder {images} cannot be read by this user: set LDPFL_DATA to the node's data" in own_data(node, images)
    arrays = tmp_path / "rows.npz"
    arrays.write_bytes(b"something")
    assert "run the check as the user of the SuperNode" in own_data(node, arrays)[0]
    assert any("images cannot be read by this user: set LDPFL_DATA_DIR" in one.said for one in found(replace(node, data_dir=images)))


def test_values_outside_their_bounds_are_counted(node: NodeSetUp) -> None:
    Path(node.data or "").write_text("age,died\n400,no\n70,yes\n1e300,no\n", encoding="utf-8")
    assert "the column 'age' has 2 of 3 values outside its data.bounds" in said(node, "data")


@pytest.mark.parametrize("persons", [False, True], ids=["records", "persons"])
def test_a_stated_mean_far_from_the_node_s_own_number_is_said(persons: bool, node: NodeSetUp, tmp_path: Path) -> None:
    """Each mean gradient would be as many times too long or too short. A node a few times above or below the mean may be unusual."""
    rows = (f"{40 + number % 30},{('no', 'yes')[number % 2]},p{number % 100}\n" for number in range(300 if persons else 100))
    (tmp_path / "table.csv").write_text("age,died,patient\n" + "".join(rows), encoding="utf-8")
    (tmp_path / "table.csv").chmod(0o600)
    mechanism = 'mechanism.name="dp-sgd";\nmechanism.perturbed="gradient";\nmechanism.clip_norm=1.0;\nmechanism.records=RECORDS'
    app = APP.replace("mechanism.epsilon=0.5", mechanism + ';\ndata.person="patient"' * persons)
    means = {20: Standing.WRONG, 21: Standing.LOOK, 33: Standing.LOOK, 34: None, 299: None, 300: Standing.LOOK}
    for mean, standing in means.items():
        (tmp_path / "app" / "pyproject.toml").write_text(app.replace("RECORDS", str(mean)), encoding="utf-8")
        told = [one for one in found(node) if one.what == "data" and one.standing is not Standing.FINE]
        assert [one.standing for one in told] == ([standing] if standing else []), mean
        counts = f"100 {'persons' if persons else 'records'}, but the app's mechanism.records states {mean} for a client on average"
        assert all(counts in one.said for one in told)
