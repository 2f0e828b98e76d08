"""PTX instructions as Python source on numpy arrays: one function for each block of a program."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.machine import BASE, Block, Instruction, Program, Unit, Unknown

STORAGE = {"pred": "bool_", "b8": "uint8", "b16": "uint16", "b32": "uint32", "b64": "uint64"}
TINY = np.float32(2.0**-126)
#: numpy's type of a PTX type; bf16 has none.
TYPES = {
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8, "u16": np.uint16, "s16": np.int16, "b16": np.uint16,
    "f16": np.float16,
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32, "u64": np.uint64, "s64": np.int64,
    "b64": np.uint64, "f64": np.float64, "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32, "tf32": np.uint32,
}  # fmt: skip
SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid)\.([xyz])$|%(laneid|warpid|clock|clock64|globaltimer_lo)$")


def bits(kind: str) -> int:
    """Width of a type in bits."""
    if kind == "pred":
        return 1
    return np.dtype(TYPES[kind]).itemsize * 8


# ------------------------------------------------------------------------------------------- what the source calls


def flush(x: Any) -> Any:
    """fp32 with what is below the smallest normal number made zero."""
    return np.where(np.abs(x) < TINY, x * np.float32(0), x)


def fma(a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once (almost: through fp64)."""
    return (np.asarray(a, np.float64) * b + c).astype(np.float32)


def to_bf16(x: Any) -> Any:
    """fp32 to the bits of bf16, to nearest even."""
    u = np.asarray(x, np.float32).view(np.uint32)
    rounded = ((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def from_bf16(u: Any) -> Any:
    return (np.asarray(u).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_tf32(x: Any) -> Any:
    """fp32 rounded to tf32, halves away from zero."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return ((u + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.uint32)


def pair(high: Any, low: Any) -> Any:
    return (np.asarray(high).astype(np.uint32) << np.uint32(16)) | np.asarray(low).astype(np.uint32)


def halves(x: Any) -> tuple[Any, Any]:
    """(low, high) 16 bits of 32."""
    x = np.asarray(x)
    return x.astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)


def shl(x: Any, n: Any) -> Any:
    x, n = np.asarray(x), np.asarray(n)
    width = x.dtype.itemsize * 8
    return np.where(n >= width, x.dtype.type(0), x << np.minimum(n, width - 1).astype(x.dtype))


def shr(x: Any, n: Any) -> Any:
    x, n = np.asarray(x), np.asarray(n)
    width = x.dtype.itemsize * 8
    y = x >> np.minimum(n, width - 1).astype(x.dtype)
    return y if x.dtype.kind == "i" else np.where(n >= width, x.dtype.type(0), y)


def bfe(x: Any, at: Any, length: Any, signed: bool) -> Any:
    """A field of bits, zero- or sign-extended."""
    x = np.asarray(x).astype(np.int64 if signed else np.uint64)
    at, length = np.asarray(at).astype(np.int64) & 255, np.asarray(length).astype(np.int64) & 255
    field = (x.astype(np.uint64) >> np.minimum(at, 63).astype(np.uint64)) & (
        (np.uint64(1) << np.minimum(length, 32).astype(np.uint64)) - np.uint64(1)
    )
    if signed:
        sign = np.uint64(1) << np.maximum(length - 1, 0).astype(np.uint64)
        field = np.where(length > 0, (field ^ sign) - sign, np.uint64(0))
    return field.astype(np.uint32)


def bfi(a: Any, b: Any, at: Any, length: Any) -> Any:
    """b with `length` bits of a at `at`."""
    mask = (np.uint64(1) << np.minimum(np.asarray(length), 32).astype(np.uint64)) - np.uint64(1)
    mask = (mask << np.minimum(np.asarray(at), 63).astype(np.uint64)).astype(np.uint32)
    moved = (np.asarray(a).astype(np.uint64) << np.minimum(np.asarray(at), 63).astype(np.uint64)).astype(np.uint32)
    return (np.asarray(b) & ~mask) | (moved & mask)


def prmt(a: Any, b: Any, s: Any) -> Any:
    """Bytes of a and b, chosen by the nibbles of s."""
    both = np.asarray(a).astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
    s = np.asarray(s).astype(np.uint64)
    out = np.uint64(0)
    for k in range(4):
        nibble = (s >> np.uint64(4 * k)) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (nibble & np.uint64(7)))) & np.uint64(255)
        sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        out = out | (np.where(nibble >= 8, sign, byte) << np.uint64(8 * k))
    return out.astype(np.uint32)


def lop3(a: Any, b: Any, c: Any, table: int) -> Any:
    """The three-input function whose truth table is `table`."""
    out = np.uint32(0)
    for k in range(8):
        if table >> k & 1:
            out = out | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
    return out


def mul_hi(a: Any, b: Any) -> Any:
    """The upper half of a product of 32-bit numbers."""
    wide = np.int64 if np.asarray(a).dtype.kind == "i" else np.uint64
    return ((np.asarray(a).astype(wide) * np.asarray(b).astype(wide)) >> wide(32)).astype(np.asarray(a).dtype)


def quotient(a: Any, b: Any) -> Any:
    """Division that truncates."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind == "u":
        return a // np.where(b == 0, b.dtype.type(1), b)
    q = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    return (q * np.sign(a) * np.sign(b)).astype(a.dtype)


def popc(x: Any) -> Any:
    return np.bitwise_count(np.asarray(x)).astype(np.uint32)


def clz(x: Any) -> Any:
    x = np.asarray(x).astype(np.uint32)
    return np.where(x == 0, 32, 31 - np.floor(np.log2(np.maximum(x, 1).astype(np.float64))).astype(np.int64)).astype(
        np.uint32
    )


def funnel(low: Any, high: Any, n: Any, left: bool, clamp: bool) -> Any:
    """shf: 32 bits of the pair (high, low) shifted."""
    both = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | np.asarray(low).astype(np.uint64)
    n = np.asarray(n).astype(np.uint64)
    n = np.minimum(n, np.uint64(32)) if clamp else n & np.uint64(31)
    return (((both << n) >> np.uint64(32)) if left else (both >> n)).astype(np.uint32)


NAMESPACE: dict[str, Any] = {
    "np": np, "where": np.where, "flush": flush, "fma": fma, "to_bf16": to_bf16, "from_bf16": from_bf16,
    "to_tf32": to_tf32, "pair": pair, "halves": halves, "shl": shl, "shr": shr, "bfe": bfe, "bfi": bfi,
    "prmt": prmt, "lop3": lop3, "mul_hi": mul_hi, "quotient": quotient, "popc": popc, "clz": clz, "funnel": funnel,
    **{f"N_{name}": np.dtype(kind).type for name, kind in TYPES.items()},
}  # fmt: skip


# --------------------------------------------------------------------------------------------------- the translator


class Translator:
    """Source of the blocks of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.index = {name: k for k, name in enumerate(program.registers)}
        self.kind = {name: storage(kind) for name, kind in program.registers.items()}
        self.constants: dict[str, Any] = {}

    def function(self, index: int, masked: bool) -> Callable[[Unit, list[Any], Any], None]:
        """The function of a block: (unit, registers, mask)."""
        block = self.program.blocks[index]
        self.lines: list[str] = []
        self.masked = masked
        self.fresh = 0
        ended = False
        for k, instruction in enumerate(block.body):
            self.where = len(self.lines)
            try:
                ended = self.translate(instruction, block, k == len(block.body) - 1)
            except (KeyError, IndexError, ValueError, AttributeError) as error:
                raise Unknown(f"{instruction.text} ({type(error).__name__}: {error})") from error
        if not ended:
            self.emit(f"u.goto({self.mask()}, {index + 1})")
        source = "def block(u, R, M):\n" + "\n".join("    " + line for line in self.lines)
        space = {**NAMESPACE, **self.constants}
        exec(compile(source, f"{self.program.name}:{block.label or index}", "exec"), space)
        return space["block"]

    # -- pieces

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def mask(self, guard: str | None = None) -> str:
        """The lanes that do it, as an expression; "None" for all."""
        if guard is None:
            return "M" if self.masked else "None"
        p = ("~" if guard[0] == "!" else "") + f"R[{self.index[guard.lstrip('!')]}]"
        return f"(M & {p})" if self.masked else p

    def constant(self, value: Any) -> str:
        name = f"C{len(self.constants)}"
        self.constants[name] = value
        return name

    def number(self, text: str, kind: str) -> str | None:
        """A literal as a constant of a type."""
        if text.startswith(("0f", "0F")) and len(text) == 10:
            value = np.uint32(int(text[2:], 16))
            return self.constant(value.view(np.float32) if kind == "f32" else value)
        if text.startswith(("0d", "0D")) and len(text) == 18:
            return self.constant(np.float64(struct.unpack(">d", bytes.fromhex(text[2:]))[0]))
        if not re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
            return None
        value = int(text.rstrip("U"), 0)
        if kind == "pred":
            return self.constant(np.bool_(value != 0))
        if kind in ("f32", "f16", "f64"):
            return self.constant(TYPES[kind](value))
        width = bits(kind)
        value &= (1 << width) - 1
        unsigned = np.dtype(f"u{width // 8}").type(value)
        return self.constant(unsigned.view(TYPES[kind]))

    def value(self, text: str, kind: str) -> str:
        """An operand read as a type."""
        if text in self.index:
            have = self.kind[text]
            source = f"R[{self.index[text]}]"
            if kind == "pred" or have == "pred":
                return source
            want = TYPES[kind]
            if np.dtype(want) == np.dtype(STORAGE[have]):
                return source
            if np.dtype(want).itemsize == np.dtype(STORAGE[have]).itemsize:
                return f"{source}.view(N_{kind})"
            unsigned = f"u{bits(kind)}"
            source = f"{source}.astype(N_{unsigned})"
            return source if np.dtype(want).kind == "u" else f"{source}.view(N_{kind})"
        special = SPECIAL.match(text)
        if special:
            return self.special(special, kind)
        literal = self.number(text, kind)
        if literal:
            return literal
        if re.fullmatch(r"[\w$]+(\+\d+)?", text):
            symbol, _, more = text.partition("+")
            return self.constant(TYPES[kind](BASE + self.program.symbols[symbol] + int(more or 0)))
        raise Unknown(f"operand {text}")

    def special(self, found: re.Match[str], kind: str) -> str:
        vector, axis, scalar = found.groups()
        if scalar:
            source = {"laneid": "u.lane", "warpid": "u.tid // 32"}.get(scalar, "np.zeros(u.n)")
        else:
            k = "xyz".index(axis)
            source = {
                "tid": "u.tid" if k == 0 else "np.zeros(u.n)",
                "ntid": f"np.int64(({'u.batch.kernel.threads'}, 1, 1)[{k}])",
                "ctaid": f"u.batch.ctas[u.cta, {k}]",
                "nctaid": f"np.int64(u.batch.kernel.grid[{k}])",
            }[vector]
        return f"({source}).astype(N_{kind})"

    def set(self, register: str, source: str, kind: str, guard: str | None = None) -> None:
        """Assign an expression of a type to a register."""
        if register == "_":
            return
        k, have = self.index[register], self.kind[register]
        if kind != "pred" and have != "pred":
            want, got = np.dtype(STORAGE[have]), np.dtype(TYPES[kind])
            if want.itemsize != got.itemsize:
                if got.kind == "i":  # sign-extend
                    source = f"({source}).astype(np.int{8 * want.itemsize}).view(np.{want.name})"
                else:
                    source = f"({source}).astype(np.{want.name})"
            elif want != got:
                source = f"({source}).view(np.{want.name})"
        mask = self.mask(guard)
        if mask == "None":
            self.emit(f"R[{k}] = {source}")
        else:
            self.emit(f"R[{k}] = where({mask}, {source}, R[{k}])")

    def address(self, text: str, wide: bool) -> str:
        """An address operand "[%rd1 + 8]"."""
        inner = text.strip()[1:-1].strip()
        kind = "u64" if wide else "u32"
        match = re.fullmatch(r"(.+?)\s*\+\s*(-?(?:0x)?[0-9A-Fa-f]+)", inner)
        base, more = (match.group(1), int(match.group(2), 0)) if match else (inner, 0)
        base = self.value(base, kind)
        if not more:
            return base
        return f"({base} + {self.constant(TYPES[kind](more % (1 << bits(kind))))})"

    def says(self, instruction: Instruction) -> str:
        return self.constant(f"{self.program.name}: {instruction.text}")

    def temp(self) -> str:
        self.fresh += 1
        return f"t{self.fresh}"

    # -- instructions

    def translate(self, x: Instruction, block: Block, last: bool) -> bool:
        """Emit the source of an instruction; whether it says where lanes go on."""
        parts = x.op.replace("shared::cta", "shared").split(".")
        head = parts[0]
        method = getattr(self, f"op_{head}", None)
        if method is None:
            raise Unknown(x.text)
        self.block = block
        return bool(method(x, parts, x.args, x.guard))

    def simple(self, x: Instruction, kind: str, source: str, guard: str | None, ftz: bool = False) -> None:
        self.set(x.args[0], f"flush({source})" if ftz else source, kind, guard)

    def arithmetic(self, x: Instruction, parts: list[str], sign: str, guard: str | None) -> None:
        kind = parts[-1]
        a, b = x.args[1], x.args[2]
        if kind == "bf16":
            out = f"to_bf16(from_bf16({self.value(a, 'b16')}) {sign} from_bf16({self.value(b, 'b16')}))"
            self.set(x.args[0], out, "b16", guard)
        elif kind in ("bf16x2", "f16x2"):
            self.packed(x, kind, lambda p: f"{p[0]} {sign} {p[1]}", guard)
        elif kind == "f16":
            self.set(x.args[0], f"{self.value(a, 'f16')} {sign} {self.value(b, 'f16')}", "f16", guard)
        else:
            self.simple(x, kind, f"{self.value(a, kind)} {sign} {self.value(b, kind)}", guard, "ftz" in parts)

    def packed(self, x: Instruction, kind: str, f: Callable[[list[str]], str], guard: str | None) -> None:
        """Two 16-bit operations in one register."""
        lows, highs = [], []
        for a in x.args[1:]:
            low, high = self.temp(), self.temp()
            self.emit(f"{low}, {high} = halves({self.value(a, 'b32')})")
            for side, name in ((lows, low), (highs, high)):
                side.append(f"from_bf16({name})" if kind == "bf16x2" else f"{name}.view(N_f16).astype(N_f32)")
        if kind == "bf16x2":
            out = f"pair(to_bf16({f(highs)}), to_bf16({f(lows)}))"
        else:
            out = f"pair(({f(highs)}).astype(N_f16).view(N_u16), ({f(lows)}).astype(N_f16).view(N_u16))"
        self.set(x.args[0], out, "b32", guard)

    def op_add(self, x, parts, a, guard):
        self.arithmetic(x, parts, "+", guard)

    def op_sub(self, x, parts, a, guard):
        self.arithmetic(x, parts, "-", guard)

    def op_mul(self, x, parts, a, guard):
        kind = parts[-1]
        if parts[1] == "wide":
            wide = kind[0] + str(2 * bits(kind))
            source = f"{self.value(a[1], kind)}.astype(N_{wide}) * {self.value(a[2], kind)}.astype(N_{wide})"
            self.set(a[0], source, wide, guard)
        elif parts[1] == "hi":
            self.set(a[0], f"mul_hi({self.value(a[1], kind)}, {self.value(a[2], kind)})", kind, guard)
        else:
            self.arithmetic(x, parts, "*", guard)

    def op_mad(self, x, parts, a, guard):
        kind = parts[-1]
        if parts[1] == "wide":
            wide = kind[0] + str(2 * bits(kind))
            source = (
                f"{self.value(a[1], kind)}.astype(N_{wide}) * {self.value(a[2], kind)}.astype(N_{wide})"
                f" + {self.value(a[3], wide)}"
            )
            self.set(a[0], source, wide, guard)
        elif parts[1] == "lo":
            source = f"{self.value(a[1], kind)} * {self.value(a[2], kind)} + {self.value(a[3], kind)}"
            self.set(a[0], source, kind, guard)
        else:
            raise Unknown(x.text)

    def op_fma(self, x, parts, a, guard):
        kind = parts[-1]
        if kind in ("bf16x2", "f16x2"):
            self.packed(x, kind, lambda p: f"fma({p[0]}, {p[1]}, {p[2]})", guard)
        elif kind == "bf16":
            p = [f"from_bf16({self.value(y, 'b16')})" for y in a[1:]]
            self.set(a[0], f"to_bf16(fma({p[0]}, {p[1]}, {p[2]}))", "b16", guard)
        elif kind == "f16":
            p = [f"{self.value(y, 'f16')}.astype(N_f32)" for y in a[1:]]
            self.set(a[0], f"fma({p[0]}, {p[1]}, {p[2]}).astype(N_f16)", "f16", guard)
        elif kind == "f32":
            p = [self.value(y, kind) for y in a[1:]]
            self.simple(x, kind, f"fma({p[0]}, {p[1]}, {p[2]})", guard, "ftz" in parts)
        else:
            raise Unknown(x.text)

    def op_div(self, x, parts, a, guard):
        kind = parts[-1]
        p, q = self.value(a[1], kind), self.value(a[2], kind)
        self.set(a[0], f"{p} / {q}" if kind[0] == "f" else f"quotient({p}, {q})", kind, guard)

    def op_rem(self, x, parts, a, guard):
        kind = parts[-1]
        p, q = self.value(a[1], kind), self.value(a[2], kind)
        self.set(a[0], f"{p} - quotient({p}, {q}) * {q}", kind, guard)

    def op_neg(self, x, parts, a, guard):
        kind = parts[-1]
        if kind in ("bf16", "bf16x2", "f16", "f16x2"):
            flip = "N_u32(0x80008000)" if kind.endswith("x2") else "N_u16(0x8000)"
            raw = "b32" if kind.endswith("x2") else "b16"
            self.set(a[0], f"{self.value(a[1], raw)} ^ {flip}", raw, guard)
        else:
            self.simple(x, kind, f"-{self.value(a[1], kind)}", guard)

    def op_abs(self, x, parts, a, guard):
        self.simple(x, parts[-1], f"np.abs({self.value(a[1], parts[-1])})", guard)

    def extreme(self, x, parts, a, guard, f: str, integer: str):
        kind = parts[-1]
        if kind in ("bf16x2", "f16x2"):
            self.packed(x, kind, lambda p: f"np.{f}({p[0]}, {p[1]})", guard)
            return
        name = integer if kind[0] != "f" or "NaN" in parts else f
        self.simple(x, kind, f"np.{name}({self.value(a[1], kind)}, {self.value(a[2], kind)})", guard)

    def op_max(self, x, parts, a, guard):
        self.extreme(x, parts, a, guard, "fmax", "maximum")

    def op_min(self, x, parts, a, guard):
        self.extreme(x, parts, a, guard, "fmin", "minimum")

    def op_ex2(self, x, parts, a, guard):
        if parts[-1] != "f32":
            raise Unknown(x.text)
        source = f"np.exp2({self.value(a[1], 'f32')})"
        self.simple(x, "f32", source, guard, "ftz" in parts)

    def op_lg2(self, x, parts, a, guard):
        self.simple(x, "f32", f"np.log2({self.value(a[1], 'f32')})", guard)

    def op_rcp(self, x, parts, a, guard):
        self.simple(x, "f32", f"N_f32(1) / {self.value(a[1], 'f32')}", guard, "ftz" in parts)

    def op_rsqrt(self, x, parts, a, guard):
        self.simple(x, "f32", f"N_f32(1) / np.sqrt({self.value(a[1], 'f32')})", guard, "ftz" in parts)

    def op_sqrt(self, x, parts, a, guard):
        self.simple(x, "f32", f"np.sqrt({self.value(a[1], 'f32')})", guard)

    def op_tanh(self, x, parts, a, guard):
        self.simple(x, "f32", f"np.tanh({self.value(a[1], 'f32')})", guard)

    def logic(self, x, parts, a, guard, sign: str):
        kind = parts[-1]
        self.set(a[0], f"{self.value(a[1], kind)} {sign} {self.value(a[2], kind)}", kind, guard)

    def op_and(self, x, parts, a, guard):
        self.logic(x, parts, a, guard, "&")

    def op_or(self, x, parts, a, guard):
        self.logic(x, parts, a, guard, "|")

    def op_xor(self, x, parts, a, guard):
        self.logic(x, parts, a, guard, "^")

    def op_not(self, x, parts, a, guard):
        self.set(a[0], f"~{self.value(a[1], parts[-1])}", parts[-1], guard)

    def op_shl(self, x, parts, a, guard):
        self.set(a[0], f"shl({self.value(a[1], parts[-1])}, {self.value(a[2], 'u32')})", parts[-1], guard)

    def op_shr(self, x, parts, a, guard):
        self.set(a[0], f"shr({self.value(a[1], parts[-1])}, {self.value(a[2], 'u32')})", parts[-1], guard)

    def op_shf(self, x, parts, a, guard):
        p = [self.value(y, "u32") for y in a[1:]]
        source = f"funnel({p[0]}, {p[1]}, {p[2]}, {parts[1] == 'l'}, {parts[2] == 'clamp'})"
        self.set(a[0], source, "u32", guard)

    def op_bfe(self, x, parts, a, guard):
        p = [self.value(a[1], parts[-1]), self.value(a[2], "u32"), self.value(a[3], "u32")]
        self.set(a[0], f"bfe({p[0]}, {p[1]}, {p[2]}, {parts[-1][0] == 's'})", "u32", guard)

    def op_bfi(self, x, parts, a, guard):
        p = [self.value(y, "u32") for y in a[1:]]
        self.set(a[0], f"bfi({', '.join(p)})", "u32", guard)

    def op_prmt(self, x, parts, a, guard):
        p = [self.value(y, "u32") for y in a[1:]]
        self.set(a[0], f"prmt({', '.join(p)})", "u32", guard)

    def op_lop3(self, x, parts, a, guard):
        p = [self.value(y, "u32") for y in a[1:4]]
        self.set(a[0], f"lop3({', '.join(p)}, {int(a[4], 0)})", "u32", guard)

    def op_popc(self, x, parts, a, guard):
        self.set(a[0], f"popc({self.value(a[1], parts[-1])})", "u32", guard)

    def op_clz(self, x, parts, a, guard):
        self.set(a[0], f"clz({self.value(a[1], 'u32')})", "u32", guard)

    def op_selp(self, x, parts, a, guard):
        kind = parts[-1]
        source = f"where({self.value(a[3], 'pred')}, {self.value(a[1], kind)}, {self.value(a[2], kind)})"
        self.set(a[0], source, kind, guard)

    def op_setp(self, x, parts, a, guard):
        kind = parts[-1]
        compare, combine = parts[1], [y for y in parts[2:-1] if y in ("and", "or", "xor")]
        sides = [self.value(y, kind) for y in a[1:3]]
        if kind in ("bf16", "f16"):
            sides = [f"from_bf16({y})" if kind == "bf16" else y for y in sides]
        p, q = sides
        plain = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=",
                 "hi": ">", "hs": ">="}  # fmt: skip
        if compare in plain:
            source = f"({p} {plain[compare]} {q})"
            if compare == "ne" and kind[0] == "f":
                source = f"({source} & ({p} == {p}) & ({q} == {q}))"
        elif compare in ("num", "nan"):
            source = f"(np.isnan({p}) | np.isnan({q}))"
            source = f"(~{source})" if compare == "num" else source
        elif compare[:-1] in plain and compare[-1] == "u":
            source = f"(({p} {plain[compare[:-1]]} {q}) | np.isnan({p}) | np.isnan({q}))"
        else:
            raise Unknown(x.text)
        names = a[0].split("|")
        if combine:
            sign = {"and": "&", "or": "|", "xor": "^"}[combine[0]]
            third = a[3]
            other = f"(~{self.value(third[1:], 'pred')})" if third[0] == "!" else self.value(third, "pred")
            keep = self.temp()
            self.emit(f"{keep} = {source}")
            self.set(names[0], f"{keep} {sign} {other}", "pred", guard)
            if len(names) > 1:
                self.set(names[1], f"~{keep} {sign} {other}", "pred", guard)
            return
        if len(names) > 1:
            keep = self.temp()
            self.emit(f"{keep} = {source}")
            self.set(names[0], keep, "pred", guard)
            self.set(names[1], f"~{keep}", "pred", guard)
            return
        self.set(a[0], source, "pred", guard)

    def op_mov(self, x, parts, a, guard):
        kind = parts[-1]
        if isinstance(a[1], list):
            n = len(a[1])
            part = f"u{bits(kind) // n}"
            whole = f"u{bits(kind)}"
            source = " | ".join(
                f"({self.value(y, part)}.astype(N_{whole}) << N_{whole}({k * bits(part)}))" for k, y in enumerate(a[1])
            )
            self.set(a[0], source, whole, guard)
        elif isinstance(a[0], list):
            n = len(a[0])
            part, whole = f"u{bits(kind) // n}", f"u{bits(kind)}"
            keep = self.temp()
            self.emit(f"{keep} = {self.value(a[1], whole)}")
            for k, y in enumerate(a[0]):
                self.set(y, f"({keep} >> N_{whole}({k * bits(part)})).astype(N_{part})", part, guard)
        else:
            self.set(a[0], self.value(a[1], kind), kind, guard)

    def op_cvta(self, x, parts, a, guard):
        self.set(a[0], self.value(a[1], parts[-1]), parts[-1], guard)

    def op_cvt(self, x, parts, a, guard):
        modes = [y for y in parts[1:] if y not in TYPES]
        kinds = [y for y in parts[1:] if y in TYPES]
        to, of = kinds
        if to in ("bf16x2", "f16x2"):
            high, low = self.value(a[1], "f32"), self.value(a[2], "f32")
            if to == "bf16x2":
                self.set(a[0], f"pair(to_bf16({high}), to_bf16({low}))", "b32", guard)
            else:
                part = "({}).astype(N_f16).view(N_u16)"
                self.set(a[0], f"pair({part.format(high)}, {part.format(low)})", "b32", guard)
            return
        source = self.value(a[1], of)
        if to == "tf32":
            self.set(a[0], f"to_tf32({source})", "b32", guard)
        elif to == "bf16":
            if of == "f32":
                source = f"to_bf16({source})"
            else:
                source = f"to_bf16({source}.astype(N_f32))"
            self.set(a[0], source, "b16", guard)
        elif of == "bf16":
            source = f"from_bf16({source})"
            self.set(a[0], source if to == "f32" else f"({source}).astype(N_{to})", to, guard)
        else:
            rounding = {"rzi": "np.trunc", "rni": "np.rint", "rmi": "np.floor", "rpi": "np.ceil"}
            for mode in modes:
                if mode in rounding:
                    source = f"{rounding[mode]}({source})"
                elif mode not in ("rn", "ftz", "sat", "rz", "rna"):
                    raise Unknown(x.text)
            if "sat" in modes:
                source = f"np.clip({source}, 0, 1)"
            self.set(a[0], f"({source}).astype(N_{to})", to, guard)

    # -- memory

    def vector(self, a: Any) -> list[str]:
        return a if isinstance(a, list) else [a]

    def op_ld(self, x, parts, a, guard):
        kind = parts[-1]
        size = bits(kind) // 8
        names = self.vector(a[0])
        if parts[1] == "param":
            inner = a[1].strip()[1:-1].strip()
            match = re.fullmatch(r"([\w$]+?)(?:\s*\+\s*(\d+))?", inner)
            at = self.program.offsets[match.group(1)] + int(match.group(2) or 0)
            for k, name in enumerate(names):
                lo = at + k * size
                source = f"np.frombuffer(u.batch.kernel.params[{lo}:{lo + size}], N_u{8 * size})[0]"
                if kind[0] in "sf":
                    source = f"{source}.view(N_{kind})"
                self.set(name, source, kind, guard)
            return
        space = parts[1]
        keep = self.temp()
        mask = self.mask(guard)
        if space == "shared":
            where = self.address(a[1], self.is_wide(a[1]))
            self.emit(f"{keep} = u.load_shared({where}, {mask}, {size}, {len(names)}, {self.says(x)})")
        elif space == "global":
            where = self.address(a[1], True)
            self.emit(f"{keep} = u.load_global({where}, {mask}, {size}, {len(names)}, {self.says(x)})")
            self.emit(f"if {keep} is not None:")
            for k, name in enumerate(names):
                self.set(name, self.loaded(f"{keep}[{k}]", kind), kind, guard)
                self.lines[-1] = "    " + self.lines[-1]
            return
        else:
            raise Unknown(x.text)
        for k, name in enumerate(names):
            self.set(name, self.loaded(f"{keep}[{k}]", kind), kind, guard)

    def loaded(self, source: str, kind: str) -> str:
        return source if np.dtype(TYPES[kind]).kind == "u" else f"{source}.view(N_{kind})"

    def is_wide(self, text: str) -> bool:
        base = re.split(r"[\s+]", text.strip()[1:-1].strip())[0]
        return self.kind.get(base) == "b64"

    def op_st(self, x, parts, a, guard):
        kind = parts[-1]
        size = bits(kind) // 8
        values = [self.value(y, f"u{8 * size}") for y in self.vector(a[1])]
        space = parts[1]
        if space not in ("shared", "global"):
            raise Unknown(x.text)
        where = self.address(a[0], True if space == "global" else self.is_wide(a[0]))
        self.emit(f"u.store_{space}({where}, {self.mask(guard)}, {size}, [{', '.join(values)}], {self.says(x)})")

    def op_cp(self, x, parts, a, guard):
        if parts[1:3] == ["async", "commit_group"]:
            self.emit("u.commit()")
        elif parts[1:3] == ["async", "wait_group"]:
            self.emit(f"u.wait_copies({int(a[0])})")
        elif parts[1:3] == ["async", "wait_all"]:
            self.emit("u.wait_all()")
        elif parts[1:3] in (["async", "cg"], ["async", "ca"]):
            take = self.value(a[3], "u32") if len(a) > 3 else "None"
            self.emit(
                f"u.cp_async({self.address(a[0], self.is_wide(a[0]))}, {self.address(a[1], True)}, {self.mask(guard)}, "
                f"{int(a[2], 0)}, {take}, {self.says(x)})"
            )
        else:
            raise Unknown(x.text)

    def op_ldmatrix(self, x, parts, a, guard):
        names = self.vector(a[0])
        keep = self.temp()
        self.emit(
            f"{keep} = u.load_matrix({self.address(a[1], False)}, {self.mask(guard)}, {len(names)}, "
            f"{'trans' in parts}, {self.says(x)})"
        )
        for k, name in enumerate(names):
            self.set(name, f"{keep}[{k}]", "b32", guard)

    def op_stmatrix(self, x, parts, a, guard):
        values = ", ".join(self.value(y, "b32") for y in self.vector(a[1]))
        self.emit(
            f"u.store_matrix({self.address(a[0], False)}, {self.mask(guard)}, [{values}], {'trans' in parts}, "
            f"{self.says(x)})"
        )

    # -- across lanes

    def op_shfl(self, x, parts, a, guard):
        names = a[0].split("|")
        keep = self.temp()
        b, c = self.value(a[2], "u32"), self.value(a[3], "u32")
        self.emit(f"{keep} = u.shuffle({parts[2]!r}, {self.value(a[1], 'b32')}, {b}, {c})")
        self.set(names[0], f"{keep}[0]", "b32", guard)
        if len(names) > 1:
            self.set(names[1], f"{keep}[1]", "pred", guard)

    def op_redux(self, x, parts, a, guard):
        self.set(a[0], f"u.redux({parts[2]!r}, {self.value(a[1], 'u32')}, {parts[3][0] == 's'})", "u32", guard)

    def op_vote(self, x, parts, a, guard):
        p = f"(~{self.value(a[1][1:], 'pred')})" if a[1][0] == "!" else self.value(a[1], "pred")
        ballot = f"u.ballot({p}, {self.mask()})"
        if parts[2] == "ballot":
            self.set(a[0], ballot, "b32", guard)
        elif parts[2] == "any":
            self.set(a[0], f"{ballot} != 0", "pred", guard)
        else:
            raise Unknown(x.text)

    def op_mma(self, x, parts, a, guard):
        kind = parts[-2]
        sizes = {"m16n8k16": ("bf16", "f16"), "m16n8k8": ("tf32",)}
        shape = next(y for y in parts if y.startswith("m16"))
        if kind not in sizes[shape] or parts[-1] != "f32":
            raise Unknown(x.text)
        lists = [f"[{', '.join(self.value(y, 'b32') for y in side)}]" for side in a[1:4]]
        keep = self.temp()
        self.emit(f"{keep} = u.mma({kind!r}, {', '.join(lists)})")
        self.emit("u.batch.count_products += 1")
        for k, name in enumerate(a[0]):
            self.set(name, f"{keep}[{k}]", "b32", guard)

    def op_wgmma(self, x, parts, a, guard):
        if parts[1] in ("fence",):
            return
        if parts[1] == "commit_group":
            self.emit("u.commit_products()")
            return
        if parts[1] == "wait_group":
            self.emit(f"u.wait_products({int(a[0])})")
            return
        shape = re.search(r"m64n(\d+)k(\d+)", x.op)
        kind = parts[-1]
        if parts[-3] != "f32" or kind not in ("bf16", "f16", "tf32"):
            raise Unknown(x.text)
        d = a[0]
        side = a[1]
        left = (
            f"[{', '.join(self.value(y, 'b32') for y in side)}]" if isinstance(side, list) else self.value(side, "u64")
        )
        rest = a[3:]
        keep = self.value(rest[0], "pred")
        signs = (int(rest[1]), int(rest[2]))
        turns = [bool(int(y)) for y in rest[3:]]
        turned = (False, turns[-1]) if isinstance(side, list) and turns else tuple(turns) or (False, False)
        out = [self.index[y] for y in d]
        self.emit(
            f"u.wgmma({kind!r}, {shape.group(1)}, {shape.group(2)}, None, {left}, {self.value(a[2], 'u64')}, {keep}, "
            f"{signs}, {turned}, {out}, {self.mask(guard)}, {self.says(x)})"
        )

    # -- order

    def op_bar(self, x, parts, a, guard):
        if parts[1] == "warp":
            return False
        if guard is not None:
            raise Unknown(x.text)
        number = self.value(a[0], "u32")
        count = self.value(a[1], "u32") if len(a) > 1 else "None"
        self.emit(f"u.barrier({self.mask()}, {number}, {count}, {self.block.index + 1}, {parts[1] == 'arrive'})")
        return True

    op_barrier = op_bar

    def op_mbarrier(self, x, parts, a, guard):
        if parts[1] == "init":
            self.emit(f"u.init_arrivals({self.address(a[0], False)}, {self.mask(guard)}, {self.value(a[1], 'u32')})")
        elif parts[1] == "arrive" and len(a) == 2 and len(parts) == 4:
            self.emit(f"u.arrive_at({self.address(a[1], False)}, {self.mask(guard)}, {self.says(x)})")
        elif parts[1:3] == ["try_wait", "parity"]:
            where = self.address(a[1], False)
            done = f"u.try_wait({where}, {self.mask(guard)}, {self.value(a[2], 'u32')}, {self.says(x)})"
            self.set(a[0], done, "pred", guard)
        else:
            raise Unknown(x.text)

    def op_movmatrix(self, x, parts, a, guard):
        self.set(a[0], f"u.turn_matrix({self.value(a[1], 'b32')})", "b32", guard)

    def op_fence(self, x, parts, a, guard):
        if parts[1:3] == ["proxy", "async"]:
            self.emit(f"u.show({self.mask(guard)})")

    op_membar = op_fence
    op_griddepcontrol = op_fence

    def op_setmaxnreg(self, x, parts, a, guard):
        return

    def op_bra(self, x, parts, a, guard):
        target = self.program.labels[a[0]]
        if guard is None:
            self.emit(f"u.goto({self.mask()}, {target})")
        else:
            p = ("~" if guard[0] == "!" else "") + f"R[{self.index[guard.lstrip('!')]}]"
            self.emit(f"u.branch({self.mask()}, {p}, {target}, {self.block.index + 1})")
        return True

    def op_ret(self, x, parts, a, guard):
        if guard is not None:
            p = ("~" if guard[0] == "!" else "") + f"R[{self.index[guard.lstrip('!')]}]"
            self.emit(f"u.branch({self.mask()}, {p}, -1, {self.block.index + 1})")
        else:
            self.emit(f"u.goto({self.mask()}, -1)")
        return True

    op_exit = op_ret


def storage(kind: str) -> str:
    """How a register's type is kept."""
    return kind if kind == "pred" else f"b{bits(kind)}"
