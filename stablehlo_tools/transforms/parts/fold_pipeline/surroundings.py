"""Where the loop over layers goes: outside of the axis of the stages, inside of all others."""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools import bindings
from stablehlo_tools.analysis.shardings import manual_axes, sharding_per_value
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.transforms.parts.fold_pipeline.loop_region import LoopRegion
from stablehlo_tools.transforms.parts.fold_pipeline.outputs import Output
from stablehlo_tools.transforms.parts.fold_pipeline.tidying import erase_unused


class Surroundings:
    """In front of a loop, or of the manual computation around it; or in one over its other axes."""

    def __init__(self, region: LoopRegion) -> None:
        self._region = region
        self._entering: dict[ir.Value, ir.Value] = {}
        self.anchor = region.manual or region.loop
        self.point = ir.InsertionPoint(self.anchor)
        self.inner: ir.Block | None = None
        if region.manual is not None:
            self._enter(region.manual)

    def entering(self, value: ir.Value) -> ir.Value:
        """What stands here for a value from outside of the region."""
        return self._entering.get(value, value)

    def kind(self, output: Output) -> ir.Type:
        """The type that an output has here."""
        return ir.RankedTensorType.get(
            output.box.sizes, element_of(output.value), loc=self.anchor.location
        )

    def leaving(self, outputs: Sequence[Output], values: Sequence[ir.Value]) -> list[ir.Value]:
        """What takes the place of outputs, of which values stand here."""
        manual = self._region.manual
        if self.inner is None or manual is None:
            return list(values)
        ir.Operation.create(
            "sdy.return",
            operands=list(values),
            loc=terminator(manual.regions[0].blocks[0]).location,
            ip=ir.InsertionPoint(self.inner),
        )
        erase_unused(self.inner)
        listed = sharding_per_value(manual.attributes["out_shardings"])
        shardings = [self._without_axis(listed[output.result]) for output in outputs]
        new = self._manual([output.value.type for output in outputs], shardings, manual)
        self.inner.append_to(new.regions[0])
        return list(new.results)

    def _enter(self, manual: ir.Operation) -> None:
        arguments = list(manual.regions[0].blocks[0].arguments)
        if manual_axes(manual) == frozenset({self._region.ranks.axis}):
            self._entering = dict(zip(arguments, manual.operands, strict=True))
            return
        kinds = [self._whole(argument) for argument in arguments]
        held = ir.Operation.create(  # holds the block until the results are known
            "sdy.manual_computation",
            results=[],
            operands=list(manual.operands),
            attributes=dict(manual.attributes.items()),
            regions=1,
            loc=manual.location,
            ip=self.point,
        )
        locations = [argument.location for argument in arguments]
        inner = held.regions[0].blocks.append(*kinds, arg_locs=locations)
        self.inner = inner
        self._held = held
        self._entering = dict(zip(arguments, inner.arguments, strict=True))
        self.point = ir.InsertionPoint(inner)

    def _manual(
        self, kinds: Sequence[ir.Type], shardings: Sequence[ir.Attribute], manual: ir.Operation
    ) -> ir.Operation:
        context = manual.context
        entering = sharding_per_value(manual.attributes["in_shardings"])
        axes = sorted(manual_axes(manual) - {self._region.ranks.axis})
        named = ", ".join(f'"{axis}"' for axis in axes)
        per_value = bindings.TensorShardingPerValueAttr
        return ir.Operation.create(
            "sdy.manual_computation",
            results=list(kinds),
            operands=list(manual.operands),
            attributes={
                "in_shardings": per_value.get([self._without_axis(s) for s in entering], context),
                "out_shardings": per_value.get(list(shardings), context),
                "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{named}}}>", context),
            },
            regions=1,
            loc=manual.location,
            ip=ir.InsertionPoint(manual),
        )

    def _whole(self, argument: ir.Value) -> ir.Type:
        """The type of an argument with the shards of all ranks put together."""
        dim, shape = self._region.entering_dim(argument), shape_of(argument)
        if dim is not None:
            shape[dim] *= self._region.ranks.count
        return ir.RankedTensorType.get(shape, element_of(argument), loc=self.anchor.location)

    def _without_axis(self, attribute: ir.Attribute) -> ir.Attribute:
        """A sharding of which the axis of the stages is no part."""
        sharding = bindings.TensorShardingAttr(attribute)
        context, axis = attribute.context, self._region.ranks.axis
        dims: list[ir.Attribute] = []
        for dimension in sharding.dimension_shardings:
            held = bindings.SdyDimensionShardingAttr(dimension)
            kept = [a for a in held.axes if bindings.SdyAxisRefAttr(a).name != axis]
            dims.append(
                bindings.SdyDimensionShardingAttr.get(kept, held.is_closed, context=context)
            )
        return bindings.TensorShardingAttr.get(sharding.mesh_or_ref, dims, context=context)

    def clear(self) -> None:
        """Erases what held the block of a new manual computation."""
        if self.inner is not None:
            self._held.erase()
