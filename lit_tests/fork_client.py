"""Has one command of a RUN line run by its fork server, in this process's name.

`forked_commands.py` writes this file out under the name of each command. It starts once for each
command of the suite, so it takes the bare modules that `socket`, `os` and `signal` are made of,
and no `site`: that halves the time to start.
"""

import _socket
import marshal
import posix
import sys

NO_ANSWER = 125  # a status that the commands themselves never have
EXPORTS = ("/export_model.py", "/export_step.py")  # the scripts whose imports are worth it
PYTHON = ""  # the true one, which `forked_commands.py` writes here


def main() -> int:
    """Hand on the arguments, the directory, the environment and the streams; return the status."""
    arguments = sys.argv[1:]
    if sys.argv[0].endswith("/python") and not (arguments and arguments[0].endswith(EXPORTS)):
        posix.execv(PYTHON, [PYTHON, *arguments])
    request = marshal.dumps((arguments, posix.getcwdb(), posix.environ))
    message = len(request).to_bytes(4, sys.byteorder) + request
    streams = b"".join(stream.to_bytes(4, sys.byteorder) for stream in (0, 1, 2))
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        server.connect(f"{sys.argv[0]}.socket")
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)
        sent = server.sendmsg([message], [rights])
        if sent < len(message):  # to send nothing fails where the answer is there already
            server.sendall(message[sent:])
        answer = server.recv(4)
    except OSError:
        answer = b""
    if not answer:
        message = "the fork server of the tests has ended; STABLEHLO_TOOLS_LIT_PLAIN=1 does "
        print(f"{sys.argv[0]}: {message}without it", file=sys.stderr)
        return NO_ANSWER
    return _status(int.from_bytes(answer, sys.byteorder))


def _status(waited: int) -> int:
    """The exit status in what `wait` says of the child; ends as the child did, if by a signal."""
    if posix.WIFSIGNALED(waited):
        number = posix.WTERMSIG(waited)
        import signal

        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        posix.kill(posix.getpid(), number)
    return posix.WEXITSTATUS(waited)


if __name__ == "__main__":
    posix._exit(main())
