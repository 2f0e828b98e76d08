"""The loops that Numba compiles for `fused`: written so that the innermost ones run over K and vectorise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

#: Tokens whose activations are held at once.
BLOCK = 16


def compiled(parallel: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit` with the machine code kept on disk, where that can be written.

    Sums may be reassociated into vector lanes; NaN and infinity keep their meaning.
    """
    options: dict[str, Any] = {"nogil": True, "parallel": parallel, "fastmath": {"reassoc", "contract", "nsz", "arcp"}}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no writable place for the cache
            return numba.njit(**options)(function)

    return decorate


@compiled()
def activate(q, k, g, beta, A_log, dt_bias, numbers, sizes, token, head, i, ak, kk, qq, bt):  # noqa: ANN001, ANN201
    """Finish the inputs of one token and head into row i of ak (decay), kk, qq (scaled) and bt."""
    real = q.dtype.type
    H, HV, K = sizes[0], sizes[1], sizes[2]
    at_k = (token * H + head // (HV // H)) * K
    at_g = (token * HV + head) * K
    q_norm, k_norm = real(numbers[0]), real(1.0)
    if sizes[6]:
        qs, ks = real(0.0), real(0.0)
        for c in range(K):
            qs += q[at_k + c] * q[at_k + c]
            ks += k[at_k + c] * k[at_k + c]
        q_norm = q_norm / math.sqrt(qs + real(1e-6))
        k_norm = k_norm / math.sqrt(ks + real(1e-6))
    for c in range(K):
        qq[i, c] = q[at_k + c] * q_norm
        kk[i, c] = k[at_k + c] * k_norm
        ak[i, c] = g[at_g + c]
    if sizes[4] > 0:
        a = math.exp(A_log[head]) if sizes[7] else real(1.0)
        for c in range(K):
            x = ak[i, c] + (dt_bias[head * K + c] if sizes[8] else real(0.0))
            if sizes[4] == 1:
                ak[i, c] = -a * (max(x, real(0.0)) + math.log1p(math.exp(-abs(x))))
            else:
                ak[i, c] = real(numbers[1]) / (real(1.0) + math.exp(-a * x))
    for c in range(K):
        ak[i, c] = math.exp(ak[i, c])
    b = beta[token * HV + head]
    if sizes[5] > 0:
        b = real(sizes[5]) / (real(1.0) + math.exp(-b))
    bt[i] = b


@compiled()
def step(row, a, k, q, b, v):  # noqa: ANN001, ANN201
    """One token of one state row, in place; returns its output."""
    zero = row.dtype.type(0.0)
    seen, o = zero, zero
    for c in range(row.shape[0]):
        row[c] *= a[c]
        seen += row[c] * k[c]
    u = b * (v - seen)
    for c in range(row.shape[0]):
        row[c] += u * k[c]
        o += row[c] * q[c]
    return o


@compiled(parallel=True)
def walk(q, k, v, g, beta, A_log, dt_bias, numbers, sizes, first, count, read, write, pool, states_out, out_ids, out):  # noqa: ANN001, ANN201, E501
    """Every (sequence, head, part of V) through its tokens. All arrays flat; see `fused._walk` for their meaning."""
    real = q.dtype.type
    HV, K, V, splits = sizes[1], sizes[2], sizes[3], sizes[15]
    for task in numba.prange(first.shape[0] * HV * splits):
        part = task % splits
        head = (task // splits) % HV
        n = task // (splits * HV)
        low, high = V * part // splits, V * (part + 1) // splits
        source = read[n]
        ak = np.empty((BLOCK, K), q.dtype)
        kk = np.empty((BLOCK, K), q.dtype)
        qq = np.empty((BLOCK, K), q.dtype)
        bt = np.empty(BLOCK, q.dtype)
        row = np.empty(K, q.dtype)
        for t0 in range(0, count[n], BLOCK):
            tokens = min(BLOCK, count[n] - t0)
            if source < 0:
                for i in range(tokens):
                    at_v = ((first[n] + t0 + i) * HV + head) * V
                    out[at_v + low : at_v + high] = real(0.0)
                continue
            for i in range(tokens):
                activate(q, k, g, beta, A_log, dt_bias, numbers, sizes, first[n] + t0 + i, head, i, ak, kk, qq, bt)
            for r in range(low, high):
                at = source * sizes[9] + head * sizes[10] + r * sizes[11]
                for c in range(K):
                    row[c] = pool[at + c]
                for i in range(tokens):
                    token = first[n] + t0 + i
                    at_v = (token * HV + head) * V + r
                    out[at_v] = step(row, ak[i], kk[i], qq[i], bt[i], v[at_v])
                    if out_ids.shape[0] > 0 and out_ids[token] >= 0:
                        at = out_ids[token] * sizes[12] + head * sizes[13] + r * sizes[14]
                        for c in range(K):
                            states_out[at + c] = row[c]
                if write[n] >= 0:
                    at = write[n] * sizes[9] + head * sizes[10] + r * sizes[11]
                    for c in range(K):
                        pool[at + c] = row[c]
