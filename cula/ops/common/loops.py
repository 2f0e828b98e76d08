"""Pieces of the Numba loops of every algorithm: the compiler's options, memory by address, state rows, slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

#: The length given to arrays that are made of an address: beyond every index, so that no slice is cut short.
FLAT = 1 << 60
#: Bytes of a cache line.
LINE = 64


def compiled(parallel: bool = False, reassociate: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit` with the machine code kept on disk, where that can be written.

    Sums may be reassociated into vector lanes where `reassociate`; NaN and infinity keep their meaning.
    """
    options: dict[str, Any] = {
        "nogil": True,
        "parallel": parallel,
        "error_model": "numpy",
        "fastmath": {"contract", "nsz", "arcp"} | ({"reassoc"} if reassociate else set()),
    }

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no writable place for the cache
            return numba.njit(**options)(function)

    return decorate


@intrinsic
def address_of(typingctx, array):
    """The address of a flat array's first element."""

    def codegen(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.intp))

    return types.intp(array), codegen


@intrinsic
def array_at(typingctx, like, address, size):
    """A flat array of the type of `like` over memory that somebody else keeps alive: costs no reference count."""

    def codegen(context, builder, signature, arguments):
        kind = signature.return_type
        array = context.make_array(kind)(context, builder)
        item = context.get_data_type(kind.dtype)
        size_of = context.get_constant(types.intp, context.get_abi_sizeof(item))
        populate_array(
            array, data=builder.inttoptr(arguments[1], item.as_pointer()), shape=(arguments[2],), strides=(size_of,),
            itemsize=size_of, meminfo=None,
        )  # fmt: skip
        return array._getvalue()

    return like(like, types.intp, types.intp), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at an address, to be read; any address is safe."""

    def codegen(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, i32, i32, i32])
        name = "llvm.prefetch.p0i8" if str(place.type) == "i8*" else "llvm.prefetch.p0"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [place, i32(0), i32(2), i32(1)])  # to read, into the second-level cache, data
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@compiled()
def prefetch_rows(address, size):
    """Ask for `size` bytes from an address on."""
    for c in range(0, size, LINE):
        prefetch(address + c)


@compiled()
def copy_rows(source, from_at, from_stride, target, to_at, to_stride, rows, width):
    """Copy state rows between flat buffers."""
    for r in range(rows):
        s, t = np.uint64(from_at + r * from_stride), np.uint64(to_at + r * to_stride)
        for c in range(width):
            target[t + np.uint64(c)] = source[s + np.uint64(c)]


@compiled()
def slot_of(indices, row, slots, null):
    """The slot of a row, -1 where it is null or out of range."""
    slot = indices[row]
    return -1 if slot < 0 or slot >= slots or slot == null else slot
