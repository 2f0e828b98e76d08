"""KimiDeltaAttention: the mixing layer of Kimi Linear, for training, prefill, decoding and draft verification."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cula.host.errors import DeviceError, DtypeError, RangeError, ShapeError
from cula.kda import chunk_kda, kda_decode, kda_prefill, kda_verify
from cula.layers.cache import KDACache, KDADraft, Slots
from cula.layers.short_conv import Window, convolve


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention with short convolutions, a low-rank decay gate and a gated RMSNorm at the output.

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv))
        g       = in-kernel gate of x Wf1 Wf2 with A_log [HV] and dt_bias [HV*K]
        beta    = sigmoid(x Wb)                        (doubled with allow_neg_eigval)
        o       = KDA(l2norm(q), l2norm(k), v, g, beta)
        y       = (RMSNorm(o) * weight * sigmoid(x Wg1 Wg2 + bias)) Wo

    Arguments. hidden_size: D. num_heads: H query/key heads. head_dim: K. num_v_heads: HV, a multiple of H (default
    H); value head j reads query/key head j // (HV/H). head_v_dim: V (default K). conv_size: W, 2 or more.
    conv_bias: a bias in the convolutions. gate_rank: inner width of the two low-rank projections (default V).
    lower_bound: None for the softplus gate, else a finite number < 0 for the scaled sigmoid. norm_eps: of the
    RMSNorm. implementation: as in `cula.kda` ("eager", "portable", ...; None chooses). device, dtype: of the
    parameters; A_log and dt_bias stay fp32 whatever `dtype` is at construction.

    The methods for serving run without gradients and share a `KDACache` (see `allocate_cache`). For one sequence,
    `forward`, `prefill` in any pieces, `step` token by token and `verify` + commit agree within the tolerance of
    the kernels. x has the dtype of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int = 128,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate_rank: int | None = None,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.head_v_dim = head_dim if head_v_dim is None else head_v_dim
        self.conv_size, self.norm_eps, self.implementation = conv_size, norm_eps, implementation
        self.lower_bound, self.allow_neg_eigval = lower_bound, allow_neg_eigval
        rank = self.head_v_dim if gate_rank is None else gate_rank
        _check_sizes(self, rank)
        key, value = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        self.key_dim, self.value_dim = key, value
        where: dict[str, Any] = {"device": device, "dtype": dtype}

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, **where)

        def conv(channels: int) -> nn.Conv1d:
            return nn.Conv1d(channels, channels, conv_size, groups=channels, bias=conv_bias, **where)

        self.q_proj, self.k_proj = linear(hidden_size, key), linear(hidden_size, key)
        self.v_proj = linear(hidden_size, value)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = conv(key), conv(key), conv(value)
        self.f_proj = nn.Sequential(linear(hidden_size, rank), linear(rank, self.num_v_heads * head_dim))
        self.b_proj = linear(hidden_size, self.num_v_heads)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, device=device, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads * head_dim, device=device, dtype=torch.float32))
        self.g_proj = nn.Sequential(linear(hidden_size, rank), linear(rank, value, bias=True))
        self.o_norm = nn.RMSNorm(self.head_v_dim, eps=norm_eps, **where)
        self.o_proj = linear(value, hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew from torch's default generator.

        Matrices: normal, std 1/sqrt(inputs). Convolutions: uniform in +-1/sqrt(W). A_log: log of uniform 1..16.
        dt_bias: the inverse softplus of dt, log-uniform in 1e-3..0.1. Biases 0, norm weight 1.
        """
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0.0, module.in_features**-0.5)
                elif isinstance(module, nn.Conv1d):
                    module.weight.uniform_(-(self.conv_size**-0.5), self.conv_size**-0.5)
                if isinstance(module, nn.Linear | nn.Conv1d) and module.bias is not None:
                    module.bias.zero_()
            self.o_norm.weight.fill_(1.0)
            self.A_log.uniform_(1.0, 16.0).log_()
            dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp_()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def extra_repr(self) -> str:
        """The sizes, for `print(layer)`."""
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_v_heads={self.num_v_heads}, "
            f"head_dim={self.head_dim}, head_v_dim={self.head_v_dim}, conv_size={self.conv_size}"
        )

    def allocate_cache(self, slots: int, *, state_dtype: torch.dtype = torch.float32) -> KDACache:
        """Zeroed pools for `slots` sequences on the layer's device; convolution rows in the parameters' dtype."""
        weight = self.q_proj.weight
        return KDACache.allocate(
            slots,
            num_v_heads=self.num_v_heads,
            head_dim=self.head_dim,
            head_v_dim=self.head_v_dim,
            conv_channels=2 * self.key_dim + self.value_dim,
            conv_size=self.conv_size,
            dtype=weight.dtype,
            state_dtype=state_dtype,
            device=weight.device,
        )

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, *, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
        """Training: x [B,T,D] -> [B,T,D], every sequence from an empty state, with gradients.

        cu_seqlens: int32 or int64 [N+1] for N sequences packed into B = 1; neither the convolution nor the state
        crosses a boundary, and rows behind the last boundary are zeros. cu_seqlens_cpu: the same on the host,
        which saves a copy. ShapeError, DtypeError for an x or cu_seqlens that does not fit.
        """
        self._check_x(x)
        _check_boundaries(x, cu_seqlens)
        window = Window(x, self.conv_size, cu_seqlens)
        packed, g, beta, gate = self._project(x)
        q, k, v = self._mix(window, window.fill(packed, None))
        o, _ = chunk_kda(
            *(q, k, v, g, beta),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            lower_bound=self.lower_bound,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            implementation=self.implementation,
        )
        return self._output(o, gate)

    @torch.no_grad()
    def prefill(
        self,
        x: Tensor,
        cache: KDACache,
        slots: Slots,
        cu_seqlens: Tensor | None = None,
        has_initial_state: Tensor | None = None,
        *,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> Tensor:
        """Continue sequences by many tokens: x [N,T,D], or [1,T,D] with cu_seqlens [N+1] -> the same shape.

        slots: [N]. Each sequence goes on from its slot and leaves its new state there, so a prompt may come in any
        pieces. has_initial_state: bool [N]; False starts from zero whatever the slot holds (None: all True).
        """
        self._check_x(x)
        _check_boundaries(x, cu_seqlens)
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        ids = self._ids(cache, slots, sequences)
        if has_initial_state is not None and has_initial_state.shape != (sequences,):
            raise ShapeError(f"has_initial_state must have shape [{sequences}], got {tuple(has_initial_state.shape)}")
        window = Window(x, self.conv_size, cu_seqlens)
        packed, g, beta, gate = self._project(x)
        rows = window.fill(packed, cache.history(ids, has_initial_state))
        q, k, v = self._mix(window, rows)
        o = kda_prefill(
            *(q, k, v, g, beta),
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            state_pool=cache.state_pool,
            read_indices=ids,
            has_initial_state=has_initial_state,
            **self._serving(),
        )
        cache.put_history(ids, window.new_history(rows))
        return self._output(o, gate)

    @torch.no_grad()
    def step(self, x: Tensor, cache: KDACache, slots: Slots) -> Tensor:
        """Decode: one token per sequence, x [N,D] or [N,1,D] -> the same shape; slots [N] move on by it.

        A padding slot (see `KDACache`) gives a row of zeros. No host copy is made.
        """
        if x.dim() == 2:
            return self.step(x[:, None], cache, slots)[:, 0]
        self._check_x(x)
        if x.shape[1] != 1:
            raise ShapeError(f"x of step must be [N,D] or [N,1,D], got {tuple(x.shape)}; verify takes more tokens")
        ids = self._ids(cache, slots, x.shape[0])
        o, rows, gate = self._short(kda_decode, x, cache, ids)
        cache.put_history(ids, rows[:, 1:].transpose(1, 2))
        return self._output(o, gate)

    @torch.no_grad()
    def verify(self, x: Tensor, cache: KDACache, slots: Slots) -> tuple[Tensor, KDADraft]:
        """Score draft tokens: x [N,T,D], 1 <= T <= 16 -> (y [N,T,D], draft). The cache stays as it is.

        y equals what `step` would give token by token. `draft.commit(cache, accepted)` then moves each slot on by
        the accepted tokens.
        """
        self._check_x(x)
        sequences, tokens = x.shape[:2]
        if not 1 <= tokens <= 16:
            raise ShapeError(f"x of verify must hold 1 to 16 draft tokens, got {tokens}")
        ids = self._ids(cache, slots, sequences)
        states = cache.state_pool.new_zeros(sequences * tokens, *cache.state_pool.shape[1:])
        places = torch.arange(sequences * tokens, device=x.device).view(sequences, tokens)
        o, rows, gate = self._short(kda_verify, x, cache, ids, states_out=states, states_out_indices=places)
        draft = KDADraft(states.view(sequences, tokens, *states.shape[1:]), rows.transpose(1, 2), ids)
        return self._output(o, gate), draft

    def _short(
        self, function: Callable[..., Tensor], x: Tensor, cache: KDACache, ids: Tensor, **extra: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """o, the convolution's buffer and the output gate of a few tokens x [N,T,D] that continue `ids`."""
        window = Window(x, self.conv_size)
        packed, g, beta, gate = self._project(x)
        rows = window.fill(packed, cache.history(ids))
        q, k, v = self._mix(window, rows)
        options = {"state_pool": cache.state_pool, "state_indices": ids, **extra, **self._serving()}
        return function(q, k, v, g, beta, **options), rows, gate

    def _serving(self) -> dict[str, Any]:
        """The common arguments of the serving functions; gate, beta and norms are theirs by default."""
        return {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.lower_bound,
            "allow_neg_eigval": self.allow_neg_eigval,
            "implementation": self.implementation,
        }

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """packed q|k|v [B,T,channels], raw g [B,T,HV,K], beta logits [B,T,HV], output gate [B,T,HV,V]."""
        packed = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)
        g = self.f_proj(x).unflatten(-1, (self.num_v_heads, self.head_dim))
        gate = self.g_proj(x).unflatten(-1, (self.num_v_heads, self.head_v_dim))
        return packed, g, self.b_proj(x), gate

    def _mix(self, window: Window, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,T,H,K], k [B,T,H,K], v [B,T,HV,V] after convolution and SiLU of a filled buffer."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        weight = torch.cat([conv.weight[:, 0] for conv in convs])
        bias = None if convs[0].bias is None else torch.cat([conv.bias for conv in convs])
        y = window.pick(convolve(rows, weight, bias))
        q, k, v = y.split((self.key_dim, self.key_dim, self.value_dim), -1)
        heads = (self.num_heads, self.head_dim)
        return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, (self.num_v_heads, self.head_v_dim))

    def _output(self, o: Tensor, gate: Tensor) -> Tensor:
        """(RMSNorm(o) * weight * sigmoid(gate)) Wo: o [B,T,HV,V] -> [B,T,D]."""
        weight = self.o_norm.weight.to(o.dtype)
        o = F.rms_norm(o, (self.head_v_dim,), weight, self.norm_eps)
        return self.o_proj((o * torch.sigmoid(gate)).flatten(-2))

    def _ids(self, cache: KDACache, slots: Slots, sequences: int) -> Tensor:
        shape = (self.num_v_heads, self.head_v_dim, self.head_dim)
        if tuple(cache.state_pool.shape[1:]) != shape:
            raise ShapeError(
                f"cache was allocated for another layer: its slots hold {tuple(cache.state_pool.shape[1:])}, "
                f"this layer needs [HV,V,K] = {shape}"
            )
        weight = self.q_proj.weight
        if cache.device != weight.device:
            raise DeviceError(f"cache must live where the layer does ({weight.device}), got {cache.device}")
        return cache.ids(slots, sequences)

    def _check_x(self, x: Tensor) -> None:
        weight = self.q_proj.weight
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ShapeError(f"x must be [B,T,{self.hidden_size}], got {tuple(x.shape)}")
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise DtypeError(f"x must have the dtype of the parameters, {weight.dtype}, got {x.dtype}")
        if x.device != weight.device:
            raise DeviceError(f"x must live where the layer does ({weight.device}), got {x.device}")


def _check_boundaries(x: Tensor, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is None:
        return
    if x.shape[0] != 1:
        raise ShapeError(f"x must be [1,T,D] with cu_seqlens (packed sequences), got {tuple(x.shape)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ShapeError(f"cu_seqlens must be [N+1] with N >= 1, got shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")


def _check_sizes(layer: KimiDeltaAttention, rank: int) -> None:
    sizes = {
        "hidden_size": layer.hidden_size,
        "num_heads": layer.num_heads,
        "head_dim": layer.head_dim,
        "num_v_heads": layer.num_v_heads,
        "head_v_dim": layer.head_v_dim,
        "gate_rank": rank,
    }
    for name, size in sizes.items():
        if size < 1:
            raise RangeError(f"{name} must be at least 1, got {size}")
    if layer.num_v_heads % layer.num_heads:
        raise ShapeError(f"num_v_heads must be a multiple of num_heads={layer.num_heads}, got {layer.num_v_heads}")
    if layer.conv_size < 2:
        raise RangeError(f"conv_size must be at least 2, got {layer.conv_size}")
    bound = layer.lower_bound
    if bound is not None and not (math.isfinite(bound) and bound < 0):
        raise RangeError(f"lower_bound must be None or a finite number below 0, got {bound}")
