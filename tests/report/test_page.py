"""The page about runs: what is in it, what is not, and that it needs nothing else."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest

from conftest import CommandLine
from ldpfl import ConfigError, api
from ldpfl.experiments.public_figures import public_settings
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.privacy.accounting import account
from ldpfl.privacy.guarantee import REPLACE_ONE, Guarantee, Statement
from ldpfl.report import client_figures
from ldpfl.report.console import terminal
from ldpfl.report.page import page
from ldpfl.report.progress import ProgressDisplay
from ldpfl.report.scores import intervals_sentence
from ldpfl.report.terminal_tables import layer_table
from ldpfl.report.watching import watching
from ldpfl.server import RoundMetrics
from ldpfl.tasks.weighted_metrics import MEASURED_AT_CLIENTS
from ldpfl.util.number_format import number


class Reader(HTMLParser):
    """Collects the text of a page, its tags, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.tags, self.fetched, self.open = "", [""], [""], [""]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href") and not str(value).startswith("#")]

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(scope="module")
def folder(tiny_data: Path, config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "run"
    api.run(config_file, folder=path, data_dir=tiny_data, progress=False)
    return path


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    """The page of the run in ``folder``."""
    return page([folder])


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xdist_group("page")
def test_it_says_how_good_and_what_is_protected_and_needs_nothing_else(folder: Path, text: str, tiny_data: Path) -> None:
    result = api.load_run(folder, data_dir=tiny_data)
    read = Reader(text)
    said = " ".join(read.words.split())
    assert result.privacy.verdict in said
    assert f"{result.accuracy:.2%}" in said
    for layer in result.to_dict()["layers"]:
        assert layer in said
    assert "What the rounds so far cost together" in said
    found, plain = result.to_dict(), result.baseline
    assert plain is not None
    for place, (score, without) in enumerate(zip(found["score_per_round"], plain, strict=True), start=1):
        assert f'<td class="number">{place}</td><td class="number">{score:.2%}</td><td class="number">{without:.2%}</td>' in text
    assert 'name = "duchi"' in said
    assert not {"script", "img", "link", "iframe"} & set(read.tags)
    assert [place for place in read.fetched if place] == []
    assert read.tags.count("svg") == 3
    assert read.tags.count("main") == read.tags.count("h1") == 1


@pytest.mark.slow
@pytest.mark.xdist_group("page")
def test_equal_runs_have_equal_pages(folder: Path, text: str) -> None:
    assert page([folder]) == text


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xdist_group("page")
def test_runs_stand_beside_each_other(folder: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "a copy")
    outcome = ldpfl("report", folder, copied, "--out", tmp_path / "both.html")
    assert outcome.code == 0, outcome.err
    read = Reader((tmp_path / "both.html").read_text(encoding="utf-8"))
    assert "2 runs" in read.words
    assert read.tags.count("article") == 2
    assert read.words.count("in a copy") == read.words.count(f"in {folder.name}") == 2


@pytest.mark.slow
@pytest.mark.xdist_group("page")
def test_a_run_s_page_lies_in_its_folder(folder: Path, text: str, ldpfl: CommandLine) -> None:
    assert "report.html" in ldpfl("report", folder).out
    assert (folder / "report.html").read_text(encoding="utf-8") == text


@pytest.mark.slow
@pytest.mark.xdist_group("page")
def test_colours_follow_the_reader_s_mode(text: str) -> None:
    """No picture keeps a colour of its own, which may be that of the paper."""
    pictures = re.findall(r"<svg.*?</svg>", text, re.S)
    assert [re.findall(r"#[0-9a-fA-F]{6}\b", picture) for picture in pictures] == [[], [], []]


@pytest.mark.slow
@pytest.mark.draws
def test_the_seed_of_own_data_is_not_in_it(tmp_path: Path) -> None:
    rows = pd.DataFrame({"age": range(40), "hospital": [0, 1] * 20, "outcome": ["a", "b", "b", "a"] * 10})
    settings = {"data.bounds": {"age": [0, 40]}, "training.rounds": 2}
    api.run(data=rows, target="outcome", client="hospital", seed=987654321, settings=settings, folder=tmp_path / "own", progress=False)
    text = page([tmp_path / "own"])
    assert "987654321" not in text
    assert "seed" not in (tmp_path / "own" / "curve.svg").read_text(encoding="utf-8")
    assert "which of two records the client holds" in text
    for picture in (text, (tmp_path / "own" / "curve.svg").read_text(encoding="utf-8")):  # of the whole run, not of a round
        assert re.search(r"dp-sgd, ε = (?:4|3\.99\d*) for one record, whole run, δ = 1e-05", picture)
    assert '<th scope="row">noise multiplier</th>' in text
    assert '<th scope="row">records</th>' not in text


@pytest.mark.parametrize(("what", "said"), [("nothing", "holds no run"), ("begun", "no finished round yet")])
def test_what_is_no_run_is_named(what: str, said: str, folder: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    place = tmp_path / what
    place.mkdir()
    if what == "begun":
        (place / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    assert said in ldpfl.refused("report", place)


@pytest.mark.slow
@pytest.mark.xdist_group("page")
def test_what_a_foreign_run_is_called_is_no_markup(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "foreign"
    place.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (place / file.name).write_bytes(file.read_bytes())
    result = (place / "result.json").read_text(encoding="utf-8")
    (place / "result.json").write_text(result.replace('"name": "', '"name": "<script>alert(1)</script>', 1), encoding="utf-8")
    assert "<script" not in page([place])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_goes_on_has_a_page_too(tiny_data: Path, config_file: Path, tmp_path: Path) -> None:
    """With nothing in it that only the end tells, and no run at all where no round is finished."""
    path = tmp_path / "run"
    seen: list[str] = []

    def look(metrics: RoundMetrics) -> None:
        if metrics.round == 2:
            seen.append(page([path], refresh_s=5))

    api.run(config_file, folder=path, data_dir=tiny_data, progress=False, baseline=False, on_round=look)
    read = Reader(seen[0])
    assert "of 3 so far." in read.words
    assert "without noise" not in read.words
    assert 'http-equiv="refresh"' in seen[0]
    last = page([path], refresh_s=5)
    assert "so far. Figures" not in Reader(last).words
    assert 'http-equiv="refresh"' not in last
    with pytest.raises(ConfigError, match="holds no run"):
        page([tmp_path / "nowhere"])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_is_watched_by_who_knows_its_address(tiny_data: Path, config_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with watching(path) as address:
        assert address.startswith("http://127.0.0.1:")
        assert "holds no run" in httpx.get(address).text
        seen: list[str] = []
        look = partial(httpx.get, address)

        def after(metrics: RoundMetrics) -> None:
            if metrics.round == 2:
                seen.append(look().text)

        api.run(config_file, folder=path, data_dir=tiny_data, progress=False, baseline=False, on_round=after)
        assert "of 3 so far." in Reader(seen[0]).words
        last = look()
        assert last.text == page([path])
        assert last.headers["cache-control"] == "no-store"
        assert "default-src 'none'" in last.headers["content-security-policy"]
        for wrong in (
            httpx.get(address + "x"),
            httpx.get(address.rsplit("/", 2)[0]),
            httpx.get(address, headers={"Host": "rebound.example"}),
        ):
            assert wrong.status_code == 404
    with pytest.raises(httpx.ConnectError):
        look()


def test_the_watched_page_names_the_metric_as_the_terminal_does(tmp_path: Path) -> None:
    """Classes that the config does not state are known to the run alone."""
    frame = pd.DataFrame({"age": [20.0 + place % 50 for place in range(60)], "sick": ["no", "yes", "yes"] * 20})
    seen: list[str] = []
    with ProgressDisplay(terminal(quiet=True)) as display, watching(tmp_path / "run", lambda: display.metric) as address:

        def after(metrics: RoundMetrics) -> None:
            if metrics.round == 2:
                seen.extend(Reader(text).words for text in (httpx.get(address).text, page([tmp_path / "run"])))

        settings = {"training.rounds": 3, "clients.count": 2}
        how: dict[str, Any] = {"settings": settings, "baseline": False, "progress": display, "on_round": after}
        api.run(data=frame, target="sick", folder=tmp_path / "run", **how)
    assert ["AUROC" in words for words in seen] == [True, False]  # who looks at the folder alone does not know


def test_connections_that_say_nothing_are_few(tmp_path: Path) -> None:
    """Each has a thread and an open file, of which a run needs some itself.

    Whoever is one too many is hung up on at once, not after the five seconds that the others may be silent. None is begun before the one
    before it was seen: of more than a few that wait, the system lets each wait for a second or more.
    """
    with watching(tmp_path) as address, ExitStack() as stack:
        place = httpx.URL(address)
        for number in range(80):
            one = stack.enter_context(socket.create_connection((place.host, place.port or 0), timeout=4))
            if number < 32:
                time.sleep(0.003)
                continue
            with suppress(ConnectionError):  # a reset says the same
                assert one.recv(1) == b""
        stack.close()
        for _ in range(200):  # until the threads of the others have seen that these are closed
            with suppress(httpx.HTTPError):
                assert "holds no run" in httpx.get(address).text
                return
            time.sleep(0.05)
        pytest.fail("nobody was answered any more")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.draws
def test_dollars_in_a_name_are_dollars(tiny_data: Path, config_file: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    config = tmp_path / "dear.toml"
    config.write_text(config_file.read_text(encoding="utf-8").replace('name = "tiny"', 'name = "cost $5} or $6"'), encoding="utf-8")
    arguments = ("run", config, "--data-dir", tiny_data, "--no-baseline", "--set", "training.rounds=1", "--report", "--out")
    assert ldpfl(*arguments, tmp_path / "run").code == 0
    for name in ("curve.svg", "report.html"):
        assert "cost $5} or $6" in (tmp_path / "run" / name).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.thorough
def test_every_run_s_folder_gets_its_page(tiny_data: Path, config_file: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    arguments = ("run", config_file, "--data-dir", tiny_data, "--no-baseline", "--set", "training.rounds=1", "--out")
    outcome = ldpfl(*arguments, tmp_path / "with", "--report", "--watch")
    assert "watch it at http://127.0.0.1:" in outcome.err
    assert (tmp_path / "with" / "report.html").read_text(encoding="utf-8") == page([tmp_path / "with"])
    ldpfl(*arguments, tmp_path / "without", "--no-report")
    assert not (tmp_path / "without" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.xdist_group("page")
def test_its_epsilons_are_those_of_the_ledger(folder: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the headlines, and beside those of another run; and each stands under the trust that it rests on."""
    kept = RunFolder(folder)
    result, best = kept.result(), account(kept.ledger(), kept.config().privacy.delta).best
    assert result
    assert best
    assert f"<dt>epsilon, trusting nobody</dt><dd>{number(best.epsilon)}<small>" in text
    assert "if the others hide it" not in text
    both = page([folder, shutil.copytree(folder, tmp_path / "a copy")])
    size = f"{result['uplink_bytes_per_client_round']:,}"
    assert both.count(f'<td class="number">{number(best.epsilon)}</td><td class="number">{size}</td></tr>') == 2

    edited = shutil.copytree(folder, tmp_path / "edited")
    false = {"epsilon_per_unit": 0.001, "unit": "person", "mechanism": "magic"}
    (edited / "result.json").write_text(json.dumps({**result, **false}), encoding="utf-8")
    assert page([edited]) == text

    alone = Guarantee(7.0, 1e-5, "client", 1, REPLACE_ONE, "local", "proved", scope="run")
    hidden = replace(alone, epsilon=3.0, trust_model="shuffled")
    monkeypatch.setattr("ldpfl.report.page.account", lambda ledger, delta: Statement(1e-5, (alone, hidden)))
    shuffled = page([folder])
    for name, figure in (("epsilon, if the others hide it", 3), ("epsilon, trusting nobody", 7)):
        assert f"<dt>{name}</dt><dd>{figure}<small>" in shuffled


CODE = """
import torch

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(400, 10))

def deal(samples, clients, seed):
    return [place % clients for place in range(samples)]
"""


@pytest.mark.thorough
def test_a_public_page_names_no_folder_of_this_machine(tiny_data: Path, config_file: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    secret = tmp_path / "ward-of-dr-who"
    secret.mkdir()
    (secret / "code.py").write_text(CODE, encoding="utf-8")
    run = tmp_path / "run"
    named = {"model.name": f"{secret}/code.py:Net", "data.partition": f"{secret}/code.py:deal", "data.tokenizer": f"hf:{secret}"}
    api.run(config_file, folder=run, data_dir=tiny_data, progress=False, settings=named)
    with (run / "config.toml").open("a", encoding="utf-8") as config:
        config.write(f'# a quote that nobody closes: "{secret}/notes\n')
    own, public = page([run]), page([run], public=True)
    assert str(secret) in own
    assert "closes: &#34;notes" in public
    assert "code.py:Net" in public
    assert "code.py:deal" in public
    assert not any(folder in public for folder in (str(tmp_path), str(tiny_data), tmp_path.name))
    assert str(tmp_path) not in str(public_settings(RunFolder(run).config()))


@pytest.mark.parametrize(
    ("unit", "words"), [("record", "on 40 records that they hold back"), ("person", "on 40 persons, all of whose records")]
)
def test_figures_of_clients_count_the_protected_unit_and_are_drawn_by_no_bootstrap(unit: str, words: str) -> None:
    figure = {"value": 0.5, "noise": 0.1, "sampling": 0.1, "low": 0.3, "high": 0.7}
    measured = {"round": 2, "records": 40, "figures": {"accuracy": figure}, "calibration": [], "confusion_noise": 2.0, "stated": True}
    name = f"accuracy{MEASURED_AT_CLIENTS}"
    result = {"at_clients": [measured], "privacy": {"guarantees": [{"unit": unit}]}, "intervals": {name: [0.3, 0.7]}}
    said = client_figures.how_measured(result)
    assert words in said
    assert f"the limited number of {unit}s." in said
    assert f"state the number of {unit}s" in said
    assert client_figures.confusion_caption(result).startswith(f"{unit.capitalize()}s by their class")
    del measured["calibration"]  # an evaluation of several classes, for example, needs none
    assert list(client_figures.bin_rows(result)) == []
    assert intervals_sentence(result) == ""
    assert "bootstrap over test rows" in intervals_sentence({"intervals": {"accuracy": [0.3, 0.7], name: [0.3, 0.7]}})


@pytest.mark.parametrize(("mechanism", "unit"), [("dp-sgd", "multiples of the clipping norm"), ("dp-fedavg", None)])
def test_noise_below_the_layers_has_its_unit(mechanism: str, unit: str | None) -> None:
    layer = {"weights": 3, "radius": None, "noise_std": 0.5, "clipped_fraction": None}
    caption = layer_table({"mechanism": mechanism, "layers": {"1.weight": layer}}).caption
    assert unit in str(caption) if unit else caption is None
