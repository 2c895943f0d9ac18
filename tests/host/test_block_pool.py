"""BlockPool against a recount, over random allocate, share and release."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.host.block_pool import BlockPool


@given(st.integers(2, 20), st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 30)), max_size=60))
def test_counts_add_up(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    pool, held = BlockPool(num_blocks), []
    for action, number in actions:
        if action == "allocate" and number <= pool.num_free:
            held.append(pool.allocate(number))
            assert 0 not in held[-1]
        elif action == "share" and held:
            held.append(list(held[number % len(held)]))
            pool.share(held[-1])
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        pool.check(held)
        assert pool.num_free == pool.capacity - len({b for blocks in held for b in blocks})


def test_released_blocks_are_given_out_again_at_once() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.release(blocks)
    assert sorted(pool.allocate(3)) == sorted(blocks)


def test_misuse_is_caught() -> None:
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="allocate\\(4\\) with 3 free blocks"):
        pool.allocate(4)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="released once too often"):
        pool.release([block])
    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        pool.share([block])


def test_check_sees_a_leak_and_a_stolen_block() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="reference counts differ"):
        pool.check([blocks[:1]])
    with pytest.raises(AssertionError, match="reference counts differ"):
        pool.check([blocks, [next(b for b in range(1, 6) if b not in blocks)]])
    with pytest.raises(AssertionError, match="scrap block"):
        pool.check([blocks, [0]])
