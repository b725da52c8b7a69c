"""Profiles: where a model's time goes.

Rooms, each of which imports only from those above it:

- `profile.py` holds the result, `recorded_events.py` what a profiler saw; `profile_doubts.py` says
  when a time is not believed, and `dispatch_counts.py` counts ops without a profiler
- `attributing/`: what an op is, which of ops inside ops counts, and which module owns it
- `accounting/`: what an op has to do, what that costs at least, what its time consists of, and what
  changed between two profiles (`profile_diff.py`, `tw.diff`)
- `traces/`: chrome traces of torch.profiler, from a file to events
- `recording/`: the three ways to a `Profile`: `live_profile.py` (`tw.profile`), `loop_profile.py`
  (`tw.profiling`) and `trace_profile.py` (`tw.read_trace`); `torch_profiler.py` is the only file
  that uses torch.profiler, and `pricing_machine.py` knows what this machine costs
- `expecting/`: guesses about what code launches (`tw.expect`)
"""
