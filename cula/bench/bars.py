"""The ratios that a CPU run is held to, as data: (op, peer) -> how many times the peer's speed, and the goal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """`least`: our speed must be at least this many times the peer's. `goal`: where the work aims, if said."""

    least: float
    goal: float | None = None


#: Speed: peer's time / ours. Set from measurements on two cores, fp32, K = V = 128.
SPEED: dict[tuple[str, str], Bar] = {
    ("kda_prefill", "ggml"): Bar(1.0, 3.0),
    ("kda_prefill", "transformers"): Bar(20.0),
    ("kda_train", "transformers"): Bar(25.0, 60.0),
    ("kda_decode", "ggml"): Bar(0.6, 1.0),
    ("kda_decode", "transformers"): Bar(3.0),
    ("lightning_prefill", "transformers"): Bar(3.0),
}

#: Memory: peak of the call, its arguments included, / size of the inputs (q, k, v, and KDA's g and beta). At most this.
MEMORY: dict[str, float] = {
    "kda_prefill": 12.0, "kda_train": 24.0, "lightning_prefill": 12.0, "lightning_train": 24.0,
}  # fmt: skip


def speed_bar(op: str, peer: str) -> Bar | None:
    """The bar of `op` against `peer`, None where there is none."""
    return SPEED.get((op, peer))


def memory_bar(op: str) -> float | None:
    """The most that `op` may hold, in multiples of its inputs' size; None where there is no bar."""
    return MEMORY.get(op)
