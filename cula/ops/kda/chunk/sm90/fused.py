"""fused (CuTe DSL, SM90): a whole KDA forward in one launch, K = V = 128, bf16, bounded gate, normalized q and k.

One CTA per sequence, value head and 64 or 128 rows of V. Two producer warpgroups prepare 32 tokens at a time, by turns,
as two chunks of 16; one consumer warpgroup per 64 rows of V walks the transposed state through them, in registers.

With l the running sum of the base-2 gate inside a chunk, c = 2^57, and q and k normalized, a stage holds

    qg = scale q 2^l c    kb = k 2^l c    ck = k 2^-l / c    v    total = 2^(l of the last row)    beta
    Aqk[i, j] = qg_i . ck_j for j <= i    M = P (I + beta P)^-1 with P[i, j] = kb_i . ck_j for j < i

and the consumers do, with the state S kept divided by c,

    x = v - kb S    e = x - M (beta x)    o = qg S + Aqk (beta e)    S <- total (S + ck^T (beta e))

c centres the factors, which lie between 2^-116 and 2^116 for a gate of at most 5 a token, in the range of bf16.

| barrier | who arrives | arrivals | who waits |
|---|---|---|---|
| full[stage] | the producer warpgroup of that stage, every thread | 128 | all consumers |
| empty[stage] | one lane of each consumer warp | 4 a consumer warpgroup | the producers that fill it next |
| named 1, 2 | a producer warpgroup, for itself | 128 | itself |
"""

from __future__ import annotations

import inspect
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from cula.ops.common import ptx
from cula.ops.kda.chunk.sm90.options import GROUP, PRODUCERS, REGISTERS, ROWS, TILE, Options

LOG2E = 1.4426950408889634
#: log2 of c.
SHIFT = 57.0
EPS = 1e-6
#: A raw gate whose sigmoid is 0 for any A_log and bias.
CLOSED = -1e30
CHUNK = 16


class Fused:
    """The kernel of one set of options."""

    def __init__(self, options: Options) -> None:
        self.o = options
        self.stage = -(-options.stage_bytes // 1024) * 1024
        self.ck_at = 2 * TILE
        self.v_at = 3 * TILE
        self.g_at = 4 * TILE if options.wide_gate else 2 * TILE
        self.Aqk_at = 4 * TILE + (2 * TILE if options.wide_gate else 0)
        self.M_at = self.Aqk_at + 1024
        self.total_at = self.M_at + 1024
        self.beta_at = self.total_at + 1024
        self.norms_at = self.beta_at + 4 * ROWS
        self.turn_at = options.stages * self.stage  # of consumers: 512 bytes a warp
        self.full_at = self.turn_at + 512 * 4 * options.consumers
        self.empty_at = self.full_at + 8 * options.stages
        self.bytes = self.empty_at + 8 * options.stages

    @cute.jit
    def __call__(
        self, q: Int64, k: Int64, v: Int64, g: Int64, beta: Int64, A_log: Int64, dt_bias: Int64, cu: Int64,
        state_in: Int64, o: Int64, state_out: Int64,
        sqb: Int64, sqt: Int64, sqh: Int64, skb: Int64, skt: Int64, skh: Int64, svb: Int64, svt: Int64, svh: Int64,
        sgb: Int64, sgt: Int64, sgh: Int64, sbb: Int64, sbt: Int64, sbh: Int64, sob: Int64, sot: Int64, soh: Int64,
        sin: Int64, sih: Int64, siv: Int64, sik: Int64, sun: Int64, suh: Int64, suv: Int64, suk: Int64,
        read: Int64, srn: Int64, write: Int64, swn: Int64, flag: Int64, sfn: Int64, scn: Int64,
        checkpoints: Int64, scc: Int64, sch: Int64, scv: Int64, sck: Int64, offsets: Int64, son: Int64,
        slots_in: Int32, slots_out: Int32, null_index: Int32, checkpoint_rows: Int32, checkpoint_every: Int32,
        T: Int32, HV: Int32, G: Int32, N: Int32, scale: Float32, lower_bound: Float32, stream: Any,
    ) -> None:  # fmt: skip
        """Launch it. Addresses; strides in elements; G: value heads of a head."""
        self.kernel(
            q, k, v, g, beta, A_log, dt_bias, cu, state_in, o, state_out,
            sqb, sqt, sqh, skb, skt, skh, svb, svt, svh, sgb, sgt, sgh, sbb, sbt, sbh, sob, sot, soh,
            sin, sih, siv, sik, sun, suh, suv, suk, read, srn, write, swn, flag, sfn, scn,
            checkpoints, scc, sch, scv, sck, offsets, son, slots_in, slots_out, null_index, checkpoint_rows,
            checkpoint_every, T, HV, G, N, scale, lower_bound,
        ).launch(
            grid=[HV * (2 // self.o.consumers), N, 1], block=[self.o.threads, 1, 1], stream=stream,
            smem=self.bytes + 1024, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: Int64, k: Int64, v: Int64, g: Int64, beta: Int64, A_log: Int64, dt_bias: Int64, cu: Int64,
        state_in: Int64, o: Int64, state_out: Int64,
        sqb: Int64, sqt: Int64, sqh: Int64, skb: Int64, skt: Int64, skh: Int64, svb: Int64, svt: Int64, svh: Int64,
        sgb: Int64, sgt: Int64, sgh: Int64, sbb: Int64, sbt: Int64, sbh: Int64, sob: Int64, sot: Int64, soh: Int64,
        sin: Int64, sih: Int64, siv: Int64, sik: Int64, sun: Int64, suh: Int64, suv: Int64, suk: Int64,
        read: Int64, srn: Int64, write: Int64, swn: Int64, flag: Int64, sfn: Int64, scn: Int64,
        checkpoints: Int64, scc: Int64, sch: Int64, scv: Int64, sck: Int64, offsets: Int64, son: Int64,
        slots_in: Int32, slots_out: Int32, null_index: Int32, checkpoint_rows: Int32, checkpoint_every: Int32,
        T: Int32, HV: Int32, G: Int32, N: Int32, scale: Float32, lower_bound: Float32,
    ) -> None:  # fmt: skip
        """See the module."""
        tid, _, _ = cute.arch.thread_idx()
        block, n, _ = cute.arch.block_idx()
        smem = SmemAllocator().allocate(self.bytes, 1024).toint()
        smem = Int32(smem)
        hv = block
        first_v = Int32(0)
        if cutlass.const_expr(self.o.consumers == 1):
            hv = block >> 1
            first_v = (block & 1) * 64
        batch, first, length = Int64(n), Int64(0), T
        if cutlass.const_expr(self.o.packed > 0):
            here = cu + Int64(n) * scn * self.o.packed
            begin = Int32(ptx.load_global(here, "b32"))
            end = Int32(ptx.load_global(here + scn * self.o.packed, "b32"))
            batch, first, length = Int64(0), Int64(begin), end - begin
        if tid < self.o.stages:
            ptx.init_arrivals(smem + self.full_at + tid * 8, GROUP)
            ptx.init_arrivals(smem + self.empty_at + tid * 8, 4 * self.o.consumers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        steps = (length + (ROWS - 1)) // ROWS
        group = cute.arch.make_warp_uniform(tid // GROUP)
        h = hv // G
        if group < PRODUCERS:
            cute.arch.setmaxregister_decrease(REGISTERS[self.o.consumers][0])
            inputs = (
                q + 2 * (batch * sqb + first * sqt + Int64(h) * sqh),
                k + 2 * (batch * skb + first * skt + Int64(h) * skh),
                v + 2 * (batch * svb + first * svt + Int64(hv) * svh),
                g + (4 if self.o.wide_gate else 2) * (batch * sgb + first * sgt + Int64(hv) * sgh),
                beta + (4 if self.o.wide_beta else 2) * (batch * sbb + first * sbt + Int64(hv) * sbh),
            )
            self.produce(
                smem, tid & (GROUP - 1), group, steps, length, inputs,
                (2 * sqt, 2 * skt, 2 * svt, (4 if self.o.wide_gate else 2) * sgt, sbt),
                A_log + 4 * Int64(hv), dt_bias + 512 * Int64(hv), scale, lower_bound,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(REGISTERS[self.o.consumers][1])
            vv = first_v + (group - PRODUCERS) * 64
            slot_in, slot_out = Int64(n), Int64(n)
            if cutlass.const_expr(self.o.index_in > 0):
                slot_in = self.slot(read + self.o.index_in * Int64(n) * srn, slots_in, null_index, self.o.index_in)
            if cutlass.const_expr(self.o.flagged):
                slot_in = slot_in if ptx.load_global(flag + Int64(n) * sfn, "u8") != 0 else Int64(-1)
            if cutlass.const_expr(self.o.index_out > 0):
                slot_out = self.slot(write + self.o.index_out * Int64(n) * swn, slots_out, null_index, self.o.index_out)
            size_in, size_out = 4 if self.o.state_in == "fp32" else 2, 4 if self.o.state_out == "fp32" else 2
            rest = Int32(0)  # rows after the last boundary, which the last sequence's CTAs make zeros
            if cutlass.const_expr(self.o.packed > 0):
                rest = T - Int32(first) if n == N - 1 else Int32(0)
            mark, marks = Int64(0), Int64(0)  # rows of this sequence's checkpoints
            if cutlass.const_expr(self.o.checkpoints != ""):
                own = offsets + self.o.offset * Int64(n) * son
                mark = Int64(Int32(ptx.load_global(own, "b32")))
                marks = Int64(Int32(ptx.load_global(own + self.o.offset * son, "b32")))
                marks = marks if marks < Int64(checkpoint_rows) else Int64(checkpoint_rows)
            size_mark = 4 if self.o.checkpoints == "fp32" else 2
            kept = (checkpoints + size_mark * Int64(hv) * sch, size_mark * scc, scv, sck, marks, checkpoint_every)
            self.consume(
                smem, tid & (GROUP - 1), group - PRODUCERS, steps, length, rest, vv, mark, kept,
                state_in + size_in * (slot_in * sin + Int64(hv) * sih), siv, sik, slot_in,
                state_out + size_out * (slot_out * sun + Int64(hv) * suh), suv, suk, slot_out,
                o + 2 * (batch * sob + first * sot + Int64(hv) * soh), 2 * sot,
            )  # fmt: skip

    @cute.jit
    def slot(self, at: Int64, slots: Int32, null_index: Int32, width: cutlass.Constexpr) -> Int64:
        """The slot whose index stands there, -1 where it is null or out of range."""
        found = Int64(0)
        if cutlass.const_expr(width == 8):
            found = ptx.load_global(at, "b64")
        else:
            found = Int64(Int32(ptx.load_global(at, "b32")))
        fits = (found >= 0) & (found < Int64(slots)) & (found != Int64(null_index))
        return found if fits else Int64(-1)

    # ------------------------------------------------------------------------------------------------- producers

    @cute.jit
    def load(self, at: Int32, t: Int32, rows: Int32, q: Int64, k: Int64, v: Int64, g: Int64, strides: Any) -> None:
        """Start the copies of a step's q, k, v and g from this thread's row on; rows from the rows-th on are zeros."""
        sq, sk, sv, sg = strides
        octet, first = t & 15, t >> 4
        for part in cutlass.range_constexpr(4):
            row = first + 8 * part
            take = Int32(16) if row < rows else Int32(0)
            to = at + ptx.tile_at(first, octet, ROWS) + 8 * part * ptx.ROW  # the swizzle repeats every 8 rows
            ptx.copy_16(to, q, take)
            ptx.copy_16(to + TILE, k, take)
            ptx.copy_16(to + self.v_at, v, take)
            if cutlass.const_expr(self.o.wide_gate):
                for half in cutlass.range_constexpr(2):
                    ptx.copy_16(at + self.g_at + half * TILE + row * 256 + octet * 16, g + half * 256, take)
            else:
                ptx.copy_16(to + self.g_at, g, take)
            q, k, v, g = q + sq, k + sk, v + sv, g + sg

    @cute.jit
    def produce(
        self, smem: Int32, t: Int32, group: Int32, steps: Int32, length: Int32, inputs: Any, strides: Any,
        A_log: Int64, dt_bias: Int64, scale: Float32, lower_bound: Float32,
    ) -> None:  # fmt: skip
        """A producer warpgroup: steps group, group + 2, ..."""
        p = t & 63  # channels 2 p, 2 p + 1
        a = Float32(LOG2E)
        if cutlass.const_expr(self.o.has_A):
            a = LOG2E * ptx.exp2(LOG2E * ptx.load_global(A_log, "f32"))
        bias = [Float32(0.0), Float32(0.0)]
        if cutlass.const_expr(self.o.has_bias):
            bias = [-a * ptx.load_global(dt_bias + Int64(p) * 8 + 4 * c, "f32") for c in range(2)]
        bound = lower_bound * LOG2E
        row = Int64(group * ROWS + (t >> 4))
        beta, beta_stride = inputs[4], strides[4]
        from_q, from_k, from_v, from_g = (
            x + row * stride + Int64(t & 15) * 16 for x, stride in zip(inputs[:4], strides[:4], strict=True)
        )
        eight = tuple(8 * stride for stride in strides[:4])
        if group < steps:
            self.load(smem + group * self.stage, t, length - group * ROWS, from_q, from_k, from_v, from_g, eight)
        ptx.commit_copies()
        for step in cutlass.range(group, steps, 2, unroll=1):
            following = step + 2
            from_q, from_k = from_q + 8 * eight[0], from_k + 8 * eight[1]
            from_v, from_g = from_v + 8 * eight[2], from_g + 8 * eight[3]
            if following < steps:
                use = following // self.o.stages
                slot = following - use * self.o.stages
                if use > 0:
                    self.wait(smem + self.empty_at + slot * 8, (use - 1) & 1)
                rows = length - following * ROWS
                self.load(smem + slot * self.stage, t, rows, from_q, from_k, from_v, from_g, eight)
            ptx.commit_copies()
            ptx.wait_copies(1)
            slot = step % self.o.stages
            at = smem + slot * self.stage
            if (step + 1) * ROWS > length:
                self.close(at, t, length - step * ROWS)
            ptx.meet(1 + group, GROUP)
            self.norms(at, t, scale)
            sums = self.gates(at, t, p, a, bias, bound)
            self.betas(at, t, step, length, beta, beta_stride)
            ptx.meet(1 + group, GROUP)
            self.factors(at, t, p, sums)
            ptx.meet(1 + group, GROUP)
            self.pairs(at, t, group)
            ptx.show_to_products()
            ptx.arrive(smem + self.full_at + slot * 8)

    @cute.jit
    def close(self, at: Int32, t: Int32, rows: Int32) -> None:
        """Raw gates from row `rows` on become what no decay comes from; each thread closes what it copied."""
        octet = t & 15
        for part in cutlass.range_constexpr(4):
            row = (t >> 4) + 8 * part
            if row >= rows:
                if cutlass.const_expr(self.o.wide_gate):
                    shut = [Float32(CLOSED)] * 4
                    for half in cutlass.range_constexpr(2):
                        ptx.store_shared(at + self.g_at + half * TILE + row * 256 + octet * 16, shut)
                else:
                    word = ptx.pack_bf16(Float32(CLOSED), Float32(CLOSED))
                    ptx.store_shared(at + self.g_at + ptx.tile_at(row, octet, ROWS), [word, word, word, word])

    @cute.jit
    def norms(self, at: Int32, t: Int32, scale: Float32) -> None:
        """Factors of each row of q (scale included) and k: the diagonal of q q^T and k k^T, 16 rows a warp."""
        lane, warp = t & 31, cute.arch.make_warp_uniform(t >> 5)
        chunk, of_k = warp >> 1, warp & 1
        matrix = lane >> 3
        row = chunk * CHUNK + (matrix & 1) * 8 + (lane & 7)
        acc = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
        for s in cutlass.range_constexpr(8):
            A = ptx.load_matrices(at + of_k * TILE + ptx.tile_at(row, 2 * s + (matrix >> 1), ROWS), False)
            acc[0] = ptx.mma("bf16", acc[0], A, [A[0], A[2]])
            acc[1] = ptx.mma("bf16", acc[1], A, [A[1], A[3]])
        i = lane >> 2
        if (lane & 3) == (i >> 1):  # it holds the products of rows i and i + 8 with themselves
            odd = (i & 1) == 1
            first = acc[0][1] if odd else acc[0][0]
            second = acc[1][3] if odd else acc[1][2]
            factor = scale if of_k == 0 else Float32(1.0)
            to = at + self.norms_at + (chunk * CHUNK + i) * 8 + of_k * 4
            ptx.store_shared(to, [factor * ptx.rsqrt(first + EPS)])
            ptx.store_shared(to + 64, [factor * ptx.rsqrt(second + EPS)])

    @cute.jit
    def gates(self, at: Int32, t: Int32, p: Int32, a: Float32, bias: Any, bound: Float32) -> Any:
        """log2 c and running sums of the base-2 gate, of this thread's two channels and 16 rows; bias: times -a."""
        chunk = t >> 6
        sums = [Float32(SHIFT), Float32(SHIFT)]
        rows = []
        for r in cutlass.range_constexpr(CHUNK):
            row = chunk * CHUNK + r
            if cutlass.const_expr(self.o.wide_gate):
                z = ptx.load_shared_f32(at + self.g_at + (p >> 5) * TILE + row * 256 + (p & 31) * 8, 2)
            else:
                word = ptx.load_shared(at + self.g_at + ptx.tile_at(row, p >> 2, ROWS) + (p & 3) * 4)[0]
                z = ptx.unpack_bf16(word)
            for c in cutlass.range_constexpr(2):
                sums[c] = sums[c] + bound * ptx.rcp(1.0 + ptx.exp2(bias[c] - a * z[c]))
            rows.append((sums[0], sums[1]))
        return rows

    @cute.jit
    def betas(self, at: Int32, t: Int32, step: Int32, length: Int32, beta: Int64, stride: Int64) -> None:
        """beta of each row, 0 past the end."""
        if t < ROWS:
            value = Float32(0.0)
            token = step * ROWS + t
            if token < length:
                if cutlass.const_expr(self.o.wide_beta):
                    value = ptx.load_global(beta + 4 * Int64(token) * stride, "f32")
                else:
                    value = ptx.as_float(ptx.load_global(beta + 2 * Int64(token) * stride, "u16") << 16)
                if cutlass.const_expr(self.o.sigmoid):
                    value = ptx.rcp(1.0 + ptx.exp2(-LOG2E * value))
                if cutlass.const_expr(self.o.doubled):
                    value = 2.0 * value
            ptx.store_shared(at + self.beta_at + t * 4, [value])

    @cute.jit
    def factors(self, at: Int32, t: Int32, p: Int32, sums: Any) -> None:
        """qg, kb over q, k; ck (over g where it is bf16); total."""
        chunk = t >> 6
        for r in cutlass.range_constexpr(CHUNK):
            row = chunk * CHUNK + r
            norm = ptx.load_shared_f32(at + self.norms_at + row * 8, 2)
            here = at + ptx.tile_at(row, p >> 2, ROWS) + (p & 3) * 4
            near = [ptx.exp2(sums[r][c]) for c in range(2)]
            far = [ptx.exp2(-sums[r][c]) for c in range(2)]
            qs = ptx.unpack_bf16(ptx.load_shared(here)[0])
            ks = ptx.unpack_bf16(ptx.load_shared(here + TILE)[0])
            ks = [x * norm[1] for x in ks]
            ptx.store_shared(here, [ptx.pack_bf16(*(x * (norm[0] * y) for x, y in zip(qs, near, strict=True)))])
            ptx.store_shared(here + TILE, [ptx.pack_bf16(*(x * y for x, y in zip(ks, near, strict=True)))])
            ptx.store_shared(here + self.ck_at, [ptx.pack_bf16(*(x * y for x, y in zip(ks, far, strict=True)))])
        ptx.store_shared(
            at + self.total_at + chunk * 512 + p * 8,
            [ptx.exp2(sums[CHUNK - 1][0] - SHIFT), ptx.exp2(sums[CHUNK - 1][1] - SHIFT)],
        )

    @cute.jit
    def pairs(self, at: Int32, t: Int32, group: Int32) -> None:
        """Aqk (two warps) and M (two) of a chunk each; M's, the longer work, on other warps in each group."""
        lane, warp = t & 31, cute.arch.make_warp_uniform(t >> 5)
        chunk, of_k = warp >> 1, (warp ^ group) & 1
        matrix, row8 = lane >> 3, lane & 7
        # rows of A: (rows 0-7, 8-15) x (terms 0-7, 8-15); of ck: terms first
        a_row = chunk * CHUNK + (matrix & 1) * 8 + row8
        b_row = chunk * CHUNK + (matrix >> 1) * 8 + row8
        acc = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
        for s in cutlass.range_constexpr(8):
            A = ptx.load_matrices(at + of_k * TILE + ptx.tile_at(a_row, 2 * s + (matrix >> 1), ROWS), False)
            B = ptx.load_matrices(at + self.ck_at + ptx.tile_at(b_row, 2 * s + (matrix & 1), ROWS), False)
            acc[0] = ptx.mma("bf16", acc[0], A, B[0:2])
            acc[1] = ptx.mma("bf16", acc[1], A, B[2:4])
        i = lane >> 2
        j = 2 * (lane & 3)
        if of_k == 0:
            for tile in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(4):
                    keep = j + 8 * tile + (e & 1) <= i + 8 * (e >> 1)
                    acc[tile][e] = acc[tile][e] if keep else Float32(0.0)
            self.write_pairs(at + self.Aqk_at + chunk * 512, lane, acc)
        else:
            b = [ptx.load_shared_f32(at + self.beta_at + 4 * (chunk * CHUNK + i + 8 * half))[0] for half in range(2)]
            self.write_pairs(at + self.M_at + chunk * 512, lane, self.delta_inverse(acc, b, i, j))

    @cute.jit
    def write_pairs(self, at: Int32, lane: Int32, acc: Any) -> None:
        """A 16 x 16 matrix as four of 8 x 8, 128 bytes each: below each other, then beside."""
        for tile in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                word = ptx.pack_bf16(acc[tile][2 * half], acc[tile][2 * half + 1])
                ptx.store_shared(at + tile * 256 + half * 128 + lane * 4, [word])

    @cute.jit
    def delta_inverse(self, P: Any, b: Any, i: Int32, j: Int32) -> Any:
        """P (I + diag(b) P)^-1 of the strict lower part of P, doubling diagonal blocks; fp16 products.

        b: of rows i and i + 8; a thread holds rows i, i + 8 and columns j, j + 1 (+ 8) of P.
        """
        M = self.parted(P, i, j, 0)
        for level in cutlass.range_constexpr(1, 4):
            low = self.parted(P, i, j, level)
            X = self.minus_product(low, low, self.scaled(M, b))
            M = self.minus_product([[m + x for m, x in zip(M[n], X[n], strict=True)] for n in range(2)],
                                   M, self.scaled(X, b))  # fmt: skip
        return M

    @cute.jit
    def parted(self, P: Any, i: Int32, j: Int32, level: cutlass.Constexpr) -> Any:
        """P where the middle of a block of 2s rows parts row and column, s = 2^level; 0 elsewhere."""
        out = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
        for tile in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(4):
                row, column = i + 8 * (e >> 1), j + 8 * tile + (e & 1)
                keep = ((row >> level) > (column >> level)) & ((row >> (level + 1)) == (column >> (level + 1)))
                out[tile][e] = P[tile][e] if keep else Float32(0.0)
        return out

    def scaled(self, M: Any, b: Any) -> Any:
        """diag(b) M."""
        return [[M[tile][e] * b[e >> 1] for e in range(4)] for tile in range(2)]

    @cute.jit
    def minus_product(self, C: Any, A: Any, B: Any) -> Any:
        """C - A B of 16 x 16, all as accumulators are held."""
        a = [ptx.pack_f16(-A[n][2 * half], -A[n][2 * half + 1]) for n in range(2) for half in range(2)]
        out = []
        for n in cutlass.range_constexpr(2):
            b = [ptx.turn_matrix(ptx.pack_f16(B[n][2 * half], B[n][2 * half + 1])) for half in range(2)]
            out.append(ptx.mma("f16", C[n], a, b))
        return out

    # ------------------------------------------------------------------------------------------------- consumers

    @cute.jit
    def wait(self, barrier: Int32, parity: Int32) -> None:
        """Until the barrier's phase of this parity is over."""
        done = ptx.try_wait(barrier, parity)
        while done == 0:
            done = ptx.try_wait(barrier, parity)

    @cute.jit
    def consume(
        self, smem: Int32, t: Int32, group: Int32, steps: Int32, length: Int32, rest: Int32, vv: Int32, mark: Int64,
        kept: Any, state_in: Int64, siv: Int64, sik: Int64, slot_in: Int64,
        state_out: Int64, suv: Int64, suk: Int64, slot_out: Int64, o: Int64, sot: Int64,
    ) -> None:  # fmt: skip
        """A consumer warpgroup: rows vv .. vv + 63 of the transposed state, through every step."""
        lane, warp = t & 31, cute.arch.make_warp_uniform(t >> 5)
        S = cute.make_rmem_tensor(64, Float32)
        row = vv + warp * 16 + (lane >> 2)
        column = 2 * (lane & 3)
        for e in cutlass.range_constexpr(64):
            S[e] = Float32(0.0)
        if cutlass.const_expr(self.o.state_in != ""):  # noqa: SIM102 (a constant: the other is none)
            if slot_in >= 0:
                for e in cutlass.range_constexpr(64):
                    spot = Int64(row + 8 * ((e >> 1) & 1)) * siv + Int64(column + 8 * (e >> 2) + (e & 1)) * sik
                    if cutlass.const_expr(self.o.state_in == "fp32"):
                        S[e] = ptx.load_global(state_in + 4 * spot, "f32") * 2.0**-SHIFT
                    else:
                        S[e] = ptx.as_float(ptx.load_global(state_in + 2 * spot, "u16") << 16) * 2.0**-SHIFT
        turn = smem + self.turn_at + (group * 4 + warp) * 512
        for step in cutlass.range(0, steps, 1, unroll=1):
            use = step // self.o.stages
            slot = step - use * self.o.stages
            at = smem + slot * self.stage
            self.wait(smem + self.full_at + slot * 8, use & 1)
            for chunk in cutlass.range_constexpr(2):
                out = self.walk(at, chunk, lane, vv + warp * 16, S)
                self.write(turn, out, lane, step * ROWS + chunk * CHUNK, length, o + 2 * Int64(vv + warp * 16), sot)
                if cutlass.const_expr(self.o.checkpoints != ""):
                    checkpoints, scc, scv, sck, marks, every = kept
                    done = step * ROWS + (chunk + 1) * CHUNK
                    if done % every == 0 and done <= length:
                        if mark >= 0 and mark < marks:
                            self.put(S, checkpoints + mark * scc, row, column, scv, sck, self.o.checkpoints)
                        mark = mark + 1
            ptx.meet_warp()
            if lane == 0:
                ptx.arrive(smem + self.empty_at + slot * 8)
        for row_at in cutlass.range(length + (t >> 3), rest, GROUP // 8, unroll=1):
            zero = Uint32(0)
            ptx.store_global(o + Int64(row_at) * sot + Int64(vv * 2 + (t & 7) * 16), [zero, zero, zero, zero])
        if cutlass.const_expr(self.o.state_out != ""):  # noqa: SIM102 (a constant: the other is none)
            if slot_out >= 0:
                self.put(S, state_out, row, column, suv, suk, self.o.state_out)

    @cute.jit
    def put(
        self, S: cute.Tensor, to: Int64, row: Int32, column: Int32, sv: Int64, sk: Int64, kind: cutlass.Constexpr
    ) -> None:
        """Store this thread's part of the state, with c put back."""
        for e in cutlass.range_constexpr(64):
            spot = Int64(row + 8 * ((e >> 1) & 1)) * sv + Int64(column + 8 * (e >> 2) + (e & 1)) * sk
            if cutlass.const_expr(kind == "fp32"):
                ptx.store_global(to + 4 * spot, [S[e] * 2.0**SHIFT])
            else:
                ptx.store_global_16(to + 2 * spot, ptx.pack_bf16(S[e] * 2.0**SHIFT, Float32(0.0)))

    @cute.jit
    def walk(self, at: Int32, chunk: cutlass.Constexpr, lane: Int32, v_row: Int32, S: cute.Tensor) -> Any:
        """One chunk: S goes on, the transposed output `[16 of V, 16 tokens]` comes back."""
        zero = [Float32(0.0)] * 8
        A = [ptx.pack_bf16(S[2 * e], S[2 * e + 1]) for e in range(32)]
        ptx.begin_products()
        kS, out = zero, zero
        for s in cutlass.range_constexpr(8):
            b = self.step_of(at, TILE, chunk, s)
            kS = ptx.wgmma(16, kS, A[4 * s : 4 * s + 4], b, False, s > 0)
        ptx.commit_products()
        for s in cutlass.range_constexpr(8):
            b = self.step_of(at, 0, chunk, s)
            out = ptx.wgmma(16, out, A[4 * s : 4 * s + 4], b, False, s > 0)
        ptx.commit_products()
        matrix = lane >> 3
        token = chunk * CHUNK + (matrix >> 1) * 8 + (lane & 7)
        words = ptx.load_matrices(at + self.v_at + ptx.tile_at(token, (v_row >> 3) + (matrix & 1), ROWS), True)
        beta = []
        for n in cutlass.range_constexpr(2):
            beta += ptx.load_shared_f32(at + self.beta_at + 4 * (chunk * CHUNK + 8 * n + 2 * (lane & 3)), 2)
        ptx.wait_products(1)
        x = []
        for n in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                low, high = ptx.unpack_bf16(words[2 * n + half])
                x += [low - kS[4 * n + 2 * half], high - kS[4 * n + 2 * half + 1]]
        y = self.times_beta(x, beta)
        ptx.begin_products()
        M = ptx.matrix_descriptor(at, self.M_at + chunk * 512, 128, 256)
        Mx = ptx.wgmma(16, zero, y, M, False, False)
        ptx.commit_products()
        ptx.wait_products(0)
        new = self.times_beta([a - b for a, b in zip(x, Mx, strict=True)], beta)
        ptx.begin_products()
        Aqk = ptx.matrix_descriptor(at, self.Aqk_at + chunk * 512, 128, 256)
        out = ptx.wgmma(16, out, new, Aqk, False, True)
        ck = ptx.tile_descriptor(at, self.ck_at + chunk * (CHUNK * ptx.ROW), 1024, ROWS * ptx.ROW)
        grown = ptx.wgmma(128, [S[e] for e in range(64)], new, ck, True, True)
        ptx.commit_products()
        ptx.wait_products(0)
        for n in cutlass.range_constexpr(16):
            total = ptx.load_shared_f32(at + self.total_at + chunk * 512 + 4 * (8 * n + 2 * (lane & 3)), 2)
            for e in cutlass.range_constexpr(4):
                S[4 * n + e] = grown[4 * n + e] * total[e & 1]
        return out

    def step_of(self, at: Int32, tile: int, chunk: int, s: int) -> Any:
        """Descriptor of terms 16 s .. 16 s + 15 of a chunk's rows in a tile."""
        more = tile + (s // 4) * (ROWS * ptx.ROW) + chunk * (CHUNK * ptx.ROW) + (s % 4) * 32
        return ptx.tile_descriptor(at, more, 1024, 16)

    def times_beta(self, x: Any, beta: Any) -> Any:
        """x times the beta of its columns, as the first operand of a product."""
        return [ptx.pack_bf16(x[2 * e] * beta[2 * (e // 2)], x[2 * e + 1] * beta[2 * (e // 2) + 1]) for e in range(4)]

    @cute.jit
    def write(self, turn: Int32, out: Any, lane: Int32, token: Int32, length: Int32, o: Int64, sot: Int64) -> None:
        """Store `[16 of V, 16 tokens]` to o, through 512 bytes of the warp's own."""
        words = [ptx.pack_bf16(out[2 * e], out[2 * e + 1]) for e in range(4)]
        matrix = lane >> 3
        ptx.meet_warp()
        ptx.store_matrices(turn + ((matrix >> 1) * 8 + (lane & 7)) * 32 + (matrix & 1) * 16, words, True)
        ptx.meet_warp()
        row = ptx.load_shared(turn + lane * 16, 4)
        here = token + (lane >> 1)
        if here < length:
            ptx.store_global(o + Int64(here) * sot + Int64(lane & 1) * 16, row)


def example_arguments() -> list[Any]:
    """Arguments of the right types for compiling, all but the stream."""
    kinds = {"Int64": Int64(0), "Int32": Int32(1), "Float32": Float32(1.0)}
    names = inspect.signature(Fused.__call__).parameters.values()
    return [kinds[x.annotation] for x in names if x.annotation in kinds]
