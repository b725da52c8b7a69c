"""The ways to a profile: run a model under torch.profiler, watch a loop, or read a trace."""
