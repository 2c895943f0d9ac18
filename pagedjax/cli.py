"""The `pagedjax` command: what can be said on the command line, and how its errors end.

Only the configuration is imported here. A command's own module, and JAX with it, is loaded by name once the arguments are right,
so that --help and a wrong flag answer at once.
"""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Annotated, Any, Literal

import tyro

from pagedjax.config import BucketConfig, QueueConfig, Reserve, ScheduleConfig
from pagedjax.errors import UserError
from pagedjax.flags import engine_flags, sampling_flags
from serving.config import ServeConfig

EngineFlags: Any = engine_flags()
GenerateFlags: Any = sampling_flags(max_tokens=256)
ScheduleFlags: Any = engine_flags(ScheduleConfig, "schedule.")
QueueFlags: Any = engine_flags(QueueConfig, "queue.")
BucketFlags: Any = engine_flags(BucketConfig, "buckets.")
ServeFlags: Any = engine_flags(ServeConfig, "serve.")
ChatFlags: Any = sampling_flags(max_tokens=None, without=("n", "logprobs", "prompt_logprobs"))

Model = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(metavar="MODEL", help="A Hugging Face folder or hub id, a GGUF file, or a folder written by `pagedjax convert`."),
]


def each(what: str, metavar: str) -> Any:
    return tyro.conf.arg(help=f"{what} May be given several times.", metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class Generate:
    """Complete prompts as they stand, without the model's chat template (`pagedjax chat` uses it). Text goes to stdout, everything
    else to stderr."""

    model: Model
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, each("A prompt.", "TEXT")] = ()
    prompt_file: Annotated[
        tuple[str, ...],
        tyro.conf.UseAppendAction,
        each("A text file that is one prompt, or a .jsonl file with one on each line: a string or token ids.", "FILE"),
    ] = ()
    prompt_ids: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, each("A prompt as token ids, with commas between them.", "1,2,3")
    ] = ()
    json: bool = False  # print one JSON object for each prompt, on one line
    stream: bool = True  # print text as it comes
    sampling: Annotated[Any, tyro.conf.arg(constructor=GenerateFlags)] = field(default_factory=GenerateFlags)
    engine: Annotated[Any, tyro.conf.arg(constructor=EngineFlags)] = field(default_factory=EngineFlags)


@dataclass(frozen=True)
class Chat:
    """Talk to a model. /reset forgets the conversation, Ctrl-C stops an answer, /exit or Ctrl-D leaves."""

    model: Model
    system: Annotated[str, tyro.conf.arg(help="What the model is told first.", metavar="TEXT", help_behavior_hint="")] = ""
    sampling: Annotated[Any, tyro.conf.arg(constructor=ChatFlags)] = field(default_factory=ChatFlags)
    engine: Annotated[Any, tyro.conf.arg(constructor=EngineFlags)] = field(default_factory=EngineFlags)


@dataclass(frozen=True)
class Serve:
    """Serve a model by gRPC and HTTP until SIGTERM (docs/serving.md)."""

    model: Model
    serve: Annotated[Any, tyro.conf.arg(constructor=ServeFlags)] = field(default_factory=ServeFlags)
    engine: Annotated[Any, tyro.conf.arg(constructor=EngineFlags)] = field(default_factory=EngineFlags)


@dataclass(frozen=True)
class Compile:
    """Compile every shape of a model into the persistent cache, and list what each costs."""

    model: Model
    engine: Annotated[Any, tyro.conf.arg(constructor=EngineFlags)] = field(default_factory=EngineFlags)


@dataclass(frozen=True)
class Convert:
    """Write a model as an Orbax folder, which loads straight into shards."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC", help="Any kind of model that the others take.")]
    destination: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DST", help="The folder to write; must not exist.")]
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the matrices; auto: as in the file


@dataclass(frozen=True)
class Doctor:
    """Say what pagedjax finds on this machine: versions, devices, the compile cache, and the kernel of each op."""

    compile_cache: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = EngineFlags().compile_cache  # folder of the compilation cache


@dataclass(frozen=True)
class Simulate:
    """Replay recorded traffic through the scheduler and the block pool, without a model or a device, in virtual time. What is left
    at 0 is decided as on a GPU."""

    trace: Annotated[
        str,
        tyro.conf.arg(
            metavar="FILE",
            help="A .csv file like the Azure LLM traces (TIMESTAMP, ContextTokens, GeneratedTokens), or a .jsonl file like the "
            "Mooncake traces (timestamp, input_length, output_length, hash_ids); plain, .gz or .xz.",
        ),
    ]
    num_blocks: int = 8192  # blocks of the pool
    host_blocks: int = 0  # blocks that find room in host memory, where preempted sequences and evicted prefixes may go
    block_size: int = 64  # P, tokens in a block; a power of two
    prefix_caching: bool = True  # start from blocks that already hold the beginning of a prompt
    reserve: Reserve = "paged"  # block by block, or one contiguous run from the start
    step_time: Annotated[
        str,
        tyro.conf.arg(
            metavar="FILE",
            help="A JSON object with the seconds per_pass, per_token, per_row, per_context, per_pair and per_moved (of a token to "
            "host memory or back), as bench.simulate fits them.",
            help_behavior_hint="(default: 8B parameters by the data sheet of an H200)",
        ),
    ] = ""
    speed: float = 1.0  # requests come this many times as fast as they were recorded
    scale: float = 1.0  # prompts and outputs are this many times as long; 1 for a trace with hash_ids
    limit: Annotated[
        int | None,
        tyro.conf.arg(metavar="INT", help="Only so many requests of the trace.", help_behavior_hint="(default: all)"),
    ] = None
    json: bool = False  # print one JSON object
    schedule: Annotated[Any, tyro.conf.arg(constructor=ScheduleFlags)] = field(default_factory=ScheduleFlags)
    queue: Annotated[Any, tyro.conf.arg(constructor=QueueFlags)] = field(default_factory=QueueFlags)
    buckets: Annotated[Any, tyro.conf.arg(constructor=BucketFlags)] = field(default_factory=BucketFlags)


COMMANDS: dict[str, Any] = {
    "generate": Generate,
    "chat": Chat,
    "serve": Serve,
    "compile": Compile,
    "convert": Convert,
    "doctor": Doctor,
    "simulate": Simulate,
}


def parse(args: Sequence[str]) -> Any:
    """The command that was given; SystemExit(2) with an explanation on stderr where the arguments are wrong."""
    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="pagedjax",
        description="LLM inference in JAX with a paged KV cache.",
        args=list(args),
        config=(tyro.conf.OmitArgPrefixes,),
    )


def load(name: str) -> ModuleType:
    """The module of a command. No garbage is looked for meanwhile, nor later among what it has brought: modules stay. A start is a
    tenth shorter."""
    gc.disable()
    try:
        return importlib.import_module(f"pagedjax.commands.{name}")
    finally:
        gc.freeze()
        gc.enable()


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command; its exit code. 2: the user can mend it; 70: a server's engine failed; 130: Ctrl-C; 141: nobody reads stdout
    any more."""
    command = parse(sys.argv[1:] if args is None else args)
    try:
        code = load(type(command).__name__.lower()).run(command)
        sys.stdout.flush()
    except UserError as error:
        print(f"pagedjax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # or Python complains when it flushes stdout at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code or 0
