"""The loss curve as a PNG."""

from __future__ import annotations

from pathlib import Path

from cula.demo.checkpoint import History


def loss_curve(history: History, path: Path, title: str) -> None:
    """Draw training loss (each step, and its running mean) and validation loss, in bits per byte."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(1, history.step + 1)
    axes.plot(steps, history.train, color="#9db4d0", linewidth=0.8, label="training, each step")
    axes.plot(steps, _running_mean(history.train), color="#1f4e8c", linewidth=1.8, label="training, running mean")
    if history.validation:
        at, values = zip(*history.validation)
        label = f"validation (last: {values[-1]:.2f})"
        axes.plot(at, values, color="#c8501e", marker="o", markersize=4, linewidth=1.5, label=label)
    axes.set_ylim(0, 8.4)
    axes.set_xlim(0, max(2, history.step))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (bits per byte)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    fresh = path.with_suffix(".tmp.png")
    figure.savefig(fresh)
    fresh.replace(path)


def _running_mean(values: list[float], keep: float = 0.9) -> list[float]:
    """Exponential running mean, corrected for its start."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        means.append(total / weight)
    return means
