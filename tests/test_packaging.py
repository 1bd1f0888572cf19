"""What is built is whole: the wheel works by itself, the source distribution has what the Makefile needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from cargohold import __version__

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="not in a source tree")


def test_the_lowest_versions_are_tested() -> None:
    """What `make test-lowest` installs is what the project says that it needs at least."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    elsewhere = {"mooncake", "vllm"}  # tested in environments of their own
    extras = {extra: needs for extra, needs in project["optional-dependencies"].items() if extra not in elsewhere}
    named = [Requirement(text) for text in sum(extras.values(), project["dependencies"])]
    needed = [requirement for requirement in named if requirement.name != "cargohold"]  # an extra in an extra
    pinned = dict(re.findall(r"(?m)^([\w-]+)==(.*)$", (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")))
    for requirement in needed:
        (bound,) = requirement.specifier
        assert (bound.operator, Version(pinned[requirement.name])) == (">=", Version(bound.version)), requirement
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"--editable '.[{','.join(sorted(extras))}]'" in recipe


def test_the_base_is_small() -> None:
    """An engine's users get nothing with the connector that their engine has not, but for two small packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {Requirement(text).name for text in project["dependencies"]}
    assert names == {"msgspec", "numpy", "platformdirs", "psutil", "xxhash"}


def run_without_packages(code: str, *, without: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run code where some packages are not installed."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({list(without)!r}))\n"
    hidden = "import importlib.util as u; find = u.find_spec\n"
    hidden += f"u.find_spec = lambda name, *rest: None if name in {list(without)!r} else find(name, *rest)\n"
    return subprocess.run(
        [sys.executable, "-c", hidden + blocked + code], capture_output=True, text=True, timeout=60, check=False
    )


def test_what_vllm_runs_needs_none_of_the_packages_that_only_we_use() -> None:
    """Beside vLLM, cargohold is installed alone: no engine, no server, no terminal."""
    absent = ["fastapi", "packaging", "prometheus_client", "pytest", "rich", "transformers", "typer", "uvicorn"]
    code = (
        "import cargohold.connector.factory, cargohold.connector.options, cargohold.integrations.vllm.plugin\n"
        "import cargohold.connector.offloading.factory, cargohold.tiers.opening, cargohold.transfer.cpu\n"
        "from cargohold import OffloadConfig; OffloadConfig(host_bytes='1GiB')\n"
        "import cargohold.lab.simulation\n"
        "print('all there')"
    )
    done = run_without_packages(code, without=absent)
    assert (done.stdout, done.returncode) == ("all there\n", 0), done.stderr


@pytest.mark.parametrize(
    ("code", "absent", "said"),
    [
        ("from cargohold.cli import main; sys.exit(main())", "typer", "pip install 'cargohold[cli]'"),
        ("import cargohold; cargohold.LLM('smollm2')", "transformers", "pip install 'cargohold[engine]'"),
    ],
)
def test_what_needs_an_extra_says_which(code: str, absent: str, said: str) -> None:
    done = run_without_packages(code, without=[absent])
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert said in last and absent in last


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel and the source distribution are."""
    pytest.importorskip("hatchling")
    directory = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(directory)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=100)
    return directory


def test_the_wheel_has_the_demo_texts_types_licence_and_command(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"cargohold-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "cargohold = cargohold.cli:main" in archive.read(entry_points).decode()
    package = ROOT / "src" / "cargohold"
    sources = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(package).parts)
    }
    assert sources <= set(names), "files of the package are missing"
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_runs_by_itself(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    code = (
        "import cargohold; from cargohold.cli.demo import load_conversations as load; "
        "print(cargohold.__file__, len(load(3)), all(len(talk.questions[0]) > 5000 for talk in load(3)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd="/", check=True, capture_output=True, text=True, timeout=60
    )
    where, count, are_long = done.stdout.split()
    assert where.startswith(str(wheel)), "something else was imported"
    assert (count, are_long) == ("4", "True")


def test_the_source_distribution_has_all_that_make_needs(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"Makefile", "pyproject.toml", "README.md", "LICENSE", "tools/check_docs.py"}
    needed |= set(re.findall(r"constraints[\w-]*\.txt", (ROOT / "Makefile").read_text(encoding="utf-8")))
    assert needed - names == set()
    assert {"tests/conftest.py", "benchmarks/__main__.py", "docs/usage.md", "examples/README.md"} <= names
