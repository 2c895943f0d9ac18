"""What can be known of a call of grouped_matmul before it is traced."""

from dataclasses import dataclass

from pallas_kernels.common.tuning import Key


@dataclass(frozen=True)
class GroupedSpec:
    """Of grouped_matmul."""

    tokens: int  # T: rows of all groups, and those past them
    inputs: int
    outputs: int
    experts: int  # E
    dtype: str  # of both factors
    out_dtype: str


def grouped_key(spec: GroupedSpec) -> Key:
    """What its tuned sizes are looked up by: the size is the number of tokens."""
    shape = ("dtype", spec.dtype), ("experts", spec.experts), ("inputs", spec.inputs), ("outputs", spec.outputs)
    return Key(shape, spec.tokens)


TYPICAL_GROUPED = GroupedSpec(512, 4096, 14336, 8, "bfloat16", "bfloat16")  # 256 tokens of a Mixtral 8x7B
