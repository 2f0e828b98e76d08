"""Chunk kernels for SM90, in the CuTe DSL."""
