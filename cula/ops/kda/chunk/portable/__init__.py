"""Chunk stages in Triton: any GPU that Triton supports."""
