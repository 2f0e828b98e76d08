"""Training: AdamW, a warm-up and a cosine, validation now and then, a checkpoint that is never half-written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cula.demo import checkpoint, data
from cula.demo.checkpoint import History
from cula.demo.config import DemoConfig
from cula.demo.interrupt import Interrupt
from cula.demo.model import ByteLM

#: Called after each step with (history, bytes per second since the start of this run).
Report = Callable[[History, float], None]


def build(config: DemoConfig, device: str) -> tuple[ByteLM, torch.optim.Optimizer]:
    """The model with weights drawn from the seed (on the CPU, so that devices agree), and its optimizer."""
    torch.manual_seed(config.seed)
    model = ByteLM(config).to(device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": config.decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.rate, betas=(0.9, 0.95), eps=1e-8, fused=True)
    return model, optimizer


def bits_per_byte(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in bits."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / math.log(2.0)


@torch.no_grad()
def evaluate(model: nn.Module, corpus: data.Corpus, config: DemoConfig) -> float:
    """Bits per byte on the validation windows."""
    total, count = 0.0, 0
    device = next(model.parameters()).device
    for inputs, targets in data.validation(corpus, config):
        loss = bits_per_byte(model(inputs.to(device)), targets.to(device))
        total, count = total + loss.item() * targets.numel(), count + targets.numel()
    return total / count


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, rate: float) -> float:
    """One update at learning rate `rate`; the loss before it, in bits per byte."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = bits_per_byte(model(inputs), targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def train(
    folder: Path,
    config: DemoConfig,
    corpus: data.Corpus,
    model: ByteLM,
    optimizer: torch.optim.Optimizer,
    history: History,
    report: Report,
    every: int = 100,
) -> bool:
    """Go on from `history` to `config.steps`; True when that is reached, False where Ctrl-C asked to stop.

    A checkpoint is in `folder` from the first moment on, after every `every` steps and at the end or the stop.
    """
    device = next(model.parameters()).device
    began, first, before = time.perf_counter(), history.step, history.seconds
    with Interrupt() as interrupt:
        if history.step == 0:
            checkpoint.save(folder, config, model, optimizer, history)
        while history.step < config.steps and not interrupt.asked:
            step = history.step
            inputs, targets = data.batch(corpus, config, step)
            rate = config.learning_rate(step)
            history.train.append(one_step(model, optimizer, inputs.to(device), targets.to(device), rate))
            last = history.step == config.steps
            if history.step % every == 0 or last:
                history.validation.append((history.step, evaluate(model, corpus, config)))
            history.seconds = before + time.perf_counter() - began
            speed = (history.step - first) * config.batch * config.context / (history.seconds - before)
            report(history, speed)
            if history.step % every == 0 and not last:
                checkpoint.save(folder, config, model, optimizer, history)
        checkpoint.save(folder, config, model, optimizer, history)
    return not interrupt.asked
