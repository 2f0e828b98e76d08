"""`cula explain`: which implementation a call would use, stage by stage, and why the others refuse."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import click

import cula
from cula.cli.console import make_console, make_table
from cula.host import env
from cula.host.table import Row, Verdict, request_for

EXAMPLES = """\b
Examples:
  cula explain
  cula explain chunk_kda --device sm90 --B 1 --T 8192 --H 64
  cula explain chunk_kda --device cpu --T 4096 --H 8 --grad --flag chunk_size=32
  cula explain kda_prefill --device sm90 --H 32 --lengths 1300,547,2048
"""

_WORDS = {"true": True, "false": False, "none": None}


def _parse_flag(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    flags = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"needs name=value, got {text!r}", ctx, parameter)
        flags[name] = _parse_value(value)
    return flags


def _parse_value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _parse_lengths(ctx: click.Context, parameter: click.Parameter, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = [-1]
    if min(lengths) < 0:
        raise click.BadParameter(f"needs token counts such as 1300,547,2048, got {text!r}", ctx, parameter)
    return lengths


@click.command(name="explain", epilog=EXAMPLES)
@click.argument("function", required=False)
@click.option("--device", help="cpu, cuda, cuda:N, or an architecture such as sm90 (default: this machine's best)")
@click.option("--B", "B", type=int, default=1, show_default=True, help="batch")
@click.option("--T", "T", type=int, default=1024, show_default=True, help="tokens")
@click.option("--H", "H", type=int, default=1, show_default=True, help="query/key heads")
@click.option("--HV", "HV", type=int, help="value heads (default: H)")
@click.option("--K", "K", type=int, default=128, show_default=True, help="key dimension")
@click.option("--V", "V", type=int, help="value dimension (default: K)")
@click.option("--lengths", callback=_parse_lengths, metavar="N,N,...", help="packed sequences, their token counts")
@click.option("--dtype", default="bf16", show_default=True, help="bf16, fp16, fp32 or fp64")
@click.option("--grad", is_flag=True, help="the call needs gradients")
@click.option(
    "--flag",
    "flags",
    multiple=True,
    callback=_parse_flag,
    metavar="NAME=VALUE",
    help="an argument of FUNCTION itself; may be repeated",
)
def command(function: str | None, flags: dict[str, Any], **problem: Any) -> None:
    """Show which implementation FUNCTION would use, and why the others refuse. No name: every function.

    Needs no GPU: --device sm90 describes one.
    """
    try:
        explanation = cula.explain(function, flags=flags or None, **problem)
    except TypeError as error:
        # An argument that FUNCTION does not have, or a value of the wrong type.
        raise click.UsageError(str(error)) from error

    table = make_table(
        function or "Every function", "stage", "implementation", "mechanism", "written in", "verdict", "status"
    )
    for stage, verdicts in explanation.stages:
        used = used_row(stage, verdicts, flags.get("implementation"))
        for verdict in verdicts:
            row = verdict.row
            answer = "accepts" if verdict.reason is None else f"no: {verdict.reason}"
            answer += ", used" if row is used else ""
            table.add_row(stage, row.name, row.mechanism, row.dsl, answer, row.status)
        table.add_section()
    make_console().print(table)


def used_row(stage: str, verdicts: Sequence[Verdict], implementation: Any) -> Row | None:
    """The row that a call would run: of the forced name, else of the preferred one, else the first that accepts."""
    accepted = [verdict.row for verdict in verdicts if verdict.reason is None]
    forced = request_for(implementation, "backward" if "backward" in stage else "forward")
    if forced not in (None, "auto"):
        return next((row for row in accepted if row.name == forced), None)
    preferred = env.preferred_implementation() if forced is None else None
    return next((row for row in accepted if row.name == preferred), accepted[0] if accepted else None)
