"""Runs the rank of this process, in a job with one process or several for each rank.

The program of the rank is compiled as a whole, for all devices of the job. Its transfers are in the
form that the runtime of the platform supports.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.frontend_attributes import set_side_entries, side_entries
from stablehlo_tools.dialect.names import CALL, COLLECTIVE_PERMUTE
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, ops_named
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.functions import any_values, permutes_left, run_on
from stablehlo_tools.mpmd.runtime.engine import Engine, PreparedSet, Values, devices_for
from stablehlo_tools.mpmd.runtime.microbatch_loop import in_a_loop
from stablehlo_tools.mpmd.transfers import SHARDED_AUTOTUNING, with_both_ends, with_permutes


class OneRank(Engine):
    """Runs the rank of this process, in a job with one process or several for each rank."""

    def __init__(self, prepared: PreparedSet) -> None:
        super().__init__(prepared)
        self._all = devices_for(prepared.ranks)
        size, mine = prepared.ranks.manifest.devices, jax.process_index()
        found = {
            place // size for place, device in enumerate(self._all) if device.process_index == mine
        }
        if len(found) > 1:
            raise ToolError(
                f"this process has devices of ranks {', '.join(map(str, sorted(found)))}: start "
                "one process for each rank (local_device_ids of jax.distributed.initialize), or "
                "a single one for all"
            )
        self.ranks = (found.pop(),)
        (rank,) = self.ranks
        module = _in_form(prepared.ranks, self._all[0].platform).programs[rank].module
        before = entry_function(prepared.ranks.programs[rank].module)
        self._results = len(Function(before).yields)
        after = len(Function(entry_function(module)).yields)
        state = set(prepared.following[rank].values())
        # A result that no later step donates: that which keeps permutes alive, or a loss.
        self._signal = next((n for n in reversed(range(after)) if n not in state), None)
        _donate(module, prepared.following[rank])
        if self._all[0].platform == "cpu":
            looped = in_a_loop(module) if prepared.ranks.ranks == 1 else None
            if looped is None:
                _keep_calls(module)
            else:
                module = looped
        self._executable = bindings.compile_kept(bindings.write_bytecode(module), self._all)
        # If a compiler deletes permutes from the program of one rank, the others deadlock.
        wanted = len(ops_named(entry_function(module), {COLLECTIVE_PERMUTE}))
        if wanted:
            left = permutes_left(self._executable)
            if left != wanted:
                raise ToolError(f"the compiler left {left} of {wanted} permutes in the program")
        self._whole = any_values(self._all)

    def devices(self, rank: int) -> list[tuple[int, Any]]:
        first = rank * self.devices_of_rank
        devices = enumerate(self._all[first : first + self.devices_of_rank])
        mine = jax.process_index()
        return [(place, device) for place, device in devices if device.process_index == mine]

    def process_of(self, rank: int, place: int) -> int:
        return self._all[rank * self.devices_of_rank + place].process_index

    def run(self, arguments: Values) -> Values:
        (rank,) = self.ranks
        results = run_on(self._executable, arguments.pop(rank), self._whole)
        self.signs.append(results[self._signal] if self._signal is not None else [])
        return {rank: results[: self._results]}


def _in_form(ranks: RankSet, platform: str) -> RankSet:
    """Returns the set with transfers in the form of a platform. Raises ToolError for others."""
    if ranks.ranks == 1:
        return ranks
    if platform == "cpu":
        return with_permutes(ranks)
    if platform in ("gpu", "cuda", "rocm"):
        if f"--{SHARDED_AUTOTUNING}=false" not in os.environ.get("XLA_FLAGS", ""):
            raise ToolError(
                "XLA:GPU shares autotuning among processes that compile the same program, but "
                "ranks compile different programs and would wait for each other forever; start "
                f"with XLA_FLAGS=--{SHARDED_AUTOTUNING}=false"
            )
        return with_both_ends(ranks)
    raise ToolError(
        f"different programs on several processes of {platform} are not supported; gpu and cpu are"
    )


def _keep_calls(module: ir.Module) -> None:
    """Makes XLA:CPU keep the calls of `main` as functions.

    If they are inlined, XLA computes values that all microbatches share, such as zeros for rows,
    once. It then copies them for each microbatch at the start. That needs ten times the memory, and
    a third more time.
    """
    with module.context:
        kept = ir.Attribute.parse('{inlineable = "false"}')
        for view in Function(entry_function(module)).body.operations:
            if view.operation.name == CALL:
                view.operation.attributes["mhlo.frontend_attributes"] = kept


def _donate(module: ir.Module, following: Mapping[int, int]) -> None:
    """Marks the arguments whose memory a result may reuse: that of their next value."""
    main = entry_function(module)
    block = Function(main).body
    taken: set[int] = set()
    number = ir.IntegerType.get_signless(32, module.context)
    listed = side_entries(main, "arg_attrs") or [{} for _ in block.arguments]
    for argument, result in following.items():
        if result not in taken:
            taken.add(result)
            listed[argument]["tf.aliasing_output"] = ir.IntegerAttr.get(number, result)
    set_side_entries(main, "arg_attrs", listed)
