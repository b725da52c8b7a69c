"""Reads traces that torch.profiler wrote."""
