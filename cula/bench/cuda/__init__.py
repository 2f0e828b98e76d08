"""GPU rows: in-kernel gate, norm and sigmoid, fp32 states in and out, timed by CUDA-graph replay.

The tensors, the check, the clock, the implementations and the runner are their own modules here; rows, records and
reports are shared with the CPU. Only `clock` and `session` need a GPU: the rest runs, and is tested, on a CPU.
"""
