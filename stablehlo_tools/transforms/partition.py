"""Makes the communication of a plain sharded `jit` export explicit, by Shardy's partitioner.

Shardy's own passes decide how every value is divided and which collectives join the parts. This
pass rewrites the program for one device and wraps it, so that callers of the artifact see no
change.

    func @main(%x: tensor<64x32xf32> {sharded over "data"}, %w: tensor<32x16xf32>) {
      %y = stablehlo.dot_general %x, %w …
      %s = stablehlo.reduce(%y) …
      return %s
    }
    ==>
    func @main(%x: tensor<64x32xf32> {sharded over "data"}, %w: tensor<32x16xf32>) {
      %r = sdy.manual_computation(%x, %w) … manual_axes={"data"} (%a: tensor<16x32xf32>, %b) {
        %y = stablehlo.dot_general %a, %b …
        %p = stablehlo.reduce(%y) …
        %s = "stablehlo.all_reduce"(%p) …
        sdy.return %s
      }
      return %r
    }

Preconditions:
  P1  The shardings can be read: Shardy's, as jax writes them now or wrote them first (the frontend
      attributes `xla.sdy.…`), or GSPMD's (`mhlo.sharding`, @Sharding, @SPMDFullToShardShape).
  P2  Shapes are static.
  P3  All shardings name one mesh: the same axes over the same devices.
  P4  The program runs as one replica of several partitions.
  P5  Outside of manual computations no op communicates, has a side effect, reads the device id or
      draws random numbers of its own (`stablehlo.rng`). Tokens that order the collectives of manual
      computations stay. Collectives of groups of one communicate nothing; they are erased.
  P6  It is clear which sums devices hold in parts (`unreduced`): manual computations take no parts
      along an axis of their own, ops that keep parts are linear, and shardings state the parts of
      sums that Shardy's collectives reduce.
  P7  A program for several platforms has no custom calls, because one of them alone may know them.

Guarantees: signature, shapes, shardings and calling convention of `main` stay, so the artifact runs
through jax.export as before. Manual computations (shard_map, nested too) become part of the one
body, with their collectives. Calls and composites are inlined. A program without shardings, or
partitioned already, stays unchanged. Values are bitwise those of the export, except sums of floats
over a divided dimension and prefix sums, which are added in another order.

If each device needs only its own part of a sum, it gets the part by a reduce_scatter, or cuts it
from the sum if one all_reduce is faster than several collectives. An op that reads neighbours along
a divided dimension gets the missing elements by collective_permutes. If an op cannot run on parts
(a sort), its operand is divided along another dimension, or gathered, with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from stablehlo_tools.analysis.collectives import next_channel
from stablehlo_tools.analysis.entry import erase_groups_of_one, next_values
from stablehlo_tools.analysis.replica_groups import DeviceMesh
from stablehlo_tools.analysis.sharding_import import import_shardings, state_call_rules
from stablehlo_tools.analysis.shardings import (
    SHARDING,
    Axes,
    Dims,
    MeshAxes,
    ValueShardings,
    function_sharding,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware, load_hardware
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.ir.equal_branches import fold_equal_branches
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.shardy_round_trip import set_entry
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import (
    ENTRY,
    MESH,
    entry_function,
    functions_by_name,
    ops_where,
    symbol_name,
)
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage
from stablehlo_tools.passes.native_passes import NativePasses
from stablehlo_tools.transforms.parts.partition.added_sums import add_before_sums
from stablehlo_tools.transforms.parts.partition.border import (
    Border,
    MainSignature,
    UnreducedBorder,
    check_sums,
    make_border_even,
    state_border,
    sum_everywhere,
    warn_of_uneven,
)
from stablehlo_tools.transforms.parts.partition.choosing.border_choices import (
    BorderChoices,
    choose_border,
)
from stablehlo_tools.transforms.parts.partition.choosing.division_moves import Moves
from stablehlo_tools.transforms.parts.partition.choosing.division_prices import Machine
from stablehlo_tools.transforms.parts.partition.choosing.division_problem import PartitionProblem
from stablehlo_tools.transforms.parts.partition.choosing.proposals import improve
from stablehlo_tools.transforms.parts.partition.choosing.written_choices import (
    explain_moves,
    warn_of_lost,
    write_choices,
)
from stablehlo_tools.transforms.parts.partition.divided_forms import write_divided_forms
from stablehlo_tools.transforms.parts.partition.dividing import (
    ModuleDivider,
    fold_reshards,
    make_even,
)
from stablehlo_tools.transforms.parts.partition.grouped_permutes import group_divergent_permutes
from stablehlo_tools.transforms.parts.partition.localizing import Localizer
from stablehlo_tools.transforms.parts.partition.partition_form import (
    check,
    drop_barriers,
    drop_propagation_notes,
    has_inlined_meshes,
    is_partitioned,
    one_mesh,
    prepare,
    rename_meshes,
    restore_global_view,
)
from stablehlo_tools.transforms.parts.partition.plain_forms import (
    batch_rows,
    insert_indexed_dims,
    plain_moves,
    reduce_from_identities,
    scans_as_windows,
)
from stablehlo_tools.transforms.parts.partition.sharding_rules import (
    sums_over_space,
    warn_of_wrong_gradients,
    widen_rules,
)

# Shardy's passes, and the reason for their order.
_LIFT_MESHES = "sdy-lift-inlined-meshes"  # first: every sharding names a mesh of the module
_RULES = "sdy-populate-op-sharding-rules"  # writes rules, which we check and correct
_PROPAGATION = (
    "sdy-propagation-pipeline",  # decides the sharding of every value
    _RULES,
)
_RESHARDS = "sdy-insert-explicit-reshards{enable-full-version=true}"  # makes each op fit its rule
_COLLECTIVES = "sdy-reshard-to-collectives"  # last: added reshards become collectives, too

_ANY = "h100"  # the figures to use if no hardware is given


@dataclass(frozen=True)
class PartitionPass(Pass):
    """One program for one device, with explicit collectives, inside the same artifact.

    `choices`: how each op is divided if its values are divided differently: `cost` chooses the
    least time on `hardware`, a profile's name or file; `shardy` keeps the choice of Shardy's
    reshards. Without `hardware`, links are weighed as those of an H100, ops that XLA:TPU runs
    slowly cost more, and small programs are divided like large ones. `explain`: a note for each
    value that is resharded, with bytes, time, and the constraint that would remove the reshard.
    `partitioner`: whose reshards and collectives; `xla` uses those of XLA:CPU's partitioner (slow,
    locations are lost), `shardy-or-xla` does so if Shardy's way is refused.
    """

    name: ClassVar[str] = "partition"
    milestone: ClassVar[Milestone | None] = Milestone(
        RoadStage.PARTITION, slow=("choices=shardy", "partitioner=xla")
    )
    partitioner: Literal["shardy", "xla", "shardy-or-xla"] = "shardy"
    choices: Literal["cost", "shardy"] = "cost"
    hardware: str = ""
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Partitions the module in place.

        Raises a located ToolError. Warns of ops that cannot run on parts, whose operands are
        gathered.
        """
        import_shardings(module)
        # Shardy's passes run in a process of their own, because some programs end it.
        with NativePasses(module.context) as native:
            if has_inlined_meshes(module):
                drop_propagation_notes(module)
                _replace(module, native.run(module, _LIFT_MESHES))
            main = entry_function(module)
            if not main.regions[0].blocks:
                raise ToolError("the entry function has no body to partition", main.location)
            shardings = one_mesh(module, main)
            if shardings is None or is_partitioned(main, shardings):
                return
            signature = MainSignature.from_function(main)
            unreduced = UnreducedBorder.from_function(main, shardings)
            propagated, apart, channel = propagate(module, main, shardings, native, diagnostics)
            # Barriers to the propagation have done their work.
            drop_barriers(propagated)
            if self.partitioner == "shardy":
                warn_of_wrong_gradients(propagated, shardings, diagnostics)
            border = Border.from_function(entry_function(propagated), shardings, unreduced)
            left = [parts.axes for parts in unreduced.results]
            shardy = _Shardy(native, shardings, channel, diagnostics, self, left)
            local = self._local(module, propagated, shardy)
        _replace(module, local)
        for op in apart:
            module.body.append(op)
        unreduced.cross(entry_function(module), shardings, next_channel(module))
        names = [name for name, _ in shardings.axes.mesh.axes]
        signature.wrap(entry_function(module), border, names)
        group_divergent_permutes(module)

    def _local(self, module: ir.Module, propagated: ir.Module, shardy: _Shardy) -> ir.Module:
        """Returns the module that one device runs."""
        if self.partitioner == "xla":
            return _by_xla(module, propagated, shardy.shardings)
        try:
            return shardy.local(propagated)
        except ToolError as error:
            if self.partitioner == "shardy":
                raise
            message, place = error.diagnostic.message, error.diagnostic.place
            shardy.diagnostics.warn(f"{message}; partitioned by XLA instead", place)
            return _by_xla(module, propagated, shardy.shardings)


@dataclass(frozen=True)
class _Shardy:
    """Partitions by Shardy's reshards and collectives; new channel handles start at `channel`.

    `left` has, for each result of `main`, the axes along which devices keep parts of a sum.
    """

    native: NativePasses
    shardings: ValueShardings
    channel: int
    diagnostics: Diagnostics
    options: PartitionPass
    left: Sequence[Axes]

    def local(self, propagated: ir.Module) -> ir.Module:
        """Returns the module that one device runs. In `propagated`, all values have their
        shardings."""
        propagated = _with_divided_forms(propagated, self.shardings, self.native)
        hardware = load_hardware(self.options.hardware or _ANY)
        if self.options.choices == "cost":
            machine = Machine.from_hardware(hardware, is_any=not self.options.hardware)
            problem = PartitionProblem(entry_function(propagated), self.shardings, self.left)
            moves = Moves(problem, machine)
            improve(moves)
            if self.options.explain:
                self.diagnostics.collected += explain_moves(moves)
            write_choices(moves)
            warn_of_lost(moves.problem, self.diagnostics)
        divided = self.native.run(propagated, _RESHARDS)
        make_even(divided, self.shardings)
        ModuleDivider(self.shardings, self.diagnostics).run(entry_function(divided))
        fold_reshards(divided, self.shardings)
        add_before_sums(entry_function(divided), self.shardings)
        local = self.native.run(divided, _COLLECTIVES)
        body = Function(entry_function(local)).body
        Localizer(body, self.shardings, self.channel, hardware).run()
        return local


def undivided_form(module: ir.Module) -> ir.Module:
    """Returns a program without shardings, with a mesh, in the form that `choose_border_of` reads.

    The module changes: give a copy. Raises ToolError as `partition` does.
    """
    import_shardings(module)
    with NativePasses(module.context) as native:
        main = entry_function(module)
        shardings = one_mesh(module, main)
        assert shardings is not None, "the caller has stated a mesh"
        propagated, *_ = propagate(module, main, shardings, native, Diagnostics())
        drop_barriers(propagated)
        return _with_divided_forms(propagated, shardings, native)


def choose_border_of(
    program: ir.Module,
    mesh: DeviceMesh,
    hardware: Hardware,
    memory: float,
    ties: Mapping[int, int],
    pins: Mapping[int, Dims],
) -> list[BorderChoices]:
    """Chooses how the arguments and results of a program from `undivided_form` are divided over a
    mesh: see `choose_border`.

    `ties` are the results that are the next values of arguments, `pins` given divisions, by number.
    """
    main = entry_function(program)
    left: list[Axes] = [()] * len(Function(main).yields)
    # No value has a sharding, so the mesh needs no name.
    problem = PartitionProblem(main, ValueShardings(MeshAxes(mesh), ""), left, ties)
    machine = Machine.from_hardware(hardware, is_any=False)
    return choose_border(problem, machine, memory, pins)


def _with_divided_forms(
    propagated: ir.Module, shardings: ValueShardings, native: NativePasses
) -> ir.Module:
    """Returns a propagated module in forms that can be divided, with the rules of their ops."""
    make_even(propagated, shardings)
    if write_divided_forms(propagated, shardings):
        propagated = native.run(propagated, _RULES)
    widen_rules(propagated)
    return propagated


def propagate(
    module: ir.Module,
    main: ir.Operation,
    shardings: ValueShardings,
    native: NativePasses,
    diagnostics: Diagnostics,
) -> tuple[ir.Module, list[ir.OpView], int]:
    """Inlines and checks a program, and has Shardy decide the sharding of every value.

    Returns the propagated module, the functions that `main` does not name, which were detached,
    and the first free channel.
    """
    drop_propagation_notes(module)
    ir.SymbolTable.set_symbol_name(main, ENTRY)  # the name that Shardy knows
    # Before inlining: the body of a scan is a loop over rows, which hides the prefix sum.
    scans_as_windows(module)
    inline_all_calls(module)
    fold_equal_branches(module)
    # Before Shardy decides: these forms show the partitioner where each element goes.
    plain_moves(module)
    reduce_from_identities(module)
    insert_indexed_dims(module)
    batch_rows(module)
    apart = _set_apart(module, main)
    prepare(module, shardings)
    # The next value of a donated argument stays where the argument is: a loop can then donate it,
    # and calls the program that was timed.
    for result, argument in next_values(main).items():
        given = function_sharding(main, "arg_attrs", argument)
        if given is not None and function_sharding(main, "res_attrs", result) is None:
            set_entry(main, "res_attrs", result, SHARDING, given)
    restore_global_view(module, shardings, lambda each: native.run(each, _RULES))
    # A collective over one device is not communication, so P5 must not refuse it.
    erase_groups_of_one(module)
    check_sums(module, shardings)
    sum_everywhere(module, shardings, next_channel(module))
    check(module, main, shardings)
    warn_of_uneven(main, shardings, diagnostics)
    channel = next_channel(module)
    state_call_rules(module)
    # Devices sum parts of the image if a convolution's kernel is longer than its result.
    if sums_over_space(module):
        _replace(module, native.run(module, _RULES))
        widen_rules(module)
    propagated = native.run(module, *_PROPAGATION)
    even = make_border_even(entry_function(propagated), shardings)
    if even:  # propagate again, so that values inside follow the arguments and results
        state_border(entry_function(module), even)
        propagated = native.run(module, *_PROPAGATION)
        make_border_even(entry_function(propagated), shardings)
    return propagated, apart, channel


def _by_xla(module: ir.Module, propagated: ir.Module, shardings: ValueShardings) -> ir.Module:
    """Partitions the module by XLA's own partitioner, with the signature divided as Shardy divides
    it."""
    from stablehlo_tools.targets.xla_partitioner import partition_with_xla

    main, decided = entry_function(module), entry_function(propagated)
    for name in ("arg_attrs", "res_attrs"):
        if name in decided.attributes:
            main.attributes[name] = decided.attributes[name]
    local = partition_with_xla(module, shardings.axes.mesh.size)
    rename_meshes(local, module)
    return local


def _set_apart(module: ir.Module, main: ir.Operation) -> list[ir.OpView]:
    """Detaches the functions that `main` does not name from the module, to hide them from Shardy.
    Returns them."""
    calls = ops_where(main, lambda op: "called_computations" in op.attributes)
    texts = " ".join(str(op.attributes["called_computations"]) for op in calls)
    named = set(re.findall(r"@([\w$.-]+)", texts))
    functions = functions_by_name(module).items()
    return [op.detach_from_parent() for n, op in functions if op != main and n not in named]


def _replace(module: ir.Module, other: ir.Module) -> None:
    """Gives a module the ops of another one. Its own meshes stay, because its signature names
    them."""
    for view in list(module.body.operations):
        if view.operation.name != MESH:
            view.operation.erase()
    kept = {symbol_name(op) for op in module.body.operations}
    for view in list(other.body.operations):
        if view.operation.name != MESH or symbol_name(view) not in kept:
            module.body.append(view.operation.detach_from_parent())
