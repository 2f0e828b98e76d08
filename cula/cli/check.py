"""`cula check`: every implementation that runs here against the float64 recurrence, forward and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cula.checks.report import Report

EXAMPLES = """\b
Examples:
  cula check
  cula check --quick --implementation eager
  cula check --device cuda --report check.md

Each cell is the worst error over the grid and what the tolerance table allows: RMS of the difference over RMS
of the reference. Lengths 0 to 200, head groups, both state layouts, every gate, packed sequences, four dtypes.

Exit code 0; 1 where something misses; 2 for a bad argument.
"""


def _here(ctx: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """ "cpu" or "cuda" for a device that is on this machine; an architecture must be the GPU's own."""
    if text is None:
        return None
    import cula
    from cula.host.arch import parse_target

    try:
        target = parse_target(text)
    except cula.RangeError as error:
        raise click.BadParameter(str(error), ctx, parameter) from error
    if target.kind == "cpu":
        return "cpu"
    from cula.checks.rows import devices

    if "cuda" not in devices() or target.kind != "cuda":
        raise click.BadParameter(f"{text} is not on this machine; it has {', '.join(devices())}", ctx, parameter)
    own = parse_target("cuda")
    if not target.live and target.capability != own.capability:
        raise click.BadParameter(f"this machine's GPU is {own.name}, not {text}", ctx, parameter)
    return "cuda"


def _report_file(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that could not be written before anything is checked."""
    if path is None:
        return None
    if path.suffix not in (".json", ".md"):
        raise click.BadParameter(f"{str(path)!r} must end in .json or .md", ctx, parameter)
    if not path.parent.is_dir():
        raise click.BadParameter(f"the folder {str(path.parent)!r} does not exist; make it first", ctx, parameter)
    return path


@click.command(name="check", epilog=EXAMPLES)
@click.option("--device", callback=_here, help="cpu, cuda, or this GPU's architecture.  [default: all here]")
@click.option("--implementation", metavar="NAME", help="Only this one, such as eager.  [default: all here]")
@click.option("--quick", is_flag=True, help="A smaller grid and no call-order property: seconds, not minutes.")
@click.option("--report", type=click.Path(path_type=Path), callback=_report_file, metavar="FILE",
              help="Also write a .json or .md file.")  # fmt: skip
@click.pass_context
def command(
    context: click.Context, device: str | None, implementation: str | None, quick: bool, report: Path | None
) -> None:
    """Compare every implementation that runs here with the float64 recurrence."""
    _known(context, device, implementation)
    found = _run(device, implementation, quick)
    _show(found)
    if report is not None:
        found.write(report)
        click.echo(f"wrote {report}")
    context.exit(0 if found.passed else 1)


def _known(context: click.Context, device: str | None, implementation: str | None) -> None:
    """Refuse a name that nothing answers to."""
    from cula.checks import rows

    kinds = rows.devices() if device is None else (device,)
    labels = list(dict.fromkeys(label for kind in kinds for label in rows.subjects(kind)))
    names = list(dict.fromkeys([*map(rows.name_of, labels), *labels]))
    if implementation is not None and implementation not in names:
        where = " and ".join(kinds)
        text = f"{implementation!r} does not run on {where} here; it must be one of {', '.join(names)}"
        raise click.BadParameter(text, context, param_hint="'--implementation'")


def _facts(device: str | None, quick: bool) -> dict[str, Any]:
    import platform

    import torch

    import cula

    kinds = {"device": device or "all", "quick": quick, "cula": cula.__version__, "torch": torch.__version__}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {**kinds, "python": platform.python_version(), "machine": platform.machine(), "gpu": gpu}


def _run(device: str | None, implementation: str | None, quick: bool) -> Report:
    """The sweep and the properties, behind a progress bar where somebody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cula.checks import grid, properties, rows
    from cula.checks.report import Held, Report

    found = Report(facts=_facts(device, quick))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("calls", total=None)
        for done, total, outcomes in grid.sweep(device=device, implementation=implementation, quick=quick):
            found.outcomes += outcomes
            progress.update(task, completed=done, total=total)
        pairs = [
            (kind, label)
            for kind in (rows.devices() if device is None else (device,))
            for label in rows.subjects(kind)
            if implementation in (None, label, rows.name_of(label))
        ]
        names = [name for name in properties.PROPERTIES if not (quick and name == "call-order independence")]
        task = progress.add_task("properties", total=len(pairs) * len(names))
        for kind, label in pairs:
            for name in names:
                found.properties.append(Held(name, label, kind, _broken(name, label, kind)))
                progress.advance(task)
    return found


def _broken(name: str, label: str, kind: str) -> str | None:
    """None where the property holds, else what it says."""
    from cula.checks import properties

    try:
        properties.check(name, label, kind)
    except Exception as error:  # whatever goes wrong is the verdict
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _show(found: Report) -> None:
    """The table of errors, the properties, the misses, and one line at the end."""
    from cula.checks.report import HEAD, sentence
    from cula.cli.console import make_console, make_table

    console = make_console()
    lines = found.lines()
    table = make_table("Worst error of its tolerance, against the float64 recurrence", *HEAD)
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        end = following is None or following.function != line.function
        table.add_row(*line.cells(), style="red" if line.misses else None, end_section=end)
    console.print(table)
    table = make_table("Properties", "property", "implementation", "device", "verdict")
    for x in found.properties:
        table.add_row(x.name, x.implementation, x.device, x.reason or "holds", style="red" if x.reason else None)
    console.print(table)
    for miss in found.misses[:20]:
        console.print(f"missed: {sentence(miss)}", markup=False)
    for reason, count in found.refusals().items():
        console.print(f"refused {count} times: {reason}", markup=False)
    compared = sum(not x.refused for x in found.outcomes)
    broken = sum(x.reason is not None for x in found.properties)
    verdict = "all within tolerance" if found.passed else f"{len(found.misses)} missed, {broken} properties broken"
    console.print(f"{compared} comparisons: {verdict}", markup=False)
