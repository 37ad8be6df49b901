"""The floors and walls of ``docs/architecture.md``, read off the import graph."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

FLOORS: dict[int, tuple[str, ...]] = {
    6: ("cli", "server", "migration", "llm", "__main__"),
    5: ("engine", "simulation", "bench"),
    4: ("scheduling", "execution"),
    3: ("cache", "models", "loading", "text"),
    2: ("parallel", "devices"),
    1: (
        "request",
        "plan",
        "outcome",
        "tiers",
        "config",
        "settings",
        "errors",
        "version",
        "wire",
        "lifeline",
        "trace",
        "compatibility",
        "grammar",
        "logs",
    ),
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}

TORCH_FREE = (
    "request",
    "plan",
    "outcome",
    "tiers",
    "config",
    "settings",
    "errors",
    "cache",
    "scheduling",
    "simulation",
)
LIGHT_AT_START = ("cli", "server", "text")
PLAN_ONLY = ("execution", "models", "cache", "loading", "parallel", "devices")
"""Packages that work on plans and columns; only their neighbours know requests."""

HEAVY = frozenset({"torch", "transformers"})
OPTIONAL = frozenset({"opentelemetry.sdk", "opentelemetry.exporter"})
"""Of an extra: loaded only where a setting asks for it. (FastAPI brings ``opentelemetry.trace``.)"""
NOT_IN_INIT = HEAVY | {
    "fastapi",
    "uvicorn",
    "starlette",
    "pydantic",
    "zmq",
    "tokenizers",
    "gguf",
    "safetensors",
    "jinja2",
}


@pytest.fixture(scope="module")
def source() -> Path:
    spec = importlib.util.find_spec("ropeway")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Every import of the package, lazy and type-checking ones included."""
    return grimp.build_graph("ropeway", cache_dir=None)


@pytest.fixture(scope="module")
def runtime_graph() -> grimp.ImportGraph:
    """Imports that can run, those of other distributions included."""
    return grimp.build_graph(
        "ropeway", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )


def room(module: str) -> str:
    """``ropeway.cache.pool`` -> ``cache``; the package itself stands above everything and has no room."""
    return module.split(".")[1] if "." in module else ""


def loaded_after_importing(modules: list[str], watched: frozenset[str]) -> list[str]:
    """Which of the watched packages a fresh interpreter has loaded after importing ``modules``."""
    code = (
        "import importlib, json, sys\n"
        "modules, watched = json.loads(sys.argv[1])\n"
        "for module in modules: importlib.import_module(module)\n"
        "print(json.dumps([name for name in watched if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([modules, sorted(watched)])],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def modules_of(source: Path, package: str) -> list[str]:
    inside = pkgutil.walk_packages([str(source / package)], prefix=f"ropeway.{package}.")
    # __main__ runs on import; what it imports is in the list on its own account.
    names = [module.name for module in inside if not module.name.endswith(".__main__")]
    return [f"ropeway.{package}", *names]


def test_every_module_of_the_package_has_a_floor(graph: grimp.ImportGraph) -> None:
    rooms = {room(module) for module in graph.find_children("ropeway")}
    assert rooms <= FLOOR_OF.keys(), "new rooms need a floor, here and in docs/architecture.md"
    assert FLOOR_OF.keys() == rooms, "a room is gone"


def test_a_module_imports_only_from_its_own_floor_or_a_lower_one(graph: grimp.ImportGraph) -> None:
    climbing = [
        f"{importer} (floor {FLOOR_OF[room(importer)]}) imports {imported}"
        for importer in sorted(graph.modules - {"ropeway"})
        for imported in sorted(graph.find_modules_directly_imported_by(importer))
        if imported == "ropeway" or FLOOR_OF[room(imported)] > FLOOR_OF[room(importer)]
    ]
    assert climbing == []


@pytest.mark.parametrize("name", TORCH_FREE)
def test_the_host_side_never_imports_torch_however_far_around(name: str, runtime_graph: grimp.ImportGraph) -> None:
    for heavy in HEAVY & runtime_graph.modules:
        chain = runtime_graph.find_shortest_chain(f"ropeway.{name}", heavy, as_packages=True)
        assert chain is None, " -> ".join(chain or ())


@pytest.mark.parametrize("name", LIGHT_AT_START)
def test_what_clients_start_first_loads_neither_torch_nor_transformers_nor_extras(name: str, source: Path) -> None:
    assert loaded_after_importing(modules_of(source, name), HEAVY | OPTIONAL) == []


def test_package_inits_are_light(source: Path) -> None:
    packages = [
        ".".join(("ropeway", *init.parent.relative_to(source).parts)) for init in sorted(source.rglob("__init__.py"))
    ]
    assert "ropeway.devices.cpu" in packages
    assert loaded_after_importing(packages, NOT_IN_INIT) == []


def test_execution_and_below_never_see_a_request(source: Path) -> None:
    seen = [
        f"{path.relative_to(source)}:{node.lineno}"
        for package in PLAN_ONLY
        for path in sorted((source / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and node.module == "ropeway.request"
        and any(alias.name == "Request" for alias in node.names)
    ]
    assert seen == []
