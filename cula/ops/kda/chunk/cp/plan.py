"""Where to cut long sequences into segments: a cost model, pure Python.

A walk goes through the chunks of a sequence one by one; with few sequences and heads most of a card is idle. A segment
is an affine map of its entry state, `S_out = P S_in + b`: `pre_scan` finds P and b of every segment but a sequence's
last, `merge` turns them into entry states, then all segments are walked as if they were sequences. That is about two
walks instead of one, so it pays where they are less than half as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

#: Microseconds of one chunk of a walk with output, of one chunk of `pre_scan`, of one step of `merge`, and of two
#: more launches. The first is measured (H200, 64 tokens, K = V = 128); the others are estimates from it.
WALK, SCAN, MERGE, LAUNCHES = 2.0, 1.6, 4.0, 12.0
#: The part of the serial time that a plan must promise to save.
GAIN = 0.10
#: A segment has at least this many chunks.
LEAST_CHUNKS = 4
#: Into how many segments the longest sequence may be cut: steps of about a fifth, so that choosing costs little.
PARTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 20, 24, 29, 35, 42, 50, 60, 72, 86, 103, 124)


@dataclass(frozen=True)
class Plan:
    """Segments of the sequences of a call: each has `cut` chunks, the last of a sequence what is left.

    chunks: of each sequence.
    """

    chunks: tuple[int, ...]
    cut: int

    @property
    def parts(self) -> tuple[int, ...]:
        """Segments of each sequence; one without tokens has one."""
        return tuple(max(1, -(-n // self.cut)) for n in self.chunks)


@dataclass(frozen=True)
class Shape:
    """How wide walks are.

    columns: programs of one sequence's walk (heads x blocks of V); map_columns: those of its P likewise; programs:
    how many a card runs at once.
    """

    columns: int
    map_columns: int
    programs: int


def cost(plan: Plan, shape: Shape) -> float:
    """Microseconds that the walks of a plan take; a plan of one segment a sequence is the serial walk."""
    total, longest = sum(plan.chunks), max(plan.chunks, default=0)
    walk = max(min(plan.cut, longest), total * shape.columns / shape.programs) * WALK
    steps = max(plan.parts, default=1) - 1
    if not steps:
        return walk
    inner = (sum(plan.parts) - len(plan.parts)) * plan.cut
    scan = max(plan.cut, inner * (shape.columns + shape.map_columns) / shape.programs) * SCAN
    return walk + scan + steps * MERGE + LAUNCHES


@lru_cache(maxsize=1024)
def make_plan(chunks: tuple[int, ...], shape: Shape) -> Plan | None:
    """The cheapest plan of sequences of so many chunks, None where the serial walk is as good."""
    longest = max(chunks, default=0)
    if longest < 2 * LEAST_CHUNKS or shape.programs < 1:
        return None
    serial = cost(Plan(chunks, longest), shape)
    if sum(chunks) * shape.columns / shape.programs * WALK > (1 - GAIN) * serial:
        return None  # the card is full as it is
    cuts = {max(LEAST_CHUNKS, -(-longest // parts)) for parts in PARTS}
    best = min((Plan(chunks, cut) for cut in sorted(cuts)), key=lambda plan: cost(plan, shape))
    return best if cost(best, shape) < (1 - GAIN) * serial else None
