"""What a demo run is: sizes of the model, the training schedule, the text. Pure Python."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from cula.host.errors import RangeError

#: Bytes that every text must have, in windows of context + 1: the validation part alone needs a few of them.
MINIMUM_WINDOWS = 40


@dataclass(frozen=True)
class DemoConfig:
    """One run's settings. They are stored in its checkpoint, and a resumed run takes them from there.

    width: model width D. layers: blocks. heads, head_dim: of each KDA layer (K = V = head_dim). context: bytes per
    training window. batch: windows per step. steps: of the whole schedule. rate: peak learning rate after `warmup`
    steps, falling as a cosine to a twentieth. decay: weight decay of the matrices. seed: of the initial weights, the
    data order and the sampling. file: the text, None = the Python documentation. text: SHA-256 of the text, filled
    in when it is loaded.
    """

    width: int = 192
    layers: int = 3
    heads: int = 4
    head_dim: int = 64
    context: int = 128
    batch: int = 4
    steps: int = 800
    warmup: int = 40
    rate: float = 4e-3
    decay: float = 0.1
    seed: int = 0
    file: str | None = None
    text: str = ""

    def __post_init__(self) -> None:
        for name, least in (
            ("width", 8),
            ("layers", 1),
            ("heads", 1),
            ("head_dim", 8),
            ("context", 16),
            ("batch", 1),
            ("steps", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise RangeError(f"--{name} must be at least {least}, got {value}")

    @property
    def hidden(self) -> int:
        """Inner width of the SwiGLU: 8/3 of the model's, in steps of 64."""
        return max(64, round(self.width * 8 / 3 / 64) * 64)

    def learning_rate(self, step: int) -> float:
        """The rate of step `step` (from 0): linear warm-up, then a cosine."""
        warmup = min(self.warmup, max(1, self.steps // 10))
        if step < warmup:
            return self.rate * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        return self.rate * (0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done))))

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> DemoConfig:
        """The inverse of `to_json`; unknown keys of another version are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in json.loads(text).items() if key in known})

    def override(self, given: dict[str, Any], *, resumed: bool = False) -> DemoConfig:
        """A copy with the options that were given (None = not given).

        resumed: only `steps` may change; RangeError names the first other option that differs.
        """
        chosen = {key: value for key, value in given.items() if value is not None}
        if resumed:
            for key, value in chosen.items():
                if key != "steps" and value != getattr(self, key):
                    raise RangeError(
                        f"--{key} {value} differs from the checkpoint's {getattr(self, key)}: leave it out, "
                        "or start anew without --resume"
                    )
        return replace(self, **chosen)
