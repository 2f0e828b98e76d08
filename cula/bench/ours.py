"""Our own calls, as a user makes them: finished gate and beta, q and k normalised beforehand, as the peers get them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cula.bench.runs import Run, forward_run, training_run

if TYPE_CHECKING:
    import torch

    from cula.bench.cases import Case
    from cula.bench.inputs import Inputs


class Cula:
    """The public functions of `cula.kda` and `cula.lightning`. `name` is the implementation that a result file names.

    implementation: what is passed on as `implementation=`; None leaves the choice to the library.
    """

    def __init__(self, name: str = "eager", implementation: str | None = None) -> None:
        self.name = name
        self.implementation = implementation

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

    def mechanism(self, case: Case) -> str | None:
        """What `cula.explain` says would run, such as "fused, numba"; with several stages, each distinct one."""
        import cula

        explanation = cula.explain(
            self._function(case), device=case.device, B=case.N if case.decodes else case.B,
            T=case.tokens if case.decodes else case.T, H=case.H, HV=case.value_heads, K=case.K, V=case.value_dim,
            lengths=case.lengths or None, dtype=case.dtype, grad=case.trains,
        )  # fmt: skip
        accepted = [
            next((v.row for v in verdicts if v.reason is None and self.implementation in (None, v.row.name)), None)
            for _, verdicts in explanation.stages
        ]
        names = [f"{row.mechanism}, {row.dsl}" for row in accepted if row is not None]
        return "; ".join(dict.fromkeys(names)) or None

    def run(self, case: Case, inputs: Inputs, threads: int) -> Run:
        """Threads are torch's, which are set for the whole process."""
        if case.decodes:
            return self._decode(case, inputs)
        from importlib import import_module

        chunk = getattr(import_module("cula.lightning" if case.lightning else "cula.kda"), self._function(case))

        def call(*operands: torch.Tensor) -> tuple:
            return chunk(
                *operands, output_final_state=True, cu_seqlens=inputs.cu_seqlens, implementation=self.implementation,
                **inputs.options,
            )  # fmt: skip

        return training_run(call, inputs) if case.trains else forward_run(call, inputs)

    @staticmethod
    def _function(case: Case) -> str:
        """The public function that the row calls."""
        if case.decodes:
            return case.op
        return "chunk_lightning_attn" if case.lightning else "chunk_kda"

    def _decode(self, case: Case, inputs: Inputs) -> Run:
        """One token a sequence, in place: buffer j of the row is slots j*N .. j*N + N-1 of one pool."""
        from importlib import import_module

        import torch

        decode = getattr(import_module("cula.lightning" if case.lightning else "cula.kda"), case.op)
        pool = inputs.state.repeat(case.buffers, 1, 1, 1)
        slots = torch.arange(case.buffers * case.N, dtype=torch.int32, device=pool.device).split(case.N)
        turns = [slots[j] for j in case.turns]
        out = torch.empty_like(inputs.v)
        flags = inputs.options or {"gate_is_raw": False, "beta_is_logits": False, "normalize_qk": False}

        def call(indices: torch.Tensor) -> None:
            decode(
                *inputs.operands, state_pool=pool, state_indices=indices, out=out,
                implementation=self.implementation, **flags,
            )  # fmt: skip

        def first() -> None:
            call(slots[0])

        def step() -> None:
            for indices in turns:
                call(indices)

        def outputs() -> dict[str, torch.Tensor]:
            return {"o": out, "final_state": pool[: case.N].transpose(-1, -2)}

        return Run(step=step, outputs=outputs, calls=len(turns), first=first, repeatable=False)
