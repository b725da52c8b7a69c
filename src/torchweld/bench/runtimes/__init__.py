"""Ways to run a block or a model: eager, compiled, welded, and runtimes outside of PyTorch.

`runtime` has what all of them do, `runtime_names` the one table of names.
"""
