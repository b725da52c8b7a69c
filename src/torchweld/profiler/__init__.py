"""Profiles: where a model's time goes.

`live.py` (tw.profile) and `loop.py` (tw.profiling) record with torch.profiler through `collect.py`;
`trace.py` (tw.read_trace) reads what others recorded. `attribution.py` gives every microsecond an
owner, `overhead.py` takes the profiler's cost away, and `profile.py` holds the result, which
`account.py` explains.
"""
