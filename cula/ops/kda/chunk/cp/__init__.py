"""Context parallelism of the chunk stage: a long sequence in segments that run at once."""
