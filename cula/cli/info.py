"""`cula info`: versions, devices, environment, and what runs here and why the rest does not."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

import click

import cula
from cula.cli.console import make_console, make_table
from cula.host import env

#: What is looked up: (label, module, distributions that may hold it, the extra that installs it).
PACKAGES = (
    ("torch", "torch", ("torch",), None),
    ("triton", "triton", ("triton", "pytorch-triton"), "triton"),
    ("CuTe DSL", "cutlass", ("nvidia-cutlass-dsl",), "cute"),
    ("numba", "numba", ("numba",), "cpu"),
    ("FLA", "fla", ("fla-core", "flash-linear-attention"), "fla"),
    ("transformers", "transformers", ("transformers",), "transformers"),
)

EXAMPLES = """\b
Examples:
  cula info
  CULA_IMPLEMENTATION=eager cula info
"""


@click.command(name="info", epilog=EXAMPLES)
def command() -> None:
    """Show versions, devices, environment variables, and which implementations run on this machine."""
    console = make_console()

    table = make_table("Versions", "package", "version")
    table.add_row("cula", cula.__version__)
    table.add_row("Python", f"{platform.python_version()} ({platform.system()} {platform.machine()})")
    for label, version in package_versions():
        table.add_row(label, version)
    console.print(table)

    table = make_table("Devices", "device", "arch", "name", "size")
    for row in devices():
        table.add_row(*row)
    console.print(table)

    table = make_table("Environment", "variable", "value", "known values")
    for name, value, known in environment():
        table.add_row(name, value, known)
    console.print(table)

    table = make_table(
        "Implementations on this machine", "stage", "name", "mechanism", "written in", "runs here", "status"
    )
    for row in implementations():
        table.add_row(*row)
    console.print(table)


def package_versions() -> Iterator[tuple[str, str]]:
    """(label, version or how to install it) of the packages that cula can use, importing none of them."""
    for label, module, distributions, extra in PACKAGES:
        if find_spec(module) is None:
            requirement = f"'cula[{extra}]'" if extra else label
            yield label, f"not found: pip install {requirement}"
        else:
            yield label, next(filter(None, map(_version, distributions)), "found, version unknown")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def devices() -> Iterator[tuple[str, str, str, str]]:
    """(device, arch, name, size) of the CPU and of every CUDA device."""
    if find_spec("torch") is None:
        yield "none", "", "torch is not installed", ""
        return
    import torch

    from cula.host.arch import cuda_target

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cpu", "cpu", _cpu_name(), f"{cores} cores, {torch.get_num_threads()} torch threads"
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = "torch finds no CUDA device" if built else "this torch is built without CUDA"
        yield "cuda", "", f"none: {reason}", ""
        return
    for index in range(torch.cuda.device_count()):
        target = cuda_target(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        size = f"{target.sm_count} SMs, {memory:.0f} GiB"
        yield f"cuda:{index}", target.name, torch.cuda.get_device_name(index), size


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def environment() -> Iterator[tuple[str, str, str]]:
    """(variable, value, known values) of each variable that cula reads."""
    for name, known in env.VARIABLES.items():
        value = os.environ.get(name)
        wrong = " (not a known value)" if value and value not in known else ""
        yield name, f"{value}{wrong}" if value else "not set", ", ".join(known)


def implementations() -> Iterator[tuple[str, str, str, str, str, str]]:
    """(stage, name, mechanism, written in, "yes" or the reason, status) of every row of every stage."""
    for row, reason in cula.available().rows:
        stage = f"{row.algorithm} {row.stage}"
        yield stage, row.name, row.mechanism, row.dsl, "yes" if reason is None else f"no: {reason}", row.status
