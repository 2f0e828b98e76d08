"""Run the decode kernels' PTX of an architecture that need not be there, by the host code that a GPU would run.

    TRITON_INTERPRET=0 python run_ptx.py ARCH

Prints one JSON object: {case: {"found", "limit": {quantity: error}, "same": whether what must have equal bits has}}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from cula.checks.cases import Case, make, normal
from cula.checks.runs import errors, limits, reference, run_decode, run_verify, serve
from cula.checks.tolerance import bits_equal, relative_error
from cula.host.arch import parse_target
from cula.kda import KDARollback, fused_recurrent_kda, kda_decode_fused, kda_rollback
from tests.ptx.triton_host import Runs

BASE = {"dtype": "bf16", "beta": "logits", "l2norm": True}
CASES = [
    Case(B=3, T=2, H=1, HV=2, K=128, V=128, gate="softplus", **BASE),
    Case(B=2, T=3, K=64, V=40, gate="sigmoid", **BASE),
    Case(B=1, T=2, K=256, V=64, gate="sigmoid_bare", **BASE),
    Case(T=22, lengths=(3, 0, 1, 16), H=1, HV=2, K=128, V=64, gate="sigmoid", **BASE),
]


def run(arch: str, case: Case) -> dict[str, Any]:
    """Verify and, of a fixed batch, decode."""
    p = make(case)
    with Runs(arch, races=True) as runs:
        got = run_verify(p, "portable")
        steps = got if case.lengths else run_decode(p, "portable")
    assert runs.launches
    same = all(bits_equal(got[name], steps[name]) for name in got)
    return {"found": errors(p, got, reference(p, gradients=False)), "limit": limits(p, got), "same": same}


def pooled(dtype: torch.dtype) -> tuple[Any, torch.Tensor, list[int]]:
    """A problem of five drafts, a pool, and the slots of its two sequences."""
    p = make(Case(B=2, T=5, H=1, HV=2, K=64, V=32, gate="sigmoid", v_first=True, **BASE))
    return p, normal(9, 2, 32, 64, seed=5, dtype=dtype), [6, 2]


def drafts(arch: str, dtype: torch.dtype) -> dict[str, Any]:
    """A tree with its states, each path by decode; a rollback, by the states that were kept."""
    p, pool, index = pooled(dtype)
    parents, same = [[-1, -1, 0, 0, 2], [0, 0, 1, 9, 1]], True
    start, kept, slots = pool.clone(), pool.new_full((10, 2, 32, 64), torch.nan), torch.arange(10).view(2, 5)
    given = {"state_pool": pool, "state_indices": torch.tensor(index), "implementation": "portable"}
    keep = {**given, "states_out": kept, "states_out_indices": slots}
    with Runs(arch, races=True):
        out = serve("kda_verify", p, parent=torch.tensor(parents), **keep)
        for n in range(2):
            for t in range(5):
                path = [t]
                while 0 <= parents[n][path[0]] < path[0]:
                    path.insert(0, parents[n][path[0]])
                one = start[index[n]][None].clone()
                for step in path:
                    cut = {f: getattr(p, f)[n : n + 1, step : step + 1] for f in ("q", "k", "v", "g", "beta")}
                    slot = {"state_pool": one, "state_indices": torch.tensor([0]), "implementation": "portable"}
                    o = serve("kda_decode", p.map(lambda x: x, **cut), **slot)
                same &= bits_equal(o[0, 0], out[n, t]) and bits_equal(one[0], kept[slots[n, t]])
        r = KDARollback.allocate(2, 5, 2, 64, 32, "cpu")
        serve("kda_verify", p, rollback=r, **keep)
        same &= bits_equal(pool, start)
        kda_rollback(pool, torch.tensor(index), r, torch.tensor([3, 0]), implementation="portable")
    same &= bits_equal(pool[2], start[2])
    found = {"rolled back": relative_error(pool[6], kept[2].double())}
    return {"found": found, "limit": {"rolled back": 5e-5 if dtype == torch.float32 else 8e-3}, "same": same}


def recurrent(arch: str) -> dict[str, Any]:
    """Packed sequences, K-first and V-first states."""
    p = make(Case(T=20, lengths=(0, 17, 3), H=1, HV=2, K=64, V=48, gate="softplus", **BASE))
    named = {"A_log": p.A_log, "dt_bias": p.dt_bias, "implementation": "portable"}
    with Runs(arch, races=True):
        got = dict(zip(("o", "final_state"), fused_recurrent_kda(*p.five(), **p.flags(), initial_state=p.h0, **named)))
        flags = {**p.flags(), "state_v_first": True}
        other, turned = fused_recurrent_kda(*p.five(), **flags, initial_state=p.h0.mT.contiguous(), **named)
    truth, v_first = reference(p, gradients=False), {"o": other, "final_state": turned.mT}
    found, limit = errors(p, got, truth), limits(p, got)
    found |= {f"{name}, V-first": error for name, error in errors(p, v_first, truth).items()}
    return {"found": found, "limit": limit | {f"{name}, V-first": x for name, x in limit.items()}, "same": True}


def serving(arch: str, sizes: tuple[int, int, int, int], pool: torch.dtype) -> dict[str, Any]:
    """kda_decode_fused beside eager's, and twice in the same bits."""
    H, HV, K, V = sizes
    channels = 2 * H * K + HV * V
    shapes = {
        "x": (3, channels), "g": (3, HV, K), "beta": (3, HV), "conv_weight": (channels, 4), "conv_bias": (channels,),
        "conv_pool": (6, channels, 3), "state_pool": (6, HV, V, K), "output_gate": (3, HV, V), "norm_weight": (V,),
        "A_log": (HV,), "dt_bias": (HV * K,),
    }  # fmt: skip
    narrow, results = ("x", "g", "beta", "conv_pool", "output_gate"), []
    for name in ("portable", "portable", "eager"):
        a = {
            what: normal(*shape, seed=seed, dtype=torch.bfloat16 if what in narrow else torch.float32)
            for seed, (what, shape) in enumerate(shapes.items(), 40)
        }
        a["state_pool"] = a["state_pool"].to(pool)
        given = {"state_indices": torch.tensor([4, -1, 2]), "lower_bound": -5.0, "implementation": name}
        with Runs(arch, races=True):
            out = kda_decode_fused(**a, **given)
        results.append((out, a["state_pool"], a["conv_pool"]))
    same = all(bits_equal(x, y) for x, y in zip(*results[:2])) and bits_equal(results[0][2], results[2][2])
    found = {name: relative_error(results[0][i], results[2][i].double()) for i, name in enumerate(("o", "pool"))}
    return {"found": found, "limit": {"o": 6e-3, "pool": 5e-5 if pool == torch.float32 else 8e-3}, "same": same}


OTHERS = {
    "drafts fp32": lambda arch: drafts(arch, torch.float32),
    "drafts bf16": lambda arch: drafts(arch, torch.bfloat16),
    "recurrent": recurrent,
    "serving": lambda arch: serving(arch, (1, 2, 64, 128), torch.float32),
    "serving blocks": lambda arch: serving(arch, (1, 1, 256, 80), torch.bfloat16),
}


def main() -> None:
    arch = sys.argv[1]
    target = parse_target(arch)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("cula.ops") and hasattr(module, "target_of"):
            module.target_of = lambda device: target
    torch.set_num_threads(1)
    found = {case.id: run(arch, case) for case in CASES}
    print(json.dumps(found | {name: job(arch) for name, job in OTHERS.items()}))


if __name__ == "__main__":
    main()
