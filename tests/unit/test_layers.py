"""The project's own shape: which layer may import which, and what is public."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import tutti

PACKAGE = Path(tutti.__file__).parent

LAYERS = [
    "errors", "plugins", "versions", "simulation.sizes", "cluster", "measurement", "events", "coordination",
    "transports", "codecs",
    "collectives", "replica", "simulation", "backend", "cost", "strategies", "parallel", "plan", "world", "data",
    "checkpoint", "job", "launch", "recipes", "simulation.runs", "report", "fit", "integrations", "bench", "cli",
    "__main__",
]  # fmt: skip
"""Lower first: a module imports only from its own layer and those before it. The longest name that fits counts."""

PUBLIC = {
    "Cluster", "Simulation", "simulate", "BSP", "SSP", "Async", "ParameterServer", "SoftSync", "StalenessAware",
    "Auto", "Averaging", "BlockMomentum", "DiLoCo",
    "AllReduce", "Job", "Link", "TuttiError", "World", "distribute", "init", "lab", "launch", "measure_link", "shard",
    "sync_batchnorm", "world", "Gossip", "Graph", "PeerUpdates", "Poseidon", "Profile", "profile", "Branches",
    "Mesh", "Pipeline", "tensor_plan", "print", "fit", "summary",
}  # fmt: skip


def test_public_names() -> None:
    assert set(tutti.__all__) == PUBLIC
    assert all(hasattr(tutti, name) for name in PUBLIC)


def test_submodules_are_attributes_without_being_imported_before() -> None:
    functions = {"fit", "launch", "world"}  # Public functions, which hide the submodules of the same name.
    expected = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if _is_module(path)}
    expected -= functions | {"__init__", "__main__"}
    script = (
        "import sys, tutti\n"
        f"names = {sorted(expected)}\n"
        "assert set(names) <= set(dir(tutti)), set(names) - set(dir(tutti))\n"
        "assert 'torch' not in sys.modules\n"
        "for name in names: assert getattr(tutti, name).__name__ == f'tutti.{name}'\n"
        "assert callable(tutti.launch) and callable(tutti.world)\n"
        "assert not hasattr(tutti, 'nothing')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50)
    assert ended.returncode == 0, ended.stderr


def test_every_module_is_in_a_layer() -> None:
    found = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if _is_module(path)}
    assert found <= set(LAYERS), f"not in LAYERS: {sorted(found - set(LAYERS))}"


def test_layers_import_only_downwards() -> None:
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if module == "__init__":
            continue
        for imported in _tutti_imports(file):
            if _layer(imported) > _layer(module):
                wrong.append(f"{file.relative_to(PACKAGE)} imports tutti.{imported}")
    assert not wrong, "\n".join(sorted(wrong))


def test_only_launch_and_the_command_line_read_the_environment() -> None:
    allowed = {"launch", "cli", "bench"}
    readers = {
        file.relative_to(PACKAGE).parts[0]
        for file in PACKAGE.rglob("*.py")
        if "os.environ" in file.read_text() or "getenv" in file.read_text()
    }
    assert readers <= allowed, f"reads the environment: {sorted(readers - allowed)}"


def test_nothing_is_unpickled_outside_the_launcher() -> None:
    users = {
        file.relative_to(PACKAGE).parts[0]
        for file in PACKAGE.rglob("*.py")
        for node in _parsed(file)
        if isinstance(node, ast.Import) and any(alias.name in ("pickle", "cloudpickle") for alias in node.names)
    }
    assert users == {"launch"}


@cache
def _parsed(file: Path) -> list[ast.AST]:
    """Everything in a file, read once for all tests here."""
    return list(ast.walk(ast.parse(file.read_text())))


def _is_module(path: Path) -> bool:
    if path.is_dir():
        return (path / "__init__.py").exists()
    return path.suffix == ".py" and path.stem != "__init__"


def _layer(module: str) -> int:
    """The position of the longest entry of LAYERS that `module` is, or is inside of."""
    return LAYERS.index(max((name for name in LAYERS if f"{module}.".startswith(f"{name}.")), key=len))


def _tutti_imports(file: Path) -> set[str]:
    """The modules of Tutti that `file` imports, below `tutti`; what is only imported for types counts too."""
    found = set()
    for node in _parsed(file):
        if isinstance(node, ast.ImportFrom) and node.module and (node.module + ".").startswith("tutti."):
            package = node.module.removeprefix("tutti").lstrip(".")
            found.update(_module(package, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name.removeprefix("tutti.") for alias in node.names if alias.name.startswith("tutti."))
    return found


def _module(package: str, name: str) -> str:
    """What `from tutti.package import name` imports: a module of that name, or something of the package itself."""
    inner = PACKAGE / package.replace(".", "/") / name
    is_module = inner.with_suffix(".py").exists() or (inner / "__init__.py").exists()
    return f"{package}.{name}".lstrip(".") if is_module else package


def test_importing_tutti_imports_no_compiler() -> None:
    """Every worker and every command pays for what is imported here, before it does anything."""
    heavy = ("torch._dynamo", "torch._inductor", "sympy", "numba", "matplotlib", "torch.utils.flop_counter")
    script = f"import sys, tutti.cli; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50)
    assert found.stdout == "[]\n"


MAX_METHODS, MAX_FUNCTION_LINES, MAX_FILE_LINES = 20, 60, 500
TORCH_INTERFACES = {"TuttiGroup"}
"""Classes whose methods are given by torch."""


def _nodes(kind: type[ast.AST]) -> list[tuple[Path, Any]]:
    return [(file, node) for file in sorted(PACKAGE.rglob("*.py")) for node in _parsed(file) if isinstance(node, kind)]


def test_one_class_name_has_one_meaning() -> None:
    places: dict[str, list[Path]] = {}
    for file, node in _nodes(ast.ClassDef):
        places.setdefault(node.name, []).append(file.relative_to(PACKAGE))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_classes_functions_and_files_are_small() -> None:
    large = [
        f"{node.name} has {methods} methods"
        for _, node in _nodes(ast.ClassDef)
        if node.name not in TORCH_INTERFACES
        and (methods := sum(isinstance(member, ast.FunctionDef) for member in node.body)) > MAX_METHODS
    ]
    large += [
        f"{node.name} has {lines} lines"
        for _, node in _nodes(ast.FunctionDef)
        if (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    large += [
        f"{file.relative_to(PACKAGE)} has {lines} lines"
        for file in PACKAGE.rglob("*.py")
        if (lines := len(file.read_text().splitlines())) > MAX_FILE_LINES
    ]
    assert large == []


def test_modules_say_what_they_provide() -> None:
    """A module's docstring starts with what the module provides, not with "What", "Who" or "How"."""
    starts = ("What ", "Who ", "How ", "When ", "Where ", "Which ")
    wrong = [
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if (ast.get_docstring(ast.parse(file.read_text())) or "").startswith(starts)
    ]
    assert wrong == []
