"""What a kernel copies, counted while an interpreter runs it. On a chip, and outside of `count_copies`, it costs nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np


class Copy(NamedTuple):
    """One copy from or to the pool: of what, how many bytes, and where in the pool (layer, block, ... as the kernel says)."""

    what: str
    bytes: int
    where: tuple[int, ...]


_open: list[list[Copy]] = []  # the lists of the `count_copies` that are entered, the innermost last


@contextmanager
def count_copies() -> Iterator[list[Copy]]:
    """In here, a kernel that is traced notes each copy that it starts in the list that this gives."""
    _open.append([])
    try:
        yield _open[-1]
        jax.effects_barrier()
    finally:
        _open.pop()


def copied(what: str, ref: Any, *where: Any) -> None:
    """Called by a kernel where it starts a copy of what `ref` refers to; `where` are scalars, traced or not."""
    if not _open:
        return
    log, size = _open[-1], int(np.prod(ref.shape)) * ref.dtype.itemsize
    jax.debug.callback(lambda *at: log.append(Copy(what, size, tuple(int(x) for x in at))), *where)
