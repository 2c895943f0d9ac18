"""Flash attention over the blocks where they lie, in Python that Numba compiles.

Dao et al. 2022, FlashAttention (arXiv 2205.14135), with the online softmax of Milakov and Gimelshein 2018 (arXiv 1805.02867). An
item is one kv head of a tile of a row's queries, or of some rows of one token each that begin with the same blocks: these are read
once for all of them, as in Juravsky et al. 2024, Hydragen (arXiv 2402.05099).
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import numpy as np

from pallas_kernels.common.numba_ffi import argument, array, jit, prefetch, result, take

TILE = 48  # queries: tokens times heads that share a kv head
TOGETHER = 8  # rows of one token each that begin with the same block, and read what they share once
CHUNK = 4  # tokens of context whose products are made at a time
MATH = {"reassoc", "contract", "nsz", "arcp"}
LOG2E, LN2_HIGH, LN2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)


@jit(fastmath=MATH)
def exp(x):
    """e^x of x <= 0, f32, to 5 units in the last place: 2^n times a Taylor polynomial of at most ln(2) / 2 either side of 0."""
    x = np.float32(-87) if x < np.float32(-87) else x
    n = np.floor(x * LOG2E + np.float32(0.5))
    x = x - n * LN2_HIGH - n * LN2_LOW
    y = np.float32(1 / 5040)
    y = y * x + np.float32(1 / 720)
    y = y * x + np.float32(1 / 120)
    y = y * x + np.float32(1 / 24)
    y = y * x + np.float32(1 / 6)
    y = y * x + np.float32(1 / 2)
    y = y * x * x + x + np.float32(1)
    return y * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@jit
def as_it_is(x):
    return np.float32(x)


@jit
def of_bfloat16(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@jit
def of_float16(bits):
    """By moving the exponent: XLA's threads take subnormal numbers for 0."""
    size = np.uint32(bits) & np.uint32(0x7FFF)
    more = np.uint32(224 << 23) if size >= np.uint32(0x7C00) else np.uint32(112 << 23)  # infinities and NaN, or numbers
    x = np.uint32(np.uint32(size << np.uint32(13)) + more).view(np.float32)
    x = np.float32(np.int32(size)) * np.float32(2.0**-24) if size < np.uint32(1 << 10) else x
    return -x if np.uint32(bits) >= np.uint32(0x8000) else x


@jit
def of_float8_e4m3fn(bits):
    size = np.uint32(bits) & np.uint32(0x7F)
    x = np.uint32(np.uint32(size << np.uint32(20)) + np.uint32(120 << 23)).view(np.float32)
    x = np.float32(np.int32(size)) * np.float32(2.0**-9) if size < np.uint32(1 << 3) else x
    x = np.float32(np.nan) if size == np.uint32(0x7F) else x
    return -x if np.uint32(bits) >= np.uint32(0x80) else x


# By dtype of the pool: what its numbers are read as, and what makes f32 of them.
DTYPES = {
    "float32": (np.float32, as_it_is),
    "bfloat16": (np.uint16, of_bfloat16),
    "float16": (np.uint16, of_float16),
    "int8": (np.int8, as_it_is),
    "float8_e4m3fn": (np.uint8, of_float8_e4m3fn),
}


@jit(fastmath=MATH | {"nnan"})
def largest(values, first, last, top):
    for p in range(first, last):
        top = values[p] if values[p] > top else top
    return top


@jit
def start_of(starts, row, tokens):
    """Of a row's tokens; never outside of them, whatever the caller says."""
    return min(max(np.int64(starts[row]), 0), tokens)


@jit
def rows_and_tiles(starts, tables, first, rows, group, windowed, tokens):
    """How many rows from `first` on go together, and how many tiles of queries they are."""
    count = max(0, start_of(starts, first + 1, tokens) - start_of(starts, first, tokens))
    if count != 1 or windowed:
        return 1, (count * group + TILE - 1) // TILE
    most = max(1, min(TOGETHER, TILE // group, rows - first))
    size = 1
    while size < most and tables[first + size, 0] == tables[first, 0]:
        if start_of(starts, first + size + 1, tokens) - start_of(starts, first + size, tokens) != 1:
            break
        size += 1
    return size, (size * group + TILE - 1) // TILE


@jit
def item_count(frame):
    tokens = argument(frame, 0)[1][0]
    group = argument(frame, 0)[1][1] // argument(frame, 1)[1][3]
    ints = array(argument(frame, 2)[0], (2,), np.int32)
    address, dims = argument(frame, 4)
    tables = array(address, (dims[0], dims[1]), np.int32)
    starts = array(argument(frame, 6)[0], (dims[0] + 1,), np.int32)
    row, items = 0, 0
    while row < dims[0]:
        size, tiles = rows_and_tiles(starts, tables, row, dims[0], group, ints[1] > 0, tokens)
        row += size
        items += tiles
    return items * argument(frame, 1)[1][3] + 1  # the last one is what belongs to no row


def make_kernel(width: int, stored: int, block_size: int, dtype: str, by_token: bool):
    """For heads of `width` in a pool of DTYPES whose heads have a width of `stored`. by_token: scales are of tokens and heads, not
    f32[2]."""
    raw, number = DTYPES[dtype]
    token_bytes = np.dtype(raw).itemsize * stored
    zero, one, lowest = np.float32(0), np.float32(1), np.float32(-1e29)

    # Loops begin at 0: Numba lets indices count from the end, which costs a test where it does not see that they are not negative.
    @jit
    def load(part, tokens, ahead):
        """The first tokens as f32, and zeros where there are fewer. Prefetches as many from an address on."""
        for line in range(0, CHUNK * token_bytes, 64):
            prefetch(ahead + line)
        for j in range(CHUNK):
            if j < tokens.shape[0]:
                for d in range(width):
                    part[j, d] = number(tokens[j, d])
            else:
                for d in range(width):
                    part[j, d] = zero

    @jit(fastmath=MATH)
    def score(scores, queries, part, at):
        """Products of the queries with four tokens."""
        for r in range(queries.shape[0]):
            a, b, c, e = zero, zero, zero, zero
            for d in range(width):
                x = queries[r, d]
                a += x * part[0, d]
                b += x * part[1, d]
                c += x * part[2, d]
                e += x * part[3, d]
            scores[r, at], scores[r, at + 1], scores[r, at + 2], scores[r, at + 3] = a, b, c, e

    @jit(fastmath=MATH)
    def add_weighted(sums, weights, part, at):
        """Adds four tokens."""
        for r in range(sums.shape[0]):
            a, b, c, e = weights[r, at], weights[r, at + 1], weights[r, at + 2], weights[r, at + 3]
            for d in range(width):
                sums[r, d] += a * part[0, d] + b * part[1, d] + c * part[2, d] + e * part[3, d]

    @jit(fastmath=MATH)
    def cap(values, count, soft_cap):
        """As in Gemma 2 (arXiv 2408.00118)."""
        for p in range(count):
            t = exp(np.float32(-2) * abs(values[p] / soft_cap))
            y = soft_cap * (one - t) / (one + t)
            values[p] = y if values[p] > zero else -y

    @jit(fastmath=MATH)
    def weigh(values, first, last, count, top):
        """`count` scores into weights, which are 0 but from `first` to `last`; their sum."""
        total = zero
        for p in range(count):
            x = exp(values[p] - top) if first <= p < last else zero
            values[p] = x
            total += x
        return total

    @jit(fastmath=MATH)
    def rescale(values, factors):
        for p in range(factors.shape[0]):
            values[p] *= factors[p]

    @jit(fastmath=MATH)
    def attend(
        kv, scales, pool, base, blocks, k, table, begin, end, places, window, soft_cap, queries, scores, top, total, sums, part
    ):  # fmt: skip
        """Queries to the tokens `begin` to `end` of a table's row; each sees those up to its place. An entry that names no block of
        the pool is taken for the scrap block."""
        kv_heads = kv.shape[2]
        for b in range(begin // block_size, (end + block_size - 1) // block_size):
            block, following = base + table[b], base + table[min(b + 1, table.shape[0] - 1)]
            block = block if base <= block < base + blocks else base
            low, high = max(begin - b * block_size, 0), min(block_size, end - b * block_size)
            keys, values = kv[block, 0, k, low:high], kv[block, 1, k, low:high]
            chunks = (high - low + CHUNK - 1) // CHUNK
            ahead = pool + (((2 * block + 1) * kv_heads + k) * block_size + low) * token_bytes
            for c in range(chunks):
                load(part, keys[c * CHUNK :], ahead + c * CHUNK * token_bytes)
                score(scores, queries, part, c * CHUNK)
            for r in range(queries.shape[0]):
                place = places[r] - b * block_size - low
                first = max(0, place + 1 - window) if window > 0 else 0
                last = min(high - low, place + 1)
                if by_token:
                    rescale(scores[r], scales[block, 0, k, low:high])
                if soft_cap > zero:
                    cap(scores[r], chunks * CHUNK, soft_cap)
                new = largest(scores[r], first, last, top[r])
                keep = exp(top[r] - new)
                top[r] = new
                total[r] = total[r] * keep + weigh(scores[r], first, last, chunks * CHUNK, new)
                if by_token:
                    rescale(scores[r], scales[block, 1, k, low:high])
                for d in range(width):
                    sums[r, d] *= keep
            ahead = pool + (2 * following * kv_heads + k) * block_size * token_bytes
            for c in range(chunks):
                load(part, values[c * CHUNK :], ahead + c * CHUNK * token_bytes)
                add_weighted(sums, scores, part, c * CHUNK)

    @jit(fastmath=MATH)
    def kernel(frame, job):
        address, dims = argument(frame, 0)
        tokens, heads = dims[0], dims[1]
        q = array(address, (tokens, heads, width), np.float32)
        pool, dims = argument(frame, 1)
        layers, blocks, kv_heads = dims[0], dims[1], dims[3]
        kv = array(pool, (layers * blocks, 2, kv_heads, block_size, stored), raw)
        address = argument(frame, 8)[0]
        factors = array(address, (2,), np.float32)
        scales = array(address, (layers * blocks, 2, kv_heads, block_size), np.float32)
        k_factor, v_factor = (one, one) if by_token else (factors[0], factors[1])
        ints = array(argument(frame, 2)[0], (2,), np.int32)
        floats = array(argument(frame, 3)[0], (2,), np.float32)
        address, dims = argument(frame, 4)
        rows = dims[0]
        tables = array(address, (rows, dims[1]), np.int32)
        room = dims[1] * block_size
        lens = array(argument(frame, 5)[0], (rows,), np.int32)
        starts = array(argument(frame, 6)[0], (rows + 1,), np.int32)
        sinks = array(argument(frame, 7)[0], (heads,), np.float32)
        out = array(result(frame, 0)[0], (tokens, heads, width), np.float32)
        lse = array(result(frame, 1)[0], (tokens, heads), np.float32)

        base, window = min(max(np.int64(ints[0]), 0), layers - 1) * blocks, np.int64(ints[1])
        scale, soft_cap = floats[0] * k_factor, floats[1]
        group = heads // kv_heads
        queries, sums = np.empty((TILE, width), np.float32), np.empty((TILE, width), np.float32)
        scores = np.empty((TILE, block_size + CHUNK), np.float32)
        top, total = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
        places = np.empty(TILE, np.int64)
        part = np.empty((CHUNK, width), np.float32)

        row, size, tiles, before = 0, 0, 0, 0  # rows that go together, and items of those before them
        while True:
            item = take(job)
            if item < 0:
                break
            while item >= before + tiles * kv_heads:
                before += tiles * kv_heads
                row += size
                if row == rows:
                    break
                size, tiles = rows_and_tiles(starts, tables, row, rows, group, window > 0, tokens)
            if row == rows:
                first, after = tokens, 0
                for s in range(rows + 1):
                    first, after = min(first, start_of(starts, s, tokens)), max(after, start_of(starts, s, tokens))
                for t in range(tokens):
                    for h in range(0 if first <= t < after else heads):
                        lse[t, h] = -np.inf
                        for d in range(width):
                            out[t, h, d] = zero
                break

            k, tile = (item - before) % kv_heads, (item - before) // kv_heads
            start = start_of(starts, row, tokens)
            count = start_of(starts, row + size, tokens) - start  # tokens of the rows
            n = min(TILE, count * group - tile * TILE)
            for r in range(n):
                t, g = (tile * TILE + r) // group, (tile * TILE + r) % group
                length = min(np.int64(lens[row + t if size > 1 else row]), room)
                places[r] = length - 1 if size > 1 else length - count + t
                top[r], total[r] = lowest, zero
                for d in range(width):
                    queries[r, d] = q[start + t, k * group + g, d] * scale
                    sums[r, d] = zero

            shared = np.int64(tables.shape[1]) if size > 1 else 0  # blocks that all rows begin with, but for those without any
            seen = 0
            for s in range(row, row + size if size > 1 else row):
                if lens[s] > 0:
                    shared, seen = min(shared, (np.int64(lens[s]) - 1) // block_size), seen + 1
                    for b in range(shared):
                        if tables[s, b] != tables[row, b]:
                            shared = b
                            break
            shared = shared if seen > 1 else 0
            begin = max(0, places[0] + 1 - window) if window > 0 else 0
            # The shared blocks for all queries, then what is left, row by row.
            for i in range(-1, size):
                s = max(i, 0)
                first, last = (0, n) if i < 0 or size == 1 else (s * group, (s + 1) * group)
                since, until = (begin, shared * block_size) if i < 0 else (max(begin, shared * block_size), places[last - 1] + 1)
                attend(
                    kv, scales, pool, base, blocks, k, tables[row + s], since, until, places[first:last], window, soft_cap,
                    queries[first:last], scores[first:last], top[first:last], total[first:last], sums[first:last], part,
                )  # fmt: skip

            for r in range(n):
                t, h = start + (tile * TILE + r) // group, k * group + (tile * TILE + r) % group
                if total[r] == zero:
                    lse[t, h] = -np.inf
                    for d in range(width):
                        out[t, h, d] = zero
                    continue
                new = max(top[r], sinks[h])
                keep = exp(top[r] - new)
                whole = total[r] * keep + exp(sinks[h] - new)
                lse[t, h] = new + np.log(whole)
                for d in range(width):
                    out[t, h, d] = sums[r, d] * (keep * v_factor / whole)

    return kernel
