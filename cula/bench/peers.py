"""The peers of a CPU run, each behind the same three questions: is it here, can it do this row, give me a run.

- ggml: the fused gated delta rule of ggml's CPU backend, which llama.cpp runs, through the ctypes binding of the
  package ggml-python. Forward only. Tensors are fp32 in our own `[B, T, H, D]` order (ggml lists dimensions from the
  innermost), the gate one natural log per channel, the state V-first; the scale is fixed at V ** -0.5. o and the new
  states come out as one tensor.
- transformers: the plain torch functions of its Kimi Linear model, never a kernel package behind them; for Lightning
  Attention the loop of its MiniMax layer, whose projections, activation, norm and output gate are taken out.

A peer is imported when a run is asked for, not before.
"""

from __future__ import annotations

import ctypes
import logging
import math
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cula.bench.runs import Implementation, Run, forward_run, training_run

if TYPE_CHECKING:
    import torch

    from cula.bench.cases import Case
    from cula.bench.inputs import Inputs


class _Package:
    """What both peers share: finding the package without importing it."""

    name = ""
    package = ""
    distribution = ""

    def available(self) -> tuple[bool, str]:
        """(True, "") where the package can be found, else (False, what to install)."""
        if find_spec(self.package) is None:
            return False, f"not installed (pip install {self.distribution})"
        return True, ""

    def version(self) -> str | None:
        """The installed distribution's version, None where there is none."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def mechanism(self, case: Case) -> str | None:
        """A peer has one way."""
        return None


class Ggml(_Package):
    """ggml_gated_delta_net, computed by ggml's own threads; the graph is built and planned once, outside the time."""

    name = "ggml"
    package = "ggml"
    distribution = "ggml-python"

    def refusal(self, case: Case) -> str | None:
        """The operator has no backward, one head dim, as many value heads as query heads, fp32, no packing."""
        if case.lightning:
            return "has no attention of this kind"
        if case.trains:
            return "has no backward"
        if case.device != "cpu" or case.dtype != "fp32" or case.state_dtype != "fp32":
            return "this binding is run on the CPU in fp32"
        if case.value_dim != case.K or case.value_heads != case.H:
            return f"needs K = V and HV = H, got K={case.K} V={case.value_dim} H={case.H} HV={case.value_heads}"
        if case.lengths:
            return "has no packed sequences"
        return None

    def run(self, case: Case, inputs: Inputs, threads: int) -> Run:
        """Decode: every buffer has its own state to read; o and the new state go to one place for all of them, as
        llama.cpp's allocator has it. The copy back into a cache, which its users pay as well, is left out."""
        import torch

        B, T, H, D = inputs.q.shape
        graph = _GgmlGraph(threads)
        operands = [graph.tensor(x, (D, H, T, B)) for x in inputs.operands[:4]]
        operands.append(graph.tensor(inputs.beta, (1, H, T, B)))
        result = torch.empty(D * H * B * (T + D))
        calls = []
        for _ in range(case.buffers):
            state = torch.zeros(B, H, D, D) if inputs.state is None else inputs.state.clone()
            calls.append(graph.gated_delta_net(operands, graph.tensor(state, (D, D, H, B)), result))

        turns = [calls[j] for j in case.turns]

        def step() -> None:
            for call in turns:
                call()

        def outputs() -> dict[str, torch.Tensor]:
            o, state = result.split([D * H * T * B, D * D * H * B])
            return {"o": o.view(B, T, H, D), "final_state": state.view(B, H, D, D).transpose(-1, -2)}

        return Run(step=step, outputs=outputs, calls=len(turns), first=calls[0])

    @staticmethod
    def flags() -> list[str]:
        """The instruction sets that the installed library was compiled for. Imports ggml."""
        import ggml

        names = ("avx2", "avx512", "fma", "f16c", "neon", "sve")
        return [name for name in names if (has := getattr(ggml, f"ggml_cpu_has_{name}", None)) and has()]


class _GgmlGraph:
    """A ggml context over memory that torch owns: ggml allocates nothing but its own bookkeeping."""

    def __init__(self, threads: int) -> None:
        import ggml

        self.ggml = ggml
        self.threads = threads
        self._kept: list[Any] = []
        ggml.ggml_cpu_init()
        self._context = ggml.ggml_init(ggml.ggml_init_params(mem_size=16 << 20, mem_buffer=None, no_alloc=True))

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self.ggml.ggml_free(self._context)
            self._context = None

    def tensor(self, x: torch.Tensor, sizes: tuple[int, int, int, int]) -> Any:
        """A ggml view of the contiguous fp32 tensor `x`; `sizes` from the innermost dimension outwards."""
        assert x.is_contiguous() and x.numel() == sizes[0] * sizes[1] * sizes[2] * sizes[3]
        self._kept.append(x)
        node = self.ggml.ggml_new_tensor_4d(self._context, self.ggml.GGML_TYPE_F32, *sizes)
        node.contents.data = x.data_ptr()
        return node

    def gated_delta_net(self, operands: list[Any], state: Any, result: torch.Tensor) -> Any:
        """A callable that computes the operator of (q, k, v, g, beta) and `state` into `result`."""
        ggml = self.ggml
        node = ggml.ggml_gated_delta_net(self._context, *operands, state, 1)
        node.contents.data = result.data_ptr()
        graph = ggml.ggml_new_graph(self._context)
        ggml.ggml_build_forward_expand(graph, node)
        plan = ggml.ggml_graph_plan(graph, self.threads, None)
        scratch = (ctypes.c_uint8 * (plan.work_size + 64))()
        plan.work_data = ctypes.cast(scratch, ctypes.POINTER(ctypes.c_uint8))
        compute, handle = ggml.ggml_graph_compute, ctypes.byref(plan)
        self._kept += [result, scratch, plan]

        def call(owner: _GgmlGraph = self) -> None:
            if compute(graph, handle) != 0:
                raise RuntimeError("ggml_graph_compute failed")

        return call


class Transformers(_Package):
    """The torch code that Kimi Linear and MiniMax run in transformers where no kernel package is installed."""

    name = "transformers"
    package = "transformers"
    distribution = "transformers"

    def refusal(self, case: Case) -> str | None:
        """No packed sequences and no grouped value heads; K and V are free."""
        if case.lengths:
            return "its torch path has no packed sequences"
        if case.value_heads != case.H:
            return f"needs HV = H, got H={case.H} HV={case.value_heads}"
        return None

    def run(self, case: Case, inputs: Inputs, threads: int) -> Run:
        """Prefill and training call the chunked function, decode the recurrent one with a state per buffer."""
        if case.lightning:
            return _minimax_run(case, inputs)
        chunk, recurrent = _kimi_functions()
        if case.decodes:
            return self._decode(case, inputs, recurrent)

        def call(*operands: torch.Tensor) -> tuple:
            return chunk(*operands, output_final_state=True)

        return training_run(call, inputs) if case.trains else forward_run(call, inputs)

    @staticmethod
    def _decode(case: Case, inputs: Inputs, recurrent: Any) -> Run:
        """States are K-first; each call returns a fresh one, which replaces the buffer's, as its cache does."""
        import torch

        states = [inputs.state.transpose(-1, -2).contiguous() for _ in range(case.buffers)]
        held: dict[str, torch.Tensor] = {}

        def call(j: int) -> torch.Tensor:
            with torch.no_grad():
                o, states[j] = recurrent(*inputs.operands, states[j], True)
            return o

        def first() -> None:
            held["o"] = call(0)
            held["final_state"] = states[0]

        def step() -> None:
            for j in case.turns:
                call(j)

        return Run(step=step, outputs=lambda: held, calls=len(case.turns), first=first, repeatable=False)


class _Held:
    """A MiniMax layer's cache of one state, K-first."""

    def __init__(self, state: torch.Tensor) -> None:
        self.state = state

    def get_linear_cache(self, layer: int) -> torch.Tensor:
        """The state."""
        return self.state

    def set_linear_cache(self, layer: int, state: torch.Tensor) -> None:
        """Keep the new state."""
        self.state = state


def _minimax_layer(case: Case, slopes: torch.Tensor) -> Any:
    """A MiniMax layer that is nothing but its loop: it takes q, k, v as one tensor `[B, T, H, 3 D]`.

    What remains beside the loop is one product with 1, its output gate's.
    """
    import torch

    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(
        hidden_size=case.H * case.K, num_attention_heads=case.H, head_dim=case.K, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip
    layer = MiniMaxLightningAttention(config, 0)
    opened = torch.nn.Identity()
    opened.forward = lambda x: torch.full((), math.inf)  # sigmoid makes it 1
    layer.qkv_proj = layer.act_fn = layer.norm = layer.out_proj = torch.nn.Identity()
    layer.output_gate = opened
    layer.slope_rate = slopes[:, None, None]
    layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)
    return layer


def _minimax_run(case: Case, inputs: Inputs) -> Run:
    """Its loop over blocks of 256 tokens, or one step of it with a state per buffer."""
    import torch

    layer = _minimax_layer(case, inputs.slopes)
    shape = inputs.v.shape

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: _Held | None = None) -> tuple:
        joined = torch.cat((q, k, v), -1).flatten(2) if q.requires_grad else together
        o, state = layer(joined, None, None, cache=cache)[:2]
        return o.view(shape), state

    together = torch.cat(inputs.operands, -1).flatten(2)
    if not case.decodes:
        return training_run(call, inputs) if case.trains else forward_run(call, inputs)
    caches = [_Held(inputs.state.transpose(-1, -2).contiguous()) for _ in range(case.buffers)]
    held: dict[str, torch.Tensor] = {}

    def first() -> None:
        with torch.no_grad():
            held["o"] = call(*inputs.operands, caches[0])[0]
        held["final_state"] = caches[0].state

    def step() -> None:
        with torch.no_grad():
            for j in case.turns:
                call(*inputs.operands, caches[j])

    return Run(step=step, outputs=lambda: held, calls=len(case.turns), first=first, repeatable=False)


def _kimi_functions() -> tuple[Any, Any]:
    """(chunked, recurrent), each the plain torch function itself.

    transformers wraps them so that FLA takes over where it is installed; the undecorated function is what is timed.
    """
    from inspect import unwrap

    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    functions = unwrap(kimi.chunk_kimi_delta_attention), unwrap(kimi.recurrent_kimi_delta_attention)
    for function in functions:
        if function.__module__ != kimi.__name__:
            raise RuntimeError(f"{function.__name__} comes from {function.__module__}, not from {kimi.__name__}")
    return functions


#: Every peer, by the name that a result file has.
PEERS: dict[str, Implementation] = {peer.name: peer for peer in (Ggml(), Transformers())}
