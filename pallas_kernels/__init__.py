"""Operations on a paged KV pool, and products with quantized and with grouped weights, for TPU, GPU and CPU. Depends on jax, and on
Numba for attention on CPU.

The pool is `kv[J, N, 2, K, P, D']`: layer, block, key or value, kv head, token in block, stored head width. Block 0 is scrap:
what padding writes goes there and nothing reads it. Row lengths include the tokens written in the same step.
"""

from pallas_kernels.common.dispatch import Op
from pallas_kernels.grouped_matmul import OP as GROUPED_MATMUL
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.kv_write import OP as KV_WRITE
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import OP as PAGED_ATTENTION
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_decode import OP as PAGED_DECODE
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.quant_matmul import OP as QUANT_MATMUL
from pallas_kernels.quant_matmul import Int4Weight, Int8Weight, quant_matmul, quantize_int4, quantize_int8

__all__ = [
    "OPS",
    "Int4Weight",
    "Int8Weight",
    "grouped_matmul",
    "kv_write",
    "paged_attention",
    "paged_decode",
    "quant_matmul",
    "quantize_int4",
    "quantize_int8",
]

OPS: tuple[Op, ...] = (PAGED_DECODE, PAGED_ATTENTION, KV_WRITE, QUANT_MATMUL, GROUPED_MATMUL)
