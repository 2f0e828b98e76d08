"""Run flash-linear-attention's own KDA tests against cula: FLA's public functions are replaced, its tests are not.

    python tools/fla_suite.py PATH/TO/tests/ops/test_kda.py [--implementation NAME] [-- pytest arguments]

PATH is that file of a checkout of FLA; fla itself must be importable (and with it Triton). Before pytest collects the
file, the functions that it imports from `fla.ops.kda` become cula's, by name. What stays FLA's is what it compares
with: naive_recurrent_kda, the naive gates and assert_close. `DIFFERENCES` lists the tests whose failure is no fault.

Prints passed, failed and skipped, the calls that reached cula, and the ids of failed tests. Exit code 0 where nothing
but known differences failed, 1 where something did or nothing ran, 2 for a bad argument.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: (module of FLA, name there) -> the function here that takes its place.
REPLACED = {
    ("fla.ops.kda", "chunk_kda"): "chunk_kda",
    ("fla.ops.kda.chunk", "chunk_kda"): "chunk_kda",
    ("fla.ops.kda", "fused_recurrent_kda"): "fused_recurrent_kda",
    ("fla.ops.kda.fused_recurrent", "fused_recurrent_kda"): "fused_recurrent_kda",
    ("fla.ops.kda.fused_recurrent", "fused_recurrent_kda_fwd"): "fused_recurrent_kda_fwd",
    ("fla.ops.kda.gate", "fused_kda_gate"): "fused_kda_gate",
    ("fla.ops.kda.naive", "naive_chunk_kda"): "naive_chunk_kda",
}

#: Tests, or single cases of them, whose failure is no fault of cula's, and why.
DIFFERENCES = {
    "test_chunk_invalid_chunk_size": "cula takes chunks of 16 tokens too",
    "test_gate[B1-T2-H2-D12-a_logTrue-biasFalse-lowerbound-5.0]": (
        "FLA's fp32 reference of dA is itself off by 2e-4 on saturated gates (float64: cula 6e-7), the limit is 1e-4"
    ),
}


def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` that also takes FLA's old name of `state_v_first`, with FLA's warning and its refusal of both."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "transpose_state_layout" in kwargs:
            old = kwargs.pop("transpose_state_layout")
            if kwargs.get("state_v_first"):
                raise ValueError("state_v_first and transpose_state_layout are one argument: give one")
            warnings.warn("transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=2)
            kwargs["state_v_first"] = old
        return function(*args, **kwargs)

    return call


def decode_over_pool(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    initial_state: Any,
    ssm_state_indices: Any,
    cu_seqlens: Any,
    use_gate_in_kernel: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    **named: Any,
) -> tuple[Any, Any]:
    """FLA's forward over a pool of states, one token a sequence and in place, as one kda_decode.

    Its pool is K-first unless `state_v_first`; cula's is V-first, so it is copied there and back.
    """
    from cula.kda import kda_decode

    for name, value in {"inplace_final_state": True, "output_final_state": False, "num_accepted_tokens": None}.items():
        if named.pop(name, value) != value:
            raise NotImplementedError(f"{name} other than {value}")
    if len(cu_seqlens) - 1 != q.shape[1]:
        raise NotImplementedError("more than one token a sequence")
    v_first = named.pop("state_v_first", False)
    pool = initial_state if v_first else initial_state.transpose(-1, -2).contiguous()
    out = kda_decode(
        q, k, v, g, beta, state_pool=pool, state_indices=ssm_state_indices, gate_is_raw=use_gate_in_kernel,
        normalize_qk=use_qk_l2norm_in_kernel, beta_is_logits=use_beta_sigmoid_in_kernel, **named,
    )  # fmt: skip
    if not v_first:
        initial_state.copy_(pool.transpose(-1, -2))
    return out, initial_state


def recurrent_forward(*args: Any, ssm_state_indices: Any = None, **named: Any) -> tuple[Any, Any]:
    """FLA's inner forward: over a pool where slots are given, else as fused_recurrent_kda."""
    from cula.kda import fused_recurrent_kda

    if ssm_state_indices is not None:
        return decode_over_pool(*args, ssm_state_indices=ssm_state_indices, **named)
    named.pop("inplace_final_state", None)
    return fused_recurrent_kda(*args, **named)


def ours() -> dict[str, Callable[..., Any]]:
    """What takes the place of FLA's functions, by the names in `REPLACED`."""
    from cula import kda

    return {
        "chunk_kda": renamed(kda.chunk_kda),
        "fused_recurrent_kda": renamed(kda.fused_recurrent_kda),
        "fused_recurrent_kda_fwd": recurrent_forward,
        "fused_kda_gate": kda.fused_kda_gate,
        "naive_chunk_kda": kda.kda_chunk_reference,
    }


class Plugin:
    """Puts cula's functions in FLA's places for the session, counts their calls, and keeps each test's outcome."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.outcomes: dict[str, str] = {}
        self._patch = pytest.MonkeyPatch()

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Before anything is collected."""
        functions = {name: self._counted(name, function) for name, function in ours().items()}
        for (module, attribute), name in REPLACED.items():
            self._patch.setattr(import_module(module), attribute, functions[name])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Leave FLA as it was."""
        self._patch.undo()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test is what its call says; a failure or skip in its set-up or tear-down counts too."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid.partition("::")[2]] = report.outcome

    def ids(self, outcome: str) -> list[str]:
        """The tests with this outcome."""
        return [name for name, found in self.outcomes.items() if found == outcome]

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **kwargs)

        return call


def difference(name: str) -> str | None:
    """Why a test, by its name with the case in brackets, may fail; None where it may not."""
    return DIFFERENCES.get(name, DIFFERENCES.get(name.partition("[")[0]))


def summary(plugin: Plugin) -> tuple[list[str], bool]:
    """(lines to print, True where nothing but known differences failed and something ran)."""
    failed = plugin.ids("failed")
    known = {name: why for name in failed if (why := difference(name)) is not None}
    counts = {outcome: len(plugin.ids(outcome)) for outcome in ("passed", "failed", "skipped")}
    lines = [", ".join(f"{outcome} {count}" for outcome, count in counts.items())]
    lines.append("calls of cula: " + (", ".join(f"{name} {n}" for name, n in sorted(plugin.calls.items())) or "none"))
    lines += [f"known difference: {name}: {why}" for name, why in known.items()]
    lines += [f"FAILED {name}" for name in failed if name not in known]
    return lines, len(known) == len(failed) and counts["passed"] > 0 and bool(plugin.calls)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the file; see the module."""
    parser = argparse.ArgumentParser(prog="tools/fla_suite.py", description="FLA's KDA tests against cula")
    parser.add_argument("file", type=Path, help="tests/ops/test_kda.py of a checkout of FLA")
    parser.add_argument("--implementation", help="the implementation of cula to prefer (CULA_IMPLEMENTATION)")
    parser.add_argument("arguments", nargs="*", metavar="-- ...", help="arguments for pytest, such as -k or -x")
    options = parser.parse_args(argv)
    if not options.file.is_file():
        parser.error(f"{options.file} is no file")
    sys.path.insert(0, str(ROOT))
    if options.implementation:
        os.environ["CULA_IMPLEMENTATION"] = options.implementation
    plugin = Plugin()
    fixed = [
        "-c",
        os.devnull,
        "--rootdir",
        str(options.file.parent),
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
    ]
    code = pytest.main([str(options.file), *fixed, "-q", "--tb=line", *options.arguments], plugins=[plugin])
    lines, good = summary(plugin)
    print("\n".join(lines))
    finished = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return 0 if good and finished else 1


if __name__ == "__main__":
    sys.exit(main())
