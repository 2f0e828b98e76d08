"""The GPU decode rows without a GPU: a clock that counts stands for the device's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from cula.bench import facts as machine
from cula.bench.cuda import decode
from cula.bench.timing import Timing

ROWS = [
    decode.Row("kda_decode", N=5, H=2, D=16),
    decode.Row("kda_decode", N=2, H=3, D=16, state_dtype="bf16"),
    decode.Row("kda_verify", N=3, H=2, D=16, tokens=4),
    decode.Row("kda_decode_fused", N=6, H=2, D=16),
]


@dataclass
class Clock:
    """Everybody takes as many ms as it has letters."""

    l2: int = 3000

    def l2_bytes(self) -> int:
        return self.l2

    def prepare(self, calls: list[Any]) -> list[Any]:
        for call in calls:
            call()
        return calls

    def interleave(self, steps: dict[str, Any], *, rounds: int) -> dict[str, Timing]:
        return {name: Timing([float(len(name))] * rounds) for name in steps}


FACTS = machine.collect("cpu", 1, {}, "abc")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.op}-{row.state_dtype}")
def test_a_row_is_checked_and_timed(row: decode.Row) -> None:
    (record,) = decode.run(row, ["eager"], 3, FACTS, Clock(), "cpu")
    assert record.reason is None and record.error <= record.tolerance
    assert (record.ms, record.limit_ms, record.rounds) == (5.0, float(len(decode.LIMIT)), 3)
    assert (record.tokens, record.state_dtype, record.case) == (row.tokens, row.state_dtype, row.name)
    assert "x limit" in decode.line(record)


def test_enough_pools_to_leave_the_cache() -> None:
    row = ROWS[0]
    assert row.pool_bytes == 5 * 2 * 16 * 16 * 4
    for l2, pools in ((0, 1), (row.pool_bytes, 4), (10**9, decode.MOST_POOLS)):
        (record,) = decode.run(row, ["eager"], 1, FACTS, Clock(l2), "cpu")
        assert record.buffers == pools


def test_bytes_of_a_row() -> None:
    row = decode.Row("kda_decode", N=64)
    assert row.pool_bytes == 64 * 64 * 128 * 128 * 4
    assert row.moved_bytes == 2 * row.pool_bytes + 64 * 64 * 1280
    assert replace(row, op="kda_verify", tokens=4).moved_bytes == row.pool_bytes + 4 * 64 * 64 * 1280


def test_who_is_wrong_or_fails_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = decode.ours
    monkeypatch.setattr(decode, "ours", lambda b, name: lambda: real(b, name)() * 1.1)
    (record,) = decode.run(ROWS[0], ["eager"], 1, FACTS, Clock(), "cpu")
    assert record.ms is None and record.reason.startswith("red") and "red" in decode.line(record)
    monkeypatch.setattr(decode, "ours", real)
    wrong, lost = decode.run(ROWS[0], ["sm90", "fla"], 1, FACTS, Clock(), "cpu")
    assert wrong.ms is None and "NotSupportedError" in wrong.reason
    assert lost.ms is None and lost.reason.startswith("failed")


@pytest.mark.parametrize("wrong", [["--N", "0"], ["--tokens", "4"], ["--op", "kda_prefill"]], ids=str)
def test_a_wrong_option_is_one_line(wrong: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        decode.main(wrong)
    assert caught.value.code == 2 and wrong[0] in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys) -> None:
    with pytest.raises(SystemExit):
        decode.main([])
    assert "CUDA" in capsys.readouterr().err
