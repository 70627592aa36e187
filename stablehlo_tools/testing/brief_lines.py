"""The shortest CHECK lines that still distinguish schedules of collectives.

%4 = "stablehlo.all_gather"(%3#0) <{all_gather_dim = 0 : i64, channel_handle = …}> : …
==>
CHECK: "stablehlo.all_gather"{{.*}}all_gather_dim = 0{{.*}}replica_groups = …{{.*}} -> tensor<8xf32>

They check kind, groups and result of each collective, in order, and the loops and branches around
them, but no operands and no tokens. If a collective has a region, its result type comes after the
region; of equal collectives in a row, only the last result type is checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import MANUAL_COMPUTATION
from stablehlo_tools.ir.walk import FUNCTION, ops_where
from stablehlo_tools.testing.check_lines import Checks
from stablehlo_tools.testing.check_patterns import as_regex, escape_literal
from stablehlo_tools.testing.shown_ops import (
    CONTROL_FLOW,
    LineRole,
    ShownLine,
    communicates,
    printed_lines,
    visibility,
)

LINK = "stablehlo_tools.token_link"
_ANY = "{{.*}}"
_RESULTS = re.compile(r"^%[^=]* = ")
# Text that does not describe the exchange: operands, channels, types of attributes and operands,
# and the name of a mesh, which jax chooses.
_CUT = re.compile(
    r"\(%[^()]*\)(?: <\{)?|%[^\s,()]+|channel_handle = #\S+ = \d+, type = \d+>(?:, )?"
    r"|(?<=>) : tensor<[\dx]*i64>(?:, )?|(?<=\d) : i64(?:, )?|(?:, )?use_global_device_ids"
    r"|\}>(?: : \([^()]*\))?|(?<=mesh = @)[\w$.-]+"
)
_GAPS = re.compile(r"\s*(?:\{\{\.\*\}\})+")


@dataclass(frozen=True)
class _BriefCheck:
    suffix: str  # of the directive: "", -LABEL
    pattern: str
    behind: str = ""  # the pattern of the line that ends a region


def brief_checks(module: ir.Module) -> Checks:
    """Returns the directives for a module, without their comment leader."""
    lines = printed_lines(module)
    holders = _holders(module)
    closing = (line for line in lines if line.text.startswith("})") and line.op not in holders)
    ends = {line.op: line.text for line in closing}
    checks: list[_BriefCheck] = []
    before = -1
    for line in lines:
        check = _check(line, line.op in holders, ends.get(line.op, ""))
        if check is None:
            continue
        regex = as_regex(check.pattern, [])
        alike = sum(bool(regex.search(other.text)) for other in lines[before + 1 : line.number])
        checks += [] if check.suffix else [_BriefCheck("", check.pattern)] * alike
        checks.append(check)
        before = line.number
    directives: list[str] = []
    for check, same in groupby(checks):  # equal checks in a row become one CHECK-COUNT
        count = len(list(same))
        suffix = f"-COUNT-{count}" if count > 1 else check.suffix
        directives.append(f"CHECK{suffix}: {check.pattern}")
        if check.behind:
            directives.append(f"CHECK: {check.behind}")
    return Checks(directives, has_gaps=True)


def link_count(text: str) -> int:
    """Counts the lines of a module's text that belong to a token chain, as `grep -c` does."""
    return sum(LINK in line for line in text.splitlines())


def _holders(module: ir.Module) -> set[ir.Operation]:
    """Returns every op that contains one that communicates."""
    holders: set[ir.Operation] = set()
    for op in ops_where(module.operation, communicates):
        parent = op.parent
        while parent is not None:
            holders.add(parent.operation)
            parent = parent.operation.parent
    return holders


def _check(line: ShownLine, holds: bool, end: str) -> _BriefCheck | None:
    op = line.op
    if op.name == FUNCTION:
        if line.role is not LineRole.HEADER or visibility(op) == "private":  # jax chooses its name
            return None
        return _BriefCheck("-LABEL", line.text[: line.text.index("(") + 1])
    if communicates(op):
        if line.role is not LineRole.HEADER:
            return None
        # The line from the op's name on, without the text that `_CUT` matches.
        named = _RESULTS.sub("", line.text.removesuffix(" ({"))
        pattern = _GAPS.sub(_ANY, _CUT.sub(_ANY, escape_literal(named))).removesuffix(_ANY)
        return _BriefCheck("", pattern, escape_literal(end))
    if op.name not in CONTROL_FLOW or not (holds or op.name == MANUAL_COMPUTATION):
        return None
    if line.role is LineRole.HEADER:
        axes = re.search(r"manual_axes=\{[^}]*\}", line.text)
        return _BriefCheck("", op.name + (f"{_ANY} {axes[0]}" if axes else ""))
    return _BriefCheck("", escape_literal(line.text)) if line.role is LineRole.BETWEEN else None
