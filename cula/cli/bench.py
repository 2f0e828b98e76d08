"""`cula bench`: time the implementations that run here beside the peers installed here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cula.bench.cases import DEVICES, GATES, OPS, names, select

if TYPE_CHECKING:
    from cula.bench.cases import Case
    from cula.bench.facts import Facts
    from cula.bench.records import Record

EXAMPLES = """\b
Examples:
  cula bench --device cpu
  cula bench --op kda_prefill --gate mixed --rounds 40
  cula bench --op kda_decode --json benchmarks/results/ --plot bench.png --html bench.html

Every implementation is first compared with the float64 recurrence; one that is wrong gets no time. All of
one row are timed in turn in this process, so ratios mean more than milliseconds. Peers that are not
installed are left out: pip install transformers ggml-python.

Exit code 0; 1 where a check is red (with --enforce also where a bar is missed); 2 for a bad argument.
"""


def _known_case(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    known = list(dict.fromkeys(name for device in DEVICES for name in names(device)))
    for value in values:
        if value not in known:
            raise click.BadParameter(f"{value!r} is no case; give one of {', '.join(known)}", ctx, parameter)
    return values


def _writable(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a file that could not be written before anything is measured."""
    if value is not None and parameter.name == "json_file" and value.suffix != ".jsonl" and not value.is_dir():
        raise click.BadParameter(f"{str(value)!r} must end in .jsonl or be a folder that exists", ctx, parameter)
    if value is not None and not value.is_dir() and not value.parent.is_dir():
        raise click.BadParameter(f"the folder {str(value.parent)!r} does not exist; make it first", ctx, parameter)
    if value is not None and value.is_dir() and parameter.name != "json_file":
        raise click.BadParameter(f"{str(value)!r} is a folder; name a file", ctx, parameter)
    return value


_FILE = click.Path(path_type=Path)


@click.command(name="bench", epilog=EXAMPLES)
@click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True, help="Whose rows to run.")
@click.option("--op", "ops", multiple=True, type=click.Choice(OPS), help="Only this op; may be repeated.")
@click.option("--case", "cases", multiple=True, callback=_known_case, metavar="NAME",
              help="Only this case, such as B1-T2048-H4; may be repeated.")  # fmt: skip
@click.option("--gate", "gates", multiple=True, type=click.Choice(GATES),
              help="Only this gate; may be repeated.  [default: all three]")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True,
              help="Timed rounds a row; slow peers take part in fewer.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True,
              help="Threads, for everybody the same.")  # fmt: skip
@click.option("--memory/--no-memory", default=True, help="Measure peak memory, in processes of their own.")
@click.option("--json", "json_file", type=_FILE, callback=_writable, metavar="FILE",
              help="Append result lines to FILE; a folder gets <device>-<date>-<topic>.jsonl.")  # fmt: skip
@click.option("--topic", default="kda", show_default=True, help="Last part of that file's name.")
@click.option("--plot", type=_FILE, callback=_writable, metavar="FILE.png", help="Draw the medians.")
@click.option("--html", type=_FILE, callback=_writable, metavar="FILE", help="Write a page of its own.")
@click.option("--enforce", is_flag=True, help="Exit with code 1 where a bar is missed.")
@click.pass_context
def command(
    context: click.Context,
    device: str,
    ops: tuple[str, ...],
    cases: tuple[str, ...],
    gates: tuple[str, ...],
    rounds: int,
    threads: int,
    memory: bool,
    enforce: bool,
    **files: Any,
) -> None:
    """Time the implementations that run here beside the peers installed here, after checking their results."""
    rows = select(device, ops, cases)
    if not rows:
        known = ", ".join(names(device, ops))
        raise click.UsageError(f"--op {' '.join(ops)} has no --case {' '.join(cases)}; give one of {known}")
    _check_plot(files["plot"])
    records, facts, lines = _measure(rows, gates or GATES, device, rounds, threads, memory)
    _write(records, facts, lines, **files)
    context.exit(_code(records, enforce))


def _check_plot(plot: Path | None) -> None:
    from importlib.util import find_spec

    if plot is not None and plot.suffix.lower() != ".png":
        raise click.BadParameter(f"{plot.name!r} must end in .png", param_hint="--plot")
    if plot is not None and find_spec("matplotlib") is None:
        raise click.BadParameter("needs matplotlib: pip install matplotlib", param_hint="--plot")


def _measure(
    rows: list[Case], gates: tuple[str, ...], device: str, rounds: int, threads: int, memory: bool
) -> tuple[list[Record], Facts, list[str]]:
    """Run all rows, printing each row's table as it is done. Everything heavy is imported here."""
    from cula.bench import facts as machine
    from cula.bench.timing import set_threads

    set_threads(threads)
    from cula.bench.ours import Cula
    from cula.bench.peers import PEERS
    from cula.bench.report import absent, case_table, header, title
    from cula.bench.runner import Options, in_fresh_process, run_case
    from cula.cli.console import make_console

    console = make_console()
    peers = list(PEERS.values())
    here = {peer.name: peer.version() if peer.available()[0] else None for peer in peers}
    facts = machine.collect(device, threads, here)
    lines = header(facts, rounds, PEERS["ggml"].flags() if here["ggml"] else ())
    for line in [*lines, *absent(peers)]:
        console.print(line)
    records: list[Record] = []
    with console.status("") as status:
        options = Options(rounds=rounds, threads=threads, memory=memory, say=status.update, note=console.print)
        measure = in_fresh_process(threads)
        for row in rows:
            found = []
            for gate in gates:
                found += run_case(row, gate, [Cula(), *peers], facts, options, measure)
            console.print("", title(found[0]), case_table(found, console.width), sep="\n")
            records += found
    return records, facts, lines


def _write(
    records: list[Record],
    facts: Facts,
    lines: list[str],
    json_file: Path | None,
    topic: str,
    plot: Path | None,
    html: Path | None,
) -> None:
    """The files that were asked for."""
    from cula.bench import facts as machine
    from cula.bench import page
    from cula.bench import plot as picture
    from cula.bench import records as results

    if json_file is not None:
        if json_file.is_dir():
            name = results.default_name(machine.slug(facts.cpu), facts.date, machine.slug(topic))
            json_file = json_file / name
        results.append(json_file, records)
        click.echo(f"results: {json_file}")
    if plot is not None:
        picture.bars(records, plot, f"cula bench: {facts.cpu}, {facts.threads} threads")
        click.echo(f"plot: {plot}")
    if html is not None:
        page.write(records, lines, html)
        click.echo(f"page: {html}")


def _code(records: list[Record], enforce: bool) -> int:
    """1 where one of ours is red, or with `enforce` where a bar is missed; else 0. Says which bars are missed."""
    from cula.bench.records import is_ours
    from cula.bench.report import verdicts

    missed = [(r, what, value, bar) for r, what, value, bar, met in verdicts(records) if not met]
    for record, what, value, bar in missed:
        speed = f"{value:.2f}x the speed of {record.impl}, the bar is {bar:g}x"
        memory = f"peak memory {value:.1f}x the inputs, the bar is {bar:g}x"
        line = speed if what == "speed" else memory
        click.echo(f"bar missed: {record.op} {record.case} {record.gate}: {line}")
    red = any(is_ours(r) and r.ms is None for r in records)
    return 1 if red or (enforce and missed) else 0
