"""Chooses which values a training step keeps for its backward and which it computes again.

    while (%i, %x, %rows) {                        // the forward, a layer an iteration
      %a = stablehlo.dot_general %x, %w[%i]
      %y = stablehlo.tanh %a
      %rows' = rows of %a, rows of %y              // the residuals
    }
    while (%j, %d) { … %rows[31 - %j] … }
  ==>
    while (%i, %x, %rows) {
      %rows' = rows of %a
    }
    while (%j, %d) {
      %y = stablehlo.tanh %rows[31 - %j]           // again
      …
    }

A residual costs memory, and the traffic of writing and reading it. A recomputed value costs the
time of its ops, whose operands must be available in turn. For a given price of memory the best
choice is a minimum cut. The pass tries several prices, and takes the program that fits and is
expected to be fastest in the compiler's schedule. So a program that fits may become faster, too:
elementwise results are often faster to compute than to read.

The choices of jax.checkpoint are replaced, in both directions. The pass works on loops over layers
and on unrolled layers, in manual computations and in the global view, before `partition` and after
it.

Preconditions:
  P1  `memory-limit`, if given, is positive; `margin` is at least 0 and less than 1.
  P2  No op has a token yet: thread-tokens comes after this pass.
  P3  Some choice fits; otherwise an error names the least memory that was found.
  P4  With `offload`, the profile has a [host]: how fast its link to the host copies.
  P5  With `compiler`, that compiler is installed, and supports the device of the profile.

Guarantees: the signature stays, and the same ops run on the same values. All values are bitwise as
before if the backend computes an op the same way at every place. No op with an effect, no stateful
random number, and no custom call runs twice. Calls are inlined if the pass writes anything.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

from stablehlo_tools.analysis.partitioner_work import left_to_the_partitioner
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware, load_hardware
from stablehlo_tools.diagnostics import (
    GIB,
    Diagnostic,
    Diagnostics,
    ToolError,
    duration,
    note,
    size,
)
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage
from stablehlo_tools.targets.chips import Target, chip_for
from stablehlo_tools.targets.topologies import check_installed
from stablehlo_tools.transforms.partition import PartitionPass
from stablehlo_tools.transforms.parts.offload.fitting import (
    check_host_link,
    check_limits,
    does_not_fit,
    how_to_run,
)
from stablehlo_tools.transforms.parts.rematerialize.compiled_candidates import (
    CompiledProgram,
    CompiledRun,
    compiled_run,
    fastest_compiled,
)
from stablehlo_tools.transforms.parts.rematerialize.memory_price import (
    RematerializationSearch,
    Tried,
    prepare,
)
from stablehlo_tools.transforms.parts.rematerialize.recomputation_prices import (
    RecomputationPrices,
    forget_numbers,
    partitioned_prices,
)


@dataclass(frozen=True)
class RematerializePass(Pass):
    """The backward recomputes values instead of keeping them, so that the program fits.

    `memory-limit`: the GiB that the program may need on a device (default: the device's memory).
    `margin`: the share of it that stays free if possible, because the peak is only predicted
    (default: 0.1). `hardware`: the name or the file of the profile that times are predicted for.
    `compiler`: XLA:GPU or XLA:TPU compiles up to six programs, and its figures decide which of them
    fits and which is fastest; its wheel is in the extra `aot`. `offload`: kept values may be in the
    host's memory, as `offload` writes them, with its custom call. `explain`: notes on the kept and
    the repeated values, their cost, and the user's code for the same choice.
    """

    name: ClassVar[str] = "rematerialize"
    milestone: ClassVar[Milestone | None] = Milestone(
        RoadStage.RECOMPUTE, ("", "margin=0.2"), slow=("offload",)
    )
    memory_limit: float | None = None
    margin: float = 0.1
    hardware: str = "h100"
    compiler: Literal["none", "gpu", "tpu"] = "none"
    offload: bool = False
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites a copy of the module, and replaces the module by it if anything changed."""
        hardware = load_hardware(self.hardware)
        place = entry_function(module).location
        check_limits(self.name, self.memory_limit, self.margin, "P1", place)
        if self.offload:
            check_host_link(self.name, self.hardware, "P4", place)
        if self.compiler != "none":
            try:
                check_installed(Target(self.compiler))
                chip_for(Target(self.compiler), load_hardware(self.hardware))
            except ToolError as error:
                text = f"{self.name}: compiler={self.compiler}: {error.diagnostic.message} (P5)"
                raise ToolError(text, place) from None
        refuse_tokens(module, "rematerialize", "P2")
        limit = hardware.memory_bytes if self.memory_limit is None else self.memory_limit * GIB
        with _no_collection():
            chosen, notes = self._choose_program(module, hardware, limit)
        if chosen.module is not module:
            # The search numbers the ops by an attribute, which does not belong in the result.
            forget_numbers(chosen.module)
            take_over(module, chosen.module)
        if self.explain:
            diagnostics.collected += notes
        if chosen.moved:
            diagnostics.collected.append(how_to_run(self.name, module.operation.location))

    def _choose_program(
        self, module: ir.Module, hardware: Hardware, limit: float
    ) -> tuple[Tried, list[Diagnostic]]:
        """Returns the fastest program that fits, with notes; the given module if that is best.

        Raises ToolError if none fits.
        """
        draft = copy_module(module)
        prepare(draft)
        # Before `partition`, the time of an op is that of its parts and their collectives.
        is_global = left_to_the_partitioner(draft) is not None

        def local(whole: ir.Module) -> ir.Module:
            if not is_global:
                return whole
            copy = copy_module(whole)
            PartitionPass(hardware=self.hardware).run(copy, Diagnostics())
            return copy

        prices = (
            partitioned_prices(local(draft), hardware)
            if is_global
            else RecomputationPrices.from_module(draft, hardware)
        )
        safe = (1.0 - self.margin) * limit
        choice = RematerializationSearch(draft, prices, hardware, local, offload=self.offload)
        found, said = self._fastest(choice, module, hardware, safe)
        # The choice kept the margin if possible. Only more than the limit is an error.
        if not found.run.fits(limit):
            place = entry_function(module).location
            raise does_not_fit(
                self.name, found.run.peak_bytes, limit, "P3", place, stated=self.memory_limit
            )
        chosen = found.tried
        if chosen.module is module:
            text = "the program stays unchanged: no choice that fits is expected to be faster"
            return chosen, [self._note(module, text), *said]
        return chosen, [*choice.notes(chosen), *said] if self.explain else []

    def _fastest(
        self, choice: RematerializationSearch, module: ir.Module, hardware: Hardware, safe: float
    ) -> tuple[CompiledProgram, list[Diagnostic]]:
        """Returns the fastest program with its time and memory, and notes on the compiler's
        figures."""
        if self.compiler == "none":
            chosen = choice.fastest(module, safe)
            return CompiledProgram(chosen, CompiledRun(chosen.ns, chosen.peak_bytes)), []
        target = Target(self.compiler)
        # The compiler's memory, over the expected one, says which expected memory to choose for.
        found = fastest_compiled(
            choice.try_setting(None, safe, module),
            lambda limit: choice.fastest(module, limit),
            lambda program: compiled_run(program, target, hardware),
            safe,
        )
        run, expected = found.run, found.tried
        text = (
            f"{target.title} needs {size(run.peak_bytes)} and {duration(run.ns)}; expected: "
            f"{size(expected.peak_bytes)} and {duration(expected.ns)}"
        )
        return found, [self._note(module, text)]

    def _note(self, module: ir.Module, text: str) -> Diagnostic:
        return note(f"rematerialize: {text}", module.operation.location)


@contextmanager
def _no_collection() -> Generator[None]:
    """Disables Python's garbage collection: the programs' many objects all stay live."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
