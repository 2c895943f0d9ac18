"""The rules of the house that a program can check. Each rule is also shown something that breaks it."""

import ast
import dataclasses
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pagedjax
from pagedjax import config

ROOT = Path(__file__).parents[1]
PACKAGES = ("pagedjax", "checkpoints", "pallas_kernels", "serving", "bench")
FILE_LINES = 420  # "about 400"
FUNCTION_LINES = 60
KERNEL = re.compile(r"pallas_kernels/\w+/(xla|triton|mosaic_\w+|numba_attention)\.py")  # a kernel's body may be longer
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")  # by protoc
WORDS = ("Manager", "Helper", "Util", "Base", "Handler")
BY_NAME = (
    "pagedjax/__init__.py",
    "pagedjax/cli.py",
    "pagedjax/commands/serve.py",
    "checkpoints/open.py",
    "pallas_kernels/common/dispatch.py",
    "pallas_kernels/common/numba_ffi.py",
)  # load modules by name, when they are asked for

# Who may import what of this project: itself, and these. What is not listed here may import anything but the entry points.
EDGES = {
    "pallas_kernels": (),
    "pagedjax.errors": (),
    "pagedjax.limits": (),
    "pagedjax.config": ("pagedjax.errors",),
    "pagedjax.text": ("pagedjax.errors",),
    "pagedjax.host": ("pagedjax.errors", "pagedjax.limits"),
    "pagedjax.device": (
        "pallas_kernels",
        "pagedjax.buckets",
        "pagedjax.config",
        "pagedjax.errors",
        "pagedjax.limits",
        "pagedjax.state",
        "pagedjax.wire",
    ),
    "pagedjax.models": ("pagedjax.config", "pagedjax.device", "pagedjax.errors"),
    "checkpoints": ("pagedjax.config", "pagedjax.device.params", "pagedjax.errors", "pagedjax.models", "pagedjax.text"),
}
ENTRY_POINTS = ("pagedjax.llm", "pagedjax.loop", "pagedjax.cli", "pagedjax.commands", "checkpoints", "serving")
MAY_ENTER = {
    "pagedjax.llm": ("pagedjax.loop", "checkpoints"),
    "pagedjax.commands": ("pagedjax.llm", "pagedjax.loop", "checkpoints", "serving"),
    "serving": ("pagedjax.llm", "pagedjax.loop"),
    "pagedjax.__main__": ("pagedjax.cli",),
    "pagedjax.cli": ("serving.config",),
    "bench": ("pagedjax.llm", "pagedjax.loop", "checkpoints", "serving"),
}
NO_JAX = (
    "pagedjax.errors",
    "pagedjax.limits",
    "pagedjax.config",
    "pagedjax.text",
    "pagedjax.host",
    "pagedjax.pack",
    "pagedjax.wire",
    "pagedjax.simulate",
    "pagedjax.traces",
)
OUTSIDE = {"pallas_kernels": ("jax", "numpy", "numba", "llvmlite")}  # all that may be imported beside the standard library


def sources(*packages: str) -> Iterator[tuple[str, str]]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            if GENERATED.search(path.name):
                continue
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, source: str) -> set[str]:
    """The modules that a file imports; `from a import b` is a.b where that is a module of ours."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                place = ROOT / deeper.replace(".", "/")
                found.add(deeper if place.with_suffix(".py").is_file() or place.is_dir() else str(node.module))
    return found


def inside(module: str, groups: tuple[str, ...]) -> bool:
    return any(module == group or module.startswith(f"{group}.") for group in groups)


def wrong_imports(path: str, source: str) -> list[str]:
    name = module_name(path)
    group = next((g for g in EDGES if inside(name, (g,))), None)
    entered = next((names for g, names in MAY_ENTER.items() if inside(name, (g,))), ())
    wrong = []
    for module in imports(path, source):
        ours = inside(module, PACKAGES)
        if group is not None:
            allowed = not ours or inside(module, (group, *EDGES[group]))
            outside = OUTSIDE.get(group)
            if outside is not None and not ours:
                allowed = module.split(".")[0] in (*outside, *sys.stdlib_module_names)
        else:
            own = tuple(point for point in ENTRY_POINTS if inside(name, (point,)))
            allowed = not inside(module, ENTRY_POINTS) or inside(module, (*own, *entered))
        if not allowed or (inside(name, NO_JAX) and module.split(".")[0] in ("jax", "jaxlib", "flax")):
            wrong.append(f"{path} must not import {module}")
    return wrong


def late_imports(path: str, source: str) -> list[str]:
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            wrong += [
                f"{path}:{n.lineno}: an import in a function" for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)
            ]
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in ("import_module", "__import__") and path not in BY_NAME:
            wrong.append(f"{path}: {name}")
        if name == "TYPE_CHECKING":
            wrong.append(f"{path}: TYPE_CHECKING")
    return wrong


def environment(path: str, source: str) -> list[str]:
    if path == "serving/auth.py":  # API keys, which the engine knows nothing of
        return []
    if path.startswith("pallas_kernels/aot/"):  # compilers have no other switches, and the engine does not import it
        return []
    names = (node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return [f"{path} reads the environment ({name})" for name in names if name in ("environ", "getenv")]


def too_long(path: str, source: str) -> list[str]:
    lines = source.count("\n")
    wrong = [f"{path} has {lines} lines"] if lines > FILE_LINES else []
    if not KERNEL.fullmatch(path):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                wrong += [f"{path}:{node.lineno}: {node.name} has {size} lines"] if size > FUNCTION_LINES else []
    return wrong


def class_names(path: str, source: str) -> list[str]:
    names = (node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return [f"{path}: class {name}" for name in names if any(word in name for word in WORDS)]


@pytest.mark.parametrize("rule", [wrong_imports, late_imports, environment, too_long, class_names])
def test_rule(rule: Callable[[str, str], list[str]]):
    assert [wrong for path, source in sources(*PACKAGES) for wrong in rule(path, source)] == []


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (wrong_imports, "pagedjax/host/x.py", "from pagedjax.device import step"),
        (wrong_imports, "pagedjax/host/x.py", "import jax.numpy"),
        (wrong_imports, "pagedjax/device/x.py", "from pagedjax.host.request import Request"),
        (wrong_imports, "pagedjax/engine.py", "from checkpoints import load_params"),
        (wrong_imports, "pagedjax/engine.py", "from pagedjax import loop"),
        (wrong_imports, "pallas_kernels/kv_write/x.py", "from pagedjax.errors import check"),
        (wrong_imports, "pallas_kernels/kv_write/x.py", "import flax"),
        (wrong_imports, "checkpoints/x.py", "from pagedjax.device.layers import linear"),
        (wrong_imports, "pagedjax/text/x.py", "from pagedjax.config import EngineConfig"),
        (late_imports, "pagedjax/x.py", "def f():\n    import os"),
        (late_imports, "pagedjax/x.py", "import importlib\nimportlib.import_module('jax')"),
        (late_imports, "pagedjax/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax"),
        (wrong_imports, "pagedjax/llm.py", "from serving.frontend import Frontend"),
        (wrong_imports, "serving/x.py", "import checkpoints"),
        (environment, "pagedjax/x.py", "import os\nos.environ['A']"),
        (environment, "serving/x.py", "import os\nos.environ['A']"),
        (too_long, "pagedjax/x.py", "a = 1\n" * 500),
        (too_long, "pagedjax/x.py", "def f():\n" + "    a = 1\n" * 61),
        (class_names, "pagedjax/x.py", "class PoolManager:\n    pass"),
    ],
)
def test_rule_finds_what_breaks_it(rule: Callable[[str, str], list[str]], path: str, source: str):
    assert rule(path, source)


def test_no_import_cycles():
    graph = import_graph() | {"pagedjax": set()}  # loads its public names by name, when they are asked for
    ours = {name: {module for module in modules if module in graph and module != name} for name, modules in graph.items()}
    assert "pagedjax.engine" in list(graphlib.TopologicalSorter(ours).static_order())


@functools.cache
def import_graph() -> dict[str, set[str]]:
    return {module_name(path): imports(path, source) for path, source in sources(*PACKAGES)}


def reached(*starts: str) -> set[str]:
    """All that is imported when these modules are, but for what libraries import themselves."""
    seen, todo = set(), list(starts)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += import_graph().get(name, ())
    return seen


def test_an_engine_starts_without_the_libraries_of_other_checkpoints():
    """Together they take as long to import as a model to load."""
    slow = {"orbax.checkpoint", "huggingface_hub", "gguf"}
    assert not reached("pagedjax.llm") & slow and "jax" in reached("pagedjax.llm")
    assert slow == slow & (reached("checkpoints.store") | reached("checkpoints.hub") | reached("checkpoints.gguf"))


def test_a_server_without_tracing_imports_nothing_of_it():
    """FastAPI itself imports OpenTelemetry's API, which does nothing; not what makes and sends spans."""
    ours = ("opentelemetry", "serving.spans")
    assert not [name for name in reached("pagedjax.commands.serve") if inside(name, ours)]
    assert [name for name in reached("serving.spans") if inside(name, ours)]


def read_attributes(source: str) -> set[str]:
    return {n.attr for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


def test_every_config_field_is_read():
    """By the packages, or by `resolve` or a property of config.py that they read; the checks of a class do not count."""
    reads = set().union(
        *(read_attributes(source) for path, source in sources("pagedjax", "checkpoints") if path != "pagedjax/config.py")
    )
    for node in ast.walk(ast.parse((ROOT / "pagedjax/config.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name in reads | {"resolve"} and node.name != "__post_init__":
            reads |= read_attributes(ast.unparse(node))
    classes = [c for c in vars(config).values() if dataclasses.is_dataclass(c)]
    assert len(classes) >= 7
    unread = [f"{c.__name__}.{f.name}" for c in classes for f in dataclasses.fields(c) if f.name not in reads]
    assert unread == []


def test_aliases_name_fields():
    for target in config.ALIASES.values():
        part = config.EngineConfig()
        for name in target.split("."):
            part = getattr(part, name)


def test_lazy_names_are_those_of_the_stub():
    stub = ast.parse((ROOT / "pagedjax/__init__.pyi").read_text(encoding="utf-8"))
    told = {alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert told == pagedjax.HOME
    assert {name: getattr(pagedjax, name).__name__ for name in pagedjax.HOME} == {name: name for name in pagedjax.HOME}
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        pagedjax.Nothing  # noqa: B018


def test_no_addresses_of_registries_or_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    bad = re.compile("|".join(("pypi" + r"\.org", "python" + "hosted", "npm" + r"js\.(org|com)", r"(?<![\w.}])/wo" + "rk/")))
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix not in (".npz", ".safetensors", ".gguf"):
            found = bad.search(path.read_text(encoding="utf-8", errors="replace"))
            assert found is None, f"{name} holds {found and found[0]}"
