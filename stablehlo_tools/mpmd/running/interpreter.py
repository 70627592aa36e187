"""Runs a set of two ranks in the StableHLO reference interpreter, against each other.

The interpreter has no functions that take tokens, so calls are inlined. Values cross its border as
bit patterns, as those of `verify` do (see `verify.interpreter_program`):

    func @main(%in0_bits: tensor<4xui32>, …) {
      %in0 = stablehlo.bitcast_convert %in0_bits : (tensor<4xui32>) -> tensor<4xf32>
      %out0, … = "interpreter.run_parallel"(%in0, …) {programs = [[@rank_0, @rank_1]]}
      …
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stablehlo_tools import bindings
from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.walk import functions_by_name, terminator
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.child import ask, type_of, value_of
from stablehlo_tools.mpmd.running.sequential import Run, read_results, write_inputs
from stablehlo_tools.verify.element_types import Array
from stablehlo_tools.verify.interpreter_program import BitTensor, interpreter_grid
from stablehlo_tools.verify.signatures import Value

RANKS = 2  # the interpreter's threads are as many as the machine's processors
MODULE = "module.mlirbc"
_LOWER_CHLO = "builtin.module(func.func(chlo-legalize-to-stablehlo))"


def run_in_interpreter(
    ranks: RankSet, inputs: Sequence[Sequence[Array]], directory: Path, timeout: float
) -> Run:
    """Runs a set on the arguments of each rank's `main`; `directory` is for files between.

    Raises ToolError for a set that is not two ranks of one device in the form `pairs`, and for
    what the interpreter lacks.
    """
    with naming(ranks.name):
        manifest = ranks.manifest
        if ranks.ranks != RANKS or manifest.devices != 1:
            raise ToolError(
                f"the reference interpreter is trusted with {RANKS} ranks of one device, and these "
                f"are {ranks.ranks} of {manifest.devices}: use --how sequential"
            )
        if manifest.form != "pairs":
            raise ToolError(
                f"the reference interpreter runs the form pairs, and this is {manifest.form}: use "
                "--how sequential"
            )
        values = [_values(ranks.main(rank)) for rank in range(ranks.ranks)]
        (directory / MODULE).write_bytes(_program(ranks, values))
        write_inputs(ranks, inputs, directory)
        request = {
            "inputs": [[type_of(value) for value in own] for own, _ in values],
            "outputs": [[type_of(value) for value in own] for _, own in values],
        }
        what = "running the ranks in the interpreter"
        ask("interpreter_process", directory, request, 1, timeout, what)
    return Run(read_results(ranks, directory))


def _values(main: ir.Operation) -> tuple[list[Value], list[Value]]:
    block = main.regions[0].blocks[0]
    sides = (list(block.arguments), list(terminator(block).operands))
    inputs, outputs = ([value_of(str(value.type)) for value in side] for side in sides)
    return inputs, outputs


def _program(ranks: RankSet, values: Sequence[tuple[list[Value], list[Value]]]) -> bytes:
    """One module with the programs of both ranks, and a `main` that runs them."""
    context = bindings.new_context()
    bindings.register_interpreter_dialect(context)
    with context, ir.Location.unknown():
        programs = [_inlined(ranks, rank, context) for rank in range(ranks.ranks)]
        whole = bindings.parse_module(_wrapper(values), context)
        for declared in list(functions_by_name(whole).values()):
            if not len(declared.regions[0].blocks):
                declared.erase()
        for rank, program in enumerate(programs):
            main = functions_by_name(program)["main"].clone(ip=ir.InsertionPoint(whole.body))
            main.attributes["sym_name"] = ir.StringAttr.get(_name(rank))
            main.attributes["sym_visibility"] = ir.StringAttr.get("private")
    whole.operation.verify()
    return bindings.write_bytecode(whole)


def _inlined(ranks: RankSet, rank: int, context: ir.Context) -> ir.Module:
    artifact = ranks.programs[rank]
    program = bindings.parse_module(bindings.write_bytecode(artifact.module), context)
    bindings.parse_pass_pipeline(_LOWER_CHLO, context).run(program.operation)
    with naming(artifact.name):
        inline_all_calls(program)
        interpreter_grid(program, ProcessGrid(1, RANKS))
    return program


def _name(rank: int) -> str:
    return f"rank_{rank}"


def _wrapper(values: Sequence[tuple[list[Value], list[Value]]]) -> str:
    """A module: the ranks' declarations, and `main`."""
    sides = [
        tuple(
            [BitTensor(value, f"%{what}{rank}_{i}") for i, value in enumerate(own)]
            for what, own in zip(("in", "out"), of_rank, strict=True)
        )
        for rank, of_rank in enumerate(values)
    ]
    declared = [f"func.func private @{_name(rank)}{_type(*own)}" for rank, own in enumerate(sides)]
    inputs, outputs = (
        [tensor for own in side for tensor in own] for side in zip(*sides, strict=True)
    )
    parameters = ", ".join(f"{p}: {t.pattern}" for t in inputs for p in t.patterns)
    returned = ", ".join(p for t in outputs for p in t.patterns)
    types = ", ".join(t.pattern for t in outputs for _ in t.patterns)
    results = ", ".join(t.name for t in outputs)
    names = ", ".join(f"@{_name(rank)}" for rank in range(len(values)))
    lines = (
        *declared,
        f"func.func public @main({parameters}) -> ({types}) {{",
        *(line for tensor in inputs for line in tensor.from_patterns()),
        f'{results} = "interpreter.run_parallel"({", ".join(t.name for t in inputs)}) '
        f"{{programs = [[{names}]]}} : {_type(inputs, outputs)}",
        *(line for tensor in outputs for line in tensor.to_patterns()),
        f"return {returned} : {types}",
        "}",
    )
    return "\n".join(lines)


def _type(inputs: Sequence[BitTensor], outputs: Sequence[BitTensor]) -> str:
    return " -> ".join(f"({', '.join(t.type for t in side)})" for side in (inputs, outputs))
