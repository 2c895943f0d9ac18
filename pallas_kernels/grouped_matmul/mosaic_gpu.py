"""grouped_matmul for Hopper: each visit multiplies a tile of rows, from an expert's first row on, with a tile of its weights. A
warpgroup fetches both with TMA; two others multiply, and write just the expert's rows in pieces of a power of two, because TMA's
boxes have sizes that are known before."""

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
from pallas_kernels.grouped_matmul.spec import GroupedSpec, grouped_key
from pallas_kernels.grouped_matmul.visits import find_visits

ROWS = 64  # of a warpgroup: what the matrix unit takes
ALIGNED = 8  # a tile begins at a multiple of so many rows: one swizzled tile of shared memory
INPUTS = 64  # of a stage: 128 bytes, the widest swizzle
WARPGROUPS = 2  # that multiply
MAX_STAGES = 6


@dataclass(frozen=True)
class Config:
    rows: int  # of a tile: 64, and the warpgroups share its outputs, or 128, and they share its rows
    outputs: int  # of a tile
    stages: int

    @property
    def width(self) -> int:
        """Outputs of a warpgroup."""
        return self.outputs * self.rows // (ROWS * WARPGROUPS)


def shared_bytes(spec: GroupedSpec, config: Config) -> int:
    out = config.rows * config.outputs * jnp.dtype(spec.out_dtype).itemsize
    return config.stages * 2 * INPUTS * (config.rows + config.outputs) + out + 2 * KIB


def choose_config(spec: GroupedSpec, chip: Chip) -> Config:
    """Tiles of 128 rows where experts have that many; the widest, to 128 outputs a warpgroup, that leave room for 3 stages."""
    rows = 2 * ROWS if spec.tokens >= 2 * ROWS * spec.experts else ROWS
    widths = [w for w in (256, 128, 64) if spec.outputs % w == 0 and w * rows <= 256 * ROWS] or [64]
    options = (Config(rows, w, stages) for w in widths for stages in range(MAX_STAGES, 2, -1))
    return next((c for c in options if fits(spec, c, chip)), Config(rows, widths[-1], 2))


def fits(spec: GroupedSpec, config: Config, chip: Chip) -> bool:
    """Whether it divides the outputs, two warpgroups have registers for it, and what it needs of shared memory is there."""
    sizes = config.rows in (ROWS, 2 * ROWS) and config.outputs in (64, 128, 256) and config.outputs * config.rows <= 256 * ROWS
    return sizes and spec.outputs % config.outputs == 0 and shared_bytes(spec, config) <= chip.fast_memory


def candidates(spec: GroupedSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    if chip is None or supports(spec, chip) is not None:
        return []
    default = choose_config(spec, chip)
    others = [Config(rows, outputs, stages) for rows in (64, 128) for outputs in (64, 128, 256) for stages in (2, 3, 4, 6)]
    return [default, *(c for c in others if c != default and fits(spec, c, chip))]


def config_of(spec: GroupedSpec, chip: Chip) -> Config:
    """What was tuned for such calls, if this one has room for it, or else `choose_config`."""
    default = choose_config(spec, chip)
    config = tuned("grouped_matmul", "mosaic_gpu", chip, grouped_key(spec), default)
    return config if fits(spec, config, chip) else default


def supports(spec: GroupedSpec, chip: Chip | None) -> str | None:
    if chip is None or chip.name != "sm_90a":
        return f"is for sm_90a; got {chip.name if chip else None}"
    if spec.dtype != "bfloat16":
        return f"takes bfloat16; got {spec.dtype}: cast both factors"
    if spec.inputs % INPUTS or spec.outputs % 64:
        return f"needs inputs and outputs in multiples of 64; got {spec.inputs} and {spec.outputs}: pad the weights"
    return None


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: str,
    chip: Chip,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """out_dtype[T, out]; as in the op."""
    (wanted, inputs), (experts, outputs, _) = lhs.shape, rhs.shape
    config = config or config_of(GroupedSpec(wanted, inputs, outputs, experts, str(lhs.dtype), out_dtype), chip)
    rows, width, steps = config.rows, config.width, inputs // INPUTS
    lhs = pad_axis(lhs, 0, max(-(-wanted // ALIGNED) * ALIGNED, rows))
    tokens = lhs.shape[0]
    visits = find_visits(group_sizes, tokens, rows, ALIGNED)
    sums = plgpu.ACC((ROWS, width), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]

    def body(expert_ref, start_ref, begin_ref, end_ref, lhs_ref, rhs_ref, o_ref, x_smem, w_smem, o_smem, full, empty):
        o, v, wg = (lax.axis_index(name) for name in ("o", "v", "wg"))
        expert, begin, end = expert_ref[v], begin_ref[v], end_ref[v]
        start = start_ref[v] * ALIGNED
        count = jnp.where((begin < end) & (expert < experts), steps, 0)

        @pl.when(wg == WARPGROUPS)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, count)
            def _(i):
                slot = lax.rem(i, config.stages)

                @pl.when(i >= config.stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                at = pl.ds(i * INPUTS, INPUTS)
                for part in range(rows // ROWS):
                    source = lhs_ref.at[pl.ds(start + part * ROWS, ROWS), at]
                    plgpu.copy_gmem_to_smem(source, x_smem.at[slot, part], full.at[slot])
                for part in range(config.outputs // width):
                    source = rhs_ref.at[expert, pl.ds(o * config.outputs + part * width, width), at]
                    plgpu.copy_gmem_to_smem(source, w_smem.at[slot, part], full.at[slot])

            @pl.loop(jnp.maximum(count - config.stages, 0), count)
            def _(i):
                plgpu.barrier_wait(empty.at[lax.rem(i, config.stages)])

        @pl.when((wg < WARPGROUPS) & (begin < end))
        def _():
            plgpu.set_max_registers(232, action="increase")
            row_part, output_part = (wg, 0) if rows > ROWS else (0, wg)
            first = start + row_part * ROWS

            def accumulate(acc):
                @pl.loop(0, count)
                def _(i):
                    slot = lax.rem(i, config.stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, x_smem.at[slot, row_part], w_smem.at[slot, output_part].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                return acc[...]

            o_smem[wg] = pl.run_scoped(accumulate, sums).astype(o_smem.dtype)
            plgpu.commit_smem()
            low = jnp.maximum(begin - first, 0)
            size = jnp.maximum(jnp.minimum(end - first, ROWS) - low, 0)
            columns = pl.ds(o * config.outputs + output_part * width, width)
            for bit in range(ROWS.bit_length() - 1, -1, -1):
                some = 1 << bit

                @pl.when((size & some) != 0)
                def _(some=some, low=low):
                    target = o_ref.at[pl.ds(first + low, some), columns]
                    plgpu.copy_smem_to_gmem(o_smem.at[wg, pl.ds(low, some)], target)

                low += size & some
            plgpu.wait_smem_to_gmem(0)

    tiled = plgpu.TilingTransform((ALIGNED, INPUTS)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, outputs), out_dtype),
        scratch_types=[
            plgpu.SMEM((config.stages, rows // ROWS, ROWS, INPUTS), lhs.dtype, transforms=tiled),
            plgpu.SMEM((config.stages, config.outputs // width, width, INPUTS), rhs.dtype, transforms=tiled),
            plgpu.SMEM((WARPGROUPS, ROWS, width), out_dtype),
            plgpu.Barrier(num_arrivals=rows // ROWS + config.outputs // width, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages),
        ],
        grid=(outputs // config.outputs, visits.begin.shape[0]),
        grid_names=("o", "v"),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=False),
        interpret=interpret,
    )(*visits, lhs, rhs)[:wanted]
