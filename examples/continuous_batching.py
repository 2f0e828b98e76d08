"""Continuous batching with a recurrent state: many prompts share a few slots of a pool.

    python examples/continuous_batching.py                      # untrained weights, CPU
    python examples/continuous_batching.py --checkpoint cula-demo --device cuda

The demo's byte-level model (`make demo` trains one) answers all prompts greedily, as a serving engine would:

- a sequence owns one slot while it runs; a finished one leaves its slot to the next prompt in line;
- prompts are prefilled in pieces of at most 64 bytes, packed with the pieces of other prompts;
- the state after each full piece of a prompt is kept in a slot of the prefix cache, and a prompt that begins with the
  same bytes starts from there: one copy instead of a prefill, however long the prefix;
- generation guesses: the bytes that followed the last few bytes where they stood before are a draft, which one
  verification scores; the longest prefix that the model agrees with stands.

Then every prompt runs again alone, byte by byte. All outputs must be equal, token for token, up to the first place
where the two best logits are within 1e-3 of each other; the exit code is 1 where they are not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cula.demo.checkpoint import read
from cula.demo.config import DemoConfig
from cula.demo.model import ByteLM

PIECE = 64
#: Below this difference of the two best logits, rounding may choose.
TIE = 1e-3


@dataclass
class Request:
    """One prompt and what came of it so far."""

    prompt: bytes
    length: int
    slot: int = -1
    done: int = 0  # bytes of the prompt that its slot holds
    output: list[int] = field(default_factory=list)

    @property
    def history(self) -> bytes:
        """The prompt and the output."""
        return self.prompt + bytes(self.output)

    def take(self, tokens: list[int]) -> None:
        """Append what was generated, up to the length that was asked for."""
        self.output += tokens[: self.length - len(self.output)]


@dataclass
class Counts:
    """What an engine did."""

    prefilled: int = 0
    reused: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


def ngram_draft(history: bytes, most: int, context: int = 4) -> bytes:
    """The bytes that followed the latest earlier place where the last `context` (or fewer) bytes stood."""
    for width in range(min(context, len(history) - 1), 0, -1):
        at = history.rfind(history[-width:], 0, len(history) - 1)
        if at >= 0:
            return history[at + width : at + width + most]
    return b""


class Engine:
    """Requests in, outputs out: slots 0..slots-1 run sequences, the slots behind them hold cached prefixes."""

    def __init__(self, model: ByteLM, slots: int, prefixes: int, draft: int) -> None:
        """slots: sequences at once. prefixes: states of the prefix cache. draft: most bytes of a draft, 0 for none."""
        self.model, self.draft, self.counts = model, draft, Counts()
        self.device = next(model.parameters()).device
        self.caches = model.allocate(slots + prefixes)
        self.free = list(range(slots))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.spare = list(range(slots, slots + prefixes))
        self.prefixes: OrderedDict[bytes, int] = OrderedDict()  # oldest use first

    def run(self, requests: list[Request]) -> None:
        """Serve all requests to their ends."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.admit()
            self.prefill([r for r in self.running if r.done < len(r.prompt)])
            self.generate([r for r in self.running if r.done == len(r.prompt) and len(r.output) < r.length])
            for request in [r for r in self.running if len(r.output) >= r.length]:
                self.running.remove(request)
                self.free.append(request.slot)

    def admit(self) -> None:
        """Give free slots to waiting requests; each starts from the longest cached prefix of its prompt."""
        while self.free and self.waiting:
            request = self.waiting.popleft()
            request.slot = self.free.pop()
            self.running.append(request)
            longest = (len(request.prompt) - 1) // PIECE * PIECE  # a byte must be left to get logits from
            for end in range(longest, 0, -PIECE):
                place = self.prefixes.get(request.prompt[:end])
                if place is not None:
                    self.prefixes.move_to_end(request.prompt[:end])
                    self.copy([place], [request.slot])
                    request.done = end
                    self.counts.reused += end
                    break
            else:
                for cache in self.caches:
                    cache.reset([request.slot])

    def copy(self, source: list[int], target: list[int]) -> None:
        """Copy slots of all layers."""
        for cache in self.caches:
            cache.copy(source, target)

    def prefill(self, requests: list[Request]) -> None:
        """The next piece of every prompt that is not whole yet, in one packed call."""
        if not requests:
            return
        pieces = [r.prompt[r.done : (r.done // PIECE + 1) * PIECE] for r in requests]
        tokens = torch.tensor([list(b"".join(pieces))], device=self.device)
        cu = torch.tensor([0, *map(len, pieces)], device=self.device).cumsum(0)
        logits = self.model.prefill(tokens, self.caches, [r.slot for r in requests], cu)[0]
        best = logits[cu[1:] - 1].argmax(-1).tolist()
        for request, piece, token in zip(requests, pieces, best):
            request.done += len(piece)
            self.counts.prefilled += len(piece)
            if request.done == len(request.prompt):
                request.take([token])
            elif request.done % PIECE == 0:
                self.keep(request)

    def keep(self, request: Request) -> None:
        """Put the state of a prompt's full pieces in the prefix cache; the one used longest ago makes room."""
        prefix = request.prompt[: request.done]
        if prefix in self.prefixes or not (self.spare or self.prefixes):
            return
        place = self.spare.pop() if self.spare else self.prefixes.popitem(last=False)[1]
        self.copy([request.slot], [place])
        self.prefixes[prefix] = place

    def generate(self, requests: list[Request]) -> None:
        """One byte for each request, more where a draft is right."""
        drafts = [ngram_draft(r.history, min(self.draft, r.length - len(r.output) - 1)) for r in requests]
        for width in sorted(set(map(len, drafts))):  # one call per length of draft
            group = [(r, d) for r, d in zip(requests, drafts) if len(d) == width]
            slots = [r.slot for r, _ in group]
            rows = torch.tensor([[r.output[-1], *d] for r, d in group], device=self.device)
            self.counts.steps += 1
            if width == 0:
                best = self.model.step(rows[:, 0], self.caches, slots).argmax(-1).tolist()
                for (request, _), token in zip(group, best):
                    request.take([token])
                continue
            logits, kept = self.model.verify(rows, self.caches, slots)
            best = logits.argmax(-1).tolist()
            stand = []
            for (request, draft), tokens in zip(group, best):
                right = 0
                while right < width and draft[right] == tokens[right]:
                    right += 1
                stand.append(right + 1)  # the byte before the draft, and what of the draft is right
                request.take(tokens[: right + 1])
                self.counts.drafted += width
                self.counts.accepted += right
            for cache, layer in zip(self.caches, kept):
                layer.commit(cache, stand)


def alone(model: ByteLM, prompt: bytes, length: int) -> tuple[list[int], list[float]]:
    """The greedy output of one prompt by itself, and how far the two best logits of each byte lie apart."""
    device = next(model.parameters()).device
    caches = model.allocate(1)
    logits = model.prefill(torch.tensor([list(prompt)], device=device), caches, [0])[:, -1]
    output: list[int] = []
    gaps: list[float] = []
    while True:
        best = logits[0].topk(2)
        output.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        if len(output) == length:
            return output, gaps
        logits = model.step(torch.tensor(output[-1:], device=device), caches, [0])


def first_difference(got: list[int], right: list[int], gaps: list[float]) -> int | None:
    """The first byte that differs where the choice was clear; None where there is none. Past a tie all may differ."""
    for at, (a, b, gap) in enumerate(zip(got, right, gaps, strict=True)):
        if a != b:
            return at if gap > TIE else None
    return None


def prompts_of(count: int) -> list[bytes]:
    """Prompts of many lengths, each beginning with one of four shared texts."""
    shared = [(module.__doc__ or "").encode() for module in (argparse, json, torch.nn.Linear, OrderedDict)]
    endings = [f"Question {n}: what is {n} + {7 * n % 10}? ".encode() * (1 + n % 3) for n in range(count)]
    return [shared[n % 4][: 40 + 37 * (n % 8)] + ending for n, ending in enumerate(endings)]


def load(folder: str | None, device: str) -> ByteLM:
    """The demo's model from its checkpoint, or with fresh weights."""
    torch.manual_seed(0)
    if folder is None:
        return ByteLM(DemoConfig()).to(device)
    config, _, tensors = read(Path(folder))
    model = ByteLM(config)
    model.load_state_dict({name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")})
    return model.to(device)


def main(arguments: list[str] | None = None) -> int:
    """Serve, check, report; the exit code."""
    parser = argparse.ArgumentParser(description="Continuous batching with a recurrent state.")
    parser.add_argument("--checkpoint", help="the folder of a demo run (default: untrained weights)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--slots", type=int, default=64, help="sequences at once")
    parser.add_argument("--prefixes", type=int, default=24, help="states of the prefix cache")
    parser.add_argument("--length", type=int, default=32, help="bytes to generate for each prompt")
    parser.add_argument("--draft", type=int, default=4, help="most bytes of a draft; 0: none")
    options = parser.parse_args(arguments)
    if options.prompts < 1 or options.slots < 1 or options.length < 1:
        parser.error("--prompts, --slots and --length must be at least 1")
    if not 0 <= options.draft <= 15 or options.prefixes < 0:
        parser.error("--draft must be 0 to 15 and --prefixes at least 0")
    model = load(options.checkpoint, options.device)
    requests = [Request(prompt, options.length) for prompt in prompts_of(options.prompts)]
    engine = Engine(model, options.slots, options.prefixes, options.draft)
    began = time.perf_counter()
    engine.run(requests)
    seconds, c = time.perf_counter() - began, engine.counts
    wrong = 0
    began = time.perf_counter()
    for number, request in enumerate(requests):
        right, gaps = alone(model, request.prompt, options.length)
        at = first_difference(request.output, right, gaps)
        if at is not None:
            wrong += 1
            print(f"prompt {number} differs at byte {at}: {request.output[at]} and, alone, {right[at]}")
    single = time.perf_counter() - began
    made = options.prompts * options.length
    print(f"{options.prompts} prompts, {options.slots} slots: {made} bytes in {seconds:.2f} s, alone {single:.2f} s")
    print(f"prefill: {c.prefilled} bytes computed, {c.reused} from the prefix cache")
    print(f"decode: {c.steps} calls; {c.accepted} of {c.drafted} drafted bytes stood")
    print("all outputs equal those of each prompt alone" if not wrong else f"{wrong} outputs differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
