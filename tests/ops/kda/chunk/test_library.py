"""chunk_kda as an op: torch.compile and torch.export in one graph, checkpointing, autocast, sharding, opcheck.

The op runs the row that eager mode runs, so results must agree in bits.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import cula
from cula.checks.cases import Case, Problem, make
from cula.checks.runs import chunk
from cula.checks.tolerance import bits_equal
from cula.host.table import Row
from cula.kda import chunk_kda
from cula.layers import KimiDeltaAttention
from cula.ops.common import arguments
from cula.ops.kda.chunk import library, policy
from cula.ops.kda.chunk.saved import Gradients, Saved

CASE = Case(B=2, T=37, H=1, HV=2, K=16, V=12, gate="softplus", beta="logits", l2norm=True)
PACKED = CASE.replace(B=1, T=70, lengths=(0, 33, 1, 30))
CASES = {
    "batch": CASE,
    "packed": PACKED,
    "v_first": CASE.replace(v_first=True, gate="sigmoid_no_A", beta="logits_doubled"),
    "fp64": CASE.replace(dtype="fp64", gate="mild", beta="uniform", state=False),
    "bf16": CASE.replace(dtype="bf16", K=32, V=32, chunk_size=32, scale=0.3),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
OP = "cula::kda_chunk"


@pytest.fixture(autouse=True)
def _no_compiled_code() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def leaves_of(p: Problem) -> dict[str, torch.Tensor]:
    return {name: x.clone().requires_grad_() for name, x in p.inputs().items()}


def run(p: Problem, function: Callable[..., Any] = chunk, **options: Any) -> list[torch.Tensor]:
    """o, final state and all gradients of `function(p)`, fresh leaves each time."""
    leaves = leaves_of(p)
    o, state = function(p.map(lambda x: x, **leaves), **options)
    return [o, state, *torch.autograd.grad([o, state], list(leaves.values()), [p.do, p.dht])]


def assert_same(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and bits_equal(a, b)


def op_arguments(p: Problem, grad: bool, **options: Any) -> tuple[Any, ...]:
    """What the forward op takes for the call `chunk(p)`."""
    inputs = {"initial_state" if name == "h0" else name: x for name, x in p.inputs().items()}
    call = {name: None if kind.endswith("?") else False for name, kind in library._ARGUMENTS.items()}
    flags = {name: x for name, x in p.flags().items() if name in call}
    call |= {**inputs, **flags, "chunk_size": p.case.chunk_size, **options}
    return (*library.Call(**call), grad)


# ---- the ops themselves ------------------------------------------------------------------------------------------


@cases
def test_opcheck(case: Case) -> None:
    p = make(case)
    opcheck(torch.ops.cula.kda_chunk.default, op_arguments(p.map(lambda x: x, **leaves_of(p)), True))


def test_opcheck_without_gradients() -> None:
    arguments = op_arguments(make(CASE), False, return_intermediate_states=True)
    opcheck(torch.ops.cula.kda_chunk.default, arguments)


@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
def test_opcheck_of_the_backward(case: Case) -> None:
    p = make(case)
    needed = [True, False, True, True, False, True, False, True]
    arguments = (*op_arguments(p, True)[:-1], p.do, p.dht, [], needed)
    opcheck(torch.ops.cula.kda_chunk_backward.default, arguments)


def test_the_op_called_outside_of_a_graph_has_gradients() -> None:
    p = make(CASE)
    leaves = leaves_of(p)
    outputs = torch.ops.cula.kda_chunk(*op_arguments(p.map(lambda x: x, **leaves), True))
    assert_same([*outputs, *torch.autograd.grad(outputs, list(leaves.values()), [p.do, p.dht])], run(p))
    grads = torch.autograd.grad(
        torch.ops.cula.kda_chunk(*op_arguments(p.map(lambda x: x, **leaves), True))[0].square().sum(),
        [leaves["q"]],
        create_graph=True,
    )
    with pytest.raises(cula.NotSupportedError, match="differentiated once"):
        grads[0].sum().backward()


def test_eager_calls_go_round_the_op() -> None:
    program = (
        "import sys, torch\nfrom cula.kda import chunk_kda\nx = torch.ones(1, 2, 1, 16, requires_grad=True)\n"
        "chunk_kda(x, x, x, -x, x[..., 0])[0].sum().backward()\n"
        "assert 'cula.ops.kda.chunk.library' not in sys.modules\nassert not hasattr(torch.ops.cula, 'kda_chunk')"
    )
    root = Path(__file__).resolve().parents[4]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, stdin=subprocess.DEVNULL)


# ---- torch.compile -----------------------------------------------------------------------------------------------


@cases
def test_compiled_equals_eager(on_chunk, case: Case) -> None:
    p = make(case)
    with torch.no_grad():
        try:
            expected = chunk(p, implementation=on_chunk.name)
        except cula.NotSupportedError as error:
            pytest.skip(str(error))
        assert_same(compiled(chunk)(p, implementation=on_chunk.name), expected)
    try:
        expected = run(p, implementation=on_chunk.name)
    except cula.NotSupportedError as error:
        pytest.skip(str(error))
    assert_same(run(p, compiled(chunk), implementation=on_chunk.name), expected)


def test_one_node_in_the_graph() -> None:
    p = make(CASE)
    backend = CompileCounterWithBackend("eager")
    run(p, compiled(chunk, backend))
    (graph,) = backend.graphs
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and "cula" in str(n.target)]
    assert [n.target for n in nodes] == [torch.ops.cula.kda_chunk.default]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_inductor() -> None:
    p = make(CASE)

    def step(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = chunk(p.map(lambda x: x, q=p.q * 2.0))
        return o.sin(), state

    for got, expected in zip(run(p, compiled(step, "inductor")), run(p, step), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "automatic"])
def test_another_length_compiles_nothing_new(case: Case, marked: bool) -> None:
    backend = CompileCounterWithBackend("aot_eager")
    function = compiled(chunk, backend)
    for i, T in enumerate((70, 97, 130, 71)):
        p = make(case.replace(T=T))
        leaves = leaves_of(p)
        for name in ("q", "k", "v", "g", "beta") if marked else ():
            torch._dynamo.mark_dynamic(leaves[name], 1)
        o, state = function(p.map(lambda x: x, **leaves, do=None, dht=None))
        grads = torch.autograd.grad([o, state], list(leaves.values()), [p.do, p.dht])
        assert_same([o, state, *grads], run(p))
        assert backend.frame_count == (1 if marked or i == 0 else 2)


def test_other_lengths_of_packed_sequences_compile_nothing_new() -> None:
    backend = CompileCounterWithBackend("aot_eager")
    function = compiled(chunk, backend)
    for lengths in ((0, 33, 1, 30), (40, 0, 30, 0), (1, 1, 1, 1)):
        p = make(PACKED.replace(lengths=lengths))
        assert_same(run(p, function), run(p))
    assert backend.frame_count == 1


@pytest.mark.parametrize("names", [("q",), ("h0",), ("A_log", "beta")], ids="+".join)
def test_any_subset_of_inputs_may_require_grad(names: tuple[str, ...]) -> None:
    p = make(CASE)
    results = []
    for function in (chunk, compiled(chunk)):
        leaves = {name: getattr(p, name).clone().requires_grad_() for name in names}
        o, _ = function(p.map(lambda x: x, **leaves))
        results.append([o, *torch.autograd.grad(o, list(leaves.values()), p.do, allow_unused=True)])
    assert_same(*results)


def test_final_state_not_returned() -> None:
    p = make(CASE)
    results = []
    for function in (chunk, compiled(chunk)):
        leaves = leaves_of(p)
        o, state = function(p.map(lambda x: x, **leaves), output_final_state=False)
        assert state is None
        results.append([o, *torch.autograd.grad(o, list(leaves.values()), p.do)])
    assert_same(*results)


def test_ignored_gate_parameters_get_no_gradient() -> None:
    p = make(CASE.replace(gate="mild"))
    A_log, q = torch.ones(2, requires_grad=True), p.q.clone().requires_grad_()
    o, _ = compiled(chunk)(p.map(lambda x: x, q=q), A_log=A_log, lower_bound=1.0)
    o.sum().backward()
    assert A_log.grad is None and q.grad.any()


def test_shapes_of_parameter_gradients_are_their_inputs_shapes() -> None:
    p = make(CASE)
    A_log = p.A_log.view(1, 1, 2, 1).clone().requires_grad_()
    dt_bias = p.dt_bias.reshape(-1).clone().requires_grad_()
    grads = []
    for function in (chunk, compiled(chunk)):
        o, _ = function(p, A_log=A_log, dt_bias=dt_bias)
        grads.append(torch.autograd.grad(o, [A_log, dt_bias], p.do))
    assert_same(*grads)


@pytest.mark.parametrize("v_first", [False, True])
def test_intermediate_states(v_first: bool) -> None:
    p = make(CASE.replace(v_first=v_first, T=130))
    assert_same(
        compiled(chunk)(p, return_intermediate_states=True, chunk_size=32),
        chunk(p, return_intermediate_states=True, chunk_size=32),
    )


def test_intermediate_states_of_packed_sequences() -> None:
    p = make(PACKED)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = compiled(chunk)(p, return_intermediate_states=True)
    assert_same(got, chunk(p, return_intermediate_states=True))


@pytest.mark.parametrize("implementation", [None, "auto", "eager", {"forward": "eager"}, {}], ids=str)
@pytest.mark.parametrize("cp_mode", [None, False, "auto"], ids=str)
def test_ways_to_say_the_same(implementation: Any, cp_mode: Any) -> None:
    p = make(PACKED)
    boundaries = {"cu_seqlens_cpu": p.cu_seqlens.clone(), "max_num_seqs": 4, "use_graph": True}
    function = compiled(chunk, "eager")
    assert_same(function(p, implementation=implementation, cp_mode=cp_mode, **boundaries), chunk(p))


@pytest.mark.parametrize(
    "name, values", [("scale", (0.3, 0.4, 1)), ("chunk_size", (16, 32)), ("lower_bound", (-5, -4.0))]
)
def test_scalars_may_change(name: str, values: tuple[Any, ...]) -> None:
    p = make(CASE)
    function = compiled(chunk)
    for value in values:
        assert_same(run(p, function, **{name: value}), run(p, **{name: value}))


@pytest.mark.parametrize("T", [0, 1])
@pytest.mark.parametrize("case", [CASE, PACKED.replace(lengths=(0,))], ids=["batch", "packed"])
def test_few_tokens(case: Case, T: int) -> None:
    p = make(case.replace(T=T, lengths=None if case.lengths is None else (0, T)))
    assert_same(run(p, compiled(chunk)), run(p))


def test_any_stride() -> None:
    def transposed(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    p = make(CASE)
    p = p.map(lambda x: x, **{name: transposed(getattr(p, name)) for name in ("q", "v", "g", "beta", "do")})
    p = p.map(lambda x: x, h0=p.h0.mT.contiguous().mT, dht=p.dht.mT.contiguous().mT)
    assert_same(run(p, compiled(chunk)), run(p))


def test_a_layer_compiles() -> None:
    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(32, num_heads=2, head_dim=16), torch.randn(2, 20, 32)
    results = []
    for function in (layer, compiled(layer)):
        y = function(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return chunk_kda(q, k, v, g, beta, output_final_state=True)

    p, longer = (make(CASE.replace(T=T, gate="mild", beta="uniform", state=False)) for T in (37, 90))
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(Module(), p.five(), dynamic_shapes=[{1: tokens}] * 5)
    assert OP.replace("::", ".") in str(program.graph)
    assert_same(program.module()(*longer.five()), chunk_kda(*longer.five(), output_final_state=True))


# ---- checkpointing, autocast, sharding ---------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True], ids=["tree", "reentrant"])
@pytest.mark.parametrize("where", ["eager", "inside", "around"])
@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
def test_checkpointing(case: Case, reentrant: bool, where: str) -> None:
    p = make(case)
    inner = compiled(chunk) if where == "around" else chunk

    def block(**leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def body(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return inner(p.map(lambda x: x, **dict(zip(leaves, inputs))))

        return checkpoint(body, *leaves.values(), use_reentrant=reentrant)

    function = compiled(block) if where == "inside" else block
    leaves = leaves_of(p)
    o, state = function(**leaves)
    grads = torch.autograd.grad if not reentrant else _grads_by_backward  # reentrant refuses torch.autograd.grad
    assert_same([o, state, *grads([o, state], list(leaves.values()), [p.do, p.dht])], run(p))


def _grads_by_backward(outputs: Any, leaves: Any, cotangents: Any) -> list[torch.Tensor]:
    torch.autograd.backward(outputs, cotangents)
    return [x.grad for x in leaves]


@pytest.mark.parametrize("keep", [True, False])
def test_selective_checkpointing_knows_the_op(keep: bool, keeping_rows) -> None:
    """A forward whose kept tensors are not saved runs again; one that keeps nothing never does."""
    p = make(CASE)

    def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_forward = op == torch.ops.cula.kda_chunk.default
        return CheckpointPolicy.MUST_SAVE if keep and is_forward else CheckpointPolicy.MUST_RECOMPUTE

    def block(**leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def body(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return chunk(p.map(lambda x: x, **dict(zip(leaves, inputs))))

        return checkpoint(
            body,
            *leaves.values(),
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, choose),
        )

    for promised in (True, False):
        keeping_rows(promised)
        leaves, calls = leaves_of(p), []
        backend = aot_autograd(fw_compiler=_counting(calls), partition_fn=min_cut_rematerialization_partition)
        o, state = compiled(block, backend)(**leaves)
        got = [o, state, *torch.autograd.grad([o, state], list(leaves.values()), [p.do, p.dht])]
        assert calls == [1, 1 if promised and not keep else 0]
        assert_same(got, run(p))
        torch._dynamo.reset()


def _counting(calls: list[int]) -> Callable[..., Any]:
    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.append(sum(n.target == torch.ops.cula.kda_chunk.default for n in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    return compiler


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_autocast_changes_nothing(dtype: str, where: str) -> None:
    p = make(CASE.replace(dtype=dtype, K=32, V=32))

    def inside(p: Problem) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return chunk(p)

    def around(p: Problem) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(p)

    function = compiled(inside if where == "inside" else chunk)
    assert_same(run(p, function if where == "inside" else around), run(p))


def test_mixed_dtypes_are_an_error_under_autocast() -> None:
    p = make(CASE)
    mixed = p.map(lambda x: x, q=p.q.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for function in (chunk, torch.compile(chunk, backend="eager")):
            with pytest.raises(cula.DtypeError, match="q, k and v must share one dtype; got bf16, fp32 and fp32"):
                function(mixed)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_a_sharded_layer_trains(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(32, num_heads=2, head_dim=16), torch.randn(2, 20, 32)
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        for function in (layer, torch.compile(layer, backend="aot_eager")):
            function(x).square().sum().backward()
            for parameter, grad in zip(layer.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad.full_tensor(), grad, rtol=1e-5, atol=1e-5)
                parameter.grad = None
    finally:
        torch.distributed.destroy_process_group()


# ---- errors ------------------------------------------------------------------------------------------------------

WRONG = {
    "shape": (cula.ShapeError, "k must be", lambda p: (p.map(lambda x: x, k=p.k[:, 1:]), {})),
    "state": (cula.ShapeError, "initial_state must be", lambda p: (p.map(lambda x: x, h0=p.h0[:1]), {})),
    "dtype": (cula.DtypeError, "share one dtype", lambda p: (p.map(lambda x: x, v=p.v.double()), {})),
    "chunk_size": (cula.RangeError, "chunk_size must be", lambda p: (p, {"chunk_size": 48})),
    "scale": (cula.DtypeError, "scale must be", lambda p: (p, {"scale": True})),
    "name": (cula.RangeError, "implementation must be", lambda p: (p, {"implementation": "none"})),
    "no_row": (cula.NotSupportedError, "sm90", lambda p: (p, {"implementation": "sm90"})),
    "plan": (cula.NotSupportedError, "plan", lambda p: (p, {"plan": object})),
    "split": (cula.NotSplittableError, "cp_mode='force'", lambda p: (p, {"cp_mode": True})),
    "sequences": (cula.RangeError, "max_num_seqs must equal", lambda p: (p, {"max_num_seqs": 3})),
    "h": (
        cula.NotSupportedError,
        "return_intermediate_states needs",
        lambda p: (p.map(lambda x: x, q=p.q.requires_grad_()), {"return_intermediate_states": True}),
    ),
}


@pytest.mark.parametrize("error, sentence, spoil", WRONG.values(), ids=WRONG)
def test_errors_are_those_of_eager_mode(error: type[Exception], sentence: str, spoil: Callable[..., Any]) -> None:
    p, options = spoil(make(CASE))
    with pytest.raises(error) as expected:
        chunk(p, **options)
    assert sentence in str(expected.value)
    with pytest.raises(error) as got:
        torch.compile(chunk, backend="eager")(p, **options)
    assert sentence in str(got.value)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as whole:
        compiled(chunk, "eager")(p, **options)
    assert sentence in f"{whole.value} {whole.value.__cause__}"


def test_boundaries_are_checked_when_the_graph_runs() -> None:
    p = make(PACKED)
    function = compiled(chunk)
    function(p)
    with pytest.raises(cula.RangeError, match="cu_seqlens must not decrease"):
        function(p, cu_seqlens=torch.tensor([0, 40, 30, 50, 70]))


def test_a_fake_call_raises_the_same_class() -> None:
    p = make(CASE)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = p.map(mode.from_tensor)
        with pytest.raises(cula.ShapeError, match="k must be"):
            torch.ops.cula.kda_chunk(*op_arguments(fake.map(lambda x: x, k=fake.k[:, 1:]), False))


# ---- what a forward row keeps ------------------------------------------------------------------------------------

_found: list[Saved | None] = []


def keeping_forward(p: Any, x: Any) -> Any:
    from cula.ops.kda.chunk.eager.forward import run as eager

    result = eager(p, x)
    result.saved = Saved("portable", {"marks": torch.full((p.N, p.HV), 3.0).double(), "doubled": 2 * x.q})
    return result


def keeping_backward(p: Any, x: Any, saved: Saved | None, do: torch.Tensor, dht: torch.Tensor | None) -> Gradients:
    from cula.ops.kda.chunk.eager.backward import run as eager

    _found.append(saved)
    if saved is not None:
        assert saved.writer == "portable" and sorted(saved.tensors) == ["doubled", "marks"]
        assert bits_equal(saved.tensors["doubled"], 2 * x.q) and (saved.tensors["marks"] == 3.0).all()
    return eager(p, x, None, do, dht)


def kept(p: Any) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    assert p.lengths is None and p.host_lengths
    return [("doubled", (p.B, p.T, p.H, p.K), torch.float32), ("marks", (p.N, p.HV), torch.float64)]


@pytest.fixture
def keeping_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes the two rows above those that serve every call; `promised` or not is what the forward row keeps."""

    def install(promised: bool) -> None:
        stages = ("FORWARD_ROWS", policy.FORWARD, keeping_forward), ("BACKWARD_ROWS", policy.BACKWARD, keeping_backward)
        for table, stage, entry in stages:
            row = Row(
                "portable", "keeping", "kda", stage, "any device", "torch", "a test's", f"{__name__}:{entry.__name__}",
                kept=f"{__name__}:kept" if promised and entry is keeping_forward else None,
            )  # fmt: skip
            monkeypatch.setattr(policy, table, (row,))

    return install


@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
@pytest.mark.parametrize("promised", [True, False])
def test_what_a_row_keeps_reaches_its_backward(case: Case, promised: bool, keeping_rows) -> None:
    keeping_rows(promised)
    backend = CompileCounterWithBackend("aot_eager")
    function = compiled(chunk, backend)
    for T in (70, 97, 130):
        p = make(case.replace(T=T))
        leaves = leaves_of(p)
        for name in ("q", "k", "v", "g", "beta"):
            torch._dynamo.mark_dynamic(leaves[name], 1)
        _found.clear()
        o, state = function(p.map(lambda x: x, **leaves, do=None, dht=None))
        grads = torch.autograd.grad([o, state], list(leaves.values()), [p.do, p.dht])
        assert len(_found) == backend.frame_count == 1 and (_found[0] is not None) == promised
        assert_same([o, state, *grads], run(p))
    opcheck(torch.ops.cula.kda_chunk.default, op_arguments(p.map(lambda x: x, **leaves_of(p)), True))


# ---- boundaries that live on a device ----------------------------------------------------------------------------


def test_the_backward_gets_the_boundaries_that_the_forward_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a CPU needs no copy, so that here the op is told to pass one on."""
    p, read = make(PACKED), []
    monkeypatch.setattr(library, "_returns_boundaries", lambda c, grad: grad and c.cu_seqlens_cpu is None)
    copy = arguments.to_host
    monkeypatch.setattr(arguments, "to_host", lambda x: read.append(x.dtype) or copy(x))
    got = run(p, compiled(chunk))
    assert read == [torch.int32, torch.int64]
    assert_same(got, run(p))
    opcheck(torch.ops.cula.kda_chunk.default, op_arguments(p.map(lambda x: x, **leaves_of(p)), True))


def test_boundaries_that_the_forward_could_not_copy() -> None:
    p = make(PACKED)
    extra = (p.do, p.dht, [], [True] * 8)
    unknown = torch.full((5,), library._UNKNOWN)
    grads = torch.ops.cula.kda_chunk_backward(*op_arguments(p, True, cu_seqlens_cpu=unknown)[:-1], *extra)
    assert_same(grads, run(p)[2:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_boundaries_are_copied_from_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    p, read = make(PACKED, "cuda"), []
    copy = arguments.to_host
    monkeypatch.setattr(arguments, "to_host", lambda x: read.append(x.device.type) or copy(x))
    got = run(p, compiled(chunk))
    assert read == ["cuda", "cpu"]
    assert_same(got, run(p))
