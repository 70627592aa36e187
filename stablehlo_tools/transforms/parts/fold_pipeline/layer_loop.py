"""Writes the loop over layers that a pipeline's stages fold to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.transforms.parts.fold_pipeline.chains import Link
from stablehlo_tools.transforms.parts.fold_pipeline.composing import Composer, nowhere
from stablehlo_tools.transforms.parts.fold_pipeline.scaling import Scaling

Body = Callable[[Builder, ir.InsertionPoint, ir.Value, Sequence[ir.Value]], Sequence[ir.Value]]


@dataclass(frozen=True)
class Operand:
    """An input of the layers, or all that they have for it along dimension `stacked`; `whole`
    says that a layer takes the slice as it is, with that dimension of size 1."""

    value: ir.Value
    stacked: int | None = None
    whole: bool = False


@dataclass(frozen=True)
class Stage:
    """What a loop runs again and again: a block, on `samples` of the batch that `dims` follows.

    A link says that what one round computes is an input of the next.
    """

    dims: BatchDims
    samples: int
    links: tuple[Link, ...]
    operands: tuple[Operand, ...]

    def write(self, build: Builder, place: ir.InsertionPoint, trips: int) -> list[ir.Value]:
        """Writes the loop, or one round without a loop; returns what the last round computes."""
        root = self.dims.graph.root
        if trips == 1:
            return self._scaling().write(root, [o.value for o in self.operands], place)
        linked = [link.input for link in self.links]
        others = [number for number in range(len(self.operands)) if number not in linked]
        kept = [  # where a link converts, what the last round computes is kept beside it
            output
            for output in range(len(root.returned))
            if all(link.ops for link in self.links if link.output == output)
        ]

        def body(
            inner: Builder, point: ir.InsertionPoint, _: ir.Value, taken: Sequence[ir.Value]
        ) -> list[ir.Value]:
            numbered = dict(zip(linked, taken, strict=False))
            numbered |= dict(zip(others, taken[len(linked) + len(kept) :], strict=True))
            made = self._scaling().write(
                root, [numbered[number] for number in range(len(numbered))], point
            )
            composer = Composer(inner, nowhere)
            after = [composer.through(made[link.output], link.ops) for link in self.links]
            return [*after, *(made[output] for output in kept)]

        states = [self.operands[number].value for number in linked]
        states += [self._unset(build, output) for output in kept]
        rest = [self.operands[number] for number in others]
        found = write_loop(place, build, trips, states, rest, body)
        results: list[ir.Value] = []
        for output in range(len(root.returned)):
            if output in kept:
                results.append(found[len(linked) + kept.index(output)])
                continue
            held = next(
                i for i, link in enumerate(self.links) if link.output == output and not link.ops
            )
            results.append(found[held])
        return results

    def _scaling(self) -> Scaling:
        return Scaling(self.dims, self.samples)

    def _unset(self, build: Builder, output: int) -> ir.Value:
        graph = self.dims.graph
        kind = self._scaling().kind(graph.values[graph.root.returned[output]])
        tensor = ir.RankedTensorType(kind)
        return build.splat(0, tensor.shape, tensor.element_type)


def write_loop(
    place: ir.InsertionPoint,
    build: Builder,
    trips: int,
    states: Sequence[ir.Value],
    operands: Sequence[Operand],
    body: Body,
) -> list[ir.Value]:
    """A `while` over layers, as a scan is written: operands, a counter, states.

    `body` takes the counter, the states and what each operand is for a layer, and returns the
    states.
    """
    i32 = ir.IntegerType.get_signless(32, build.context)
    carried = [*(o.value for o in operands), build.splat(0, [], i32), *states]
    types = [value.type for value in carried]
    loop = ir.Operation.create(
        "stablehlo.while",
        results=types,
        operands=carried,
        regions=2,
        loc=build.location,
        ip=place,
    )
    blocks = [
        region.blocks.append(*types, arg_locs=[build.location] * len(types))
        for region in loop.regions
    ]
    counter = len(operands)
    _condition(blocks[0], build.location, counter, trips)
    point = ir.InsertionPoint(blocks[1])
    inner = Builder(point, build.location)
    arguments = list(blocks[1].arguments)
    taken = [
        _layer(inner, argument, arguments[counter], operand)
        if operand.stacked is not None
        else argument
        for argument, operand in zip(arguments, operands, strict=False)
    ]
    after = body(inner, point, arguments[counter], [*arguments[counter + 1 :], *taken])
    following = inner.same("add", arguments[counter], inner.splat(1, [], i32))
    _return(point, build.location, [*arguments[:counter], following, *after])
    results: list[ir.Value] = list(loop.results)
    return results[counter + 1 :]


def _condition(block: ir.Block, location: ir.Location, counter: int, trips: int) -> None:
    point = ir.InsertionPoint(block)
    build = Builder(point, location)
    argument = block.arguments[counter]
    bound = build.splat(trips, [], ir.RankedTensorType(argument.type).element_type)
    _return(point, location, [build.compare("LT", argument, bound)])


def _layer(build: Builder, stack: ir.Value, counter: ir.Value, operand: Operand) -> ir.Value:
    """What a stack holds for a layer."""
    shape = shape_of(stack)
    i32 = ir.RankedTensorType(counter.type).element_type
    dim, zero = operand.stacked, build.splat(0, [], i32)
    starts = [counter if d == dim else zero for d in range(len(shape))]
    taken = build.dynamic_slice(stack, starts, [1 if d == dim else n for d, n in enumerate(shape)])
    if operand.whole:
        return taken
    return build.reshape(taken, [n for d, n in enumerate(shape) if d != dim])


def _return(point: ir.InsertionPoint, location: ir.Location, values: Sequence[ir.Value]) -> None:
    ir.Operation.create("stablehlo.return", operands=list(values), loc=location, ip=point)
