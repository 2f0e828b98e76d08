"""The machine that runs PTX: what it computes, and that it refuses what a GPU would not survive."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.machine import Fault, Kernel, Memory, Unknown

HEAD = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 a, .param .u64 b, .param .u32 n)
.reqntid {threads}
{{
  .reg .pred %p<8>; .reg .b32 %r<64>; .reg .b64 %rd<16>; .reg .b16 %rs<8>;
  .shared .align 1024 .b8 tile[4096];
  ld.param.u64 %rd1, [a];
  ld.param.u64 %rd2, [b];
  ld.param.u32 %r1, [n];
  mov.u32 %r2, %tid.x;
  mov.u32 %r3, %ctaid.x;
  mad.lo.s32 %r4, %r3, {threads}, %r2;
  mul.wide.u32 %rd3, %r4, 4;
  add.s64 %rd4, %rd1, %rd3;
  add.s64 %rd5, %rd2, %rd3;
  mov.u32 %r5, tile;
  shl.b32 %r6, %r2, 2;
  add.s32 %r7, %r5, %r6;
{body}
}}
"""


def run(body: str, a, b, n: int = 0, threads: int = 64, grid: int = 1, **options) -> None:
    memory = Memory()
    for name, x in (("a", a), ("b", b)):
        memory.add(x.ctypes.data, x.nbytes, name)
    kernel = Kernel(HEAD.format(threads=threads, body=body))
    kernel.run((grid,), threads, [a.ctypes.data, b.ctypes.data, n], memory, **options)


@pytest.fixture
def ab():
    return np.arange(128, dtype=np.float32) + 1.5, np.full(128, -1.0, np.float32)


def test_lanes_past_the_end_are_left_alone(ab) -> None:
    body = """
      setp.ge.u32 %p1, %r4, %r1;
      @%p1 bra $done;
      ld.global.f32 %r8, [%rd4];
      add.f32 %r9, %r8, 0f3F800000;
      st.global.b32 [%rd5], %r9;
    $done:
      ret;"""
    a, b = ab
    run(body, a, b, 100, grid=2)
    assert (b[:100] == a[:100] + 1).all()
    assert (b[100:] == -1).all()


@pytest.mark.parametrize(("offset", "words"), [(512, "no device memory"), (-4, "no device memory"), (2, "misaligned")])
def test_a_bad_address_is_named(ab, offset: int, words: str) -> None:
    with pytest.raises(Fault, match=words) as error:
        run(f"ld.global.b32 %r8, [%rd4+{offset}]; ret;", *ab)
    assert "ld.global.b32 %r8" in str(error.value)


def test_loops_of_unlike_lengths(ab) -> None:
    body = """
      mov.b32 %r8, 0; mov.b32 %r9, 0;
    $more:
      add.s32 %r8, %r8, %r9;
      add.s32 %r9, %r9, 1;
      setp.le.u32 %p1, %r9, %r2;
      @%p1 bra $more;
      cvt.rn.f32.s32 %r10, %r8;
      st.global.b32 [%rd5], %r10;
      ret;"""
    a, b = ab
    run(body, a, b)
    assert b[:64].tolist() == [k * (k + 1) / 2 for k in range(64)]


EXCHANGE = """
      ld.global.b32 %r8, [%rd4];
      st.shared.b32 [%r7], %r8;
      {barrier}
      xor.b32 %r9, %r6, {mask};
      add.s32 %r10, %r5, %r9;
      ld.shared.b32 %r11, [%r10];
      st.global.b32 [%rd5], %r11;
      ret;"""


@pytest.mark.parametrize("grid", [1, 2])
def test_shared_memory_behind_a_barrier(ab, grid: int) -> None:
    a, b = ab
    run(EXCHANGE.format(barrier="bar.sync 0;", mask=128), a, b, grid=grid, races=True)
    assert (b[: 64 * grid] == a[: 64 * grid].reshape(grid, 2, 32)[:, ::-1].ravel()).all()


def test_two_warps_meet_without_a_barrier(ab) -> None:
    with pytest.raises(Fault, match="no barrier between"):
        run(EXCHANGE.format(barrier="", mask=128), *ab, races=True)
    run(EXCHANGE.format(barrier="", mask=4), *ab, races=True)  # within a warp


def test_a_barrier_that_some_never_reach(ab) -> None:
    with pytest.raises(Fault, match="every thread waits"):
        run("bar.sync 1, 96; ret;", *ab)
    body = "setp.eq.u32 %p1, %r3, 0; @%p1 ret; bar.sync 0; st.global.b32 [%rd5], %r4; ret;"
    a, b = ab
    run(body, a, b, grid=2)  # a CTA that left keeps none waiting
    assert (b[:64] == -1).all()
    assert (b.view(np.int32)[64:] == np.arange(64, 128)).all()


HANDED_ON = """
      setp.ne.u32 %p1, %r2, 0;
      add.s32 %r20, %r5, 1024;
      @%p1 bra $begun;
      mbarrier.init.shared.b64 [%r20], 32;
    $begun:
      bar.sync 0;
      setp.ge.u32 %p2, %r2, 32;
      @%p2 bra $second;
      ld.global.b32 %r8, [%rd4];
      st.shared.b32 [%r7], %r8;
      {arrive}
      ret;
    $second:
      {wait}
      ld.shared.b32 %r11, [%r7+-128];
      st.global.b32 [%rd5], %r11;
      ret;"""
ARRIVE = "mbarrier.arrive.shared.b64 %rd8, [%r20];"
WAIT = """
    $again:
      mbarrier.try_wait.parity.shared.b64 %p3, [%r20], 0;
      @!%p3 bra $again;"""


@pytest.mark.parametrize("seed", range(5))
def test_one_warp_hands_on_to_another(ab, seed: int) -> None:
    a, b = ab
    run(HANDED_ON.format(arrive=ARRIVE, wait=WAIT), a, b, warps=seed, races=True)
    assert (b[32:64] == a[:32]).all()
    with pytest.raises(Fault, match="does not wait for warp 0|may still read"):
        run(HANDED_ON.format(arrive=ARRIVE, wait=""), *ab, warps=seed, races=True)
    with pytest.raises(Fault, match="every thread waits"):
        run(HANDED_ON.format(arrive="", wait=WAIT), *ab, warps=seed, races=True)


@pytest.mark.parametrize("wait", [True, False])
def test_a_copy_is_there_only_after_its_wait(ab, wait: bool) -> None:
    body = f"""
      cp.async.ca.shared.global [%r7], [%rd4], 4;
      cp.async.commit_group;
      {"cp.async.wait_group 0;" if wait else ""}
      ld.shared.b32 %r8, [%r7];
      st.global.b32 [%rd5], %r8;
      ret;"""
    a, b = ab
    run(body, a, b)
    assert (b[:64] == a[:64]).all() == wait
    run(body, a, b, late=False)
    assert (b[:64] == a[:64]).all()


def test_products_of_fragments() -> None:
    rng = np.random.default_rng(0)
    A, B = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    a = np.concatenate([A.ravel(), np.ascontiguousarray(B.T).ravel()])
    b = np.zeros((16, 8), np.float32)
    load = """
      shr.u32 %r8, %r2, 2; and.b32 %r9, %r2, 3;
      mad.lo.s32 %r10, %r8, 32, 0; mad.lo.s32 %r11, %r9, 4, %r10;
      cvt.u64.u32 %rd6, %r11; add.s64 %rd7, %rd1, %rd6;
      ld.global.b32 %r20, [%rd7]; ld.global.b32 %r21, [%rd7+256];
      ld.global.b32 %r22, [%rd7+16]; ld.global.b32 %r23, [%rd7+272];
      ld.global.b32 %r24, [%rd7+512]; ld.global.b32 %r25, [%rd7+528];
      mov.b32 %r30, 0f3F800000;
      mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r40, %r41, %r42, %r43 }, { %r20, %r21, %r22, %r23 },
        { %r24, %r25 }, { %r30, %r30, %r30, %r30 };
      mad.lo.s32 %r12, %r8, 32, 0; mad.lo.s32 %r13, %r9, 8, %r12;
      cvt.u64.u32 %rd8, %r13; add.s64 %rd9, %rd2, %rd8;
      st.global.v2.b32 [%rd9], { %r40, %r41 }; st.global.v2.b32 [%rd9+256], { %r42, %r43 };
      ret;"""
    run(load, a, b, threads=32)
    assert np.allclose(b, A.astype(np.float32) @ B.astype(np.float32) + 1, atol=1e-5)


def test_what_it_does_not_know_it_says(ab) -> None:
    with pytest.raises(Unknown, match="frobnicate"):
        run("frobnicate.b32 %r8, %r9; ret;", *ab)
