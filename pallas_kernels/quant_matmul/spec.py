"""What can be known of a call of quant_matmul before it is traced."""

from dataclasses import dataclass

from pallas_kernels.common.tuning import Key


@dataclass(frozen=True)
class MatmulSpec:
    """Of quant_matmul. group 0: int8 weights, one scale a row; else int4 weights, one scale for so many columns of a row."""

    tokens: int  # T
    inputs: int
    outputs: int
    dtype: str  # of the activations
    out_dtype: str
    group: int = 0
    zeros: bool = False
    int8_activations: bool = False

    @property
    def columns(self) -> int:
        """Bytes of a row of weights."""
        return self.inputs if self.group == 0 else -(-self.inputs // (2 * self.group)) * self.group


def matmul_key(spec: MatmulSpec) -> Key:
    """What its tuned sizes are looked up by: the size is the number of tokens."""
    shape = (
        ("dtype", spec.dtype),
        ("group", spec.group),
        ("inputs", spec.inputs),
        ("int8_activations", int(spec.int8_activations)),
        ("outputs", spec.outputs),
        ("zeros", int(spec.zeros)),
    )
    return Key(shape, spec.tokens)


TYPICAL_MATMUL = MatmulSpec(64, 4096, 14336, "bfloat16", "bfloat16")  # a decode step of a Llama 3 8B
