"""Reads the events of traces that torch.profiler wrote."""
