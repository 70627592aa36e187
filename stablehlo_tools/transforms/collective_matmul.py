"""Multiplies block by block, while the blocks of a gather or the sums of a scatter go round a ring.

A product waits for the gather of its operand, and a scatter waits for the product, so no order of
the program hides these collectives. In a ring of permutes, each step multiplies the block that has
arrived, while the next one is in flight.

    %g = "stablehlo.all_gather"(%x)                      // rows, over 4 devices
    %y = stablehlo.dot_general %g, %w
    ==>
    %b1 = "stablehlo.collective_permute"(%x)             // from the device before
    %y0 = stablehlo.dot_general %x, %w
    %b2 = "stablehlo.collective_permute"(%b1)
    %y1 = stablehlo.dot_general %b1, %w
    …
    %y = stablehlo.dynamic_update_slice …                // %y0 to the device's own rows, %y1 to
                                                         // those of the device before, …

    %p = stablehlo.dot_general %a, %w
    %y = "stablehlo.reduce_scatter"(%p)
    ==>
    %s1 = stablehlo.dot_general %a1, %w                  // for the device that is furthest ahead
    %s2 = "stablehlo.collective_permute"(%s1)
    %p2 = stablehlo.dot_general %a2, %w                  // for the one before that
    %s3 = stablehlo.add %s2, %p2
    …

    %t = "stablehlo.all_to_all"(%x)                      // tokens to their experts
    %y = stablehlo.dot_general %t, %w
    %r = "stablehlo.all_to_all"(%y)                      // and back
    ==>
    %t0 = stablehlo.dynamic_slice %x …                   // the device's own tokens
    %t1 = "stablehlo.collective_permute"(%x1)            // those of the next device, straight here
    %y0 = stablehlo.dot_general %t0, %w
    %y1 = stablehlo.dot_general %t1, %w
    %r1 = "stablehlo.collective_permute"(%y1)            // straight back
    …

Preconditions:
  P1  Every communicating op is of a dialect that is understood; groups name processes that the
      module has.
  P2  No op has a token yet: thread-tokens comes after this pass.

Guarantees: the signature stays. The same ops compute products and elementwise values, on fewer
rows. Sums over devices, and over a gathered dimension, are added in another order. A second run
changes only gathers that the first one left.

Left unchanged: collectives without a product beside them, with several operands, over groups of
different sizes, of complex numbers, started asynchronously, or over several replicas and several
partitions; scatters of anything but sums. With `rings=auto`, collectives whose rings save no time
stay, too. Calls are inlined if the pass writes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import Diagnostic, Diagnostics, note
from stablehlo_tools.ir.clone import copy_module, take_over
from stablehlo_tools.ir.equal_branches import fold_equal_branches
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.token_chain import refuse_tokens
from stablehlo_tools.passes.base import Milestone, Pass, RoadStage
from stablehlo_tools.transforms.parts.collective_matmul.regions import RingRegion
from stablehlo_tools.transforms.parts.collective_matmul.ring_choice import (
    RingTarget,
    Survey,
    best,
    write,
)
from stablehlo_tools.transforms.parts.collective_matmul.rings import RingDirection


@dataclass(frozen=True)
class CollectiveMatmulPass(Pass):
    """Gathers before products, and scatters of their sums, become rings beside the products.

    `hardware`: the name or the file of the profile that times are predicted for. `rings`: `auto`
    writes the rings that are predicted to save time, `all` writes all that are possible.
    `directions`: blocks go round in `one` direction, or in `both`, whole or by halves; `auto`
    chooses the faster. `hold`: barriers keep XLA:GPU to one hop beside each product; XLA:TPU gets
    none. `explain`: a note for each possible ring, written or not.
    """

    name: ClassVar[str] = "collective-matmul"
    milestone: ClassVar[Milestone | None] = Milestone(RoadStage.SPLIT, ("",))
    hardware: str = "h100"
    rings: Literal["auto", "all"] = "auto"
    directions: Literal["auto", "one", "both"] = "auto"
    hold: bool = True
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites a copy of the module, and replaces the module by it if there is a ring."""
        hardware = load_hardware(self.hardware)
        refuse_tokens(module, self.name, "P2")
        # Only XLA:GPU needs barriers to keep a hop beside its product; a torus is a TPU's.
        compiler = RingTarget(hardware, self.hold and not hardware.is_torus)
        draft = copy_module(module)
        inline_all_calls(draft)
        # An export for several platforms has branches for each, which are mostly equal.
        fold_equal_branches(draft)
        survey = Survey.from_module(draft)
        chosen: dict[int, RingDirection] = {}
        if survey.regions:
            chosen = best(draft, compiler, self._asks, at_any_price=self.rings == "all")
        if self.explain:
            diagnostics.collected += [
                _account(region, chosen.get(number)) for number, region in enumerate(survey.regions)
            ]
        if chosen:
            write(draft, chosen, compiler)
            take_over(module, draft)

    def _asks(self, way: RingDirection) -> bool:
        """Returns True if the `directions` option allows a way."""
        return self.directions == "auto" or (self.directions == "one") == (way is RingDirection.ONE)


def _account(region: RingRegion, way: RingDirection | None) -> Diagnostic:
    collectives = (*region.gathers, *region.scatters, *region.exchanges)
    ends = [node.op.name.removeprefix("stablehlo.") for node in collectives]
    count = len(region.products)
    products = "1 product" if count == 1 else f"{count} products"
    if way is None:
        said = f"{' and '.join(ends)} beside {products}: a ring would save no time"
    else:
        ring = f"a ring of {region.size}, in {way.value}"
        said = f"{' and '.join(ends)} became {ring}, beside {products}"
    return note(f"collective-matmul: {said}", region.nodes[0].op.location)
