"""Runs a model under torch.profiler and makes a profile of what was recorded."""
