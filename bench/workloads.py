"""Workloads of token ids, so that no tokenizer takes part. Repeat r has fresh tokens, but the lengths of every other repeat."""

import random
from collections.abc import Callable
from typing import Literal

Job = tuple[list[int], int]  # prompt, number of new tokens
Workload = Literal["a", "b", "c"]


def single(repeat: int, vocab: int) -> list[Job]:
    """(a) One request: 128 in, 128 out."""
    return [(_ids(random.Random(f"a{repeat}"), 128, vocab), 128)]


def mixed(repeat: int, vocab: int) -> list[Job]:
    """(b) 32 requests at once: prompts of 32 to 256 tokens, outputs of 16 to 256."""
    lengths = random.Random("b-lengths")
    shapes = [(lengths.randint(32, 256), lengths.randint(16, 256)) for _ in range(32)]
    rng = random.Random(f"b{repeat}")
    return [(_ids(rng, prompt, vocab), new) for prompt, new in shapes]


def shared_prefix(repeat: int, vocab: int) -> list[Job]:
    """(c) 32 requests that share their first 512 tokens, with 32 of their own: 32 out."""
    rng = random.Random(f"c{repeat}")
    prefix = _ids(rng, 512, vocab)
    return [(prefix + _ids(rng, 32, vocab), 32) for _ in range(32)]


WORKLOADS: dict[Workload, Callable[[int, int], list[Job]]] = {"a": single, "b": mixed, "c": shared_prefix}


def _ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    """The first ten and last ten ids are left out: they are often special."""
    return [rng.randint(10, vocab - 10) for _ in range(count)]
