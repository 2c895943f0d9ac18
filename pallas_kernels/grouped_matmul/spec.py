"""What can be known of a call of grouped_matmul before it is traced."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupedSpec:
    """Of grouped_matmul."""

    tokens: int  # T: rows of all groups, and those past them
    inputs: int
    outputs: int
    experts: int  # E
    dtype: str  # of both factors
    out_dtype: str


TYPICAL_GROUPED = GroupedSpec(512, 4096, 14336, 8, "bfloat16", "bfloat16")  # 256 tokens of a Mixtral 8x7B
