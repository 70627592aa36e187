"""Keeps values that a backward reads late in the host's memory, so that a training step fits.

    %rows' = dynamic_update_slice %rows, %y, %i            // of each layer, for the backward
  ==>
    %h = stablehlo.custom_call @annotate_device_placement(%y)
             {mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}}
    %rows' = dynamic_update_slice %rows, %h, %i            // in the host's memory

The values are copied back before their reader, and the link to the host copies while the device
computes. A layer that runs for 8 ms hides 400 MB over PCIe 5.0. The pass moves rows that loops over
layers write, the largest first, until the program is expected to fit in the compiler's schedule.

A row is copied one iteration after it is computed, and copied back one iteration before it is read.
So a whole iteration hides each copy, and the last row never leaves the device. If a loop reads the
rows in another order than the reverse, they are copied in the iterations that compute and read
them.

With `state`, the optimizer's state is moved first, the largest group first. A group is the state
that one gradient updates. It is copied to the device after that gradient is computed and the group
two before it is updated. The program then takes this state in the host's memory
(`mhlo.memory_kind`) and returns it there, as `Exported` says too.

Preconditions:
  P1  `memory-limit`, if given, is positive; `margin` is at least 0 and less than 1.
  P2  The profile has a [host]: how fast its link copies. Profiles of TPUs have none, because no
      figures are published; your own profile can have one.
  P3  The program fits with the values that can be moved; otherwise an error names the least memory
      that was found.
  P4  No op has a token yet: thread-tokens comes after this pass.

Guarantees: the signature stays, except the memory of the state. Copies change no value, so all are
bitwise as before. A program that fits is left unchanged. XLA:CPU has no other memory, and runs the
same program as before. Calls are inlined if the pass writes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import GIB, Diagnostics, duration, note, size
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.overlap.compilers.expected import Expected
from stablehlo_tools.passes.base import Pass
from stablehlo_tools.transforms.partition import PartitionPass
from stablehlo_tools.transforms.parts.offload.fitting import (
    check_host_link,
    check_limits,
    does_not_fit,
    how_to_run,
    offload_notes,
    offload_to_fit,
)


@dataclass(frozen=True)
class OffloadPass(Pass):
    """Values that are needed late are in the host's memory, so that the program fits.

    `memory-limit`: the GiB that the program may need on a device (default: the device's memory).
    `margin`: the share of it that stays free (default: 0.1). `hardware`: the name or the file of
    the profile that times are predicted for. `state`: the optimizer's state is moved too, and
    first; the program then takes and returns it in the host's memory. `explain`: notes on the
    values that are moved.
    """

    name: ClassVar[str] = "offload"
    memory_limit: float | None = None
    margin: float = 0.1
    hardware: str = "h100"
    state: bool = False
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites a copy of the module, and replaces the module by it if anything changed."""
        place = entry_function(module).location
        check_limits(self.name, self.memory_limit, self.margin, "P1", place)
        check_host_link(self.name, self.hardware, "P2", place)
        refuse_tokens(module, "offload", "P4")
        draft = copy_module(module)
        inline_all_calls(draft)
        before = self._run(draft)
        whole = load_hardware(self.hardware).memory_bytes
        limit = whole if self.memory_limit is None else self.memory_limit * GIB
        safe = (1.0 - self.margin) * limit
        if before.peak_bytes <= safe:
            self._say(module, diagnostics, "the program fits without a change")
            return
        # The margin is kept if possible. Only more than the limit is an error.
        found = offload_to_fit(draft, self._run, safe, state=self.state)
        least = before.peak_bytes if found is None else found.run.peak_bytes
        if found is None or least > limit:
            raise does_not_fit(self.name, least, limit, "P3", place, stated=self.memory_limit)
        text = (
            f"memory goes from {size(before.peak_bytes)} to {size(least)}, time "
            f"from {duration(before.contended_ns)} to {duration(found.run.contended_ns)}"
        )
        self._say(module, diagnostics, text)
        if self.explain:
            diagnostics.collected += offload_notes(draft, found.count, state=self.state)
        # XLA:GPU hides copies only without command buffers, which is the user's flag to set.
        diagnostics.collected.append(how_to_run(self.name, module.operation.location))
        take_over(module, found.module)

    def _say(self, module: ir.Module, diagnostics: Diagnostics, text: str) -> None:
        if self.explain:
            diagnostics.collected.append(note(f"offload: {text}", module.operation.location))

    def _run(self, module: ir.Module) -> Expected:
        # Memory and time are those of one device, so a global program is partitioned on a copy.
        if left_to_the_partitioner(module) is not None:
            module = copy_module(module)
            PartitionPass(hardware=self.hardware).run(module, Diagnostics())
        return expected_run(module, load_hardware(self.hardware))
