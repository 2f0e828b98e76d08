"""Calls of mixed dtypes, shapes and index types, each as a digest of its bits, here or in a process of its own.

`python -m cula.checks.fresh LABEL DEVICE THREADS ALGORITHM` prints the digests as JSON; every call runs in its own
fork of a process that has imported torch and made no call before.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from cula.checks import runs
from cula.checks.cases import Case, make
from cula.checks.grid import FALLBACKS
from cula.checks.rows import BACKWARDS, algorithm_of, has_backward, labels, name_of, only

#: (label, function, case, what to change in the drawn tensors)
CALLS: tuple[tuple[str, str, Case, dict[str, torch.dtype]], ...] = (
    ("chunk fp32", "chunk_kda", Case(B=2, T=70, H=1, HV=2, K=32, V=16, gate="softplus"), {}),
    ("chunk bf16, fp32 gates", "chunk_kda", Case(T=70, K=32, V=32, dtype="bf16", gate="softplus"), {}),
    ("chunk bf16, bf16 gates", "chunk_kda", Case(T=70, K=32, V=32, dtype="bf16", gate="softplus", gates="same"), {}),
    (
        "chunk bf16, bf16 bias",
        "chunk_kda",
        Case(T=70, K=32, V=32, dtype="bf16", gate="softplus"),
        {"dt_bias": torch.bfloat16},
    ),
    ("chunk fp16 packed", "chunk_kda", Case(T=70, lengths=(3, 0, 67), K=32, V=32, dtype="fp16"), {}),
    (
        "chunk packed, int64 offsets",
        "chunk_kda",
        Case(T=70, lengths=(3, 0, 67), K=32, V=32, dtype="fp16"),
        {"cu_seqlens": torch.int64},
    ),
    ("chunk fp64, chunk 16", "chunk_kda", Case(T=33, K=16, V=16, dtype="fp64", chunk_size=16), {}),
    ("prefill fp32", "kda_prefill", Case(B=2, T=65, K=32, V=32, gate="sigmoid", beta="logits"), {}),
    ("prefill bf16, V-first", "kda_prefill", Case(T=17, K=32, V=64, dtype="bf16", v_first=True), {}),
    ("recurrent fp32", "fused_recurrent_kda", Case(T=9, H=2, HV=2, K=32, V=32, beta="logits_doubled"), {}),
    ("decode bf16", "kda_decode", Case(B=3, T=2, K=64, V=64, dtype="bf16", gate="sigmoid", beta="logits"), {}),
    ("decode fp32", "kda_decode", Case(B=1, T=2, K=64, V=64, gate="sigmoid", beta="logits"), {}),
    ("verify bf16", "kda_verify", Case(B=2, T=4, K=64, V=64, dtype="bf16", gate="softplus"), {}),
    ("chunk fp32", "chunk_lightning_attn", Case(B=2, T=70, HV=2, K=32, V=16, gate="slopes_fla"), {}),
    ("chunk bf16", "chunk_lightning_attn", Case(T=70, K=32, V=32, dtype="bf16", gate="slopes_mixed"), {}),
    (
        "chunk bf16, bf16 slopes",
        "chunk_lightning_attn",
        Case(T=70, K=32, V=32, dtype="bf16", gate="slopes_fla"),
        {"slopes": torch.bfloat16},
    ),
    (
        "chunk packed, int64 offsets",
        "chunk_lightning_attn",
        Case(T=70, lengths=(3, 0, 67), K=32, V=32, dtype="fp16", gate="slopes_alibi"),
        {"cu_seqlens": torch.int64},
    ),
    ("chunk fp64", "chunk_lightning_attn", Case(T=33, K=16, V=16, dtype="fp64", gate="slopes_last"), {}),
    ("prefill fp32", "lightning_prefill", Case(B=2, T=65, K=32, V=32, gate="slopes_alibi"), {}),
    ("prefill bf16", "lightning_prefill", Case(T=17, K=32, V=64, dtype="bf16", gate="slopes_fla"), {}),
    ("decode bf16", "lightning_decode", Case(B=3, T=2, K=64, V=64, dtype="bf16", gate="slopes_fla"), {}),
    ("decode fp32", "lightning_decode", Case(B=1, T=2, K=64, V=64, gate="slopes_alibi"), {}),
    ("verify fp32", "lightning_verify", Case(B=2, T=4, K=64, V=64, gate="slopes_steep"), {}),
)


def calls_of(algorithm: str) -> list[str]:
    """The names of an algorithm's calls, which no other call of it shares."""
    return [name for name, function, *_ in CALLS if algorithm_of(function) == algorithm]


def digest(call_name: str, label: str, device: str, algorithm: str = "kda") -> str | None:
    """A hash of every output, state and gradient of one call; None where `label` has no such stage or refuses it."""
    from cula import NotSupportedError

    _, function, case, kinds = next(x for x in CALLS if x[0] == call_name and algorithm_of(x[1]) == algorithm)
    if label not in labels(function, device):
        return None
    run = _runner(function, label, device)
    for change in FALLBACKS:
        p = make(case.replace(**change), device)
        p = p.map(lambda x: x, **{field: getattr(p, field).to(kind) for field, kind in kinds.items()})
        try:
            with only(label):
                found = run(p)
        except NotSupportedError:
            continue
        return _hash(found)
    return None


def _hash(found: runs.Quantities) -> str:
    total = hashlib.sha256()
    for key in sorted(found):
        value = found[key].detach().cpu().contiguous()
        total.update(f"{key}{tuple(value.shape)}{value.dtype}".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _runner(function: str, label: str, device: str) -> Callable[..., runs.Quantities]:
    name = name_of(label)
    if function in BACKWARDS:
        gradients = has_backward(label, device, function)
        return lambda p: runs.run_chunk(p, name, gradients=gradients, fill=None)
    runners = {"prefill": runs.run_prefill, "decode": runs.run_decode, "verify": runs.run_verify}
    other = runners.get(function.rpartition("_")[2], runs.run_recurrent)
    return lambda p: other(p, name, fill=None)


def shuffled(label: str, device: str, seed: int, algorithm: str = "kda") -> dict[str, str | None]:
    """The digests of all calls of an algorithm made in this process, in an order drawn from `seed`."""
    names = calls_of(algorithm)
    random.Random(seed).shuffle(names)
    return {name: digest(name, label, device, algorithm) for name in names}


def in_fresh_processes(label: str, device: str, algorithm: str = "kda") -> dict[str, str | None]:
    """The digests of all calls, each made first thing in a process of its own."""
    command = [sys.executable, "-m", "cula.checks.fresh", label, device, str(torch.get_num_threads()), algorithm]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{' '.join(command[1:])} failed: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def _child(connection: Any, *arguments: str) -> None:
    connection.send(digest(*arguments))
    connection.close()


def main(label: str, device: str, threads: str, algorithm: str) -> None:
    """Fork one process per call, so that each starts from imports alone."""
    import multiprocessing

    torch.set_num_threads(int(threads))
    context = multiprocessing.get_context("fork")
    result = {}
    for name in calls_of(algorithm):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(send, name, label, device, algorithm))
        process.start()
        send.close()
        result[name] = receive.recv()
        process.join()
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
