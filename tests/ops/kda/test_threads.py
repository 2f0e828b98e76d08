"""No call changes the caller's thread counts."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from cula.kda import chunk_kda, kda_decode
q, beta = torch.randn(1, 4, 2, 16), torch.rand(1, 4, 2)
torch.set_num_threads({threads})
for _ in range(2):
    chunk_kda(q, q, q, -q.abs(), beta)
    assert torch.get_num_threads() == {threads}, torch.get_num_threads()
    kda_decode(q, q, q, q, beta, state_pool=torch.zeros(4, 2, 16, 16), state_indices=torch.arange(4), lower_bound=-5.0)
    assert torch.get_num_threads() == {threads}, torch.get_num_threads()
print("as before")
"""


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_thread_count_stays(threads: int) -> None:
    program = PROGRAM.format(threads=threads)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.strip() == "as before", done.stderr
