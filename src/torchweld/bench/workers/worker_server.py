"""What runs in a worker process: commands come in through a pipe, answers go out.

A message is `(what, arguments)`. The first has a callable, which makes the object that the worker
holds; all others name one of its methods. An answer is `(True, value)` or `(False, why not)`.
Between messages the process blocks on the pipe, or is stopped by its parent.
"""

from __future__ import annotations

import ctypes
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from torchweld.bench.workers.worker_messages import send_value
from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import first_line


def main() -> None:
    """Answers until the parent closes its end of the pipe, whose handle is the only argument."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    pipe = Connection(int(sys.argv[1]))
    held: Any = None
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            what, arguments = pickle.loads(message)  # imports what it names, which may fail
            if callable(what):
                held, value = what(*arguments), None
            else:
                value = getattr(held, what)(*arguments)
            send_value(pipe, (True, value))
        except Exception as error:
            traceback.print_exc()  # into the log that the parent shows if this process ends
            send_value(pipe, (False, one_line(error)))


def die_with_parent() -> None:
    """A stopped process cannot notice that its parent is gone; Linux ends it then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def one_line(error: BaseException) -> str:
    """An error in one line. Messages of torchweld's own errors stand without their class."""
    return " ".join(str(error).split()) if isinstance(error, TorchweldError) else first_line(error)
