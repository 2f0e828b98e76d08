"""Who is timed in a GPU row: our own call, and the peers that can be imported.

- fla: `fla.ops.kda.chunk_kda` with the very arguments of ours. Forward and training.
- cudnn: the Hopper KDA of cudnn-frontend, through its launcher, which takes device addresses. Prefill alone. It reads
  the raw gate and the beta logits in fp32, and states V-first.

Peers are found without an import; they are imported when a call is bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cula.bench.inputs import LOWER_BOUND

if TYPE_CHECKING:
    from cula.bench.cases import Case
    from cula.bench.cuda.inputs import RawInputs

#: cuDNN's numbers for what its kernel does in place: l2norm, the gate with a lower bound, the sigmoid of beta.
CUDNN_FLAGS = 1 | 2 | 4

#: A bound call: makes one call and returns its outputs by name, states K-first `[N, HV, K, V]`.
Call = Callable[[], dict[str, Any]]


class Subject(Protocol):
    """One implementation of GPU rows."""

    name: str

    def available(self) -> tuple[bool, str]:
        """(True, "") or (False, why not); imports nothing."""
        ...

    def version(self) -> str | None:
        """The installed version, None where it is not there."""
        ...

    def refusal(self, case: Case) -> str | None:
        """Why there is no call for `case`, None where there is one."""
        ...

    def bind(self, case: Case, inputs: RawInputs) -> Call:
        """A call on `inputs`; everything that is not the call itself is done here."""
        ...


def bind_kda(function: Callable[..., tuple], case: Case, inputs: RawInputs, **options: Any) -> Call:
    """A call of a function with chunk_kda's arguments: a forward, or forward and backward of a training row."""
    from cula.bench.cuda.truth import call_kda, leaves_of, train_kda

    if case.op == "kda_train":
        leaves = leaves_of(inputs)
        return lambda: train_kda(function, inputs, leaves, **options)
    return lambda: call_kda(function, inputs, **options)


class Ours:
    """`cula.kda.chunk_kda`. implementation: what is passed on as `implementation=`; None leaves the choice to cula.

    name: of the implementation that answers, which `chosen` says beforehand.
    """

    def __init__(self, implementation: str | None = None) -> None:
        self.implementation = implementation
        self.name = implementation or "cula"

    def available(self) -> tuple[bool, str]:
        """Always here."""
        return True, ""

    def version(self) -> str | None:
        """The version of cula."""
        import cula

        return cula.__version__

    def refusal(self, case: Case) -> str | None:
        """Nothing is refused beforehand: what the call raises is what the row says."""
        return None

    def chosen(self, case: Case) -> list[Any]:
        """The table's row for each stage of the call, the forward first; shorter where a stage has none."""
        import cula
        from cula.bench.cuda.inputs import FLAGS
        from cula.host import env

        flags = {**FLAGS, "A_log": True, "dt_bias": True}
        flags |= {"initial_state": True, "output_final_state": True} if case.states else {}
        explanation = cula.explain(
            "chunk_kda", device=case.device, B=case.B, T=case.T, H=case.H, HV=case.value_heads, K=case.K,
            V=case.value_dim, lengths=case.lengths or None, dtype=case.dtype, grad=case.op == "kda_train", flags=flags,
        )  # fmt: skip
        wanted = self.implementation or env.preferred_implementation()
        found = []
        for _, verdicts in explanation.stages:
            rows = [v.row for v in verdicts if v.reason is None]
            named = [row for row in rows if row.name == wanted]
            found += (named or ([] if self.implementation else rows))[:1]
        return found

    def bind(self, case: Case, inputs: RawInputs) -> Call:
        """The public function, as a user calls it."""
        from cula.kda import chunk_kda

        return bind_kda(chunk_kda, case, inputs, implementation=self.implementation)


class _Peer:
    """Finding a package without importing it."""

    name = ""
    package = ""
    distribution = ""

    def available(self) -> tuple[bool, str]:
        """(True, "") where the package can be found, else (False, what to install)."""
        if find_spec(self.package) is None:
            return False, f"not installed (pip install {self.distribution})"
        return True, ""

    def version(self) -> str | None:
        """The distribution's version, or what the package's own file says where only the package was brought along."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            spec = find_spec(self.package)
        if spec is None or not spec.origin:
            return None
        found = re.search(r"""^__version__ = ["']([^"']+)""", Path(spec.origin).read_text("utf-8"), re.MULTILINE)
        return found[1] if found else None


class Fla(_Peer):
    """flash-linear-attention; it tunes every new shape for a minute or more at the first call."""

    name = "fla"
    package = "fla"
    distribution = "fla-core"

    def refusal(self, case: Case) -> str | None:
        """Takes every row."""
        return None

    def bind(self, case: Case, inputs: RawInputs) -> Call:
        """The same call as ours."""
        from fla.ops.kda import chunk_kda

        return bind_kda(chunk_kda, case, inputs)


class Cudnn(_Peer):
    """cuDNN's fused Hopper kernel; NVRTC compiles it at the first call."""

    name = "cudnn"
    package = "cudnn"
    distribution = "nvidia-cudnn-frontend"

    def refusal(self, case: Case) -> str | None:
        """Forward with states, one head dim, as many value heads as query heads."""
        if case.op != "kda_prefill" or not case.states:
            return "is timed for prefill with states alone"
        if case.K != 128 or case.value_dim != 128 or case.value_heads != case.H or case.dtype != "bf16":
            return "needs K = V = 128, HV = H and bf16"
        return None

    def bind(self, case: Case, inputs: RawInputs) -> Call:
        """fp32 gate and logits, V-first states and int32 boundaries are made beforehand; o and states are its own."""
        import torch
        from cudnn.linear_attention.hopper import cuda_host

        B, T, H, K = inputs.q.shape
        g, beta, state = inputs.g.float(), inputs.beta.float(), inputs.state.transpose(-1, -2).contiguous()
        bounds = torch.arange(B + 1, device=g.device) * T if inputs.cu_seqlens is None else inputs.cu_seqlens
        bounds = bounds.int().contiguous()
        o, final = torch.empty_like(inputs.v), torch.empty_like(state)
        device = inputs.q.device.index or 0
        tensors = (inputs.q, inputs.k, inputs.v, g, beta, bounds, state, o, final)

        def call() -> dict[str, Any]:
            addresses = [x.data_ptr() for x in tensors]
            cuda_host.launch(
                device, torch.cuda.current_stream().cuda_stream, *addresses, B * T, case.sequences, H,
                a_log=inputs.A_log.data_ptr(), dt_bias=inputs.dt_bias.data_ptr(), gate_lower_bound=LOWER_BOUND,
                flags=CUDNN_FLAGS, q_scale=K**-0.5,
            )  # fmt: skip
            return {"o": o, "final_state": final.transpose(-1, -2)}

        return call


#: Every peer of GPU rows, by the name that a result file has.
PEERS: dict[str, Subject] = {peer.name: peer for peer in (Fla(), Cudnn())}
