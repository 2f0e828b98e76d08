"""The `cula` command: finds the subcommands lazily and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

import click

import cula

#: Subcommand -> its line in `cula --help`. The command itself is `cula.cli.<name>:command`.
COMMANDS = {
    "info": "What this machine has: versions, devices, and which implementations run here.",
    "explain": "Which implementation a call would use on a device, and why the others refuse.",
    "check": "Compare every implementation that runs here with the reference.",
    "bench": "Time the implementations that run here beside the peers installed here.",
    "demo": "Train a small model on real text, then generate with it.",
    "compile": "Compile kernels ahead of time for an architecture.",
}

EXAMPLES = """\b
Examples:
  cula info
  cula explain chunk_kda --device sm90 --B 1 --T 8192 --H 64
  cula check
  cula demo
"""


class LazyGroup(click.Group):
    """A group whose commands are imported when they run, so that `cula --help` loads none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, None where there is none."""
        if cmd_name not in COMMANDS:
            return None
        return import_module(f"cula.cli.{cmd_name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, but an unknown name is answered with the nearest one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = get_close_matches(args[0], COMMANDS, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"it is one of {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from `COMMANDS`, importing nothing."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    name="cula",
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(cula.__version__, prog_name="cula")
def command() -> None:
    """Linear-attention kernels (Kimi Delta Attention, Lightning Attention) on CPU and GPU."""


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors that cula or click raise become one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        result = command.main(arguments or ["--help"], prog_name="cula", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "cula"
        return _report(path, error.format_message(), f" (see {path} --help)" if context else "")
    except cula.CulaError as error:
        return _report("cula", str(error))
    except (KeyboardInterrupt, click.Abort):
        print("cula: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has left: point stdout elsewhere, so that the flush at exit stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return result if isinstance(result, int) else 0


def _report(path: str, message: str, hint: str = "") -> int:
    print(f"{path}: {' '.join(message.split())}{hint}", file=sys.stderr)
    return 2
