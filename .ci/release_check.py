"""Check what a release hands out: versions, source distributions, wheels, and both packages in empty environments. See docs/releases.md."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "release"
DIST = WORK / "dist"
PACKAGES = {"ldpfl": ROOT, "ldpfl-verify": ROOT / "verify"}
CONSTRAINTS = ROOT / "constraints.txt"


def main() -> None:
    """Run all checks. What is wrong about versions is said at the end, so that the rest can be checked before a release as well."""
    shutil.rmtree(WORK, ignore_errors=True)
    DIST.mkdir(parents=True)
    wrong = list(disagreements())
    wheels = build()
    wrong += [fault for wheel in wheels.values() for fault in faults_of(wheel)]
    certified = as_user(wheels)
    as_auditor(wheels["ldpfl-verify"], certified)
    for fault in wrong:
        print(f"release-check: {fault}", file=sys.stderr)
    print(f"{DIST}: {', '.join(sorted(path.name for path in DIST.iterdir()))}")
    sys.exit(bool(wrong))


def version_of(folder: Path) -> str:
    return str(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def disagreements() -> Iterator[str]:
    """Yield each place that does not name the version of ``pyproject.toml``."""
    version = version_of(ROOT)
    if version_of(ROOT / "verify") != version:
        yield f"verify/pyproject.toml has version {version_of(ROOT / 'verify')}, expected {version}"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    if f"\nversion: {version}\n" not in citation:
        yield f"CITATION.cff lacks version: {version}"
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M):
        yield f"CHANGELOG.md lacks the section: ## [{version}] - DATE"
    year = re.search(r"^date-released: (\d{4})", citation, re.M)
    stated = re.search(r'^YEAR = "(\d{4})"', (ROOT / "src" / "ldpfl" / "version.py").read_text(encoding="utf-8"), re.M)
    if not year or not stated or year[1] != stated[1]:
        yield "CITATION.cff and src/ldpfl/version.py name different years"


def build() -> dict[str, Path]:
    """Build a source distribution of each package, and from that its wheel; return the wheels by name."""
    python = environment("build")
    call(python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, "hatchling")
    found = {}
    for name, folder in PACKAGES.items():
        call(python, "-m", "hatchling", "build", "--target", "sdist", "--directory", DIST, cwd=folder)
        stem = f"{name.replace('-', '_')}-{version_of(folder)}"
        with tarfile.open(DIST / f"{stem}.tar.gz") as archive:
            archive.extractall(WORK / "unpacked", filter="data")
        call(python, "-m", "hatchling", "build", "--target", "wheel", "--directory", DIST, cwd=WORK / "unpacked" / stem)
        found[name] = DIST / f"{stem}-py3-none-any.whl"
    return found


def faults_of(wheel: Path) -> Iterator[str]:
    """Yield what a wheel lacks, or should not hold."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    package = wheel.name.split("-")[0]
    for wanted in (f"{package}/py.typed", f"{package}/__init__.py"):
        if wanted not in names:
            yield f"{wheel.name} lacks {wanted}"
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        yield f"{wheel.name} lacks the licence"
    others = {name.split("/")[0] for name in names if not name.startswith((f"{package}/", f"{package}-"))}
    if others:
        yield f"{wheel.name} holds {', '.join(sorted(others))} beside the package"


def as_user(wheels: dict[str, Path]) -> Path:
    """Install both wheels into an empty environment, train, certify and verify there; return the folder with certificate and ledger."""
    python = environment("user")
    torch = re.search(r"^torch==\S+$", CONSTRAINTS.read_text(encoding="utf-8"), re.M)
    call(python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, torch[0] if torch else "torch", *wheels.values())
    folder = WORK / "used"
    folder.mkdir()
    ldpfl = python.parent / "ldpfl"
    call(ldpfl, "--version", cwd=folder)
    call(ldpfl, "plan", "--epsilon", "1", "--clients", "100", "--weights", "100", "--rounds", "2", cwd=folder)
    small = ("--set", "training.rounds=1", "--set", "clients.count=10", "--no-baseline", "--out", "run")
    call(ldpfl, "run", "quickstart", *small, cwd=folder)
    call(ldpfl, "certify", "run", "--key", "key.pem", cwd=folder)
    call(ldpfl, "verify", "certificate.json", "--ledger", "run", cwd=folder)
    return folder


def as_auditor(wheel: Path, folder: Path) -> None:
    """Install the verifier alone, and check the same certificate."""
    python = environment("auditor")
    call(python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, wheel)
    call(python.parent / "ldpfl-verify", "certificate.json", "--ledger", "run", cwd=folder)
    if subprocess.run([python, "-c", "import ldpfl"], capture_output=True, check=False).returncode == 0:
        sys.exit("release-check: ldpfl can be imported where only ldpfl-verify is installed")


def environment(name: str) -> Path:
    """Make an empty environment, and return its Python."""
    venv.create(WORK / name, with_pip=True)
    return WORK / name / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def call(*command: str | Path, cwd: Path = WORK) -> None:
    """Run a command, or stop the check with its name."""
    print("$", *command, flush=True)
    code = subprocess.run(command, cwd=cwd, check=False).returncode
    if code:
        sys.exit(f"release-check: exit code {code} of {' '.join(map(str, command))}")


if __name__ == "__main__":
    main()
