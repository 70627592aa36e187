"""Random programs for create-reduce-scatter, and that they hold all there is to try.

A module has a few cases, each a collective and what is done with its result. Devices stand in a
mesh of random shape and order; a case sums or gathers along some of its axes, and cuts along some.
"""

from __future__ import annotations

import random

import numpy as np
from test_create_reduce_scatter_offsets import DEVICES, Module, cast, offsets, tensor

CASES = 5  # in a module
MESHES = ((2, 2, 2), (4, 2), (2, 4), (8,), (2, 1, 4))
GRIDS = ((1, 8), (1, 8), (8, 1), (2, 4))  # replicas, partitions
REDUCTIONS = ("add", "add", "maximum", "minimum", "multiply")
FLOATS = ("f32", "f32", "bf16", "i32", "ui8", "f64")
INDEX_TYPES = ("i32", "i32", "ui32", "i64", "ui64", "i16", "i8", "ui8")
CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, "
MISSES = ("taken twice", "other axis", "half", "other use", "barrier", "unaligned", "data")
GATHERS = ("own", "larger", "other")


def random_module(seed: int) -> Module:
    rng = random.Random(seed)
    replicas, partitions = rng.choice(GRIDS)
    ids = list(range(DEVICES))
    if rng.random() < 0.3:
        rng.shuffle(ids)
    by_replica = partitions == 1 and rng.random() < 0.5
    module = Module(rng, replicas, partitions, rng.choice(MESHES), ids, by_replica)
    for _ in range(CASES):
        kind = rng.choice(("scatter", "scatter", "scatter", "miss", "miss", "gather", "undone"))
        {"scatter": scatter, "miss": miss, "gather": gather, "undone": undone}[kind](module)
    return module


def scatter(module: Module, spoilt: str = "") -> None:
    """An all_reduce of which each device takes a part, unless it is spoilt."""
    rng = module.rng
    summed, cuts = random_axes(module)
    element, reduction = rng.choice(FLOATS), rng.choice(REDUCTIONS)
    sizes = [rng.choice((2, 4)), rng.choice((2, 3)), rng.choice((1, 2))]
    counts = [int(np.prod([module.axes[a] for a in axes])) for axes in cuts]
    shape = [size * count for size, count in zip(sizes, counts, strict=True)]
    kind = tensor(shape, element)
    result = all_reduce(module, module.argument(kind), kind, element, summed, reduction)
    if spoilt == "other use":
        module.results.append((result, kind))
    if spoilt == "barrier":
        result = module.line(f"stablehlo.optimization_barrier {result} : {kind}")
    chunks = [taken(module, axes) for axes in cuts]
    cut = [d for d, count in enumerate(counts) if count > 1]
    value, shape, element, order = formatted(module, result, shape, element, cut)
    if spoilt:
        spoil(module, spoilt, chunks, sizes, cut, summed, counts)
    starts = [offsets(module, chunks[d], sizes[d], d in cut, spoilt == "unaligned") for d in order]
    if spoilt == "data":
        index = module.argument("tensor<i32>")
        place = order.index(cut[0])
        starts[place] = (index, "i32")
    index_type = rng.choice(INDEX_TYPES)
    names = [cast(module, name, was, index_type) for name, was in starts]
    out = [sizes[d] for d in order]
    after = tensor(out, element)
    sliced = module.line(
        f"stablehlo.dynamic_slice {value}, {', '.join(names)}, sizes = {out} : "
        f"({tensor(shape, element)}, {', '.join([f'tensor<{index_type}>'] * 3)}) -> {after}"
    )
    module.results.append((sliced, after))
    members = int(np.prod([module.axes[a] for a in summed]))
    if spoilt:
        module.expected += ["all_reduce"]
    else:
        module.expected += ["reduce_scatter"] * len(cut)
        module.expected += ["all_reduce"] * (members > int(np.prod(counts)))


def miss(module: Module) -> None:
    scatter(module, module.rng.choice(MISSES))


def spoil(
    module: Module,
    how: str,
    chunks: list[list[int]],
    sizes: list[int],
    cut: list[int],
    summed: list[int],
    counts: list[int],
) -> None:
    """Changes which chunks devices take, so that it is no reduce_scatter any more."""
    first = cut[0]
    if how == "taken twice":
        device = module.rng.randrange(DEVICES)
        chunks[first][device] = (chunks[first][device] + 1) % counts[first]
    elif how == "half":
        sizes[first] //= 2
        chunks[first][:] = [2 * chunk for chunk in chunks[first]]
    elif how == "other axis":  # every member of a group takes the same
        where = module.coordinates()
        others = [a for a in range(len(module.axes)) if a not in summed]
        chunks[first][:] = [
            sum(where[d][a] for a in others) % counts[first] for d in range(DEVICES)
        ]


def gather(module: Module) -> None:
    """An all_gather of which each device takes its own part, a larger one, or another's."""
    rng = module.rng
    gathered, _ = random_axes(module)
    rng.shuffle(gathered)
    members = int(np.prod([module.axes[a] for a in gathered]))
    what = rng.choice(GATHERS)
    axes = gathered if what != "larger" else gathered[: rng.randint(1, len(gathered))]
    count = int(np.prod([module.axes[a] for a in axes]))
    size = rng.choice((2, 3))
    before, whole = tensor([size, 3], "f32"), tensor([size * members, 3], "f32")
    result = module.line(
        f'"stablehlo.all_gather"({module.argument(before)}) {{all_gather_dim = 0 : i64, '
        f"{groups(module, gathered, in_order=True)}}} : ({before}) -> {whole}"
    )
    chunks = taken(module, axes)
    one_kind = 1 in (module.replicas, module.partitions)  # pairs name partitions or replicas
    shift = rng.randrange(1, count) if what == "other" and count > 1 and one_kind else 0
    chunks = [(chunk + shift) % count for chunk in chunks]
    out = [size * members // count, 3]
    at, index = offsets(module, chunks, out[0], count > 1, False)
    zero = module.constant(0, f"tensor<{index}>")
    after = tensor(out, "f32")
    sliced = module.line(
        f"stablehlo.dynamic_slice {result}, {at}, {zero}, sizes = {out} : "
        f"({whole}, tensor<{index}>, tensor<{index}>) -> {after}"
    )
    module.results.append((sliced, after))
    if count == 1 or count < members:
        module.expected += ["all_gather"]
    elif shift:  # a permute with a channel is one of partitions
        has_pairs = module.partitions > 1 or module.by_replica
        module.expected += ["collective_permute" if has_pairs else "all_gather"]


def undone(module: Module) -> None:
    """An all_to_all, layout ops, and its inverse."""
    rng = module.rng
    members = DEVICES if module.partitions == 1 or module.replicas == 1 else module.partitions
    before, after = tensor([members * 2, 3], "f32"), tensor([2, 3 * members], "f32")
    ids = list(range(members))
    rng.shuffle(ids)
    channel = "channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>, "
    if module.partitions == 1:
        channel = ""
    attributes = (
        f"{channel}split_count = {members} : i64, "
        f"replica_groups = dense<{[ids]}> : tensor<1x{members}xi64>"
    )
    first = module.line(
        f'"stablehlo.all_to_all"({module.argument(before)}) {{split_dimension = 0 : i64, '
        f"concat_dimension = 1 : i64, {attributes}}} : ({before}) -> {after}"
    )
    turned = tensor([3 * members, 2], "f32")
    flipped = module.line(f"stablehlo.transpose {first}, dims = [1, 0] : ({after}) -> {turned}")
    undone_kind = tensor([3, 2 * members], "f32")
    same = rng.random() < 0.7
    if not same:
        attributes = attributes.replace(str([ids]), str([ids[1:] + ids[:1]]))
    second = module.line(
        f'"stablehlo.all_to_all"({flipped}) {{split_dimension = 0 : i64, '
        f"concat_dimension = 1 : i64, {attributes}}} : ({turned}) -> {undone_kind}"
    )
    module.results.append((second, undone_kind))
    module.expected += [] if same else ["all_to_all", "all_to_all"]


def random_axes(module: Module) -> tuple[list[int], list[list[int]]]:
    """Axes to sum over, and for each of three dimensions those of them that cut it."""
    rng = module.rng
    wide = [a for a, size in enumerate(module.axes) if size > 1]
    summed = sorted(rng.sample(wide, rng.randint(1, len(wide))))
    cutting = rng.sample(summed, rng.randint(1, len(summed)))
    cuts: list[list[int]] = [[], [], []]
    for axis in cutting:
        cuts[rng.choice((0, 0, 1))].append(axis)
    return summed, cuts


def taken(module: Module, axes: list[int]) -> list[int]:
    """For every device the chunk along these axes, the first the slowest."""
    where = module.coordinates()
    chunks: list[int] = []
    for device in range(DEVICES):
        chunk = 0
        for axis in axes:
            chunk = chunk * module.axes[axis] + where[device][axis]
        chunks.append(chunk)
    return chunks


def groups(module: Module, axes: list[int], in_order: bool = False) -> str:
    """The groups along the axes: by name, or dense and in any order."""
    rng = module.rng
    channel = "" if module.by_replica else f"{CHANNEL}use_global_device_ids, "
    if rng.random() < 0.5:
        named = list(axes)
        if not in_order:
            rng.shuffle(named)
        refs = ", ".join(f'#stablehlo.axis_ref<name = "x{a}">' for a in named)
        form = f"#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [{refs}]>"
        return f"{channel}replica_groups = {form}"
    where = module.coordinates()
    rows: dict[tuple[int, ...], list[int]] = {}
    for device in range(DEVICES):
        key = tuple(c for a, c in enumerate(where[device]) if a not in axes)
        rows.setdefault(key, []).append(device)
    table = list(rows.values())
    for row in table:
        if in_order:
            row.sort(key=lambda device: taken(module, axes)[device])
        else:
            rng.shuffle(row)
    return f"{channel}replica_groups = dense<{table}> : tensor<{len(table)}x{len(table[0])}xi64>"


def all_reduce(
    module: Module, value: str, kind: str, element: str, axes: list[int], reduction: str
) -> str:
    return module.line(
        f'"stablehlo.all_reduce"({value}) ({{\n'
        f"    ^bb0(%x: tensor<{element}>, %y: tensor<{element}>):\n"
        f"      %z = stablehlo.{reduction} %x, %y : tensor<{element}>\n"
        f"      stablehlo.return %z : tensor<{element}>\n"
        f"    }}) {{{groups(module, axes)}}} : ({kind}) -> {kind}"
    )


def formatted(
    module: Module, value: str, shape: list[int], element: str, cut: list[int]
) -> tuple[str, list[int], str, list[int]]:
    """Ops between: the value, its shape and element type, and which dimension each one was."""
    rng = module.rng
    order = [0, 1, 2]
    for _ in range(rng.randint(0, 3)):
        kind = tensor(shape, element)
        what = rng.choice(("transpose", "splat", "scalar", "argument", "convert", "fold", "mask"))
        if what == "transpose":
            turn = rng.sample(range(3), 3)
            shape, order = [shape[d] for d in turn], [order[d] for d in turn]
            value = module.line(
                f"stablehlo.transpose {value}, dims = {turn} : ({kind}) -> {tensor(shape, element)}"
            )
        elif what == "splat":
            two = module.constant(2 if element[0] in "iu" else "2.0", kind)
            value = module.line(f"stablehlo.add {value}, {two} : {kind}")
        elif what == "scalar":
            scalar = module.argument(f"tensor<{element}>")
            wide = module.line(
                f"stablehlo.broadcast_in_dim {scalar}, dims = [] : (tensor<{element}>) -> {kind}"
            )
            value = module.line(f"stablehlo.maximum {wide}, {value} : {kind}")
        elif what == "argument":
            value = module.line(f"stablehlo.minimum {value}, {module.argument(kind)} : {kind}")
        elif what == "convert":
            other = rng.choice(("f32", "i32"))
            value = module.line(f"stablehlo.convert {value} : ({kind}) -> {tensor(shape, other)}")
            element = other
        elif what == "mask":
            flag, other = module.argument("tensor<i1>"), module.argument(kind)
            value = module.line(f"stablehlo.select {flag}, {value}, {other} : tensor<i1>, {kind}")
        elif order[2] not in cut:
            folded = tensor([shape[0], shape[1] * shape[2]], element)
            flat = module.line(f"stablehlo.reshape {value} : ({kind}) -> {folded}")
            value = module.line(f"stablehlo.reshape {flat} : ({folded}) -> {kind}")
    return value, shape, element, order


def test_programs_hold_all_there_is_to_try():
    modules = [random_module(seed) for seed in range(80)]
    expected = {kind for module in modules for kind in module.expected}
    assert expected == {
        "reduce_scatter",
        "all_reduce",
        "all_gather",
        "all_to_all",
        "collective_permute",
    }
    text = "".join(module.text() for module in modules)
    for part in (*INDEX_TYPES, *FLOATS, "device_ids", "mesh_axes", "optimization_barrier"):
        assert part in text
    assert any(module.by_replica for module in modules)
