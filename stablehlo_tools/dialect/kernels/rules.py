"""Rules that state which dimensions of a custom call are independent.

A rule is in the program, as an `sdy.sharding_rule` that the front end wrote (jax's
`custom_partitioning` does), or in the file of `--rules`. The file has a line for each target, in
the notation of jax's `sharding_rule`, with the independent factors at the end:

    # target: operands -> results; independent factors
    my_attention: b h s k, b h t k, b h t k -> b h s k; b h free

A factor is a name; dimensions with the same name correspond. Along a free factor, a call on a part
of its operands computes that part of its results. Its configuration holds no size of such a factor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import target_of
from stablehlo_tools.dialect.factors import Along, Factor, FactorRole, Shape, Shapes

RULE = "sdy.sharding_rule"
_LINE = re.compile(
    r"(?P<target>\S+)\s*:\s*(?P<operands>[^;]*?)->(?P<results>[^;]*);(?P<free>[^;]*)"
)
_NAME = re.compile(r"\w+")
_SIZE = re.compile(r"(\w+)=\d+")


@dataclass(frozen=True)
class KernelRule:
    """The names of the dimensions of each operand and result, and the independent factors."""

    target: str
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    free: frozenset[str]


def parse_rules(text: str) -> dict[str, KernelRule]:
    """Returns the rules of a file, by target. Raises ValueError, with the number of the line."""
    rules: dict[str, KernelRule] = {}
    for number, line in enumerate(text.splitlines(), 1):
        said = line.split("#", 1)[0].strip()
        if said:
            try:
                rule = _parse(said)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
            if rule.target in rules:
                raise ValueError(f"line {number}: a second rule for {rule.target}")
            rules[rule.target] = rule
    return rules


def _parse(line: str) -> KernelRule:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(
            "a rule reads `target: b s k, b t k -> b s k; b free`, operands before the arrow, "
            "results after it, and the independent factors at the end"
        )
    operands, results = (
        tuple(tuple(_names(part)) for part in match[side].split(","))
        for side in ("operands", "results")
    )
    words = _names(match["free"])
    if len(words) < 2 or words[-1] != "free":
        raise ValueError("it ends without the independent factors, such as `; b h free`")
    known = {name for names in (*operands, *results) for name in names}
    for name in words[:-1]:
        if name not in known:
            raise ValueError(f"no operand and no result has the factor {name}")
        if any(name not in names for names in results):
            raise ValueError(f"a result does not have the factor {name}, so it is not free")
    for names in (*operands, *results):
        if len(set(names)) < len(names):
            raise ValueError(f"{' '.join(names)}: a tensor has a factor twice")
    return KernelRule(match["target"], operands, results, frozenset(words[:-1]))


def _names(text: str) -> list[str]:
    words = text.split()
    for word in words:
        if not _NAME.fullmatch(word):
            raise ValueError(f"{word} is not a name of a factor")
    return words


def state_rule(op: ir.Operation, rule: KernelRule) -> None:
    """Writes a rule on a call. Raises ValueError if its tensors do not fit."""
    sizes: dict[str, int] = {}
    sides = ((rule.operands, op.operands, "operands"), (rule.results, op.results, "results"))
    for listed, values, what in sides:
        if len(listed) != len(values):
            raise ValueError(f"the rule has {len(listed)} {what}, and the call {len(values)}")
        for names, value in zip(listed, values, strict=True):
            shape = ir.RankedTensorType(value.type).shape
            if len(names) != len(shape):
                raise ValueError(f"the rule has {' '.join(names)}, and the call {value.type}")
            for name, size in zip(names, shape, strict=True):
                if sizes.setdefault(name, size) != size:
                    raise ValueError(f"factor {name} has sizes {sizes[name]} and {size}")
    # Shardy's names of factors: i, j, …, z, z_1, …
    letters = [*"ijklmnopqrstuvwxyz", *(f"z_{number}" for number in range(1, len(sizes)))]
    letter = dict(zip(sizes, letters, strict=False))
    operands, results = (
        ", ".join(f"[{', '.join(letter[name] for name in names)}]" for names in side)
        for side in (rule.operands, rule.results)
    )
    each = ", ".join(f"{letter[name]}={size}" for name, size in sizes.items())
    whole = ", ".join(letter[name] for name in sizes if name not in rule.free)
    need = f" need_replication={{{whole}}}" if whole else ""
    text = f"#sdy.op_sharding_rule<({operands})->({results}) {{{each}}}{need}, custom>"
    op.attributes[RULE] = ir.Attribute.parse(text, op.context)


def resize_rule(op: ir.Operation) -> None:
    """Writes the present sizes of a call's tensors in its rule."""
    rule = bindings.OpShardingRuleAttr(op.attributes[RULE])
    sizes = list(rule.factor_sizes)
    for mappings, values in (
        (rule.operand_mappings, op.operands),
        (rule.result_mappings, op.results),
    ):
        shapes = [tuple(ir.RankedTensorType(value.type).shape) for value in values]
        for factor, places in _places(mappings, shapes).items():
            for along in places:
                sizes[factor] = shapes[along.tensor][along.dim]
    # The attribute lists the sizes in braces, in the order of the factors: `{i=8, j=16}`.
    numbers = iter(sizes)
    head, _, tail = str(op.attributes[RULE]).partition("{")
    listed, _, rest = tail.partition("}")
    text = _SIZE.sub(lambda match: f"{match[1]}={next(numbers)}", listed)
    op.attributes[RULE] = ir.Attribute.parse(f"{head}{{{text}}}{rest}", op.context)


def suggest_rule(op: ir.Operation) -> str:
    """Returns the rule that would let a call run on parts along its first dimension."""
    names = (f"d{number}" for number in count(1))
    given, made = (
        [ir.RankedTensorType(value.type).shape for value in side]
        for side in (op.operands, op.results)
    )
    # A first dimension as long as that of the first result is taken for the batch.
    size = next((shape[0] for shape in made if shape), 0)
    taken, results = (
        ", ".join(
            " ".join("b" if not dim and n == size else next(names) for dim, n in enumerate(shape))
            for shape in side
        )
        for side in (given, made)
    )
    return f"{target_of(op)}: {taken} -> {results}; b free"


def rule_factors(op: ir.Operation, operands: Shapes, results: Shapes) -> list[Factor]:
    """Returns the independent factors that the rule of a call states."""
    rule = bindings.OpShardingRuleAttr(op.attributes[RULE])
    bound = {*rule.reduction_factors, *rule.need_replication_factors, *rule.permutation_factors}
    taken = _places(rule.operand_mappings, operands)
    given = _places(rule.result_mappings, results)
    return [
        Factor(size, FactorRole.KEPT, tuple(taken.get(n, ())), tuple(given.get(n, ())))
        for n, size in enumerate(rule.factor_sizes)
        if n not in bound and {a.tensor for a in given.get(n, ())} == set(range(len(results)))
    ]


def _places(mappings: Iterable[ir.Attribute], shapes: Sequence[Shape]) -> Mapping[int, list[Along]]:
    """Returns the dimensions that each factor fills."""
    places: dict[int, list[Along]] = {}
    for tensor, mapping in enumerate(mappings):
        dims = bindings.TensorMappingAttr(mapping).dim_mappings
        for dim, factors in enumerate(
            bindings.DimMappingAttr(each).factor_indices for each in dims
        ):
            if len(factors) == 1 and dim < len(shapes[tensor]):
                places.setdefault(factors[0], []).append(Along(tensor, dim))
    return places
