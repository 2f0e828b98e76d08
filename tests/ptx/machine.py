"""Run compiled PTX on numpy arrays: what a kernel computes on a GPU, where there is none.

Threads are lanes of numpy vectors that go through the program together, the ones furthest behind first. Device memory
is the process's own: `Memory` knows which bytes a launch may touch, so an address outside them, or one that is not
aligned, is a `Fault` that names the instruction. Asynchronous work is done as late as the program allows (`late`), or
at once: a kernel must be right both ways. With `races`, shared memory that two warps touch without a barrier between is
a fault too.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
WARP = 32
#: Shared addresses begin here: 0 is no valid one, and swizzled tiles are aligned to 1024 bytes.
BASE = 1024
#: Lanes that are run together, at most.
LANES = 2048


class Fault(Exception):
    """The program did what a GPU would not survive, or would answer at random."""


class Unknown(Exception):
    """The program holds an instruction that this machine does not know."""


# ---------------------------------------------------------------------------------------------------- the program


@dataclass
class Instruction:
    op: str
    args: list[Any]  # a name, or a list of names of a vector operand
    guard: str | None  # "%p1" or "!%p1"
    text: str


@dataclass
class Block:
    index: int
    body: list[Instruction] = field(default_factory=list)
    label: str | None = None


@dataclass
class Program:
    name: str
    params: list[tuple[str, int, int]]  # name, bytes, alignment
    registers: dict[str, str]  # name -> type
    blocks: list[Block]
    labels: dict[str, int]
    symbols: dict[str, int]  # of shared memory -> offset
    static_shared: int
    threads: tuple[int, int, int] | None

    @property
    def offsets(self) -> dict[str, int]:
        """Where each parameter lies among all."""
        found, at = {}, 0
        for name, size, align in self.params:
            at = -(-at // align) * align
            found[name] = at
            at += size
        return found


SIZES = {"pred": 1, "8": 1, "16": 2, "32": 4, "64": 8}
#: Instructions that end a block: what the scheduler sees.
ENDS = ("bra", "ret", "exit", "bar.sync", "barrier.sync", "barrier.cta.sync", "bar.arrive", "barrier.cluster")


def parse(text: str, entry: str | None = None) -> Program:
    """The entry function of a PTX module (the first, or the one named)."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = text.split(".section", 1)[0]
    head = re.search(r"\.entry\s+" + (re.escape(entry) if entry else r"([\w$]+)") + r"\s*\(([^)]*)\)([^{]*)\{", text)
    if head is None:
        raise Unknown("no entry function")
    name = entry or head.group(1)
    params = []
    for part in filter(None, (x.strip() for x in head.group(head.lastindex - 1).split(","))):
        array = re.search(r"([\w$]+)\[(\d+)\]$", part)
        if array:
            params.append((array.group(1), int(array.group(2)), int(re.search(r"\.align (\d+)", part).group(1))))
        else:
            width = int(re.search(r"\.param\s+\.[a-z](\d+)", part).group(1)) // 8
            params.append((part.split()[-1], width, width))
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", head.group(head.lastindex))
    size = tuple(int(x or 1) for x in threads.groups()) if threads else None
    symbols, static = {}, 0
    shared = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]")
    for align, symbol, length in shared.findall(text):
        static = -(-static // int(align)) * int(align)
        symbols[symbol] = static
        static += int(length or 0)
    body = matching(text, head.end() - 1)
    program = Program(name, params, {}, [], {}, symbols, static, size)
    statements(program, body)
    return program


def matching(text: str, at: int) -> str:
    """What stands between the brace at `at` and the one that closes it."""
    depth = 0
    for k in range(at, len(text)):
        depth += (text[k] == "{") - (text[k] == "}")
        if depth == 0:
            return text[at + 1 : k]
    raise Unknown("unbalanced braces")


def statements(program: Program, body: str) -> None:
    """Fill blocks, labels and registers from a function's body; inner scopes get names of their own."""
    scopes: list[dict[str, str]] = [{}]
    count = 0
    block = Block(0)
    program.blocks.append(block)

    def rename(name: str) -> str:
        for scope in reversed(scopes):
            if name in scope:
                return scope[name]
        return name

    def new_block(label: str | None = None) -> None:
        nonlocal block
        if block.body or block.label:
            block = Block(len(program.blocks))
            program.blocks.append(block)
        if label:
            block.label = block.label or label
            program.labels[label] = block.index

    position = 0
    while position < len(body):
        rest = body[position:]
        skip = re.match(r"\s+", rest)
        if skip:
            position += skip.end()
            continue
        if rest[0] == "{":
            scopes.append({})
            count += 1
            position += 1
            continue
        if rest[0] == "}":
            scopes.pop()
            position += 1
            continue
        directive = re.match(r"\.(loc|file|pragma|branchtargets)[^;\n]*[;\n]", rest)
        if directive:
            position += directive.end()
            continue
        label = re.match(r"([\w$%]+)\s*:(?!:)", rest)
        if label:
            new_block(rename_label(label.group(1), scopes, count))
            position += label.end()
            continue
        end = rest.index(";")
        statement = " ".join(rest[:end].split())
        position += end + 1
        if statement.startswith(".reg"):
            _, kind, names = statement.split(None, 2)
            for item in names.split(","):
                item = item.strip()
                many = re.match(r"(.+)<(\d+)>$", item)
                for one in [f"{many.group(1)}{k}" for k in range(int(many.group(2)))] if many else [item]:
                    own = one if len(scopes) == 1 else f"{one}@{count}"
                    scopes[-1][one] = own
                    program.registers[own] = kind[1:]
            continue
        if statement.startswith("."):
            continue
        guard = re.match(r"@(!?)([%\w@]+)\s+", statement)
        sign = None
        if guard:
            statement = statement[guard.end() :]
            sign = guard.group(1) + rename(guard.group(2))
        op, _, operands = statement.partition(" ")
        if "{" in op:
            op, _, tail = op.partition("{")
            operands = "{" + tail + " " + operands
        args = [rename_all(x, rename, scopes, count) for x in split_operands(operands)]
        block.body.append(Instruction(op, args, sign, statement))
        if op.startswith(ENDS):
            new_block()
    program.blocks.append(Block(len(program.blocks), [Instruction("ret", [], None, "end")]))


def rename_label(name: str, scopes: list[dict[str, str]], count: int) -> str:
    """A label's name; one inside a scope gets the scope's number."""
    return name if len(scopes) == 1 else f"{name}@{count}"


def split_operands(text: str) -> list[Any]:
    """Operands at the outermost commas; a braced vector is a list."""
    parts, depth, now = [], 0, ""
    for c in text.strip():
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            parts.append(now.strip())
            now = ""
        else:
            now += c
    if now.strip():
        parts.append(now.strip())
    return [[x.strip() for x in p[1:-1].split(",")] if p.startswith("{") else p for p in parts]


def rename_all(arg: Any, rename: Any, scopes: list[dict[str, str]], count: int) -> Any:
    """An operand with its scoped names."""
    if isinstance(arg, list):
        return [rename_all(x, rename, scopes, count) for x in arg]
    if len(scopes) > 1 and not arg.startswith("["):
        if re.fullmatch(r"[A-Za-z$][\w$]*", arg) and rename(arg) == arg and not arg.startswith("0"):
            return arg
        return rename(arg)
    if len(scopes) > 1:
        return re.sub(r"%?[A-Za-z_$][\w$]*", lambda m: rename(m.group(0)), arg)
    return arg


# ----------------------------------------------------------------------------------------------------- its memory


class Memory:
    """The bytes of this process that a launch may touch."""

    def __init__(self) -> None:
        self.regions: list[tuple[int, int, Array, int, str]] = []  # start, end, bytes, where those begin, name
        self.starts = np.zeros(0, U64)

    def add(self, address: int, size: int, name: str = "") -> None:
        """Allow [address, address + size); regions that overlap become one."""
        if size == 0:
            return
        low, high, names, rest = address, address + size, [name], []
        for region in self.regions:
            if region[0] < high and low < region[1]:
                low, high = min(low, region[0]), max(high, region[1])
                names.append(region[4])
            else:
                rest.append(region)
        origin = low // 16 * 16
        raw = np.frombuffer((ctypes.c_uint8 * (-(-high // 16) * 16 - origin)).from_address(origin), U8)
        self.regions = sorted([*rest, (low, high, raw, origin, "/".join(names))], key=lambda x: x[0])
        self.starts = np.array([r[0] for r in self.regions], U64)

    def find(self, low: int, high: int, where: str) -> tuple[int, int, Array]:
        """(origin, end, bytes from origin on) of the region that holds [low, high)."""
        k = int(np.searchsorted(self.starts, U64(low), "right")) - 1
        if k < 0 or high > self.regions[k][1]:
            near = f", {low - self.regions[k][1]} bytes behind the end of {self.regions[k][4]}" if k >= 0 else ""
            raise Fault(f"no device memory at {low:#x}{near}: {where}")
        _, end, raw, origin, _ = self.regions[k]
        return origin, end, raw


def items(raw: Array, size: int) -> Array:
    """Bytes as unsigned numbers of `size` bytes."""
    kind = {1: U8, 2: U16, 4: U32, 8: U64}[size]
    return raw[: len(raw) // size * size].view(kind)


# --------------------------------------------------------------------------------------------------- its execution


class Unit:
    """Lanes that run together: whole CTAs, or one warp of a CTA."""

    def __init__(self, batch: Batch, cta: Array, tid: Array, whole: bool) -> None:
        self.batch, self.cta, self.tid, self.whole = batch, cta, tid, whole
        self.n = len(cta)
        self.R: list[Any] = [KINDS_ZERO[kind] for kind in batch.kernel.kinds]
        self.at = np.zeros(self.n, np.int64)
        self.block: int | None = 0  # where all lanes are, None where they are apart
        self.waits = np.zeros(self.n, bool)
        self.base = (cta * batch.bytes - BASE).astype(np.int64)
        self.lane = tid % WARP
        self.copies: list[Any] = []
        self.groups: list[list[Any]] = []
        self.products: list[Any] = []
        self.product_groups: list[list[Any]] = []

    # -- scheduling

    def run(self) -> bool:
        """Go on until every lane waits or has left; whether anything was done."""
        did = False
        kernel = self.batch.kernel
        left = self.batch.patience
        while left:
            left -= 1
            if self.block is not None:
                b, m = self.block, None
            else:
                ready = (self.at >= 0) & ~self.waits
                if not ready.any():
                    return did
                b = int(self.at[ready].min())
                m = ready & (self.at == b)
                if m.all():
                    self.block, m = b, None
            if b < 0:
                return did
            kernel.block(b, m is not None)(self, self.R, m)
            if self.batch.paused:  # it looked at an mbarrier, in vain
                self.batch.paused = False
                return did
            did = True
        return did

    def goto(self, m: Array | None, target: int) -> None:
        """Lanes m go on at a block; -1: they have left."""
        if m is None:
            self.block = target
            if target < 0:
                self.at[:] = -1
        else:
            self.at[m] = target
        if target < 0:
            self.batch.left()

    def branch(self, m: Array | None, p: Any, target: int, following: int) -> None:
        """Where p is true go on at target, elsewhere at the following block."""
        p = np.broadcast_to(p, (self.n,))
        if m is None:
            if p.all():
                self.goto(None, target)
                return
            if not p.any():
                self.block = following
                return
            self.block = None
            self.at = np.where(p, target, following).astype(np.int64)
            if target < 0:
                self.batch.left()
            return
        self.at[m] = np.where(p[m], target, following)
        if target < 0:
            self.batch.left()

    def barrier(self, m: Array | None, number: Any, count: Any, following: int, arrive: bool) -> None:
        """Arrive at a barrier of the CTA, and wait there for `count` threads (None: for all)."""
        if m is None and self.whole and count is None:
            self.batch.epoch += 1
            self.block = following
            return
        if self.block is not None:
            self.at[:] = self.block
            self.block = None
        lanes = np.arange(self.n) if m is None else np.nonzero(m)[0]
        self.at[lanes] = following
        if not arrive:
            self.waits[lanes] = True
        for cta in np.unique(self.cta[lanes]):
            mine = lanes[self.cta[lanes] == cta]
            if len(set(np.broadcast_to(number, (self.n,))[mine].tolist())) > 1:
                raise Unknown("lanes of one warp at unlike barriers")
            key = (int(cta), int(np.broadcast_to(number, (self.n,))[mine[0]]))
            need = None if count is None else int(np.broadcast_to(count, (self.n,))[mine[0]])
            self.batch.arrive(self, key, mine, need, arrive)

    # -- memory

    def address(self, a: Any, m: Array | None) -> tuple[Array, Array | None]:
        a = np.broadcast_to(a, (self.n,))
        if m is not None:
            m = np.broadcast_to(m, (self.n,))
            if m.all():
                m = None
        return a, m

    def load_global(self, a: Any, m: Array | None, size: int, count: int, where: str) -> list[Array] | None:
        """`count` numbers of `size` bytes at each lane's address; None where no lane asks."""
        a, m = self.address(a, m)
        live = a if m is None else a[m]
        if not len(live):
            return None
        low, high = int(live.min()), int(live.max()) + size * count
        if (live & U64(size * count - 1)).any():
            raise Fault(f"misaligned address: {where}")
        start, end, raw = self.batch.memory.find(low, low + size * count, where)
        if high <= end:
            at = ((a - U64(start)) >> U64(size.bit_length() - 1)).astype(np.int64)
            if m is not None:
                at = np.where(m, at, 0)
            data = items(raw, size)
            return [data[at + k] for k in range(count)]
        out = [np.zeros(self.n, items(raw, size).dtype) for _ in range(count)]
        for lane in np.nonzero(np.ones(self.n, bool) if m is None else m)[0]:
            x = int(a[lane])
            start, end, raw = self.batch.memory.find(x, x + size * count, where)
            for k in range(count):
                out[k][lane] = items(raw, size)[(x - start) // size + k]
        return out

    def store_global(self, a: Any, m: Array | None, size: int, values: list[Any], where: str) -> None:
        """Store each lane's numbers; where two lanes meet the later one wins."""
        a, m = self.address(a, m)
        count = len(values)
        live = a if m is None else a[m]
        if not len(live):
            return
        if (live & U64(size * count - 1)).any():
            raise Fault(f"misaligned address: {where}")
        lanes = None if m is None else np.nonzero(m)[0]
        low, high = int(live.min()), int(live.max()) + size * count
        start, end, raw = self.batch.memory.find(low, low + size * count, where)
        values = [np.broadcast_to(x, (self.n,)) for x in values]
        if high <= end:
            at = ((live - U64(start)) >> U64(size.bit_length() - 1)).astype(np.int64)
            data = items(raw, size)
            for k, x in enumerate(values):
                data[at + k] = x if lanes is None else x[lanes]
            return
        for lane in range(self.n) if lanes is None else lanes:
            x = int(a[lane])
            start, end, raw = self.batch.memory.find(x, x + size * count, where)
            for k in range(count):
                items(raw, size)[(x - start) // size + k] = values[k][lane]

    def shared(self, a: Any, m: Array | None, size: int, where: str) -> tuple[Array, Array | None]:
        """Byte offsets in the batch's shared memory of each lane's address."""
        a, m = self.address(a, m)
        a = a.astype(np.int64)
        live = a if m is None else a[m]
        if len(live):
            if int(live.min()) < BASE or int(live.max()) + size > BASE + self.batch.bytes:
                raise Fault(f"no shared memory at {int(live.max()) - BASE}, {self.batch.bytes} bytes: {where}")
            if (live & (size - 1)).any():
                raise Fault(f"misaligned shared address: {where}")
        at = a + self.base
        return (at if m is None else np.where(m, at, 0)), m

    def load_shared(self, a: Any, m: Array | None, size: int, count: int, where: str) -> list[Array]:
        at, m = self.shared(a, m, size * count, where)
        if self.batch.races:
            warp = self.tid // WARP
            self.batch.read(at if m is None else at[m], size * count, warp if m is None else warp[m], where)
        data = items(self.batch.smem, size)
        at = at // size
        return [data[at + k] for k in range(count)]

    def store_shared(self, a: Any, m: Array | None, size: int, values: list[Any], where: str) -> None:
        at, m = self.shared(a, m, size * len(values), where)
        rows = np.stack([np.broadcast_to(x, (self.n,)) for x in values], 1)
        tid = self.tid
        if m is not None:
            at, rows, tid = at[m], rows[m], tid[m]
        self.batch.write(at, rows, tid // WARP, where)

    # -- copies to shared memory

    def cp_async(self, d: Any, a: Any, m: Array | None, size: int, take: Any, where: str) -> None:
        """Copy `size` bytes a lane, of which `take` come from memory and the others are zeros."""
        at, m = self.shared(d, m, size, where)
        take = np.broadcast_to(np.int64(size) if take is None else np.asarray(take).astype(np.int64), (self.n,))
        part = (take != 0) & (take != size)
        if (part if m is None else part & m).any():
            raise Unknown(f"a copy of a part ({sorted(set(take.tolist()))}): {where}")
        want = take > 0 if m is None else m & (take > 0)
        words = self.load_global(a, want, 4, size // 4, where) if size == 4 else self.load_words(a, want, size, where)
        rows = np.zeros((self.n, size // 4), U32)
        if words is not None:
            rows = np.where(want[:, None], np.stack(words, 1), U32(0))
        tid = self.tid
        if m is not None:
            at, rows, tid = at[m], rows[m], tid[m]
        copy = (at, rows, tid // WARP, where)
        if self.batch.order is not None and len(at):  # it may land from now on
            cells = (at // 2)[:, None] + np.arange(size // 2)
            self.batch.order.write(int(tid[0]) // WARP, cells.ravel(), where)
        if self.batch.late:
            self.copies.append(copy)
        else:
            self.land(copy)

    def load_words(self, a: Any, m: Array, size: int, where: str) -> list[Array] | None:
        return self.load_global(a, m, 4, size // 4, where)

    def land(self, copy: tuple[Array, Array, Array, str]) -> None:
        self.batch.write(*copy)

    def commit(self) -> None:
        self.groups.append(self.copies)
        self.copies = []

    def wait_copies(self, keep: int) -> None:
        """Land all groups but the last `keep`."""
        while len(self.groups) > keep:
            for copy in self.groups.pop(0):
                self.land(copy)

    def wait_all(self) -> None:
        self.commit()
        self.wait_copies(0)

    # -- mbarriers

    def spots(self, a: Any, m: Array | None) -> list[tuple[int, int]]:
        """(CTA, address) of each lane that asks."""
        a, m = self.address(a, m)
        lanes = range(self.n) if m is None else np.nonzero(m)[0]
        return [(int(self.cta[k]), int(a[k])) for k in lanes]

    def init_arrivals(self, a: Any, m: Array | None, count: Any) -> None:
        count = np.broadcast_to(count, (self.n,))
        for k, spot in enumerate(self.spots(a, m)):
            self.batch.arrivals[spot] = [int(count[k]), int(count[k]), 0, 0, 0]

    def arrive_at(self, a: Any, m: Array | None, where: str) -> None:
        for spot in self.spots(a, m):
            if spot not in self.batch.arrivals:
                raise Fault(f"no mbarrier at {spot[1] - BASE}: {where}")
            state = self.batch.arrivals[spot]
            if self.batch.order is not None:
                state[3] = np.maximum(state[3], self.batch.order.leave(int(self.tid[0]) // WARP))
            state[1] -= 1
            if state[1] == 0:
                state[1] = state[0]
                state[2] += 1
                state[4] = state[3]  # what the phases that are over tell

    def try_wait(self, a: Any, m: Array | None, parity: Any, where: str) -> Array:
        """Whether the phase of this parity is over."""
        a, parity = np.broadcast_to(a, (self.n,)), np.broadcast_to(parity, (self.n,))
        done = np.ones(self.n, bool)
        for k in range(self.n) if m is None else np.nonzero(m)[0]:
            spot = (int(self.cta[k]), int(a[k]))
            if spot not in self.batch.arrivals:
                raise Fault(f"no mbarrier at {spot[1] - BASE}: {where}")
            state = self.batch.arrivals[spot]
            done[k] = state[2] % 2 != int(parity[k]) % 2
            if done[k] and self.batch.order is not None and state[2]:
                self.batch.order.learn(int(self.tid[0]) // WARP, state[4])
        self.batch.paused = not done.all()
        return done

    def turn_matrix(self, x: Any) -> Array:
        """movmatrix of 8 x 8 numbers of 16 bits."""
        rows = np.ascontiguousarray(self.warps(x)).view(U16).reshape(-1, 8, 8).swapaxes(1, 2)
        return np.ascontiguousarray(rows).view(U32).ravel()

    def show(self, m: Array | None) -> None:
        """fence.proxy.async: what this unit's warps wrote may be read by products."""
        if self.batch.unseen is not None:
            for warp in np.unique(self.tid // WARP):
                self.batch.unseen[self.batch.unseen == warp + 1] = 0

    # -- between the lanes of a warp

    def warps(self, x: Any) -> Array:
        return np.broadcast_to(x, (self.n,)).reshape(-1, WARP)

    def shuffle(self, mode: str, x: Any, b: Any, c: Any) -> tuple[Array, Array]:
        """shfl.sync: each lane's value of another lane, and whether that one was inside the segment."""
        x = self.warps(x)
        lane = np.broadcast_to(np.arange(WARP), x.shape)
        b = self.warps(b).astype(np.int64) & 31
        c = self.warps(c).astype(np.int64)
        segment, clamp = (c >> 8) & 31, c & 31
        top = (lane & segment) | (clamp & ~segment)
        if mode == "bfly":
            j = lane ^ b
            inside = j <= top
        elif mode == "up":
            j = lane - b
            inside = j >= top
        elif mode == "down":
            j = lane + b
            inside = j <= top
        else:
            j = (lane & segment) | (b & ~segment)
            inside = j <= top
        j = np.where(inside, j, lane)
        return np.take_along_axis(x, j, 1).ravel(), inside.ravel()

    def redux(self, kind: str, x: Any, signed: bool) -> Array:
        x = self.warps(x)
        x = x.view(np.int32) if signed else x
        f = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}[kind]
        return np.repeat(f.reduce(x, 1).astype(x.dtype).view(U32), WARP)

    def ballot(self, p: Any, m: Array | None) -> Array:
        p = np.broadcast_to(p, (self.n,)) if m is None else np.broadcast_to(p, (self.n,)) & m
        bits = (p.reshape(-1, WARP).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1)
        return np.repeat(bits.astype(U32), WARP)

    def load_matrix(self, a: Any, m: Array | None, count: int, turned: bool, where: str) -> list[Array]:
        """ldmatrix of 8 x 8 matrices of 16-bit numbers; m by whole warps."""
        address, live = self.matrix_rows(a, m, count, where)
        at = address[:, : 8 * count].reshape(-1, count, 8)
        if self.batch.races:
            warp = np.repeat(self.tid.reshape(-1, WARP)[:, 0] // WARP, 8 * count)
            used = np.repeat(live, 8 * count)
            self.batch.read(at.ravel()[used], 16, warp[used], where)
        data = items(self.batch.smem, 2)
        rows = data[at[..., None] // 2 + np.arange(8)]  # [warps, count, 8, 8]
        if turned:
            rows = rows.swapaxes(2, 3)
        pairs = np.ascontiguousarray(rows).view(U32).reshape(-1, count, WARP)
        return [np.ascontiguousarray(pairs[:, k]).ravel() for k in range(count)]

    def store_matrix(self, a: Any, m: Array | None, values: list[Any], turned: bool, where: str) -> None:
        count = len(values)
        address, live = self.matrix_rows(a, m, count, where)
        at = address[:, : 8 * count].reshape(-1, count, 8)
        pairs = np.stack([self.warps(x) for x in values], 1).reshape(-1, count, 8, 4)
        rows = np.ascontiguousarray(pairs).view(U16).reshape(-1, count, 8, 8)
        if turned:
            rows = rows.swapaxes(2, 3)
        at, rows = at[live].reshape(-1), np.ascontiguousarray(rows[live]).reshape(-1, 8)
        warp = self.tid.reshape(-1, WARP)[:, 0] // WARP
        self.batch.write(at, rows, np.repeat(warp[live], 8 * count), where)

    def matrix_rows(self, a: Any, m: Array | None, count: int, where: str) -> tuple[Array, Array]:
        """The byte offset of each lane's row, and which warps take part."""
        used = np.tile(np.arange(WARP) < 8 * count, self.n // WARP)
        live = np.ones(self.n // WARP, bool) if m is None else self.warps(m).all(1)
        if m is not None:
            used = used & np.repeat(live, WARP)
        at, _ = self.shared(a, used, 16, where)
        return at.reshape(-1, WARP), live

    # -- products

    def mma(self, kind: str, a: list[Any], b: list[Any], c: list[Any]) -> list[Array]:
        """mma.sync m16n8k16 of 16-bit numbers, m16n8k8 of tf32."""
        A = fragment_A([self.warps(x) for x in a], kind)
        B = fragment_B([self.warps(x) for x in b], kind)
        C = fragment_C([self.warps(x).view(np.float32) for x in c])
        return [x.ravel().view(U32) for x in split_C(product(A, B) + C)]

    def wgmma(self, kind: str, n: int, k: int, d: list[Any], a: Any, b: Any, keep: Any, signs: tuple[int, int],
              turned: tuple[bool, bool], out: list[int], m: Array | None, where: str) -> None:  # fmt: skip
        """wgmma of one k step; d: old accumulators, out: their registers."""
        first = 0 if m is None else int(np.argmax(self.warps(m)[:, 0]))

        def descriptor(x: Any) -> Array:
            """One a warp; warps that take no part get another's."""
            x = self.warps(x)[:, 0]
            return x.copy() if m is None else np.where(self.warps(m)[:, 0], x, x[first])

        a = [self.warps(x).copy() for x in a] if isinstance(a, list) else descriptor(a)
        b = descriptor(b)
        keep = self.warps(keep)[:, 0].copy()
        job = (kind, n, k, a, b, keep, signs, turned, out, m, where)
        if self.batch.late:
            self.products.append(job)
        else:
            self.multiply(job)

    def multiply(self, job: Any) -> None:
        kind, n, k, a, b, keep, signs, turned, out, m, where = job
        self.batch.count_products += 1
        if isinstance(a, list):
            A = fragment_A(a, kind)
        else:
            rows = 16 * (self.tid.reshape(-1, WARP)[:, 0] // WARP % 4)
            A = self.matrix(a, rows, 16, k, kind, turned[0], m, where)
        B = self.matrix(b, np.zeros(len(b), np.int64), n, k, kind, turned[1], m, where).swapaxes(1, 2)
        D = product(A, B) * np.float32(signs[0] * signs[1])
        old = fragment_C([self.warps(self.R[x]).view(np.float32) for x in out])
        new = split_C(np.where(keep[:, None, None], old, 0) + D)
        for x, y in zip(out, new, strict=True):
            y = y.ravel().view(U32)
            self.R[x] = y if m is None else np.where(m, y, self.R[x])

    def commit_products(self) -> None:
        self.product_groups.append(self.products)
        self.products = []

    def wait_products(self, keep: int) -> None:
        while len(self.product_groups) > keep:
            for job in self.product_groups.pop(0):
                self.multiply(job)

    def matrix(
        self, desc: Array, first: Array, rows: int, k: int, kind: str, turned: bool, m: Array | None, where: str
    ) -> Array:  # fmt: skip
        """[warps, rows, k] numbers of a shared-memory operand, from each warp's descriptor."""
        desc = desc.astype(np.int64)
        start, lead, stride = (desc & 0x3FFF) << 4, ((desc >> 16) & 0x3FFF) << 4, ((desc >> 32) & 0x3FFF) << 4
        swizzle = (desc >> 62) & 3
        if len(set(swizzle.tolist())) > 1:
            raise Unknown("warps with unlike descriptors")
        swizzle = int(swizzle[0])
        size = 4 if kind == "tf32" else 2
        T = 16 // size
        width = {0: 1, 1: 8, 2: 4, 3: 2}[swizzle]  # of a row of the pattern, in 16 bytes
        i = first[:, None, None] + np.arange(rows)[None, :, None]
        j = np.arange(k)[None, None, :]
        lead, stride = lead[:, None, None], stride[:, None, None]
        if not turned:
            at = (i % 8) * 16 * width + i // 8 * stride + j % T * size
            at = at + j // T * (lead if swizzle == 0 else 16)
        else:
            at = i % T * size + (j % 8) * 16 * width
            if swizzle == 0:
                at = at + i // T * stride + j // 8 * lead
            else:
                at = at + i // T % width * 16 + i // (T * width) * lead + j // 8 * stride
        at = at + start[:, None, None]
        at = at ^ (((at >> 7) & (width - 1)) << 4)
        low, high = int(at.min()), int(at.max()) + size
        if low < BASE or high > BASE + self.batch.bytes:
            raise Fault(f"a matrix outside shared memory ({low}..{high} of {self.batch.bytes}): {where}")
        at = at + self.base.reshape(-1, WARP)[:, 0][:, None, None]
        if self.batch.unseen is not None:
            live = slice(None) if m is None else self.warps(m)[:, 0]
            if self.batch.unseen[at[live] // 2].any():
                raise Fault(f"a product reads what was stored without fence.proxy.async: {where}")
        if self.batch.races:
            live = slice(None) if m is None else self.warps(m)[:, 0]
            warp = np.broadcast_to((self.tid.reshape(-1, WARP)[:, 0] // WARP)[:, None, None], at.shape)
            self.batch.read(at[live].ravel(), size, warp[live].ravel(), where)
        return numbers(items(self.batch.smem, size)[at // size], kind)


def numbers(x: Array, kind: str) -> Array:
    """Bits as fp32 numbers."""
    if kind == "bf16":
        return (x.astype(U32) << U32(16)).view(np.float32)
    if kind == "f16":
        return x.view(np.float16).astype(np.float32)
    return (x & U32(0xFFFFE000)).view(np.float32)


def product(A: Array, B: Array) -> Array:
    return np.matmul(A, B)


def fragment_A(a: list[Array], kind: str) -> Array:
    """[warps, 16, K] from four registers: rows g and g + 8, K in two halves."""
    W = a[0].shape[0]
    if kind == "tf32":
        parts = [numbers(x, kind).reshape(W, 8, 4) for x in a]
    else:
        parts = [numbers(np.ascontiguousarray(x).view(U16), kind).reshape(W, 8, 8) for x in a]
    top, low = np.concatenate(parts[0::2], 2), np.concatenate(parts[1::2], 2)
    return np.concatenate([top, low], 1)


def fragment_B(b: list[Array], kind: str) -> Array:
    """[warps, K, 8] from two registers."""
    W = b[0].shape[0]
    if kind == "tf32":
        parts = [numbers(x, kind).reshape(W, 8, 4) for x in b]
    else:
        parts = [numbers(np.ascontiguousarray(x).view(U16), kind).reshape(W, 8, 8) for x in b]
    return np.concatenate(parts, 2).swapaxes(1, 2)


def fragment_C(c: list[Array]) -> Array:
    """[warps, 16, 2 len(c)] fp32: pairs of columns, rows g and g + 8 in turn."""
    W, n = c[0].shape[0], len(c) // 4
    x = np.stack(c, 1).reshape(W, n, 2, 2, 8, 4)  # n8, half of rows, column of pair, g, t
    return np.ascontiguousarray(x.transpose(0, 2, 4, 1, 5, 3)).reshape(W, 16, 8 * n)


def split_C(C: Array) -> list[Array]:
    """The registers of an accumulator, the inverse of `fragment_C`."""
    W, n = C.shape[0], C.shape[2] // 8
    x = C.astype(np.float32).reshape(W, 2, 8, n, 4, 2).transpose(0, 3, 1, 5, 2, 4).reshape(W, 4 * n, WARP)
    return [np.ascontiguousarray(x[:, k]) for k in range(4 * n)]


class Order:
    """What happens before what between the warps of a CTA, by vector clocks; shared memory in cells of two bytes."""

    def __init__(self, warps: int, cells: int) -> None:
        self.clock = np.zeros((warps, warps), np.int64)
        np.fill_diagonal(self.clock, 1)
        self.wrote = np.zeros((2, cells), np.int64)  # clock, warp
        self.seen = np.zeros((warps, cells), np.int64)  # clock

    def write(self, warp: int, cells: Array, where: str) -> None:
        """A fault where another warp's access to a cell is not known to be over."""
        self.after_writes(warp, cells, where)
        late = self.seen[:, cells] > self.clock[warp][:, None]
        late[warp] = False
        if late.any():
            raise Fault(f"warp {warp} writes what warp {int(np.argmax(late.any(1)))} may still read: {where}")
        self.wrote[0][cells] = self.clock[warp, warp]
        self.wrote[1][cells] = warp

    def read(self, warp: int, cells: Array, where: str) -> None:
        self.after_writes(warp, cells, where)
        self.seen[warp][cells] = self.clock[warp, warp]

    def after_writes(self, warp: int, cells: Array, where: str) -> None:
        when, who = self.wrote[0][cells], self.wrote[1][cells]
        late = (when > self.clock[warp][who]) & (who != warp)
        if late.any():
            raise Fault(f"warp {warp} does not wait for warp {int(who[np.argmax(late)])}, which writes this: {where}")

    def leave(self, warp: int) -> Array:
        """What others learn from this warp now."""
        known = self.clock[warp].copy()
        self.clock[warp, warp] += 1
        return known

    def learn(self, warp: int, known: Array) -> None:
        np.maximum(self.clock[warp], known, out=self.clock[warp])


class Batch:
    """CTAs that run together, with their shared memory."""

    def __init__(self, kernel: Kernel, memory: Memory, ctas: Array, shared: int, late: bool, races: bool) -> None:
        self.kernel, self.memory, self.late, self.races = kernel, memory, late, races
        self.bytes = max(16, -(-shared // 16) * 16)
        self.ctas = ctas  # [C, 3]
        self.smem = np.full(len(ctas) * self.bytes, 0xFF, U8)
        self.epoch = np.ones(len(ctas), np.int32)
        self.barriers: dict[tuple[int, int], list[Any]] = {}
        self.units: list[Unit] = []
        self.paused = False
        self.patience = 1 << 60  # blocks that a unit runs before another's turn
        self.arrivals: dict[tuple[int, int], list[Any]] = {}  # mbarrier -> count, still expected, phase, two clocks
        self.unseen = np.zeros(len(self.smem) // 2, np.int16) if late else None
        self.count_products = 0
        self.order: Order | None = None  # where warps go their own ways and races are looked for
        if races:
            cells = len(self.smem) // 2
            self.wrote = np.zeros((2, cells), np.int32)  # epoch, warp
            self.seen = np.zeros((2, cells), np.int32)  # epoch, warp (-1: several)

    def write(self, at: Array, rows: Array, warp: Array, where: str) -> None:
        """Store rows of numbers at byte offsets; a fault where warps meet, unless it leaves the bytes as they are."""
        size = rows.dtype.itemsize
        data = items(self.smem, size)
        cells = (at // size)[:, None] + np.arange(rows.shape[1])
        if self.unseen is not None:
            self.unseen[((cells * size)[..., None] + np.arange(0, size, 2)) // 2] = warp[:, None, None] + 1
        if not self.races:
            data[cells] = rows
            return
        changed = data[cells] != rows
        data[cells] = rows
        if self.order is not None:
            parts = np.arange(0, size, 2)
            touched = ((cells * size)[..., None] + parts)[changed].ravel() // 2
            self.order.write(int(warp[0]) if len(warp) else 0, touched, where)
            return
        if (data[cells] != rows).any():
            raise Fault(f"two lanes write one place of shared memory: {where}")
        parts = max(1, size // 2)
        halves = ((cells * size)[..., None] // 2 + np.arange(parts)).reshape(len(at), -1)
        changed = np.repeat(changed, parts, 1)
        warp = np.broadcast_to(warp[:, None], halves.shape)
        epoch = self.epoch[halves * 2 // self.bytes]
        for table in (self.wrote, self.seen):
            if (changed & (table[0][halves] == epoch) & (table[1][halves] != warp)).any():
                raise Fault(f"two warps meet in shared memory, no barrier between: {where}")
        self.wrote[0][halves[changed]] = epoch[changed]
        self.wrote[1][halves[changed]] = warp[changed]

    def read(self, at: Array, size: int, warp: Array, where: str) -> None:
        """Note loads of `size` bytes at byte offsets; a fault where another warp wrote them since the last barrier."""
        cells = (at // 2)[:, None] + np.arange(max(1, size // 2))
        if self.order is not None:
            if len(warp):
                self.order.read(int(warp[0]), cells.ravel(), where)
            return
        warp = np.broadcast_to(warp[:, None], cells.shape)
        epoch = self.epoch[cells * 2 // self.bytes]
        if ((self.wrote[0][cells] == epoch) & (self.wrote[1][cells] != warp)).any():
            raise Fault(f"two warps meet in shared memory, no barrier between: {where}")
        several = (self.seen[0][cells] == epoch) & (self.seen[1][cells] != warp)
        self.seen[0][cells] = epoch
        self.seen[1][cells] = np.where(several, -1, warp)
        self.seen[1][cells[self.seen[1][cells] != warp]] = -1

    def arrive(self, unit: Unit, key: tuple[int, int], lanes: Array, need: int | None, arrive: bool) -> None:
        """Count threads at barrier key (CTA, number); let them go when all are there."""
        held = self.barriers.setdefault(key, [0, [], None, 0])
        held[0] += len(lanes)
        held[2] = need
        if self.order is not None:
            held[3] = np.maximum(held[3], self.order.leave(int(unit.tid[0]) // WARP))
        if not arrive:
            held[1].append((unit, lanes))
        self.settle(key)

    def settle(self, key: tuple[int, int]) -> None:
        count, waiting, need, known = self.barriers[key]
        if need is None:
            need = sum(int(((u.cta == key[0]) & (u.at >= 0)).sum()) for u in self.units)
        if count < need:
            return
        del self.barriers[key]
        for unit, lanes in waiting:
            unit.waits[lanes] = False
            if self.order is not None:
                self.order.learn(int(unit.tid[0]) // WARP, known)
        self.epoch[key[0]] += 1

    def left(self) -> None:
        """Threads have ended: a barrier of all threads waits for the others only."""
        for key in list(self.barriers):
            self.settle(key)


class Kernel:
    """A PTX entry function, ready to run."""

    def __init__(self, text: str, entry: str | None = None) -> None:
        from tests.ptx.translate import Translator

        self.program = parse(text, entry)
        self.names = list(self.program.registers)
        self.kinds = [self.program.registers[x] for x in self.names]
        self.translator = Translator(self.program)
        self.compiled: dict[tuple[int, bool], Any] = {}

    def block(self, index: int, masked: bool) -> Any:
        """The Python function of a block, for all lanes or for some."""
        key = (index, masked)
        if key not in self.compiled:
            self.compiled[key] = self.translator.function(index, masked)
        return self.compiled[key]

    def run(
        self, grid: tuple[int, ...], threads: int, args: list[int | bytes], memory: Memory, *, shared: int = 0,
        late: bool = True, races: bool = False, only: list[int] | None = None, warps: int | None = None,
    ) -> int:  # fmt: skip
        """Run every CTA of a grid; args: an integer (its low bytes) or bytes for each parameter. Number of products.

        warps: a seed; then each warp goes its own way, in an order drawn from the seed, and may use mbarriers.
        """
        size = (*grid, 1, 1)[:3]
        offsets = self.program.offsets
        params = b""
        for (name, width, _), value in zip(self.program.params, args, strict=True):
            params = params.ljust(offsets[name], b"\0")
            params += value if isinstance(value, bytes) else (int(value) % (1 << 8 * width)).to_bytes(width, "little")
        self.params = params
        self.grid, self.threads = size, threads
        total = size[0] * size[1] * size[2]
        every = np.arange(total) if only is None else np.asarray(only)
        step = 1 if warps is not None else max(1, LANES // threads)
        draw = None if warps is None else np.random.default_rng(warps)
        done = 0
        shared = max(shared, self.program.static_shared)
        with np.errstate(all="ignore"):
            for first in range(0, len(every), step):
                flat = every[first : first + step]
                ctas = np.stack([flat % size[0], flat // size[0] % size[1], flat // (size[0] * size[1])], 1)
                batch = Batch(self, memory, ctas, shared, late, races)
                cta, tid = (x.ravel() for x in np.divmod(np.arange(len(flat) * threads), threads))
                if warps is None:
                    batch.units = [Unit(batch, cta, tid, True)]
                else:
                    batch.units = [Unit(batch, c, t, False) for c, t in zip(by_warp(cta), by_warp(tid), strict=True)]
                    if races:
                        batch.order = Order(threads // WARP, len(batch.smem) // 2)
                self.play(batch, draw)
                done += batch.count_products
        return done

    def play(self, batch: Batch, draw: Any) -> None:
        """Run all units to their end."""
        alive = list(batch.units)
        while alive:
            did = False
            if draw is not None:
                draw.shuffle(alive)
                batch.patience = int(draw.integers(1, 40))
            for unit in alive:
                did |= unit.run()
            alive = [u for u in alive if (u.at >= 0).any()]
            if alive and not did:
                raise Fault(f"{self.program.name}: every thread waits")


def by_warp(x: Array) -> Array:
    return x.reshape(-1, WARP)


KINDS_ZERO = {
    "pred": np.bool_(False), "b8": U8(0), "b16": U16(0x7FC1), "b32": U32(0x7FC0DEAD), "b64": U64(0x7FC0DEAD7FC0DEAD),
    "f32": U32(0x7FC0DEAD), "f64": U64(0), "u16": U16(0), "u32": U32(0), "u64": U64(0), "s16": U16(0), "s32": U32(0),
    "s64": U64(0), "f16": U16(0),
}  # fmt: skip
