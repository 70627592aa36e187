"""Starts the fork servers of a lit run, and puts their commands where the RUN lines find them."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMANDS = ("stablehlo-tools", "filecheck", "python")
UNSET = 'PYTHON = ""'


def start(environment: dict[str, str]) -> None:
    """Start servers for tests with this environment, and put their commands first in its PATH.

    The servers end with the process that calls this, and remove what was made here. The sockets
    listen at once, so that commands wait for their server rather than fail.
    """
    directory = Path(tempfile.mkdtemp(prefix="lit-commands-"))
    # The first line of a script names a program by a path that is short and has no spaces.
    interpreter = directory / "interpreter"
    interpreter.symlink_to(sys.executable)
    client = (HERE / "fork_client.py").read_text().replace(UNSET, f"PYTHON = {sys.executable!r}")
    environment["PATH"] = os.pathsep.join([str(directory), environment["PATH"]])
    lifeline, _ = os.pipe()  # its other end stays open until lit and its workers have gone
    for command in COMMANDS:
        program = directory / command
        program.write_text(f"#!{interpreter} -IS\n{client}")
        program.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{program}.socket")
            listener.listen(64)
            number = listener.fileno()
            server = [sys.executable, HERE / "fork_server.py", command, directory, str(number)]
            subprocess.Popen(
                server,
                env=environment,
                stdin=lifeline,
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
            )
    os.close(lifeline)
