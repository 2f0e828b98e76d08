"""`cula compile`: says that this version has no kernels to compile ahead of time."""

from __future__ import annotations

import click

EXAMPLES = """\b
Example:
  cula compile --arch sm90
"""


@click.command(
    name="compile",
    epilog=EXAMPLES,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
def command(arguments: tuple[str, ...]) -> None:
    """Compile kernels ahead of time for an architecture. This version has none: it exits with code 2."""
    raise click.ClickException(
        "this version of cula has no kernels that are compiled ahead of time; nothing was compiled"
    )
