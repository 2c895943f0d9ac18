"""Calls of quant_matmul and grouped_matmul with everything that they need, as workload.py has those of the ops on the pool."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.tuning import Key
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.spec import GroupedSpec, grouped_key
from pallas_kernels.quant_matmul import Int4Weight, Int8Weight, quant_matmul
from pallas_kernels.quant_matmul.spec import MatmulSpec, matmul_key
from pallas_kernels.quant_matmul.weights import Weight
from pallas_kernels.workload import array, fill

SCALE = 0.02  # of every weight


@dataclass(frozen=True)
class Product:
    """What the two have in common: tokens times weights, in bfloat16 or float32."""

    tokens: int
    inputs: int
    outputs: int
    dtype: str = "bfloat16"

    donate = ()

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.inputs * self.outputs

    @property
    def row_bytes(self) -> int:
        """Activations, read and written."""
        return self.tokens * (self.inputs + self.outputs) * jnp.dtype(self.dtype).itemsize

    @property
    def x(self) -> jax.ShapeDtypeStruct:
        return array(self.dtype, self.tokens, self.inputs)


@dataclass(frozen=True)
class Quantized(Product):
    """Of quant_matmul. group 0: int8 weights."""

    group: int = 0
    zeros: bool = False
    int8_activations: bool = False

    op = "quant_matmul"

    @property
    def name(self) -> str:
        kind = f"int4 by {self.group}{' with zeros' if self.zeros else ''}" if self.group else "int8"
        return f"{self.tokens} x {self.inputs} x {self.outputs}, {kind}, {self.dtype}{' as int8' if self.int8_activations else ''}"

    @property
    def spec(self) -> MatmulSpec:
        sizes = self.tokens, self.inputs, self.outputs
        return MatmulSpec(*sizes, self.dtype, self.dtype, self.group, self.zeros, self.int8_activations)

    @property
    def key(self) -> Key:
        return matmul_key(self.spec)

    @property
    def weight(self) -> Weight:
        """Its shapes."""
        columns = self.spec.columns
        values = array("int8", self.outputs, columns)
        if self.group == 0:
            return Int8Weight(values, array("float32", self.outputs))  # pyright: ignore[reportArgumentType]
        lines = 2, columns // self.group, self.outputs
        zeros = array("int8", *lines) if self.zeros else None
        return Int4Weight(values, array("float32", *lines), zeros)  # pyright: ignore[reportArgumentType]

    @property
    def bytes_floor(self) -> int:
        return self.row_bytes + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.weight))

    def shapes(self) -> tuple[Any, ...]:
        return self.weight, self.x

    def function(self, backend: str | None) -> Callable[..., Any]:
        return lambda weight, x: quant_matmul(x, weight, int8_activations=self.int8_activations, backend=backend)

    def arguments(self) -> tuple[Any, ...]:
        shapes = self.weight
        values, scales = fill(shapes.values, 0), jnp.full(shapes.scales.shape, SCALE)  # pyright: ignore[reportArgumentType]
        if isinstance(shapes, Int8Weight):
            return Int8Weight(jnp.maximum(values, -127), scales), fill(self.x, 1)
        zeros = None if shapes.zeros is None else fill(shapes.zeros, 2) >> 4  # pyright: ignore[reportArgumentType]
        return Int4Weight(values, scales, zeros), fill(self.x, 1)


@dataclass(frozen=True)
class Grouped(Product):
    """Of grouped_matmul: every token's expert is drawn at random."""

    experts: int = 8

    op = "grouped_matmul"

    @property
    def name(self) -> str:
        return f"{self.tokens} x {self.inputs} x {self.outputs}, {self.experts} experts, {self.dtype}"

    @property
    def spec(self) -> GroupedSpec:
        return GroupedSpec(self.tokens, self.inputs, self.outputs, self.experts, self.dtype, self.dtype)

    @property
    def key(self) -> Key:
        return grouped_key(self.spec)

    def sizes(self) -> np.ndarray:
        """i32[experts]: rows of each."""
        drawn = np.random.default_rng(0).integers(0, self.experts, self.tokens)
        return np.bincount(drawn, minlength=self.experts).astype(np.int32)

    @property
    def bytes_floor(self) -> int:
        """The weights of experts that have rows."""
        used = int((self.sizes() > 0).sum())
        return self.row_bytes + used * self.inputs * self.outputs * jnp.dtype(self.dtype).itemsize + 4 * self.experts

    def shapes(self) -> tuple[Any, ...]:
        return array(self.dtype, self.experts, self.outputs, self.inputs), self.x, array("int32", self.experts)

    def function(self, backend: str | None) -> Callable[..., Any]:
        return lambda rhs, lhs, sizes: grouped_matmul(lhs, rhs, sizes, backend=backend)

    def arguments(self) -> tuple[Any, ...]:
        rhs, lhs, _ = self.shapes()
        return fill(rhs, 0), fill(lhs, 1), jnp.asarray(self.sizes())
