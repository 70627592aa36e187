"""Chooses by cost how each op of a propagated program is divided."""

from collections.abc import Sequence

from stablehlo_tools.analysis.shardings import Axes, ValueShardings, rule_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.ir.walk import main_function
from stablehlo_tools.transforms.parts.partition.choosing.explaining import explained
from stablehlo_tools.transforms.parts.partition.choosing.moves import Moves
from stablehlo_tools.transforms.parts.partition.choosing.problem import Node, Problem
from stablehlo_tools.transforms.parts.partition.choosing.proposals import improve
from stablehlo_tools.transforms.parts.partition.choosing.writing import write
from stablehlo_tools.transforms.parts.partition.dividing import warn_of_undivided, warn_of_whole
from stablehlo_tools.transforms.parts.partition.op_rules import is_whole_op

_ANY = "h100"  # whose figures stand for hardware that is not told


def choose(
    module: ir.Module,
    shardings: ValueShardings,
    left: Sequence[Axes],
    hardware: str,
    diagnostics: Diagnostics,
    *,
    explain: bool,
) -> None:
    """Divides every op of a module's main function, in place, as costs least time on hardware.

    Without one, links and peaks are weighed as those of an H100, and small programs, whose
    collectives are all latency, are divided like large ones. `left`: for each result the axes along
    which devices keep parts of a sum.

    Warns of ops that run on whole dimensions which propagation has divided.
    """
    main = main_function(module)
    assert main is not None, "Shardy keeps the entry function"
    problem = Problem(main, shardings, left)
    moves = Moves(problem, load_hardware(hardware or _ANY), is_model=not hardware)
    improve(moves)
    if explain:
        diagnostics.collected += explained(moves)
    write(problem)
    for node in problem.nodes:
        if node.lost:
            _warn(node, problem, diagnostics)


def _warn(node: Node, problem: Problem, diagnostics: Diagnostics) -> None:
    op, rule = node.op, node.form.rule
    assert op is not None, "only ops lose axes"
    if rule_of(op) is None or is_whole_op(op):
        warn_of_whole(op, diagnostics)
        return
    for factor, atoms in sorted(node.lost.items()):
        moved = any(atom in atoms for each in node.choice.strategy for atom in each)
        axes = problem.atoms.axes_of(atoms)
        warn_of_undivided(op, rule, factor, axes, moved, diagnostics)
