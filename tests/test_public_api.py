"""What is public is said in one place per package, sorted, and is there."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import cargohold

ROOT = Path(cargohold.__file__).parent
PACKAGES = sorted(
    [
        "cargohold",
        *(f"cargohold.{package.name}" for package in pkgutil.iter_modules(cargohold.__path__) if package.ispkg),
        *(
            f"cargohold.{package.name}.{inner.name}"
            for package in pkgutil.iter_modules(cargohold.__path__)
            if package.ispkg
            for inner in pkgutil.iter_modules([str(ROOT / package.name)])
            if inner.ispkg
        ),
    ]
)
NEEDS_MORE = {"cargohold.integrations.vllm"}
"""Packages that import what need not be installed."""


def _tree(package: str) -> ast.Module:
    path = ROOT.parent.joinpath(*package.split("."), "__init__.py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(package: str) -> set[str]:
    """Names that a package's ``__init__`` takes from its modules."""
    return {
        alias.asname or alias.name
        for node in (*_tree(package).body, *_for_type_checkers(package))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cargohold")
        for alias in node.names
    }


def _for_type_checkers(package: str) -> list[ast.stmt]:
    """What a package's ``__init__`` has type checkers alone import."""
    conditional = [node for node in _tree(package).body if isinstance(node, ast.If)]
    return next((node.body for node in conditional if ast.unparse(node.test) == "TYPE_CHECKING"), [])


def _declared(package: str) -> list[str] | None:
    for node in _tree(package).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_what_the_package_imports(package: str) -> None:
    declared, imported = _declared(package), _imported(package)
    if declared is None:
        assert not imported, f"{package} imports names without saying whether they are public"
        return
    assert len(declared) == len(set(declared))
    assert imported <= set(declared) | {"annotations"}, "imported, but not declared as public"
    if package not in NEEDS_MORE:
        module = importlib.import_module(package)
        assert [name for name in declared if not hasattr(module, name)] == [], "declared, but not there"


def test_the_front_door_is_small_and_sorted() -> None:
    constants = {name for name in cargohold.__all__ if name.isupper() or name.startswith("__")}
    classes = [name for name in cargohold.__all__ if name not in constants]
    assert classes == sorted(classes)
    assert "LLM" in constants and len(cargohold.__all__) < 25


def test_what_the_front_door_imports_when_asked_is_what_type_checkers_see() -> None:
    seen = {
        node.module: tuple(alias.name for alias in node.names)
        for node in _for_type_checkers("cargohold")
        if isinstance(node, ast.ImportFrom)
    }
    assert {name for names in seen.values() for name in names} == set(cargohold.__all__) - {"__version__"}
    for home, names in seen.items():
        for name in names:
            assert getattr(cargohold, name) is getattr(importlib.import_module(str(home)), name)
    assert set(cargohold.__all__) <= set(dir(cargohold))
    with pytest.raises(AttributeError, match="module 'cargohold' has no attribute 'Nonsense'"):
        _ = cargohold.Nonsense  # type: ignore[attr-defined]  # unused if type checkers took any name


def test_the_front_door_offers_the_contract() -> None:
    code = "import cargohold; cargohold.protocol.KVConnectorScheduler"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_command_imports_nothing_before_it_can_answer_ctrl_c() -> None:
    code = "import sys; before = set(sys.modules); import cargohold.cli; print(*sorted(sys.modules.keys() - before))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    others = {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    assert others == {"cargohold"}
    assert {name for name in done.stdout.split() if name.startswith("cargohold")} == {"cargohold", "cargohold.cli"}


def test_every_public_name_of_the_front_door_explains_itself() -> None:
    for name in cargohold.__all__:
        if name != "__version__":
            assert getattr(cargohold, name).__doc__, name


def test_every_error_that_is_raised_on_purpose_has_one_root() -> None:
    from cargohold import errors  # noqa: PLC0415  # next to its use

    raised = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(raised) > 10
    assert all(issubclass(error, cargohold.CargoholdError) for error in raised)


@pytest.mark.parametrize(
    "module",
    [
        "cargohold",
        "cargohold.cli.app",
        "cargohold.connector.factory",
        "cargohold.cache",
        "cargohold.lab.simulation",
    ],
)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'zmq', 'huggingface_hub'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
