"""Chooses by cost how each op of a propagated program is divided."""

from collections.abc import Sequence

from stablehlo_tools.analysis.shardings import Axes, ValueShardings, rule_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.ir.walk import main_function
from stablehlo_tools.transforms.parts.partition.choosing.moves import Moves
from stablehlo_tools.transforms.parts.partition.choosing.op_times import Machine
from stablehlo_tools.transforms.parts.partition.choosing.problem import Node, Problem
from stablehlo_tools.transforms.parts.partition.choosing.proposals import improve
from stablehlo_tools.transforms.parts.partition.dividing import warn_of_undivided, warn_of_whole
from stablehlo_tools.transforms.parts.partition.op_rules import is_whole_op


def choose(
    module: ir.Module,
    shardings: ValueShardings,
    left: Sequence[Axes],
    machine: Machine,
) -> Moves:
    """How every op of a module's main function costs least time on a machine.

    `left`: for each result the axes along which devices keep parts of a sum.
    """
    main = main_function(module)
    assert main is not None, "Shardy keeps the entry function"
    moves = Moves(Problem(main, shardings, left), machine)
    improve(moves)
    return moves


def warn_of_lost(problem: Problem, diagnostics: Diagnostics) -> None:
    """Warns of ops that run on whole dimensions which propagation has divided."""
    for node in problem.nodes:
        if node.lost and any(link.size for link in node.links):
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
