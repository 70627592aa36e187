"""Keeps in the host's memory what a backward reads late, so that a training step fits.

    %rows' = dynamic_update_slice %rows, %y, %i            // of each layer, for the backward
  ==>
    %h = stablehlo.custom_call @annotate_device_placement(%y)
             {mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}}
    %rows' = dynamic_update_slice %rows, %h, %i            // in the host's memory

and back in front of what reads it. The link to the host copies while the device computes: a layer
that takes 8 ms hides 400 MB over PCIe 5.0. XLA:GPU and XLA:TPU know the annotation, and make
asynchronous copies of it. As much is moved as it takes to fit, by what is expected of the
compiler's own schedule, of the rows that loops over layers write, the largest first. Values of
unrolled layers stay: XLA:GPU of jax 0.12 makes both copies of one right before it is read, also
where jax.checkpoint's policy has asked for them.

Rows are copied an iteration later than they are made, and back one earlier than they are read, so
that a whole iteration hides each copy, if XLA:GPU is run without command buffers, as a note says;
the last row never leaves the device. Where a loop does not read the rows in the reverse order of
the one that wrote them, they are copied where they are.

With `state` the state of the optimizer goes there too, and first, the largest group first: what
one gradient updates is a group, and comes to the device when that gradient is there and the group
two before it has been updated. Only then is the call of the program another one: it takes this
state in the host's memory (`mhlo.memory_kind`), and gives it back there, as `Exported` says too.

It adds a custom call, `annotate_device_placement`: one of those whose meaning jax.export promises
to keep. XLA:CPU has no other memory, and runs the program as it was.

Preconditions:
  P1  `memory-limit`, if given, is positive; `margin` is at least 0 and less than 1.
  P2  The profile has a [host]: how fast its link copies. Those of TPUs have none, for nobody has
      published it; a profile of one's own can.
  P3  It fits with what can be moved: an error names the least memory that was found.
  P4  No op has a token yet: thread-tokens comes after this pass.

Guarantees: the signature as it was, but for the memory that state lies in, and all values bitwise:
copies change none. A program that fits is left alone.

Calls are inlined where the pass writes anything. docs/offload.md has what was measured.
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
    explained,
    how_to_run,
    offloaded,
)


@dataclass(frozen=True)
class OffloadPass(Pass):
    """What is needed late lies in the host's memory, so that the program fits.

    `memory-limit`: the GiB that it may need on a device; without it, what the device has.
    `margin`: the share of it that is left free. `hardware`: the name or the file of the profile
    that times are predicted for. `state`: the optimizer's state is moved too, and first; the
    program is then given it in the host's memory, and gives it back there. `explain`: what is
    moved.
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
            self._say(module, diagnostics, "the program fits as it is")
            return
        found = offloaded(draft, self._run, safe, state=self.state)
        least = before.peak_bytes if found is None else found.run.peak_bytes
        if found is None or least > limit:
            raise does_not_fit(self.name, least, limit, "P3", place)
        text = (
            f"{size(before.peak_bytes)} become {size(least)}, "
            f"{duration(before.contended_ns)} {duration(found.run.contended_ns)}"
        )
        self._say(module, diagnostics, text)
        if self.explain:
            diagnostics.collected += explained(draft, found.count, state=self.state)
        diagnostics.collected.append(how_to_run(self.name, module.operation.location))
        take_over(module, found.module)

    def _say(self, module: ir.Module, diagnostics: Diagnostics, text: str) -> None:
        if self.explain:
            diagnostics.collected.append(note(f"offload: {text}", module.operation.location))

    def _run(self, module: ir.Module) -> Expected:
        if left_to_the_partitioner(module) is not None:
            module = copy_module(module)
            PartitionPass(hardware=self.hardware).run(module, Diagnostics())
        return expected_run(module, load_hardware(self.hardware))
