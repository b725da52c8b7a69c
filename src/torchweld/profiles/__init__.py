"""Profiles: where a model's time goes.

`live.py` (tw.profile) and `loop.py` (tw.profiling) record with torch.profiler through `collect.py`;
`trace.py` (tw.read_trace) reads what others recorded. `attribution.py` gives every microsecond an
owner, `overhead.py` says what the profiler cost, and `profile.py` holds the result. `account.py`
explains it: `kinds.py` says what an op is, `nesting.py` which of ops inside ops counts, `costs.py`
what it has to do, `traffic.py` what its memory costs, `pricing.py` and `device_pricing.py` what its
time consists of. `launches.py` counts ops for `tw.expect`.
"""
