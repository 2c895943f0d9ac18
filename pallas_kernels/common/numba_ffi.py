"""Kernels for CPU in Python that Numba compiles, and how XLA calls them: by its foreign function interface, on its own threads.

A kernel is a function (frame, job) -> None: it takes item after item of the call by `take(job)` until that gives -1, and finds the
arrays by `argument` and `result`. Several threads run it at once. What is read here of the structures of XLA's C interface
(xla/ffi/api/c_api.h, in jaxlib's include folder) is in the same places in JAX 0.11.2 and 0.12.
"""

# What Numba and its decorators make of a function is not what its signature says.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

import importlib
from functools import partial
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from pallas_kernels.common.machine_code import Recipe, Target

# For functions that other kernels call and Python does not: the two wrappers of each take a third of the time to compile.
jit: Any = partial(numba.njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
WORD = types.intp
# Places in the call frame, in words of 8 bytes, and of what it leads to.
EXTENSION, API, CONTEXT, ARGS, RETS = 1, 2, 3, 9, 14
BUFFER_DATA, BUFFER_DIMS = 3, 5
SCHEDULE, NUM_THREADS = 17, 18  # of the table of functions
METADATA = 3  # of the extension that asks for the version
MAJOR, MINOR = 0, 1  # the version that these places are of
# A call that several threads work on, in words of memory that the last of them frees: the next item, threads inside the kernel,
# threads that may still look here, how many items there are, and the call frame.
NEXT, INSIDE, HOLDERS, ITEMS, FRAME, JOB_WORDS = 0, 1, 2, 3, 4, 5

_malloc = types.ExternalFunction("malloc", WORD(WORD))
_free = types.ExternalFunction("free", types.void(WORD))
_yield = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def _pointer(typingctx, address, dtype):
    """The address as a pointer to elements of a dtype."""
    kind = types.CPointer(dtype.dtype)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(kind))

    return kind(types.intp, dtype), generate


@intrinsic
def _add(typingctx, address, amount):
    """Adds to a word that other threads change, too; what it was before."""

    def generate(context, builder, signature, args):
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def prefetch(typingctx, address):
    """Has the cache line at an address come nearer; no matter what is there."""

    def generate(context, builder, signature, args):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], byte), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def _call(typingctx, function, argument):
    """Calls a C function of one pointer at an address."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    return types.intp(types.intp, types.intp), generate


def _address_of(name: str) -> Any:
    """A function that gives the address of the C function of this name."""

    @intrinsic
    def address(typingctx):
        def generate(context, builder, signature, args):
            kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
            return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, kind, name), ir.IntType(64))

        return types.intp(), generate

    return address


@jit
def words(address, count):
    return numba.carray(_pointer(address, np.int64), count)


@jit
def _word(address, place):
    return numba.carray(_pointer(address, np.int64), place + 1)[place]


@jit
def argument(frame, index):
    """(address of the data, dims) of an argument."""
    buffer = _word(_word(frame, ARGS), index)
    return _word(buffer, BUFFER_DATA), words(_word(buffer, BUFFER_DIMS), 8)


@jit
def result(frame, index):
    """As `argument`, of a result."""
    buffer = _word(_word(frame, RETS), index)
    return _word(buffer, BUFFER_DATA), words(_word(buffer, BUFFER_DIMS), 8)


@jit
def array(address, shape, dtype):
    return numba.carray(_pointer(address, dtype), shape)


@jit
def take(job):
    """The next item, or -1."""
    item = _add(job + 8 * NEXT, 1)
    return item if item < _word(job, ITEMS) else -1


@jit
def _let_go(job):
    if _add(job + 8 * HOLDERS, -1) == 1:
        _free(job)


@jit
def _threads(frame):
    """How many threads XLA has for the call."""
    block = _malloc(8 * 5)
    request = words(block, 5)
    request[0], request[1], request[2], request[3] = 32, 0, _word(frame, CONTEXT), block + 32
    request[4] = 1
    _call(_word(_word(frame, API), NUM_THREADS), block)
    count = request[4]
    _free(block)
    return count


@jit
def _schedule(frame, task, data):
    """Has a thread of XLA call the C function at `task` with `data`, some time."""
    block = _malloc(8 * 5)
    request = words(block, 5)
    request[0], request[1], request[2], request[3], request[4] = 40, 0, _word(frame, CONTEXT), task, data
    _call(_word(_word(frame, API), SCHEDULE), block)
    _free(block)


@jit
def _answer_version(extension):
    version = _word(extension, METADATA) + 8
    numbers = numba.carray(_pointer(version + 16, np.int32), 2)
    numbers[0], numbers[1] = MAJOR, MINOR


def joining_symbol(name: str) -> str:
    return f"{name}_join"


def compile_target(name: str, recipe: Recipe) -> Target:
    """Compiles a kernel; takes seconds."""
    module = importlib.import_module(recipe.module)
    count, kernel = getattr(module, recipe.count), getattr(module, recipe.make)(*recipe.args)
    address_of_join = _address_of(joining_symbol(name))

    @numba.cfunc(WORD(WORD))
    def join(job):
        _add(job + 8 * INSIDE, 1)
        if _add(job + 8 * NEXT, 0) < _word(job, ITEMS):  # else the frame may be gone
            kernel(_word(job, FRAME), job)
        _add(job + 8 * INSIDE, -1)
        _let_go(job)
        return 0

    llvm.add_symbol(joining_symbol(name), join.address)

    @numba.cfunc(WORD(WORD))
    def call(frame):
        if _word(frame, EXTENSION) != 0:
            _answer_version(_word(frame, EXTENSION))
            return 0
        items = count(frame)
        threads = max(1, min(_threads(frame), items))
        job = _malloc(8 * JOB_WORDS)
        held = words(job, JOB_WORDS)
        held[NEXT], held[INSIDE], held[HOLDERS], held[ITEMS], held[FRAME] = 0, 0, threads + 1, items, frame
        for _ in range(threads - 1):
            _schedule(frame, address_of_join(), job)
        _call(address_of_join(), job)  # and not the kernel itself, which would be compiled into this function, too
        while _add(job + 8 * INSIDE, 0) > 0:
            _yield()
        _let_go(job)
        return 0

    return Target(name, *((f._wrapper_name, f._library.serialize_using_object_code()[2][0]) for f in (join, call)))
