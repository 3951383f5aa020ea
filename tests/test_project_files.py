"""Files that other programs and people look for at a project's root: continuous integration, issue forms, hooks, citation, security."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERIFIER = tomllib.loads((ROOT / "verify" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def parsed(path: Path) -> dict[str, Any]:
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree


def test_continuous_integration_tests_each_supported_python() -> None:
    workflow: dict[Any, Any] = parsed(ROOT / ".github" / "workflows" / "ci.yml")
    assert workflow[True].keys() == {"push", "pull_request", "schedule"}  # YAML 1.1 reads the key "on" as true
    assert workflow["permissions"] == {"contents": "read"}
    job = workflow["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == VERIFIER["requires-python"] == ">=3.11"
    assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    assert job["steps"][-1] == {"run": ".ci/run ${{ github.event_name == 'schedule' && 'test-all' || 'test' }}"}
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


@pytest.mark.parametrize("form", [form for form in FORMS if form.name != "config.yml"], ids=lambda form: form.stem)
def test_an_issue_form_is_one_that_github_shows(form: Path) -> None:
    tree = parsed(form)
    assert tree.keys() == {"name", "description", "labels", "body"}
    asked = [part for part in tree["body"] if part["type"] != "markdown"]
    assert asked
    assert {part["type"] for part in asked} <= {"input", "textarea"}
    assert len({part["id"] for part in asked}) == len(asked)
    for part in tree["body"]:
        assert part.keys() <= {"type", "id", "attributes", "validations"}
        assert part["attributes"]["value" if part["type"] == "markdown" else "label"]


def test_there_are_forms_for_figures_faults_and_mechanisms() -> None:
    assert [form.stem for form in FORMS] == ["accountant", "config", "fault", "mechanism"]
    assert parsed(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": True}


def test_hooks_before_a_commit_are_what_lint_runs() -> None:
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").split("\nlint:")[1].split("\n\n")[0]
    (local,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        assert hook["language"] == "system"
        command = hook["entry"].removesuffix(" --force-exclude").replace(".venv/bin", "$(BIN)")
        assert f"\t{command}" in lint
    assert len(local["hooks"]) == lint.count("\t")


def test_the_citation_names_this_version() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}  # what the format requires
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert isinstance(citation["date-released"], date)


def test_both_packages_have_one_version_and_the_first_asks_for_the_second() -> None:
    assert VERIFIER["version"] == PROJECT["version"]
    major, minor = PROJECT["version"].split(".")[:2]
    assert f"ldpfl-verify>={major}.{minor},<{major}.{int(minor) + 1}" in PROJECT["dependencies"]
    assert {re.match(r"[a-z]+", name)[0] for name in VERIFIER["dependencies"]} == {"mpmath", "numpy", "scipy"}  # type: ignore[index]


def test_vulnerabilities_are_reported_in_private_and_to_no_invented_address() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "private vulnerability reporting" in text
    assert "@" not in text
