"""`cula bench`: time the implementations that run here beside the peers installed here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cula.bench.cases import DEVICES, GATES, OPS, names, select
from cula.host.env import IMPLEMENTATION_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from cula.bench.cases import Case
    from cula.bench.facts import Facts
    from cula.bench.records import Record

EXAMPLES = """\b
Examples:
  cula bench --device cpu
  cula bench --op kda_prefill --gate mixed --rounds 40
  cula bench --op kda_decode --json benchmarks/results/ --plot bench.png --html bench.html
  cula bench --device cuda --op kda_prefill --case B1-T8192-H64 --peer cudnn --json benchmarks/results/

Every implementation is first compared with the float64 recurrence; one that is wrong gets no time. All of
one row are timed in turn in this process, so ratios mean more than milliseconds. Peers that are not
installed are left out: pip install transformers ggml-python (on a GPU fla-core nvidia-cudnn-frontend).

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

#: Peers of each device, and the word for none of them.
_PEERS = {"cpu": ("ggml", "transformers"), "cuda": ("fla", "cudnn")}
_NO_PEER = "none"


@click.command(name="bench", epilog=EXAMPLES)
@click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True, help="Whose rows to run.")
@click.option("--op", "--ops", "ops", multiple=True, type=click.Choice(OPS), help="Only this op; may be repeated.")
@click.option("--case", "--cases", "cases", multiple=True, callback=_known_case, metavar="NAME",
              help="Only this case, such as B1-T2048-H4; may be repeated.")  # fmt: skip
@click.option("--gate", "--gates", "gates", multiple=True, type=click.Choice(GATES),
              help="Only this gate; may be repeated.  [default: all three]")  # fmt: skip
@click.option("--peer", "--peers", "peers", multiple=True,
              type=click.Choice([*(name for found in _PEERS.values() for name in found), _NO_PEER]),
              help="Only this peer; may be repeated.  [default: all that are installed]")  # fmt: skip
@click.option("--implementation", "implementations", multiple=True, type=click.Choice(IMPLEMENTATION_NAMES),
              help="Force this implementation of ours; may be repeated.  [default: cula's choice]")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True,
              help="Timed rounds a row; slow peers take part in fewer.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True,
              help="Threads, for everybody the same.")  # fmt: skip
@click.option("--memory/--no-memory", default=True, help="Measure peak memory, in processes of their own.")
@click.option("--json", "json_file", type=_FILE, callback=_writable, metavar="FILE",
              help="Append result lines to FILE; a folder gets <device>-<date>-<topic>.jsonl.")  # fmt: skip
@click.option("--commit", metavar="HASH", help="What the checkout is, where its files are a copy without git.")
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
    enforce: bool,
    json_file: Path | None,
    topic: str,
    plot: Path | None,
    html: Path | None,
    **how: Any,
) -> None:
    """Time the implementations that run here beside the peers installed here, after checking their results."""
    rows = select(device, ops, cases)
    if not rows:
        known = ", ".join(names(device, ops))
        given = " ".join(
            f"--{option} {' '.join(values)}" for option, values in (("op", ops), ("case", cases)) if values
        )
        raise click.UsageError(f"--device {device} has no row for {given}; give one of {known}")
    how["peers"] = _peers(device, how["peers"])
    _check_plot(plot)
    if device == "cuda":
        _check_gpu()
        records, facts, lines = _measure_gpu(rows, gates or GATES, _place(json_file, topic), **how)
    else:
        records, facts, lines = _measure(rows, gates or GATES, **how)
        _append(_place(json_file, topic), records, facts)
    _write(records, facts, lines, plot, html)
    context.exit(_code(records, enforce))


def _peers(device: str, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The peers to time on `device`, in the order of its list."""
    known = _PEERS[device]
    for name in wanted:
        if name not in (*known, _NO_PEER):
            raise click.UsageError(
                f"--peer {name} is no peer of --device {device}; give {', '.join(known)} or {_NO_PEER}"
            )
    return tuple(name for name in known if not wanted or name in wanted)


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise click.BadParameter("torch finds no CUDA device here", param_hint="--device cuda")


def _check_plot(plot: Path | None) -> None:
    from importlib.util import find_spec

    if plot is not None and plot.suffix.lower() != ".png":
        raise click.BadParameter(f"{plot.name!r} must end in .png", param_hint="--plot")
    if plot is not None and find_spec("matplotlib") is None:
        raise click.BadParameter("needs matplotlib: pip install matplotlib", param_hint="--plot")


def _measure(
    rows: list[Case],
    gates: tuple[str, ...],
    *,
    peers: tuple[str, ...],
    implementations: tuple[str, ...],
    rounds: int,
    threads: int,
    memory: bool,
    commit: str | None,
) -> tuple[list[Record], Facts, list[str]]:
    """Run all CPU rows, printing each row's table as it is done. Everything heavy is imported here."""
    from cula.bench import facts as machine
    from cula.bench.timing import set_threads

    set_threads(threads)
    from cula.bench.ours import Cula
    from cula.bench.peers import PEERS
    from cula.bench.report import absent, case_table, header, title
    from cula.bench.runner import Options, in_fresh_process, run_case
    from cula.cli.console import make_console

    console = make_console()
    others = [PEERS[name] for name in peers]
    here = {peer.name: peer.version() if peer.available()[0] else None for peer in others}
    facts = machine.collect("cpu", threads, here, commit)
    lines = header(facts, rounds, PEERS["ggml"].flags() if here.get("ggml") else ())
    for line in [*lines, *absent(others)]:
        console.print(line)
    records: list[Record] = []
    ours = [Cula(name, name) for name in implementations] or [Cula()]
    with console.status("") as status:
        options = Options(rounds=rounds, threads=threads, memory=memory, say=status.update, note=console.print)
        measure = in_fresh_process(threads)
        for row in rows:
            found = []
            for gate in row.gates(gates):
                found += run_case(row, gate, [*ours, *others], facts, options, measure)
            console.print("", title(found[0]), case_table(found, console.width), sep="\n")
            records += found
    return records, facts, lines


def _measure_gpu(
    rows: list[Case],
    gates: tuple[str, ...],
    place: Callable[[Facts], Path | None],
    *,
    peers: tuple[str, ...],
    implementations: tuple[str, ...],
    rounds: int,
    commit: str | None,
    **_: Any,
) -> tuple[list[Record], Facts, list[str]]:
    """Run all GPU rows; each (case, gate) is printed, and appended to its file, as it is done."""
    from cula.bench import facts as machine
    from cula.bench.cuda import report, runner, session
    from cula.bench.cuda.implementations import PEERS, Ours
    from cula.cli.console import make_console, make_table

    console = make_console()
    facts = machine.collect("cuda", 0, session.versions(peers), commit)
    lines = [
        *facts.lines(),
        f"medians of {rounds} rounds; the gate, the norms and the sigmoid of beta are the kernel's",
    ]
    for line in [*lines, *(f"{name}: not measured, not installed" for name in peers if not facts.peers[name])]:
        console.print(line)
    json_file = place(facts)

    def show(found: list[Record], records: list[Record]) -> None:
        table = make_table(report.title(found[0]), *report.COLUMNS)
        for record in found:
            table.add_row(*report.cells(record, records))
        console.print(table)

    options = runner.Options(say=console.print, note=console.print)
    device = session.Cuda(rounds, console.print)
    ours = [Ours(name) for name in implementations] or [Ours()]
    here = [name for name in peers if PEERS[name].available()[0]]
    records = session.run(rows, gates, (ours, here), facts, device, json_file=json_file, show=show, options=options)
    if json_file is not None:
        click.echo(f"results: {json_file}")
    return records, facts, lines


def _place(json_file: Path | None, topic: str) -> Callable[[Facts], Path | None]:
    """Where the results of a run go, once its machine is known."""
    from cula.bench import facts as machine
    from cula.bench.records import default_name

    def place(facts: Facts) -> Path | None:
        if json_file is None or not json_file.is_dir():
            return json_file
        return json_file / default_name(machine.slug(facts.gpu or facts.cpu), facts.date, machine.slug(topic))

    return place


def _append(place: Callable[[Facts], Path | None], records: list[Record], facts: Facts) -> None:
    from cula.bench.records import append

    json_file = place(facts)
    if json_file is not None:
        append(json_file, records)
        click.echo(f"results: {json_file}")


def _write(records: list[Record], facts: Facts, lines: list[str], plot: Path | None, html: Path | None) -> None:
    """The picture and the page, where they were asked for."""
    from cula.bench import page
    from cula.bench import plot as picture

    if plot is not None:
        if facts.gpu:
            picture.floors(records, plot, f"cula bench: {facts.gpu}")
        else:
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
