"""Command line flags made from the configuration's dataclasses: one flag a field, with the field's comment as its help."""

import dataclasses
import inspect
import re
import types
import typing
from typing import Annotated, Any

import tyro

from pagedjax.config import ALIASES, EngineConfig
from pagedjax.errors import UserError, check
from pagedjax.host.request import SamplingParams

SIZES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
}
BYTES = ("cache.kv_memory", "cache.swap_memory")  # given with a unit
NAMES = {"sharding.model": "tensor_parallel_size"}  # where the field's name alone would say too little
SHORT = {"sharding.model": ("-tp",)}
MORE_HELP = {"seed": "; a start with the same seed gives the same texts, so another one must be given for others"}
NOT_SAMPLING = (
    "seed",
    "structured_outputs",
)  # forms are for programs; --seed is the engine's; the seeds of all requests follow from it


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "4 GiB", "2G" (1024s) or "1000000"; 1.5GB is fine, too. UserError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    check(
        match is not None and match[2].upper() in SIZES,
        f"a size must be a number with B, KiB, MiB, GiB, KB, MB or GB behind it, or none for bytes; got {text!r}",
    )
    assert match is not None
    return int(float(match[1]) * SIZES[match[2].upper()])


def comments(cls: type) -> dict[str, str]:
    """The comment behind each field of a dataclass, from its source."""
    found = re.findall(r"^ {4}(\w+): [^#\n]*# *(.+)$", inspect.getsource(cls), re.MULTILINE)
    return {name: text[0].upper() + text[1:] for name, text in found}


def engine_flags(cls: type = EngineConfig, path: str = "") -> type:
    """A dataclass like EngineConfig, whose fields carry what tyro needs to make flags of them."""
    help_of, types_of = comments(cls), typing.get_type_hints(cls)
    fields = []
    for field in dataclasses.fields(cls):
        where, kind = f"{path}{field.name}", types_of[field.name]
        if dataclasses.is_dataclass(kind):
            section = engine_flags(typing.cast(type, kind), f"{where}.")
            fields.append((field.name, section, dataclasses.field(default_factory=section)))
            continue
        name = NAMES.get(where, field.name)
        others = tuple(f"--{alias.replace('_', '-')}" for alias, target in ALIASES.items() if target == where and alias != name)
        default = field.default
        if where in BYTES:
            kind, default = str, str(default)
        hint = tyro.conf.arg(
            name=name,
            aliases=others + SHORT.get(where, ()),
            help=help_of.get(field.name, "") + MORE_HELP.get(where, ""),
            metavar=metavar(kind),
        )
        fields.append((field.name, Annotated[kind, hint], dataclasses.field(default=default)))
    made = dataclasses.make_dataclass(f"{cls.__name__}Flags", fields, frozen=True)
    made.__doc__ = (cls.__doc__ or "").splitlines()[0]
    return made


def engine_config(flags: Any, cls: type = EngineConfig, path: str = "") -> Any:
    """The EngineConfig that parsed flags stand for. UserError where a value breaks a rule."""
    values = {}
    for field in dataclasses.fields(cls):
        where, value = f"{path}{field.name}", getattr(flags, field.name)
        if dataclasses.is_dataclass(value):
            value = engine_config(value, typing.cast(type, field.default_factory), f"{where}.")
        elif where in BYTES:
            value = parse_size(value)
        values[field.name] = value
    return cls(**values)


def sampling_flags(*, max_tokens: int | None, without: tuple[str, ...] = ()) -> type:
    """A dataclass with the fields of SamplingParams, but for those `without` a use here. What is not given is None (a switch: its
    default) and is left to the model's own defaults; `max_tokens` is this command's."""
    help_of, types_of = comments(SamplingParams), typing.get_type_hints(SamplingParams)
    fields = []
    for field in dataclasses.fields(SamplingParams):
        if field.name in (*NOT_SAMPLING, *without):
            continue
        kind = types_of[field.name]
        default = field.default if kind is bool else max_tokens if field.name == "max_tokens" else None
        shown = default if field.name == "max_tokens" else field.default
        text = "the model's context" if shown is None and field.name == "max_tokens" else _shown(shown)
        hint = tyro.conf.arg(help=help_of.get(field.name, ""), metavar=metavar(kind), help_behavior_hint=f"(default: {text})")
        fields.append((field.name, Annotated[kind if kind is bool else kind | None, hint], dataclasses.field(default=default)))
    made = dataclasses.make_dataclass("SamplingFlags", fields, frozen=True)
    made.__doc__ = (
        "How tokens are chosen. The defaults of temperature, top_p and others are the model's own, where its files name some."
    )
    return made


def sampling_params(flags: Any, defaults: SamplingParams) -> SamplingParams:
    """`defaults` with what was given on the command line. UserError where a value breaks a rule."""
    values = {f.name: getattr(flags, f.name) for f in dataclasses.fields(flags)}
    given = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
    return dataclasses.replace(defaults, **given)


def metavar(kind: Any) -> str | None:
    """How a type is shown in the help; None: as tyro does."""
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return f"{metavar(parts[0])} ..."
    if origin is dict:
        return f"{metavar(parts[0])} {metavar(parts[1])} ..."
    return {int: "INT", float: "FLOAT", str: "TEXT"}.get(kind)


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids of "1,2,3"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"token ids must be integers with commas between them; got {text!r}") from error


def _shown(default: object) -> str:
    empty = default is None or default is dataclasses.MISSING or default == ()
    return "none" if empty else str(default)
