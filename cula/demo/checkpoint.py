"""The checkpoint: one safetensors file that is always whole, because it is written beside its place and moved in."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from cula.demo.config import DemoConfig
from cula.host.errors import RangeError

FILE = "checkpoint.safetensors"
EARLIER = "checkpoint-earlier.safetensors"
_FORMAT = "cula-demo-1"


@dataclass
class History:
    """Losses in bits per byte: train, one per step done; validation, (steps done, value)."""

    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.train)


def save(
    folder: Path, config: DemoConfig, model: nn.Module, optimizer: torch.optim.Optimizer, history: History
) -> Path:
    """Write FILE in `folder`; an earlier one is replaced in one move, at the end. Returns its path."""
    from safetensors.torch import save_file

    tensors = {f"model.{name}": p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value.detach().cpu().contiguous()
    tensors["rng"] = torch.get_rng_state()
    tensors["history.train"] = torch.tensor(history.train, dtype=torch.float64)
    tensors["history.validation"] = torch.tensor(history.validation, dtype=torch.float64).view(-1, 2)
    facts = {
        "format": _FORMAT,
        "config": config.to_json(),
        "step": str(history.step),
        "seconds": repr(history.seconds),
    }
    place, fresh = folder / FILE, folder / (FILE + ".tmp")
    save_file(tensors, str(fresh), metadata=facts)
    with open(fresh, "rb") as written:
        os.fsync(written.fileno())
    os.replace(fresh, place)
    return place


def read(folder: Path) -> tuple[DemoConfig, History, dict[str, Tensor]]:
    """Config, history and all tensors of the checkpoint in `folder`; RangeError where there is none that is whole."""
    from safetensors import SafetensorError, safe_open

    place = folder / FILE
    if not place.is_file():
        raise RangeError(f"--resume: {folder} holds no {FILE}: name the --out of an earlier run, or leave it out")
    try:
        with safe_open(str(place), "pt") as opened:
            facts = opened.metadata() or {}
            if facts.get("format") != _FORMAT:
                raise RangeError(f"--resume: {place} was not written by this version of the demo: start anew")
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise RangeError(f"--resume: {place} is not a whole safetensors file ({error}): start anew") from None
    history = History(
        tensors["history.train"].tolist(),
        [(int(step), value) for step, value in tensors["history.validation"].tolist()],
        float(facts["seconds"]),
    )
    return DemoConfig.from_json(facts["config"]), history, tensors


def restore(tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the checkpoint's weights, optimizer state and random state in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            state = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                saved = tensors.get(f"optimizer.{key}.{name}")
                if saved is not None:
                    state[key] = saved.clone() if key == "step" else torch.empty_like(parameter).copy_(saved)
            if state:
                optimizer.state[parameter] = state
    torch.set_rng_state(tensors["rng"].clone())


def keep_earlier(folder: Path) -> bool:
    """Move a checkpoint that a new run would replace to EARLIER; True where there was one."""
    place = folder / FILE
    if not place.is_file():
        return False
    os.replace(place, folder / EARLIER)
    return True
