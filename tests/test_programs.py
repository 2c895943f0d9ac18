"""Compiled programs on disk: a second start compiles nothing and gives the same tokens; what goes into a program goes into its
name; a file that is not what it should be is compiled again."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
from test_engine import run, tokens_of
from test_rules import ROOT, inside, module_name, reached, sources
from test_tensor_parallel import some_requests

from pagedjax.buckets import Bucket
from pagedjax.commands.cache import entries
from pagedjax.device import programs
from pagedjax.device.compile import compile_all, open_compile_cache
from pagedjax.device.programs import describe, load_program, program_file, save_program
from pagedjax.device.sharding import make_mesh
from pagedjax.engine import Engine


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[jax.stages.Lowered]:
    """What is compiled ahead of time from here on."""
    found, compile_it = [], jax.stages.Lowered.compile

    def noted(lowered: jax.stages.Lowered, **options: Any) -> jax.stages.Compiled:
        found.append(lowered)
        return compile_it(lowered, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", noted)
    return found


def outcome(engine: Engine) -> list[tuple[int, ...]]:
    """Tokens of some requests, after a check that steps write the pool where it is."""
    pool = [shard.data.unsafe_buffer_pointer() for shard in engine.state.kv.addressable_shards]
    requests = some_requests()
    events = run(engine, requests)
    assert [shard.data.unsafe_buffer_pointer() for shard in engine.state.kv.addressable_shards] == pool
    assert engine.compilations_after_start == 0
    return [tokens_of(events[request.id, index]) for request in requests for index in range(request.params.n)]


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files of programs that an engine asks for from here on."""
    found: list[Path] = []

    def noted(file: Path, mesh: Mesh) -> jax.stages.Compiled | None:
        found.append(file)
        return load_program(file, mesh)

    monkeypatch.setattr("pagedjax.device.compile.load_program", noted)
    return found


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2, "stacked": True}], ids=["one device", "two"])
def test_a_second_start_compiles_nothing(
    stories_engine: Callable[..., Engine],
    compile_cache: str,
    compiled: list[jax.stages.Lowered],
    looked_for: list[Path],
    options: dict[str, Any],
) -> None:
    first = stories_engine(**options)
    compiled.clear()
    looked_for.clear()
    second = stories_engine.__wrapped__(**options)  # pyright: ignore[reportFunctionMemberAccess]
    assert compiled == []
    assert len(set(looked_for)) == len(first.executables) + 3 and set(looked_for) <= set(entries(compile_cache))
    for bucket, was in first.executables.items():
        now = second.executables[bucket]
        assert (now.alias_bytes, now.temp_bytes) == (was.alias_bytes, was.temp_bytes)
    assert outcome(second) == outcome(first)


def test_a_damaged_file_is_compiled_again(
    stories_engine: Callable[..., Engine],
    compile_cache: str,
    tmp_path: Path,
    compiled: list[jax.stages.Lowered],
    looked_for: list[Path],
) -> None:
    """And replaced; the other programs are loaded."""
    first = stories_engine()
    shutil.copytree(compile_cache, tmp_path, dirs_exist_ok=True)
    build: Callable[..., Engine] = partial(stories_engine.__wrapped__, compile_cache=str(tmp_path))  # pyright: ignore
    build()
    file = next(file for file in looked_for if file.is_relative_to(tmp_path) and file.name.startswith("step"))
    file.write_bytes(file.read_bytes()[:-100])
    compiled.clear()
    assert outcome(build()) == outcome(first)
    assert len(compiled) == 1
    assert load_program(file, first.mesh) is not None


def lower_power(shape: jax.ShapeDtypeStruct, bucket: Bucket, exponent: int) -> jax.stages.Lowered:
    return jax.jit(lambda x: x**exponent + bucket.rows).lower(shape)


SHAPE = jax.ShapeDtypeStruct((4,), jnp.float32)
FOLDER = "somewhere"
CUBE = partial(lower_power, SHAPE, Bucket(8, 2), 3)


def name_of(lower: partial[Any] = CUBE, options: Any = None, shards: int = 1) -> str:
    file = program_file(FOLDER, lower, options or {}, make_mesh(shards))
    assert file is not None
    return file.name


def test_what_goes_into_a_program_goes_into_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        name_of(),
        name_of(partial(lower_power, SHAPE, Bucket(8, 4), 3)),
        name_of(partial(lower_power, SHAPE, Bucket(8, 2), 2)),
        name_of(partial(lower_power, jax.ShapeDtypeStruct((5,), jnp.float32), Bucket(8, 2), 3)),
        name_of(partial(lower_power, jax.ShapeDtypeStruct((4,), jnp.bfloat16), Bucket(8, 2), 3)),
        name_of(partial(name_of, CUBE, Bucket(8, 2), 3)),
        name_of(options={"xla_backend_optimization_level": 1}),
        name_of(shards=2),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", "0.0.1")
        names.append(name_of())
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        names.append(name_of())
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert len(set(names)) == len(names)
    assert name_of() == names[0], "the control: nothing has changed"


def test_the_source_goes_into_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    monkeypatch.setattr(programs, "SOURCES", (tmp_path,))
    names = []
    for text in ("x = 1", "x = 2", "x = 1"):
        (tmp_path / "a.py").write_text(text)
        programs.source_digest.cache_clear()
        names.append(name_of())
    programs.source_digest.cache_clear()
    assert names[0] == names[2] != names[1]


def test_all_that_device_and_models_import_is_source() -> None:
    files = {module_name(path): ROOT / path for path, _ in sources("pagedjax", "pallas_kernels")}
    starts = [name for name in files if inside(name, ("pagedjax.device", "pagedjax.models"))]
    seen = {files[name] for name in reached(*starts) if name in files and name != "pagedjax"}
    assert ROOT / "pallas_kernels/kv_write/__init__.py" in seen
    assert {file for file in seen if not any(file.is_relative_to(source) for source in programs.SOURCES)} == set()


def test_flags_of_xla_are_among_its_options() -> None:
    """`surroundings` counts on it."""
    code = "from jaxlib import xla_client as x; print(x.CompileOptions().SerializeAsString())"
    seen = [
        subprocess.run([sys.executable, "-c", code], env={"XLA_FLAGS": flags}, check=True, capture_output=True).stdout
        for flags in ("", "--xla_cpu_enable_fast_math=true")
    ]
    assert seen[0] != seen[1]


@pytest.mark.parametrize("damage", ["missing", "short", "bit", "other name", "no program"])
def test_a_file_that_is_no_program_of_that_name(tmp_path: Path, damage: str) -> None:
    file, mesh = tmp_path / name_of(), make_mesh(1)
    save_program(file, CUBE().compile())
    whole, loaded = file.read_bytes(), load_program(file, mesh)
    assert loaded is not None and loaded(jnp.full(4, 2.0)).tolist() == [10.0] * 4
    match damage:
        case "missing":
            file.unlink()
        case "short":
            file.write_bytes(whole[:-1])
        case "bit":
            file.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        case "other name":
            file = file.rename(tmp_path / name_of(partial(lower_power, SHAPE, Bucket(8, 2), 2)))
        case _:
            file.write_bytes(programs.digest_of(file, b"hello") + b"hello")
    assert load_program(file, mesh) is None


def test_the_folder_is_its_owners_alone(tmp_path: Path) -> None:
    """And JAX's own cache is left as it is, on CPU."""
    before = jax.config.values["jax_compilation_cache_dir"]
    open_compile_cache(str(tmp_path / "new"), "cpu")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert jax.config.values["jax_compilation_cache_dir"] == before != str(tmp_path / "new")


def test_a_program_that_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="a compiled program cannot be kept as .*nowhere"):
        save_program(tmp_path / "nowhere" / "power", CUBE().compile())


@pytest.fixture
def jax_cache(tmp_path: Path) -> Iterator[None]:
    """JAX's own cache, on."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    compilation_cache.reset_cache()


def test_what_comes_from_the_cache_of_jax_is_not_kept(tmp_path: Path, jax_cache: None) -> None:
    """On CPU such a program lacks its functions when it is serialized once more: the control."""
    mesh = make_mesh(1)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (made,) = compile_all([("cube", CUBE)], mesh, str(tmp_path / name)).values()
        assert made.call(jnp.full(4, 2.0)).tolist() == [10.0] * 4
    assert len(list((tmp_path / "first").iterdir())) == 1 and not list((tmp_path / "second").iterdir())

    file = tmp_path / "second" / "power"
    save_program(file, cast(jax.stages.Compiled, made.call))
    loaded = load_program(file, mesh)
    assert loaded is not None
    with pytest.raises(jax.errors.JaxRuntimeError, match="not found"):
        loaded(jnp.full(4, 2.0)).block_until_ready()


def test_only_what_can_be_told_apart_names_a_program() -> None:
    with pytest.raises(TypeError, match="a program cannot be named by a object"):
        describe({"a": object()})
    assert describe(replace(Bucket(1, 1), rows=2)) == "Bucket(tokens=1, rows=2)"
