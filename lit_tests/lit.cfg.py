# pyright: reportUndefinedVariable=false
"""The lit suite. lit injects `config` and `lit_config`, and runs this file once per run.

The commands of the RUN lines start in forks of one process that is loaded already
(`fork_server.py`); with STABLEHLO_TOOLS_LIT_PLAIN=1 they start in the usual way.
"""

import os
import sys
from pathlib import Path

import lit.formats

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

config.name = "stablehlo-tools"
config.test_format = lit.formats.ShTest()
config.suffixes = [".mlir", ".test"]
config.excludes = ["Inputs", "lit.cfg.py"]
config.test_source_root = str(HERE)
config.test_exec_root = str(ROOT / "build" / "lit")

# lit hands on little of the caller's environment; JAX_PLATFORMS stays unset, so a test that
# needs one platform says so in its RUN line.
config.environment["PATH"] = os.pathsep.join(
    [str(Path(sys.executable).parent), config.environment["PATH"]]
)
config.environment["TF_CPP_MIN_LOG_LEVEL"] = "2"
config.environment["PYTHONDONTWRITEBYTECODE"] = "1"

# Only lit has a `lit_config`: make-test reads this file too, and runs one command at most.
if "lit_config" in globals() and not os.environ.get("STABLEHLO_TOOLS_LIT_PLAIN"):
    sys.path.insert(0, str(HERE))
    import forked_commands

    forked_commands.start(config.environment)

config.substitutions += [
    ("%{inputs}", str(HERE / "Inputs")),
    ("%{models}", str(ROOT / "python" / "models")),
]
