"""`cula demo`: train a small byte-level model of KDA layers on real text, then generate with it."""

from __future__ import annotations

import click

_EPILOG = """\b
Examples:
  cula demo                                  train on the Python documentation, about two minutes on two cores
  cula demo --file novel.txt --prompt "She " train on your own text
  cula demo --resume                         go on after Ctrl-C

Files in --out: checkpoint.safetensors, loss.png, sample.txt. Exit code 0, 1 where the self check
misses, 2 for a bad argument, 130 after Ctrl-C (the checkpoint is then whole).
"""

#: How long torch's threads spin for work before they sleep. On two idle cores a training step takes 0.12 s with this
#: and with the default; beside another busy process 0.12 to 0.4 s with this, 2 s and more with the default.
SPIN = "1000"


@click.command(name="demo", epilog=_EPILOG)
@click.option("--file", metavar="PATH", help="Text to train on.  [default: the Python documentation topics]")
@click.option("--out", default="cula-demo", show_default=True, metavar="DIR", help="Folder for the results.")
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in --out, exactly where it stopped.")
@click.option("--steps", type=int, help="Training steps in all.  [default: 800]")
@click.option("--seed", type=int, help="Seed of weights, data order and sampling.  [default: 0]")
@click.option("--prompt", default="The ", show_default=True, help="What the generated text begins with.")
@click.option("--length", type=int, default=400, show_default=True, help="Bytes to generate; 0 for none.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, ...")
@click.option("--width", type=int, help="Model width.  [default: 192]")
@click.option("--layers", type=int, help="KDA layers.  [default: 3]")
@click.option("--heads", type=int, help="Heads of each layer, 64 wide.  [default: 4]")
@click.option("--context", type=int, help="Bytes per training window.  [default: 128]")
@click.option("--batch", type=int, help="Windows per step.  [default: 4]")
@click.pass_context
def command(
    ctx: click.Context,
    out: str,
    resume: bool,
    prompt: str,
    length: int,
    device: str,
    **given: int | str | None,
) -> None:
    """Train a small byte-level language model of KDA layers on real text, with a progress bar and a loss curve.

    Then check that prefill, decode and verify agree, and generate text through prefill and decode.
    """
    import os
    from pathlib import Path

    from cula.host.errors import CulaError

    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # read when torch is loaded, below
    try:
        from cula.demo.run import Options, execute, prepare

        plan = prepare(Options(Path(out), resume, device, prompt, length, dict(given)))
    except CulaError as error:
        raise click.UsageError(str(error), ctx) from None
    except KeyboardInterrupt:
        click.echo("\nInterrupted before anything was trained.", err=True)
        ctx.exit(130)
    from cula.cli.console import make_console

    ctx.exit(execute(plan, make_console()))
