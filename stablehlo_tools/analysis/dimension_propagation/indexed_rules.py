"""Gathers, scatters, dynamic slices and updates: indices point along other dimensions."""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.analysis.dimension_propagation.layout import Asked, Layout, Step
from stablehlo_tools.analysis.reducers import reducer_kind


def dynamic_slice(asked: Asked) -> Step | None:
    """A slice that takes all of the batch: its start is clamped to 0, in a part as in the whole."""
    given = asked.layouts[0]
    if given is None or asked.integers("slice_sizes")[given.dim] != asked.operands[0][given.dim]:
        return None
    return Step((given, *(None for _ in asked.layouts[1:])), (given,))


def dynamic_update_slice(asked: Asked) -> Step | None:
    """An update of all of the batch."""
    given = asked.given
    if given is None or asked.operands[0][given.dim] != asked.operands[1][given.dim]:
        return None
    return Step((given, given, *(None for _ in asked.layouts[2:])), (given,))


def gather(asked: Asked) -> Step | None:
    """A batch of indices, a window over all of the batch, or both in step (batching)."""
    numbers = bindings.GatherDimensionNumbers(asked.op.attributes["dimension_numbers"])
    of_operand, of_indices = asked.layouts
    offsets = list(numbers.offset_dims)
    result_rank, index_rank = len(asked.results[0]), len(asked.operands[1])
    scattered = [d for d in range(result_rank) if d not in offsets]
    index_dims = [d for d in range(index_rank) if d != numbers.index_vector_dim]
    batching = list(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    if of_operand is not None and of_operand.dim not in numbers.operand_batching_dims:
        if of_indices is not None:
            return None
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [d for d in range(len(asked.operands[0])) if d not in gone]
        full = asked.integers("slice_sizes")[of_operand.dim] == asked.operands[0][of_operand.dim]
        if of_operand.dim not in kept or not full:
            return None
        return Step((of_operand, None), (of_operand.at(offsets[kept.index(of_operand.dim)]),))
    if of_indices is None:
        assert of_operand is not None
        of_indices = of_operand.at(dict(batching)[of_operand.dim])
    if of_indices.dim not in index_dims:
        return None
    paired = {indices: operand for operand, indices in batching}.get(of_indices.dim)
    wanted = of_indices.at(paired) if paired is not None else None
    if of_operand not in (None, wanted):
        return None
    place = scattered[index_dims.index(of_indices.dim)]
    return Step((wanted, of_indices), (of_indices.at(place),))


def scatter(asked: Asked) -> Step | None:
    """A batch of updates into one tensor, a window over all of the batch, or both in step."""
    if len(asked.results) > 1:
        return None
    form = _Scatter(asked)
    into, at, updates = asked.layouts
    if updates is None:
        updates = form.updates_for(into, at)
    if updates is None or updates.dim >= len(asked.operands[2]):
        return None
    wanted_into, wanted_at = form.beside(updates)
    if into not in (None, wanted_into) or at not in (None, wanted_at):
        return None
    if wanted_into is not None:
        return Step((wanted_into, wanted_at, updates), (wanted_into,))
    if wanted_at is None or reducer_kind(asked.op.regions[0].blocks[0]) is None:
        return None
    return Step((None, wanted_at, updates), (None,), chained=True)


class _Scatter:
    """Which dimensions of a scatter's operands belong together."""

    def __init__(self, asked: Asked) -> None:
        op, (into, at, updates) = asked.op, asked.operands
        numbers = bindings.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
        windows = list(numbers.update_window_dims)
        gone = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
        indexed = set(numbers.scattered_dims_to_operand_dims)
        index_dims = [d for d in range(len(at)) if d != numbers.index_vector_dim]
        update_dims = [d for d in range(len(updates)) if d not in windows]
        kept = [d for d in range(len(into)) if d not in gone]
        self.index_of = dict(zip(update_dims, index_dims, strict=True))
        self.batch_of = dict(
            zip(numbers.scatter_indices_batching_dims, numbers.input_batching_dims, strict=True)
        )
        self.window_of = {
            update: operand
            for update, operand in zip(windows, kept, strict=True)
            if updates[update] == into[operand] and operand not in indexed
        }

    def beside(self, updates: Layout) -> tuple[Layout | None, Layout | None]:
        """The layouts of the other two operands that go with that of the updates."""
        if updates.dim in self.window_of:
            return updates.at(self.window_of[updates.dim]), None
        index = self.index_of.get(updates.dim)
        if index is None:
            return None, None
        batch = self.batch_of.get(index)
        return updates.at(batch) if batch is not None else None, updates.at(index)

    def updates_for(self, into: Layout | None, at: Layout | None) -> Layout | None:
        """The layout of the updates that goes with that of another operand."""
        given = into or at
        assert given is not None
        for dim in (*self.window_of, *self.index_of):
            updates = given.at(dim)
            if (into, at)[0 if into else 1] == self.beside(updates)[0 if into else 1]:
                return updates
        return None
