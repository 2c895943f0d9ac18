"""The benchmark of the host's part of a step keeps running."""

from bench.host import measure


def test_every_step_is_measured_in_parts() -> None:
    parts = measure(rows=4, steps=6, prompt=9, block_size=4)
    assert {name: len(values) for name, values in parts.items()} == {"schedule": 6, "pack": 6, "commit": 6}
    assert all(value > 0 for values in parts.values() for value in values)
