"""Calls of mixed dtypes, shapes and index types, each as a digest of its bits, here or in a process of its own.

`python -m cula.checks.fresh LABEL DEVICE THREADS` prints the digests as JSON; every call runs in its own fork of a
process that has imported torch and made no call before.
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
from cula.checks.rows import has_backward, labels, name_of, only

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
)


def digest(call_name: str, label: str, device: str) -> str | None:
    """A hash of every output, state and gradient of one call; None where `label` has no such stage or refuses it."""
    from cula import NotSupportedError

    _, function, case, kinds = next(entry for entry in CALLS if entry[0] == call_name)
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
    if function == "chunk_kda":
        gradients = has_backward(label, device)
        return lambda p: runs.run_chunk(p, name, gradients=gradients, fill=None)
    other = {
        "kda_prefill": runs.run_prefill,
        "kda_decode": runs.run_decode,
        "kda_verify": runs.run_verify,
        "fused_recurrent_kda": runs.run_recurrent,
    }[function]
    return lambda p: other(p, name, fill=None)


def shuffled(label: str, device: str, seed: int) -> dict[str, str | None]:
    """The digests of all calls made in this process, in an order drawn from `seed`."""
    names = [entry[0] for entry in CALLS]
    random.Random(seed).shuffle(names)
    return {name: digest(name, label, device) for name in names}


def in_fresh_processes(label: str, device: str) -> dict[str, str | None]:
    """The digests of all calls, each made first thing in a process of its own."""
    command = [sys.executable, "-m", "cula.checks.fresh", label, device, str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{' '.join(command[1:])} failed: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def _child(connection: Any, call_name: str, label: str, device: str) -> None:
    connection.send(digest(call_name, label, device))
    connection.close()


def main(label: str, device: str, threads: str) -> None:
    """Fork one process per call, so that each starts from imports alone."""
    import multiprocessing

    torch.set_num_threads(int(threads))
    context = multiprocessing.get_context("fork")
    result = {}
    for name, *_ in CALLS:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(send, name, label, device))
        process.start()
        send.close()
        result[name] = receive.recv()
        process.join()
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
