"""The `cula` command: help, exit codes, and one line that says what to change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

import cula
from cula.__main__ import main
from cula.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


def shell(*arguments: str, program: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m cula` (or `python -c program`) in a fresh interpreter."""
    command = ["-c", program] if program else ["-m", "cula"]
    return subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def refused(capsys: Capture, *arguments: str) -> str:
    """The one line on stderr of a call that must end with code 2 and print nothing else."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"cula, version {cula.__version__}"


def test_module_and_console_command_are_the_same() -> None:
    done = shell("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"cula, version {cula.__version__}")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command_with_an_example(capsys: Capture, arguments: list[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert [name for name in cli.COMMANDS if f"\n  {name} " not in out] == []
    assert "Examples:\n  cula info\n" in out.replace("    cula", "  cula").replace("  Examples", "Examples")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_has_an_example(capsys: Capture, name: str) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Example" in out
    assert f"cula {name}" in out.partition("Example")[2]


def test_help_imports_no_command() -> None:
    program = "import sys\nfrom cula.__main__ import main\nmain(['--help'])\nprint([m for m in sys.modules if m in "
    done = shell(program=program + "('torch', 'numpy', 'rich', 'cula.cli.info', 'cula.cli.demo')])")
    assert done.stdout.splitlines()[-1] == "[]"


def test_unknown_command_names_the_nearest(capsys: Capture) -> None:
    assert "did you mean 'explain'" in refused(capsys, "explian")
    assert "it is one of info, explain" in refused(capsys, "zzz")


def test_unknown_option_is_one_line(capsys: Capture) -> None:
    err = refused(capsys, "info", "--nope")
    assert "--nope" in err
    assert "cula info --help" in err


def test_compile_says_that_there_is_nothing_to_compile(capsys: Capture) -> None:
    assert "no kernels that are compiled ahead of time" in refused(capsys, "compile", "--arch", "sm90")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            cula.RangeError("chunk_size must be 16, 32 or 64;\n got 7"),
            2,
            "cula: chunk_size must be 16, 32 or 64; got 7\n",
        ),
        (cula.NotSupportedError("sm90 needs K=128, got 64"), 2, "cula: sm90 needs K=128, got 64\n"),
        (click.ClickException("no such file"), 2, "cula: no such file\n"),
        (KeyboardInterrupt(), 130, "cula: interrupted\n"),
    ],
    ids=["RangeError", "NotSupportedError", "ClickException", "KeyboardInterrupt"],
)
def test_an_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, error: BaseException, code: int, message: str
) -> None:
    def fail(self: click.Group, ctx: click.Context, cmd_name: str) -> click.Command:
        raise error

    monkeypatch.setattr(cli.LazyGroup, "get_command", fail)
    assert main(["info"]) == code
    out, err = capsys.readouterr()
    assert (out, err.lstrip("\n")) == ("", message)  # after ^C, click ends the terminal's line first


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1)])
def test_a_command_may_return_its_exit_code(monkeypatch: pytest.MonkeyPatch, returned: int | None, code: int) -> None:
    monkeypatch.setattr(
        cli.LazyGroup, "get_command", lambda self, ctx, name: click.Command(name, callback=lambda: returned)
    )
    assert main(["check"]) == code


def test_a_command_may_exit_through_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = click.Command("check", callback=lambda: click.get_current_context().exit(1))
    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: leave)
    assert main(["check"]) == 1


def test_a_mistake_in_the_program_is_no_bad_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only errors that cula raises on purpose become a line; a bug keeps its traceback."""

    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: click.Command(name, callback=broken))
    with pytest.raises(ZeroDivisionError):
        main(["info"])


@pytest.mark.parametrize(
    ("blocked", "named"), [(("click",), "click"), (("rich",), "rich"), (("click", "rich"), "click and rich")]
)
def test_without_its_packages_the_command_names_the_extra(blocked: tuple[str, ...], named: str) -> None:
    program = (
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        f"u.find_spec = lambda name, *a: None if name in {blocked} else find(name, *a)\n"
        "from cula.__main__ import main\n"
        "sys.exit(main(['info']))"
    )
    done = shell(program=program)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"cula: the command line needs {named}: pip install 'cula[cli]'\n"


def test_a_closed_pipe_ends_quietly() -> None:
    done = subprocess.run(
        f"'{sys.executable}' -m cula info | true",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in done.stderr
