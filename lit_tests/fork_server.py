"""Runs a command, each time it is asked for, in a fork of a process that has loaded it.

    python fork_server.py COMMAND DIRECTORY LISTENER [MODULE...]

Most of the time of a short command goes into loading jaxlib. Here that is done once: a command is
a process of its own as ever, but starts loaded. What it gets is what it would have got from lit:
arguments, directory, environment, streams, the handling of signals, and a status to end with. A
command whose environment is another than the server's starts in the usual way, as variables may
be read while modules are loaded (PYTHONHASHSEED, JAX_PLATFORMS). Alike in all forks is only the
seed of the hashes.

The modules are loaded beside what the command needs.
LISTENER is the number of the socket; standard input ends with the lit run, and so does this.
"""

import contextlib
import gc
import marshal
import os
import select
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from forked_process import CHILDREN, Request, fork_children, load, run

LIFELINE = 0


def main(command: str, directory: Path, listener: socket.socket, more: Sequence[str]) -> None:
    """Serve until standard input ends. In a fork, run the command and end as it does."""
    environment = dict(os.environb)
    select.select([LIFELINE, listener], [], [])  # a command that no test uses is not loaded
    load(command, more)
    if command == "stablehlo-tools":
        fork_children(directory)
    gc.freeze()  # the forks share its pages for as long as no collection writes to them
    ending = signal.SIGKILL if command == CHILDREN else signal.SIGTERM
    request = Server(listener, ending).serve()
    if request is None:
        shutil.rmtree(directory, ignore_errors=True)  # other servers and lit remove it too
        return
    run(command, request, environment)


class Server:
    """The loop that forks a process for each request and reports how it ended."""

    def __init__(self, listener: socket.socket, ending: int = signal.SIGTERM) -> None:
        self.listener = listener
        self.ending = ending  # of a process whose client has ended
        self.clients: dict[int, socket.socket] = {}  # by the process that works for it
        self.wake, self.woken = os.pipe()
        os.set_blocking(self.woken, False)
        self.selector = selectors.DefaultSelector()
        for readable in (LIFELINE, listener, self.wake):
            self.selector.register(readable, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """The request that this process, a fork, is to run; None in the server, when it ends."""
        for ending in (signal.SIGINT, signal.SIGTERM):  # lit decides when this ends
            signal.signal(ending, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.woken)
        while True:
            for key, _ in self.selector.select():
                if key.fd == LIFELINE:
                    self._end_all()
                    return None
                if key.fd == self.wake:
                    os.read(self.wake, 4096)
                    self._report()
                elif key.fileobj is self.listener:
                    request = self._accept()
                    if request is not None:
                        return request
                else:
                    self._give_up(key.data)

    def _accept(self) -> Request | None:
        """Fork for one client. The fork returns the request, the server None."""
        client, _ = self.listener.accept()
        request = _receive(client)
        if request is None:  # it was ended meanwhile
            client.close()
            return None
        process = os.fork()
        if process == 0:
            client.close()
            self._become_command()
            return request
        for stream in request.streams:
            os.close(stream)
        self.clients[process] = client
        self.selector.register(client, selectors.EVENT_READ, process)
        return None

    def _become_command(self) -> None:
        """In a fork: signals as at the start of Python, and none of the server's descriptors."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.selector.close()
        self.listener.close()
        for client in self.clients.values():
            client.close()
        os.close(self.wake)
        os.close(self.woken)

    def _report(self) -> None:
        """Tell the clients of the processes that have ended how they did."""
        while self.clients:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            client = self.clients.pop(process)
            if client in self.selector.get_map():
                self.selector.unregister(client)
                with contextlib.suppress(ConnectionError):
                    client.send(status.to_bytes(4, sys.byteorder))
            client.close()

    def _give_up(self, process: int) -> None:
        """The client was ended; end the process that works for it, unless it just has."""
        if process not in self.clients:
            return
        self.selector.unregister(self.clients[process])
        os.kill(process, self.ending)

    def _end_all(self) -> None:
        for process in self.clients:
            os.kill(process, self.ending)


def _receive(client: socket.socket) -> Request | None:
    """What a client asks for; None where it ended before it had said all."""
    message, streams, _, _ = socket.recv_fds(client, 1 << 16, 3)
    size = 4 + int.from_bytes(message[:4], sys.byteorder)
    while message and len(message) < size:
        more = client.recv(1 << 16)
        if not more:
            message = b""
        message += more
    if not message:
        for stream in streams:
            os.close(stream)
        return None
    arguments, directory, environment = marshal.loads(message[4:])
    return Request(arguments, directory, environment, tuple(streams))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), socket.socket(fileno=int(sys.argv[3])), sys.argv[4:])
