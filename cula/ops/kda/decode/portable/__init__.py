"""recurrent, decode and verify in Triton, for any GPU that it supports."""
