"""The product that `chunk_loops` is made of, as LLVM vectors: a tile of the result stays in registers to its end.

    out[r, :] (+)= sum over m of a[r, m] * b[m, :]     r in 0..3, `TILE` bytes of columns

The compiler's own vectors would store the result after every few terms: half the speed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

#: Rows of a tile.
ROWS = 4


def _registers() -> tuple[int, int]:
    """(bytes of a vector, vectors of a tile's row): a tile and its operands fit the registers of this machine."""
    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:
        features = {}
    if features.get("avx512f"):
        return 64, 4
    return (32, 2) if features.get("avx2") else (16, 2)


VECTOR, VECTORS = _registers()
#: Bytes of a row of a tile.
TILE = VECTOR * VECTORS


class _Tile:
    """Emits one tile product."""

    def __init__(self, context: Any, builder: Any, kind: Any) -> None:
        self.builder = builder
        self.real = context.get_data_type(kind)
        self.item = context.get_abi_sizeof(self.real)
        self.lanes = VECTOR // self.item
        self.vector = ir.VectorType(self.real, self.lanes)
        self.index = context.get_value_type(types.intp)
        signature = ir.FunctionType(self.vector, [self.vector] * 3)
        name = f"llvm.fmuladd.v{self.lanes}f{8 * self.item}"
        self.fused = cgutils.get_or_insert_function(builder.module, signature, name)

    def at(self, base: Any, *terms: tuple[Any, Any]) -> Any:
        """The address base + sum of index * step, in elements."""
        b = self.builder
        for index, step in terms:
            base = b.add(base, b.mul(b.mul(index, step), ir.Constant(self.index, self.item)))
        return base

    def place(self, base: Any, j: int) -> Any:
        """A pointer to the j-th vector from an address."""
        address = self.builder.add(base, ir.Constant(self.index, j * VECTOR))
        return self.builder.inttoptr(address, self.vector.as_pointer())

    def load(self, base: Any, j: int) -> Any:
        """The j-th vector from an address."""
        return self.builder.load(self.place(base, j), align=self.item)

    def spread(self, scalar: Any) -> Any:
        """A vector of one number."""
        b, none = self.builder, ir.Constant(self.vector, ir.Undefined)
        first = b.insert_element(none, scalar, ir.Constant(ir.IntType(32), 0))
        lanes = ir.VectorType(ir.IntType(32), self.lanes)
        return b.shuffle_vector(first, none, ir.Constant(lanes, [0] * self.lanes))

    def times_plus(self, x: Any, y: Any, z: Any) -> Any:
        """x * y + z, fused where the machine can."""
        return self.builder.call(self.fused, [x, y, z])


def _emit(context: Any, builder: Any, signature: Any, arguments: Any, decays: bool) -> Any:
    _, out, out_step, a, a_row, a_col, b, b_step, count, decay, rest = arguments
    t = _Tile(context, builder, signature.args[0].dtype)
    rows = [ir.Constant(t.index, r) for r in range(ROWS)]
    sums = [[cgutils.alloca_once(builder, t.vector) for _ in range(VECTORS)] for _ in rows]
    starts = [t.at(out, (r, out_step)) for r in rows]
    keep, extra = (t.spread(decay), t.spread(rest)) if decays else (None, None)
    for r in range(ROWS):
        for j in range(VECTORS):
            x = t.load(starts[r], j)
            if decays:
                x = t.times_plus(x, keep, builder.fmul(x, extra))
            builder.store(x, sums[r][j])
    with cgutils.for_range(builder, count) as loop:
        line = t.at(b, (loop.index, b_step))
        terms = [t.load(line, j) for j in range(VECTORS)]
        for r in range(ROWS):
            scalar = builder.load(
                builder.inttoptr(t.at(a, (rows[r], a_row), (loop.index, a_col)), t.real.as_pointer()), align=t.item
            )
            factor = t.spread(scalar)
            for j in range(VECTORS):
                builder.store(t.times_plus(factor, terms[j], builder.load(sums[r][j])), sums[r][j])
    for r in range(ROWS):
        for j in range(VECTORS):
            builder.store(builder.load(sums[r][j]), t.place(starts[r], j), align=t.item)
    return context.get_dummy_value()


def _signature(like: Any) -> Any:
    return types.void(like, *[types.intp] * 8, like.dtype, like.dtype)


@intrinsic
def add_tile(typingctx, like, out, out_step, a, a_row, a_col, b, b_step, count, decay, rest):
    """The tile gains `count` products. out, a, b: addresses; steps in elements; decay and rest are not used."""

    def codegen(context, builder, signature, arguments):
        return _emit(context, builder, signature, arguments, False)

    return _signature(like), codegen


@intrinsic
def decay_tile(typingctx, like, out, out_step, a, a_row, a_col, b, b_step, count, decay, rest):
    """As `add_tile`, from the tile times decay + rest."""

    def codegen(context, builder, signature, arguments):
        return _emit(context, builder, signature, arguments, True)

    return _signature(like), codegen
