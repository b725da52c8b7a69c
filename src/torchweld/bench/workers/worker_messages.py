"""Answers of a worker on their way through a pipe.

Arrays are sent as they lie in memory. Pickled along they would be copied twice, and the freed
copies of a block's gradients would teach glibc's malloc to keep more memory than it does by itself:
what is timed next would meet fewer page faults.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any

_COUNT_BYTES = 4


def send_value(pipe: Connection, value: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    pipe.send_bytes(len(buffers).to_bytes(_COUNT_BYTES, "little") + data)
    for buffer in buffers:
        pipe.send_bytes(buffer.raw())


def receive_value(pipe: Connection) -> Any:
    """What `send_value` sent; its arrays can be written to."""
    head = pipe.recv_bytes()
    count = int.from_bytes(head[:_COUNT_BYTES], "little")
    buffers = [bytearray(pipe.recv_bytes()) for _ in range(count)]
    return pickle.loads(memoryview(head)[_COUNT_BYTES:], buffers=buffers)
