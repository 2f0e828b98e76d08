"""Single PTX instructions for CuTe DSL kernels, on values and on 32-bit shared-memory addresses.

Layouts of tiles are the caller's: `tile_at` is the 128-byte swizzle that `wgmma` reads, `matrix_at` the plain one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

#: Rows of 64 16-bit numbers that a swizzled tile has in each half of 128 channels.
ROW = 128


def _asm(out: Any, args: Sequence[Any], text: str, constraints: str, effects: bool, loc: Any, ip: Any) -> Any:
    values = [x.ir_value(loc=loc, ip=ip) for x in args]
    return llvm.inline_asm(
        out, values, text, constraints, has_side_effects=effects, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


def _many(kind: Any, wrap: Any, n: int, args: Any, text: str, cons: str, effects: bool, loc: Any, ip: Any) -> list[Any]:
    out = llvm.StructType.get_literal([kind] * n)
    result = _asm(out, args, text, cons, effects, loc, ip)
    return [wrap(llvm.extractvalue(kind, result, [k], loc=loc, ip=ip)) for k in range(n)]


def _names(first: int, n: int) -> str:
    return "{" + ", ".join(f"${k}" for k in range(first, first + n)) + "}"


# ------------------------------------------------------------------------------------------------------ numbers


@dsl_user_op
def exp2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """2^x, relative error 2^-22; what is below 2^-126 becomes 0."""
    return Float32(_asm(T.f32(), [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f", False, loc, ip))


@dsl_user_op
def rcp(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """1 / x, error 1 unit in the last place."""
    return Float32(_asm(T.f32(), [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f", False, loc, ip))


@dsl_user_op
def rsqrt(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """1 / sqrt(x), relative error 2^-22."""
    return Float32(_asm(T.f32(), [x], "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", False, loc, ip))


@dsl_user_op
def pack_bf16(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two bf16 numbers in one register, rounded to nearest even."""
    return Uint32(_asm(T.i32(), [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", False, loc, ip))


@dsl_user_op
def pack_f16(low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two fp16 numbers in one register, rounded to nearest even."""
    return Uint32(_asm(T.i32(), [high, low], "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", False, loc, ip))


@dsl_user_op
def as_float(x: Uint32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The fp32 number of these bits."""
    return Float32(_asm(T.f32(), [x], "mov.b32 $0, $1;", "=f,r", False, loc, ip))


def unpack_bf16(x: Uint32) -> tuple[Float32, Float32]:
    """(low, high) bf16 numbers of a register, as fp32."""
    return as_float(x << 16), as_float(x & Uint32(0xFFFF0000))


# ------------------------------------------------------------------------------------------------------- memory


@dsl_user_op
def load_global(address: Int64, kind: str, *, loc: Any = None, ip: Any = None) -> Any:
    """One number of device memory: "u8", "u16" and "b32" give Uint32, "b64" Int64, "f32" Float32."""
    if kind == "f32":
        return Float32(_asm(T.f32(), [address], "ld.global.f32 $0, [$1];", "=f,l", True, loc, ip))
    if kind == "b64":
        return Int64(_asm(T.i64(), [address], "ld.global.b64 $0, [$1];", "=l,l", True, loc, ip))
    if kind == "u8":
        text = "{ .reg .u16 h; ld.global.u8 h, [$1]; cvt.u32.u16 $0, h; }"
        return Uint32(_asm(T.i32(), [address], text, "=r,l", True, loc, ip))
    if kind == "b32":
        return Uint32(_asm(T.i32(), [address], "ld.global.b32 $0, [$1];", "=r,l", True, loc, ip))
    text = "{ .reg .b16 h; ld.global.b16 h, [$1]; mov.b32 $0, {h, 0}; }"
    return Uint32(_asm(T.i32(), [address], text, "=r,l", True, loc, ip))


@dsl_user_op
def store_global(address: Int64, values: Sequence[Any], *, loc: Any = None, ip: Any = None) -> None:
    """1, 2 or 4 registers of 32 bits to device memory, aligned to their size."""
    n = len(values)
    vector = "" if n == 1 else f".v{n}"
    kinds = ",".join("f" if isinstance(x, Float32) else "r" for x in values)
    names = "$1" if n == 1 else _names(1, n)
    _asm(None, [address, *values], f"st.global{vector}.b32 [$0], {names};", f"l,{kinds}", True, loc, ip)


@dsl_user_op
def store_global_16(address: Int64, value: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """The low 16 bits of a register to device memory."""
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $1; st.global.b16 [$0], l; }"
    _asm(None, [address, value], text, "l,r", True, loc, ip)


@dsl_user_op
def load_shared(address: Int32, n: int = 1, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """n (1, 2, 4) registers from shared memory."""
    if n == 1:
        return [Uint32(_asm(T.i32(), [address], "ld.shared.b32 $0, [$1];", "=r,r", True, loc, ip))]
    text = f"ld.shared.v{n}.b32 {_names(0, n)}, [${n}];"
    return _many(T.i32(), Uint32, n, [address], text, ",".join(["=r"] * n + ["r"]), True, loc, ip)


@dsl_user_op
def load_shared_f32(address: Int32, n: int = 1, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """n (1, 2, 4) fp32 numbers from shared memory."""
    if n == 1:
        return [Float32(_asm(T.f32(), [address], "ld.shared.f32 $0, [$1];", "=f,r", True, loc, ip))]
    text = f"ld.shared.v{n}.f32 {_names(0, n)}, [${n}];"
    return _many(T.f32(), Float32, n, [address], text, ",".join(["=f"] * n + ["r"]), True, loc, ip)


@dsl_user_op
def store_shared(address: Int32, values: Sequence[Any], *, loc: Any = None, ip: Any = None) -> None:
    """1, 2 or 4 registers of 32 bits to shared memory."""
    n = len(values)
    vector = "" if n == 1 else f".v{n}"
    kinds = ",".join("f" if isinstance(x, Float32) else "r" for x in values)
    names = "$1" if n == 1 else _names(1, n)
    _asm(None, [address, *values], f"st.shared{vector}.b32 [$0], {names};", f"r,{kinds}", True, loc, ip)


@dsl_user_op
def copy_16(shared: Int32, address: Int64, take: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Start a copy of 16 bytes from device to shared memory; take 0: zeros, nothing is read."""
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    _asm(None, [shared, address, take], text, "r,l,r", True, loc, ip)


@dsl_user_op
def commit_copies(*, loc: Any = None, ip: Any = None) -> None:
    """Close a group of copies."""
    _asm(None, [], "cp.async.commit_group;", "", True, loc, ip)


@dsl_user_op
def wait_copies(keep: int, *, loc: Any = None, ip: Any = None) -> None:
    """Wait for this thread's groups of copies but the last `keep`."""
    _asm(None, [], f"cp.async.wait_group {keep};", "", True, loc, ip)


@dsl_user_op
def show_to_products(*, loc: Any = None, ip: Any = None) -> None:
    """This thread's stores to shared memory become visible to `wgmma`, once a barrier follows."""
    _asm(None, [], "fence.proxy.async.shared::cta;", "", True, loc, ip)


# ----------------------------------------------------------------------------------------------------- matrices


def tile_at(row: Any, octet: Any, rows: int) -> Any:
    """Byte offset of 8 channels (octet 0..15) of a row in a tile of `rows` x 128 16-bit numbers, swizzled."""
    return (octet >> 3) * (rows * ROW) + row * ROW + (((octet & 7) ^ (row & 7)) << 4)


@dsl_user_op
def _pair(low: Int32, high: int, *, loc: Any = None, ip: Any = None) -> Uint64:
    return Uint64(_asm(T.i64(), [low], f"mov.b64 $0, {{$1, {high}}};", "=l,r", False, loc, ip))


def tile_descriptor(base: Int32, more: int, stride: int, lead: int) -> Uint64:
    """What `wgmma` needs of a swizzled tile at base + more: bytes between 8 rows, bytes between 64 channels."""
    return _pair((base >> 4) + ((more >> 4) | ((lead >> 4) << 16)), (1 << 30) | (stride >> 4))


def matrix_descriptor(base: Int32, more: int, stride: int, lead: int) -> Uint64:
    """The same for plain 8 x 8 matrices of 128 bytes: bytes between those below and those beside each other."""
    return _pair((base >> 4) + ((more >> 4) | ((lead >> 4) << 16)), stride >> 4)


@dsl_user_op
def load_matrices(address: Int32, turned: bool, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """Four 8 x 8 matrices of 16-bit numbers; lanes 8 m .. 8 m + 7 give the addresses of matrix m's rows."""
    trans = ".trans" if turned else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    return _many(T.i32(), Uint32, 4, [address], text, "=r,=r,=r,=r,r", True, loc, ip)


@dsl_user_op
def store_matrices(address: Int32, values: Sequence[Uint32], turned: bool, *, loc: Any = None, ip: Any = None) -> None:
    """The inverse of `load_matrices`."""
    trans = ".trans" if turned else ""
    text = f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [$0], {{$1, $2, $3, $4}};"
    _asm(None, [address, *values], text, "r,r,r,r,r", True, loc, ip)


@dsl_user_op
def turn_matrix(x: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """An 8 x 8 matrix of 16-bit numbers, one register a lane, transposed."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return Uint32(_asm(T.i32(), [x], text, "=r,r", True, loc, ip))


@dsl_user_op
def mma(
    kind: str, acc: Sequence[Float32], a: Sequence[Uint32], b: Sequence[Uint32], *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """acc + a b of 16 x 8 with 16 terms by one warp; kind: "bf16" or "f16"."""
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, "
        "{$8, $9}, {$10, $11, $12, $13};"
    )
    cons = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    return _many(T.f32(), Float32, 4, [*a, *b, *acc], text, cons, True, loc, ip)


@dsl_user_op
def wgmma(
    n: int, acc: Sequence[Float32], a: Sequence[Uint32], b: Uint64, turned: bool, accumulate: bool,
    *, loc: Any = None, ip: Any = None,
) -> list[Float32]:  # fmt: skip
    """Start acc (+)= a b of 64 x n with 16 bf16 terms by a warpgroup, a in registers.

    b: descriptor of `[n, 16]` in shared memory, its terms contiguous, or n where `turned`.
    """
    m = n // 2
    text = (
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {_names(0, m)}, {_names(2 * m, 4)}, ${2 * m + 4}, "
        f"{int(accumulate)}, 1, 1, {int(turned)};"
    )
    cons = ",".join(["=f"] * m + [str(k) for k in range(m)] + ["r"] * 4 + ["l"])
    return _many(T.f32(), Float32, m, [*acc, *a, b], text, cons, True, loc, ip)


@dsl_user_op
def begin_products(*, loc: Any = None, ip: Any = None) -> None:
    """Registers written so far may be read by the products that follow."""
    _asm(None, [], "wgmma.fence.sync.aligned;", "", True, loc, ip)


@dsl_user_op
def commit_products(*, loc: Any = None, ip: Any = None) -> None:
    """Close a group of products."""
    _asm(None, [], "wgmma.commit_group.sync.aligned;", "", True, loc, ip)


@dsl_user_op
def wait_products(keep: int, *, loc: Any = None, ip: Any = None) -> None:
    """Wait for this warpgroup's groups of products but the last `keep`."""
    _asm(None, [], f"wgmma.wait_group.sync.aligned {keep};", "", True, loc, ip)


# ----------------------------------------------------------------------------------------------------- barriers


@dsl_user_op
def init_arrivals(address: Int32, count: int, *, loc: Any = None, ip: Any = None) -> None:
    """Make an mbarrier of `count` arrivals a phase."""
    _asm(None, [address], f"mbarrier.init.shared.b64 [$0], {count};", "r", True, loc, ip)


@dsl_user_op
def arrive(address: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive at an mbarrier: what this thread did before is seen by those who wait there."""
    _asm(None, [address], "{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [$0]; }", "r", True, loc, ip)


@dsl_user_op
def try_wait(address: Int32, parity: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """1 where the mbarrier's phase of this parity is over, 0 where not yet (after some while)."""
    text = "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }"
    return Int32(_asm(T.i32(), [address, parity], text, "=r,r,r", True, loc, ip))


@dsl_user_op
def meet(number: Int32, threads: int, *, loc: Any = None, ip: Any = None) -> None:
    """Barrier `number` (1..15) of `threads` threads."""
    _asm(None, [number], f"bar.sync $0, {threads};", "r", True, loc, ip)


@dsl_user_op
def meet_warp(*, loc: Any = None, ip: Any = None) -> None:
    """The lanes of a warp see each other's stores."""
    _asm(None, [], "bar.warp.sync 0xffffffff;", "", True, loc, ip)
