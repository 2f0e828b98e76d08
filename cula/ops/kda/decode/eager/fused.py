"""recurrent, decode and verify, eager on a CPU with Numba: each state row is read once and written once."""

from __future__ import annotations

from typing import Any

import torch

from cula.ops.kda.decode.eager import stepwise
from cula.ops.kda.decode.eager.work import final_state, initial_state
from cula.ops.kda.problem import KDAProblem, Operands
from cula.ops.kda.row_walk import States, walk_rows, walkable


def run(p: KDAProblem, x: Operands) -> Any:
    """(o, final_state) of fused_recurrent_kda; the output alone of kda_decode and kda_verify."""
    if not p.pool:
        state = initial_state(p, x)
        o = walk_rows(p, x, States(state))
        return o, final_state(p, state)
    if "walkable" not in x.memo:
        x.memo["walkable"] = p.N > 0 and walkable(x.state_pool, x.states_out)
    if not x.memo["walkable"]:
        return stepwise.run(p, x)
    read = x.read_indices
    if x.num_accepted_tokens is not None:
        columns = (x.num_accepted_tokens.to(torch.int64) - 1).clamp_(0, read.shape[1] - 1)
        read = read.gather(1, columns.unsqueeze(1)).squeeze(1)
    write = "none"
    if x.update_state:
        write = "read" if x.write_indices is None else x.write_indices
    return walk_rows(p, x, States(x.state_pool, read, write, x.states_out, x.states_out_indices, x.null_index, x.memo))
