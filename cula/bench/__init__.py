"""Benchmarks: shape rows, our calls beside the peers installed here, and the reports made from them.

One run checks every implementation against the float64 recurrence before it prints a time, times all of one case
in turn in one process, and measures the machine's own copy and matmul rates beside them. Importing this package
loads no torch and no peer.
"""
