"""The public signatures, literally: names, order, defaults, what is keyword-only; and no unknown keyword anywhere."""

from __future__ import annotations

import inspect

import pytest
import torch

import cula.kda
from cula.checks.cases import Case, make

GATE = {
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
}
COMMON = {
    "A_log": None,
    "dt_bias": None,
    "lower_bound": None,
    "scale": None,
    "gate_is_raw": True,
    "beta_is_logits": True,
    "normalize_qk": True,
    "allow_neg_eigval": False,
    "null_index": -1,
    "out": None,
    "implementation": None,
}
NEEDED = inspect.Parameter.empty
FIVE = dict.fromkeys(("q", "k", "v", "g", "beta"), NEEDED)

#: name -> (positional arguments, keyword-only arguments)
SIGNATURES = {
    "chunk_kda": (
        {
            **FIVE,
            "scale": None,
            "initial_state": None,
            "output_final_state": False,
            **GATE,
            "safe_gate": False,
            "lower_bound": None,
            "disable_recompute": False,
            "return_intermediate_states": False,
            "state_v_first": False,
            "cu_seqlens": None,
            "cu_seqlens_cpu": None,
            "cp_context": None,
            "use_graph": False,
            "max_num_seqs": None,
        },
        {
            "A_log": None,
            "dt_bias": None,
            "chunk_size": 64,
            "cp_mode": None,
            "plan": None,
            "implementation": None,
        },
    ),
    "fused_recurrent_kda": (
        {
            **FIVE,
            "A_log": None,
            "dt_bias": None,
            "scale": None,
            "initial_state": None,
            "output_final_state": False,
            **GATE,
            "lower_bound": None,
            "state_v_first": False,
            "cu_seqlens": None,
        },
        {"implementation": None},
    ),
    "fused_kda_gate": (
        {"g": NEEDED, "A_log": None, "dt_bias": None, "lower_bound": None, "output_dtype": torch.float32},
        {},
    ),
    "kda_prefill": (
        FIVE,
        {
            **dict.fromkeys(("cu_seqlens", "cu_seqlens_cpu", "state_pool", "read_indices", "write_indices")),
            **dict.fromkeys(("has_initial_state", "checkpoints")),
            "checkpoint_every": 64,
            **dict.fromkeys(("checkpoint_offsets", "position_offsets", "cp_mode", "plan")),
            **COMMON,
        },
    ),
    "kda_decode": (
        FIVE,
        {
            "state_pool": NEEDED,
            "state_indices": NEEDED,
            "write_indices": None,
            "num_accepted_tokens": None,
            **COMMON,
        },
    ),
    "kda_verify": (
        FIVE,
        {
            "state_pool": NEEDED,
            "state_indices": NEEDED,
            **dict.fromkeys(("num_accepted_tokens", "cu_seqlens", "states_out", "states_out_indices")),
            "update_state": False,
            "parent": None,
            "rollback": None,
            **COMMON,
        },
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    positional, keyword = SIGNATURES[name]
    found = inspect.signature(getattr(cula.kda, name)).parameters.values()
    by_kind = {kind: {p.name: p.default for p in found if p.kind is kind} for kind in inspect._ParameterKind}
    assert not by_kind[inspect.Parameter.VAR_KEYWORD] and not by_kind[inspect.Parameter.VAR_POSITIONAL]
    assert list(by_kind[inspect.Parameter.POSITIONAL_OR_KEYWORD].items()) == list(positional.items())
    assert by_kind[inspect.Parameter.KEYWORD_ONLY] == keyword


@pytest.mark.parametrize("name", ["kda_recurrent_reference", "kda_chunk_reference"])
def test_references_take_the_arguments_of_chunk_kda(name: str) -> None:
    found = inspect.signature(getattr(cula.kda, name)).parameters
    positional = list(SIGNATURES["chunk_kda"][0])
    assert list(found)[: positional.index("cu_seqlens") + 1] == positional[: positional.index("cu_seqlens") + 1]
    assert {"A_log", "dt_bias", "chunk_size"} <= set(found)


@pytest.mark.parametrize("name", SIGNATURES)
def test_an_unknown_keyword_is_a_type_error(name: str) -> None:
    p = make(Case(T=1))
    given = p.five() if "q" in SIGNATURES[name][0] else (p.g, torch.zeros(1))
    with pytest.raises(TypeError, match="transpose_state_layout"):
        getattr(cula.kda, name)(*given, transpose_state_layout=True)


@pytest.mark.parametrize("name", SIGNATURES)
def test_docstrings_name_every_argument_and_error(name: str) -> None:
    function = getattr(cula.kda, name)
    text = inspect.getdoc(function) or ""
    missing = [argument for argument in inspect.signature(function).parameters if argument not in text]
    assert missing == []
    assert "Returns" in text and "Error" in text
