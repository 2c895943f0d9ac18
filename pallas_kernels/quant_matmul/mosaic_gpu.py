"""quant_matmul for Hopper: the weights are the left factor, so that few tokens need few columns of the matrix unit. A warpgroup
fetches weights and activations with TMA; two others read weights from shared memory as they are stored, expand them in registers
and multiply. The sums, transposed and perhaps in parts (splits over the inputs), are scaled and turned by XLA."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.layout import pad_axis
from pallas_kernels.common.targets import KIB, Chip
from pallas_kernels.common.tuning import tuned
from pallas_kernels.quant_matmul.spec import MatmulSpec, matmul_key
from pallas_kernels.quant_matmul.weights import Int4Weight, Weight, quantize_rows, split_groups

ROWS = 64  # outputs of a warpgroup: what the matrix unit takes at least
MAX_STAGES, MAX_SPLITS = 6, 8


@dataclass(frozen=True)
class Config:
    """through_shared: expanded weights go through shared memory, because Pallas's interpreter has no product from registers."""

    tokens: int  # of a tile: 8 to 128, a power of two
    warpgroups: int  # that multiply, 64 outputs each
    columns: int  # bytes of a row of weights in a stage
    stages: int
    splits: int
    through_shared: bool = False


def piece(spec: MatmulSpec) -> int:
    """Columns with one scale that are multiplied at a time."""
    if spec.group == 0:
        return 128 if spec.inputs % 128 == 0 else 64
    return min(spec.group, 64)


def shared_bytes(spec: MatmulSpec, config: Config) -> int:
    outputs, itemsize = ROWS * config.warpgroups, 1 if spec.int8_activations else 2
    halves = 2 if spec.group else 1
    x = halves * config.tokens * config.columns * itemsize
    scales = config.columns // piece(spec) * outputs * 2 * (4 + spec.zeros) if spec.group else 0
    expanded = outputs * piece(spec) * 2 if config.through_shared else 0
    return config.stages * (outputs * config.columns + x + scales) + 4 * outputs * config.tokens + expanded + 2 * KIB


def choose_config(spec: MatmulSpec, chip: Chip) -> Config:
    """Tiles as large as the tokens are many, as many stages as fit, and splits until there is a tile for each multiprocessor."""
    tokens = min(128, max(8, pl.next_power_of_2(spec.tokens)))
    warpgroups = 2 if spec.outputs % (2 * ROWS) == 0 else 1
    tiles = spec.outputs // (ROWS * warpgroups) * -(-spec.tokens // tokens)
    widths = [w for w in (128, piece(spec)) if w >= piece(spec) and spec.columns % w == 0]

    def config(columns: int, stages: int) -> Config:
        splits = max(1, min(MAX_SPLITS, chip.cores // tiles, spec.columns // columns // 4))
        return Config(tokens, warpgroups, columns, stages, splits)

    options = (
        config(columns, stages)
        for low, high in ((3, MAX_STAGES), (2, 2))
        for columns in widths
        for stages in range(high, low - 1, -1)
    )
    return next((c for c in options if fits(spec, c, chip)), config(piece(spec), 2))


def fits(spec: MatmulSpec, config: Config, chip: Chip) -> bool:
    """Whether it divides the weight, and what it needs of shared memory is there."""
    whole = spec.outputs % (ROWS * config.warpgroups) == 0 and spec.columns % config.columns == 0
    powers = config.tokens in (8, 16, 32, 64, 128) and config.columns in (piece(spec), 2 * piece(spec), 128)
    return whole and powers and config.columns % piece(spec) == 0 and shared_bytes(spec, config) <= chip.fast_memory


def candidates(spec: MatmulSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends: the rule's, and half and twice of each size."""
    if chip is None or supports(spec, chip) is not None:
        return []
    default, found = choose_config(spec, chip), []
    for name, least in (("tokens", 8), ("warpgroups", 1), ("columns", piece(spec)), ("stages", 2), ("splits", 1)):
        size = getattr(default, name)
        found += [dataclasses.replace(default, **{name: other}) for other in (size // 2, size + 1, size * 2) if other >= least]
    return [default, *(c for c in dict.fromkeys(found) if c.warpgroups <= 2 and c.stages <= MAX_STAGES and fits(spec, c, chip))]


def config_of(spec: MatmulSpec, chip: Chip) -> Config:
    """What was tuned for such calls, if this one has room for it, or else `choose_config`."""
    default = choose_config(spec, chip)
    config = tuned("quant_matmul", "mosaic_gpu", chip, matmul_key(spec), default)
    return config if config.warpgroups <= 2 and fits(spec, config, chip) else default


def supports(spec: MatmulSpec, chip: Chip | None) -> str | None:
    if chip is None or chip.name != "sm_90a":
        return f"is for sm_90a; got {chip.name if chip else None}"
    if spec.dtype != "bfloat16" and not spec.int8_activations:
        return f"takes bfloat16 activations; got {spec.dtype}: cast them, or quantize them with int8_activations"
    if spec.outputs % ROWS:
        return f"needs outputs in multiples of {ROWS}; got {spec.outputs}: pad the weight"
    if spec.group == 0 and spec.inputs % 64:
        return f"needs inputs in multiples of 64; got {spec.inputs}: pad weight and activations"
    needed = shared_bytes(spec, choose_config(spec, chip))
    if needed > chip.fast_memory:
        return f"needs {needed // KIB} KiB of shared memory, where a block may have {chip.fast_memory // KIB}"
    return None


def matmul(
    x: jax.Array,
    weight: Weight,
    *,
    int8_activations: bool,
    out_dtype: str,
    chip: Chip,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """out_dtype[T, out]; as in the op."""
    tokens, outputs = x.shape[0], weight.values.shape[0]
    int4 = isinstance(weight, Int4Weight)
    group, zeros = (weight.group, weight.zeros) if int4 else (0, None)
    spec = MatmulSpec(tokens, x.shape[1], outputs, str(x.dtype), out_dtype, group, zeros is not None, int8_activations)
    config = config or config_of(spec, chip)
    row_scales = None
    if int8_activations:
        x, row_scales = quantize_rows(x)
    halves = split_groups(x, weight) if int4 else x[None]
    halves = pad_axis(halves, 1, -(-tokens // config.tokens) * config.tokens)
    scales = () if not int4 else (weight.scales,) if zeros is None else (weight.scales, zeros)
    sums = product(spec, config, halves, weight.values, scales, interpret)
    y = jnp.sum(sums, axis=0)[:, :tokens].T.astype(jnp.float32)
    if row_scales is not None:
        y *= row_scales
    return (y if int4 else y * weight.scales).astype(out_dtype)


def product(
    spec: MatmulSpec, config: Config, x: jax.Array, values: jax.Array, scales: tuple[jax.Array, ...], interpret: Any
) -> jax.Array:
    """[splits, out, T] of the weights [out, in] times x [halves, T, in]: f32, or i32 where x is int8. int4 weights are expanded
    with their scales [2, pairs, out] and zeros."""
    halves, tokens, _ = x.shape
    outputs, columns = values.shape
    wide, tile, part = config.columns, config.tokens, piece(spec)
    block, parts = ROWS * config.warpgroups, config.columns // part
    steps = columns // wide
    each = -(-steps // config.splits)
    int8 = spec.int8_activations
    total = jnp.int32 if int8 else jnp.float32
    scaled = len(scales)
    sums = plgpu.ACC((ROWS, tile), total)  # pyright: ignore[reportPrivateImportUsage]

    def body(x_ref, w_ref, *refs):
        scale_refs, (o_ref, x_smem, w_smem, *more) = refs[:scaled], refs[scaled:]
        scale_smem, (o_smem, full, empty, *expanded) = more[:scaled], more[scaled:]
        o, t, s, wg = (lax.axis_index(name) for name in ("o", "t", "s", "wg"))
        first = s * each
        count = jnp.clip(steps - first, 0, each)

        @pl.when(wg == config.warpgroups)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, count)
            def _(i):
                slot, step = lax.rem(i, config.stages), first + i

                @pl.when(i >= config.stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                for p in range(parts):
                    at = step * wide + p * part
                    copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target, full.at[slot])
                    copy(w_ref.at[pl.ds(o * block, block), pl.ds(at, part)], w_smem.at[slot, p])
                    for h in range(halves):
                        copy(x_ref.at[h, pl.ds(t * tile, tile), pl.ds(at, part)], x_smem.at[slot, p, h])
                        for source, target in zip(scale_refs, scale_smem, strict=True):
                            copy(source.at[h, lax.div(at, spec.group), pl.ds(o * block, block)], target.at[slot, p, h])

            @pl.loop(jnp.maximum(count - config.stages, 0), count)
            def _(i):
                plgpu.barrier_wait(empty.at[lax.rem(i, config.stages)])

        @pl.when(wg < config.warpgroups)
        def _():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(wg * ROWS, ROWS)

            def expand(slot, p, h):
                packed = w_smem[slot, p, mine]
                if not scaled:
                    return packed.astype(jnp.bfloat16)
                # Bytes can be masked, but not shifted: value + 8 of the low half, 16 times the value of the high one.
                raw, offset, unit = ((packed & 15) ^ 8, 8.0, 1.0) if h == 0 else (packed & -16, 0.0, 16.0)
                raw = raw.astype(jnp.bfloat16).astype(jnp.float32)
                column = lambda x: lax.broadcast_in_dim(x, raw.shape, [0])
                line = lambda ref: ref[slot, p, h, mine].astype(jnp.float32)
                raw -= column(line(scale_smem[1]) * unit + offset) if scaled == 2 else offset
                return (raw * column(line(scale_smem[0]) * (1 / unit))).astype(jnp.bfloat16)

            def accumulate(acc):
                @pl.loop(0, count)
                def _(i):
                    slot = lax.rem(i, config.stages)
                    plgpu.barrier_wait(full.at[slot])
                    for p in range(parts):
                        for h in range(halves):
                            right = x_smem.at[slot, p, h].transpose((1, 0))
                            if int8:
                                plgpu.wgmma(acc, w_smem.at[slot, p, mine], right)
                            elif config.through_shared:
                                expanded[0][wg] = expand(slot, p, h)
                                plgpu.commit_smem()
                                plgpu.wgmma(acc, expanded[0].at[wg], right)
                                plgpu.wgmma_wait(0)
                            else:
                                plgpu.wgmma(acc, expand(slot, p, h), right)
                                plgpu.wgmma_wait(0)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                return acc[...]

            o_smem[wg] = pl.run_scoped(accumulate, sums)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem.at[wg], o_ref.at[s, pl.ds(o * block + wg * ROWS, ROWS), pl.ds(t * tile, tile)])
            plgpu.wait_smem_to_gmem(0)

    def smem(shape: tuple[int, ...], dtype: Any) -> Any:
        size = jnp.dtype(dtype).itemsize
        swizzle = min(128, shape[-1] * size)
        tiling = plgpu.TilingTransform((8, swizzle // size))  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # pyright: ignore[reportAbstractUsage]

    copies = parts * (1 + halves * (1 + scaled))
    lines = [plgpu.SMEM((config.stages, parts, halves, block), scale.dtype) for scale in scales]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((config.splits, outputs, tokens), total),
        scratch_types=[
            smem((config.stages, parts, halves, tile, part), x.dtype),
            smem((config.stages, parts, block, part), jnp.int8),
            *lines,
            smem((config.warpgroups, ROWS, tile), total),
            plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.stages),
            *([smem((config.warpgroups, ROWS, part), jnp.bfloat16)] if config.through_shared else []),
        ],
        grid=(outputs // block, tokens // tile, config.splits),
        grid_names=("o", "t", "s"),
        num_threads=config.warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=False),
        interpret=interpret,
    )(x, values, *scales)
