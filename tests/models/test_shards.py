"""Every architecture over 2 and 4 devices: padded at load, the logits are those of one device, here transformers' own."""

import numpy as np
import pytest

from pagedjax.device.params import shard_layout
from pagedjax.device.sharding import make_mesh
from tests.golden.tiny_models import LENGTHS, texts
from tests.models.goldens import NAMES, TOLERANCE, distance, expected, load, open_golden
from tests.models.paging import compiled_pass, run, shuffled_tables

CASES = [(name, shards) for name in NAMES if name not in ("llama_linear", "qwen2_yarn") for shards in (2, 4)]


@pytest.mark.parametrize(("name", "shards"), CASES)
def test_logits_over_several_devices(name, shards, tmp_path):
    mesh = make_mesh(shards)
    params, cfg = load(open_golden(name, tmp_path), mesh, stacked=shards == 4)
    layers = params["layers"].unit[0] if shards == 4 else params["layers"][0]
    assert len(layers["up"].sharding.device_set) == shards and not layers["up"].sharding.is_fully_replicated
    ids = texts(name)
    got = run(compiled_pass(cfg), params, cfg, mesh, ids, [LENGTHS], tables=shuffled_tables(cfg, ids, shards))
    true = [scores[:, : cfg.vocab_size] for scores in got]
    assert distance(true, expected(name)) < TOLERANCE
    padding = np.concatenate([scores[:, cfg.vocab_size :] for scores in got])
    assert padding.shape[1] > 0 and np.all(padding == -np.inf)


def test_the_cases_cover_every_padding(tmp_path):
    """kv heads replicated, kv heads and query heads padded, feed-forward and vocabulary padded; and one with no padded heads."""
    seen = set()
    for name, shards in CASES:
        folder = tmp_path / f"{name}{shards}"
        folder.mkdir()
        cfg = open_golden(name, folder).config
        maps = shard_layout(cfg, shards).maps
        seen |= {"even heads"} if "heads" not in maps else {"padded heads"} if -1 in maps["heads"].source else {"dealt heads"}
        if "kv_heads" in maps:
            seen.add("padded kv" if -1 in maps["kv_heads"].source else "replicated kv")
        seen |= {f"padded {axis}" for axis in ("ffn", "vocab") if axis in maps}
    wanted = {"even heads", "padded heads", "padded kv", "replicated kv", "padded ffn", "padded vocab"}
    assert wanted <= seen
