"""What each role of the fused SM90 kernel costs a scheduler for one stage of 32 tokens, counted from machine code.

    python tools/kernel_cycles.py [--consumers 1|2] [--fp32-gate]

It compiles the kernel (no GPU needed), finds the loops of producers and consumers in its SASS, and counts by pipe. An
SM has four schedulers; each issues one instruction a cycle and has, of every warpgroup, one warp. The larger of the
columns is the least that a stage can take; waiting comes on top, and no number here is measured.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLOCK = 1.755e9  # H200, boost
ROWS = 32
#: Cycles that one instruction of a warp keeps a pipe of its scheduler: exponentials and the like 4 lanes a cycle.
MUFU = 8
#: mma.sync of 16 x 8 x 16 at half of the full rate; wgmma of 64 x n x 16 at the full rate, shared by four warps.
HMMA = 8


def sass(cubin: Path) -> list[tuple[int, str]]:
    """(address, instruction) of a cubin, by the cuobjdump that comes with triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([str(tool), "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.M)
    return [(int(address, 16), line) for address, line in found]


def loops(code: list[tuple[int, str]]) -> list[tuple[int, int]]:
    """(first, last) positions of the two longest loops, in order: the producers' and the consumers'."""
    place = {address: k for k, (address, _) in enumerate(code)}
    spans = []
    end = max(k for k, (_, line) in enumerate(code) if "EXIT" in line)  # behind it: what waits out of line
    for k, (_, line) in enumerate(code[:end]):
        target = re.search(r"\bBRA\S*\s+(?:`\(\S+\)|0x([0-9a-f]+))", line)
        if target and target.group(1):
            to = place.get(int(target.group(1), 16), k)
            if to < k:
                spans.append((to, k))
    outer = sorted(spans, key=lambda s: s[0] - s[1])
    chosen: list[tuple[int, int]] = []
    for first, last in outer:
        if all(last < a or first > b for a, b in chosen):
            chosen.append((first, last))
        if len(chosen) == 2:
            break
    return sorted(chosen)


def count(lines: Sequence[str]) -> dict[str, int]:
    """Instructions, and cycles of the pipes that matter, of one warp."""
    names = [re.sub(r"^@!?U?P\w+\s+", "", line).split()[0] for line in lines]
    wgmma = sum(int(re.search(r"64x(\d+)x16", name).group(1)) // 2 for name in names if name.startswith("HGMMA"))
    return {
        "issue": len(names),
        "mufu": MUFU * sum(name.startswith("MUFU") for name in names),
        "mma": HMMA * sum(name.startswith("HMMA") for name in names) + wgmma,
        "shared": sum(name.startswith(("LDS", "STS", "LDSM", "STSM", "LDGSTS")) for name in names),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, count, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--consumers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--fp32-gate", action="store_true")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    from cula.ops.kda.chunk.sm90.forward import compile_kernel
    from cula.ops.kda.chunk.sm90.options import Options

    with tempfile.TemporaryDirectory() as folder:
        compile_kernel(
            Options(options.consumers, options.fp32_gate, state_out="fp32"), f"--keep-cubin --dump-dir={folder}"
        )
        code = sass(next(Path(folder).glob("*.cubin")))
    found = loops(code)
    assert len(found) == 2, "the kernel has not two loops"
    producer, consumer = (count([line for _, line in code[first : last + 1]]) for first, last in found)
    total = {pipe: producer[pipe] + options.consumers * consumer[pipe] for pipe in producer}
    print(f"{'':10}" + "".join(f"{pipe:>8}" for pipe in producer))
    for name, row in (("producer", producer), ("consumer", consumer), ("stage", total)):
        print(f"{name:10}" + "".join(f"{row[pipe]:8}" for pipe in row))
    least = max(total.values())
    print(f"a stage takes a scheduler {least} cycles or more: T8192 {1e3 * least * 8192 / ROWS / CLOCK:.3f} ms or more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
