"""Processes that hold one object each and answer commands about it through a pipe.

`worker_process` is the parent's side: start, ask, park, wake, end. `worker_server` is the loop that
runs in the process. Benches and gates both use them.
"""
