"""Starts the fork servers of a lit run, and puts their commands where the RUN lines find them."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMANDS = ("stablehlo-tools", "filecheck", "python", "children")
# What is read while jax is loaded, and later, too: as most children have it.
VARIABLES = {"children": {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}}
UNSET = 'PYTHON = ""'


def start(
    environment: dict[str, str],
    commands: Sequence[str] = COMMANDS,
    more: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Start servers for tests with this environment, put their commands first in its PATH, and
    return where they are. `more`: modules that a command's server is to load beside its own.

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
    for command in commands:
        program = directory / command
        program.write_text(f"#!{interpreter} -IS\n{client}")
        program.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{program}.socket")
            listener.listen(64)
            number = listener.fileno()
            server = [sys.executable, HERE / "fork_server.py", command, directory, str(number)]
            server += (more or {}).get(command, ())
            subprocess.Popen(
                server,
                env={**environment, **VARIABLES.get(command, {})},
                stdin=lifeline,
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
            )
    os.close(lifeline)
    return directory
