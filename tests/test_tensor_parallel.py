"""Tensor parallel over simulated devices gives the tokens of one device, padded and replicated as needed; and so does a scan
over stacked layers, which is how TPU and GPU run."""

import re
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest
from judge import check_output
from test_engine import run, tokens_of

from pagedjax.device.params import shard_layout
from pagedjax.engine import Engine
from pagedjax.host.request import Request, SamplingParams


def some_requests() -> list[Request]:
    plain = SamplingParams(max_tokens=20, temperature=0)
    drawn = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, repetition_penalty=1.2, logprobs=3, n=2)
    return [
        Request("a", (1,), plain),
        Request("b", tuple(range(300, 340)), drawn, seed=99),
        Request("c", (1, 403, 407), plain),
    ]


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_stories_on_several_devices(stories_engine: Callable[..., Engine], shards: int) -> None:
    """stories260K has 8 heads over 4 kv heads and a feed-forward width of 172: on 8 devices kv heads are replicated and the
    width is padded to 176."""
    engine = stories_engine(stacked=True, tensor_parallel_size=shards)
    for part in engine.state.kv.addressable_shards:
        assert part.data.shape[3] == max(4, shards) // shards
    assert len({s.device for s in engine.state.kv.addressable_shards}) == shards
    requests = some_requests()
    events = run(engine, requests)
    for request in requests:
        for index in range(request.params.n):
            check_output(request, index, events[request.id, index])


@pytest.mark.parametrize(("bucket", "scores"), [(0, []), (-1, [["all-gather"]])])
def test_the_collectives_of_a_step(stories_engine: Callable[..., Engine], bucket: int, scores: list[list[str]]) -> None:
    """In the layer loop two all-reduces, after attention and after the feed-forward; outside it one all-reduce for the embedding,
    whose rows are sharded, and an all-gather of the logits where they are wanted: to sample and, but for decode buckets, to score
    prompts."""
    engine = stories_engine(stacked=True, tensor_parallel_size=2)
    text = engine.executables[engine.buckets[bucket]].call.as_text()
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.endswith("{"):
            computation = line.split()[0]
        # an all-gather must give logits f32[rows, vocab], not a whole weight
        assert " all-gather(" not in line or re.search(r" = f32\[\d+,512\]", line), line
        if match := re.search(r" = \S+ (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", line):
            found.setdefault(computation, []).append(match[1])
    kinds = sorted(sorted(names) for names in found.values())
    assert kinds == [*scores, ["all-gather", "all-reduce"], ["all-reduce", "all-reduce"]]


def test_lanes_are_the_same_on_every_device(stories_engine: Callable[..., Engine]) -> None:
    engine = stories_engine(stacked=True, tensor_parallel_size=4)
    run(engine, some_requests())
    for leaf in jax.tree.leaves(engine.state.lanes):
        copies = [np.asarray(s.data) for s in leaf.addressable_shards]
        assert all((copy == copies[0]).all() for copy in copies)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shards", "padded"),
    [
        (9, 3, 3, (9, 3)),
        (9, 3, 2, (12, 4)),
        (8, 4, 8, (8, 8)),
        (9, 3, 4, (12, 4)),
        (14, 2, 4, (16, 4)),
        (14, 2, 8, (16, 8)),
        (12, 3, 8, (16, 8)),
    ],
)
def test_padded_heads(
    stories_engine: Callable[..., Engine], heads: int, kv_heads: int, shards: int, padded: tuple[int, int]
) -> None:
    """Every query head stands on the shard of its own kv head, every head of the file is there at least once."""
    cfg = replace(stories_engine().model, num_heads=heads, num_kv_heads=kv_heads)
    layout = shard_layout(cfg, shards)
    assert (layout.cfg.num_heads, layout.cfg.num_kv_heads) == padded
    q = layout.maps["heads"].source if "heads" in layout.maps else tuple(range(heads))
    k = layout.maps["kv_heads"].source if "kv_heads" in layout.maps else tuple(range(kv_heads))
    each = padded[0] // padded[1]
    for i, source in enumerate(q):
        assert source == -1 or k[i // each] == source // (heads // kv_heads)
    assert sorted(s for s in q if s >= 0) == list(range(heads)) and set(range(kv_heads)) <= set(k)


def test_stacked_and_listed_layers_agree(stories_engine: Callable[..., Engine]) -> None:
    requests = some_requests()
    listed, stacked = (run(stories_engine(stacked=s), requests) for s in (False, True))
    assert {k: tokens_of(v) for k, v in listed.items()} == {k: tokens_of(v) for k, v in stacked.items()}
