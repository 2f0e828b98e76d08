"""The implementation table of the gate stage."""

from __future__ import annotations

from collections.abc import Sequence

from cula.host.table import Row, Rule

GATE = "gate"

ROWS: tuple[Row, ...] = (
    Row(
        name="eager",
        mechanism="elementwise",
        algorithm="kda",
        stage=GATE,
        arch="any device",
        dsl="torch",
        status="measured on CPU (x86-64, AVX-512); checked on one H200",
        entry="cula.ops.kda.gate.eager.gate:Gate",
        rules=(Rule(lambda p, t: t.kind != "meta", "needs tensors with values, got {t.kind} tensors"),),
    ),
)
STAGES: dict[str, Sequence[Row]] = {GATE: ROWS}
