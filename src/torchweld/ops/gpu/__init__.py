"""Blocks on a GPU: the ways to run a chain, each as two ops below one autograd function.

`gpu_ways.py` has the ways, `gpu_ops.py` registers them. Triton is imported when the first one runs.
"""
