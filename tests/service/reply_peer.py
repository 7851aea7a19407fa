"""A frontend's reply socket in a process of its own, to be killed: greets, reads some replies, then reads no more.

`python reply_peer.py ADDRESS NAME REPLIES`; writes "reading" once it is greeted and "stalled" when it has read them.
"""

from __future__ import annotations

import signal
import sys

import zmq


def main() -> None:
    address, name, replies = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, name.encode())
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send(b"hello")
        socket.recv_multipart()
        print("reading", flush=True)
        for _ in range(replies):
            socket.recv_multipart()
        print("stalled", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
