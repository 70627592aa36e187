"""Whether two artifacts compute the same values, found out by running both on random inputs.

The programs run in one child process, on as many virtual CPU devices as they need.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import stablehlo_tools
from stablehlo_tools import bindings
from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.verify.comparison import Difference, Rule
from stablehlo_tools.verify.device_grid import inferred_grid, is_partitioned, stated_grid
from stablehlo_tools.verify.interpreter_program import interpreter_grid, interpreter_module
from stablehlo_tools.verify.job import (
    SIDES,
    Answer,
    Form,
    Request,
    Run,
    Side,
    Stage,
    read_answer,
    read_stage,
)
from stablehlo_tools.verify.signatures import (
    Signature,
    check_agreement,
    entry_function,
    exported_signature,
    module_signature,
)
