"""`cula bench --plot`: the medians of a run as a picture: bars on a CPU, time against floor on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cula.bench.records import Record, is_ours, ratio
from cula.bench.report import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS_COLOUR = "#1f4e8c"
PEER_COLOURS = ("#c8501e", "#7a9a3a", "#8a6fb0", "#b08a2a")
GATE_MARKERS = {"strong": "o", "mixed": "s", "weak": "^"}

#: Lines of a floor plot, in multiples of the floor.
MULTIPLES = (1, 2, 4, 8, 16)


def bars(records: Sequence[Record], path: Path, title: str) -> None:
    """Draw one panel per (op, case), a bar per gate and implementation, on a logarithmic axis of milliseconds.

    Rows without a time are left out. ValueError where no row has one. The file appears whole or not at all.
    """
    timed = [r for r in records if r.ms is not None]
    if not timed:
        raise ValueError("no row has a time, so there is nothing to plot")
    panels = list(dict.fromkeys((r.op, r.case) for r in timed))
    colours = _colours(timed)
    counts = [sum((r.op, r.case) == panel for r in timed) for panel in panels]
    figure = _figure(9, 1.0 + 0.55 * len(panels) + 0.3 * sum(counts))
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[c + 1.5 for c in counts])
    for panel, ax in zip(panels, axes[:, 0]):
        _panel(ax, [r for r in timed if (r.op, r.case) == panel], timed, colours)
    _save(figure, path, title)


def floors(records: Sequence[Record], path: Path, title: str) -> None:
    """Draw time against floor on logarithmic axes: a panel for each op, a marker for each row.

    Rows without a time or a floor are left out. ValueError where no row has both.
    """
    timed = [r for r in records if r.ms is not None and r.floor_ms]
    if not timed:
        raise ValueError("no row has a time and a floor, so there is nothing to plot")
    ops = list(dict.fromkeys(r.op for r in timed))
    figure = _figure(4 + 5 * len(ops), 6.5)
    axes = figure.subplots(1, len(ops), squeeze=False)
    for op, ax in zip(ops, axes[0]):
        _floor_panel(ax, [r for r in timed if r.op == op], _colours(timed))
    _save(figure, path, title)


def _floor_panel(ax: Axes, rows: Sequence[Record], colours: dict[str, str]) -> None:
    """One op."""
    low, high = 0.7 * min(r.floor_ms for r in rows), 1.5 * max(r.floor_ms for r in rows)
    for times in MULTIPLES:
        style = "-" if times == 1 else ":"
        ax.plot([low, high], [times * low, times * high], color="#999999", linewidth=0.7, linestyle=style)
        name = f" {times}x" if times > 1 else " floor"
        ax.text(high, times * high, name, fontsize=7, va="center", color="#555555")
    for impl in dict.fromkeys(r.impl for r in rows):
        for gate, marker in GATE_MARKERS.items():
            found = [r for r in rows if (r.impl, r.gate) == (impl, gate)]
            if found:
                xs, ys = [r.floor_ms for r in found], [r.ms for r in found]
                ax.scatter(xs, ys, marker=marker, s=30, color=colours[impl], label=f"{impl}, {gate}", alpha=0.85)
    for members in _neighbours(rows):
        text = "\n".join(dict.fromkeys(r.case for r in sorted(members, key=lambda r: -r.ms)))
        lowest = min(members, key=lambda r: r.ms)
        place = {"textcoords": "offset points", "xytext": (0, -7), "fontsize": 6.5, "ha": "center", "va": "top"}
        ax.annotate(text, (lowest.floor_ms, lowest.ms), **place)
    _log_axes(ax)
    ax.set_xlabel("floor: bytes that must move at this run's copy rate, ms", fontsize=8)
    ax.set_ylabel("median, ms", fontsize=8)
    ax.set_title(rows[0].op, fontsize=9, loc="left")
    ax.grid(alpha=0.25, which="both")
    ax.legend(fontsize=7)


def _neighbours(rows: Sequence[Record]) -> list[list[Record]]:
    """The rows in groups whose floors are less than half apart: their names are written as one."""
    groups: list[list[Record]] = []
    for row in sorted(rows, key=lambda r: r.floor_ms):
        if groups and row.floor_ms <= 1.5 * groups[-1][0].floor_ms:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _log_axes(ax: Axes) -> None:
    """Logarithmic axes with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    ax.tick_params(labelsize=7.5)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=10)
    fresh = path.with_name(path.name + ".tmp.png")
    figure.savefig(fresh)
    fresh.replace(path)


def _colours(records: Sequence[Record]) -> dict[str, str]:
    peers = list(dict.fromkeys(r.impl for r in records if not is_ours(r)))
    return {
        r.impl: OURS_COLOUR if is_ours(r) else PEER_COLOURS[peers.index(r.impl) % len(PEER_COLOURS)] for r in records
    }


def _panel(ax: Axes, rows: Sequence[Record], records: Sequence[Record], colours: dict[str, str]) -> None:
    """One (op, case): bars from top to bottom in the order of `rows`, the floor as a dashed line."""
    places = list(range(len(rows)))[::-1]
    ax.barh(places, [r.ms for r in rows], color=[colours[r.impl] for r in rows], height=0.72)
    for place, row in zip(places, rows):
        ours = next((x for x in records if is_ours(x) and x.group == row.group), None)
        times = None if is_ours(row) or ours is None else ratio(ours, row)
        label = f" {number(row.ms)} ms" + (f", cula is {times:.2f}x as fast" if times else "")
        ax.text(row.ms, place, label, va="center", fontsize=7.5)
    ax.set_yticks(places, [f"{r.impl}, {r.gate}" for r in rows], fontsize=7.5)
    ax.set_xscale("log")
    floors = [r.floor_ms for r in rows if r.floor_ms]
    smallest = min([r.ms for r in rows] + floors)
    ax.set_xlim(0.6 * smallest, 12 * max(r.ms for r in rows))
    if floors:
        ax.axvline(max(floors), color="#555555", linestyle="--", linewidth=0.9)
    ax.set_title(f"{rows[0].op} {rows[0].case} (ms, shorter is better; dashed: floor)", fontsize=8.5, loc="left")
    ax.tick_params(axis="x", labelsize=7.5)
    ax.grid(axis="x", alpha=0.3)
