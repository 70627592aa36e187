"""Describes all ops in one place: a table of traits, and sets of ops derived from it.

A trait is a claim about an op with any operands. Only `EFFECT` and `MAY_FAIL` are complete: for the
others, a missing trait claims nothing. Treat every op outside of a set as unknown. An op that is
not described yet, such as `chlo.mulhi`, has an empty row.

A client may need a set that differs from the traits, because a compiler handles an op specially, or
because a rule does not support one. It changes the set where it uses it:

    _COPIED = ops_with(Trait.LAYOUT) - {BROADCAST} | {CONVERT}  # a broadcast adds elements

Traits depend on names only, and this module is pure Python, as readers of HLO text use it too.
Other modules handle properties that depend on types or attributes, for example if a `convert`
rounds, or if a custom call has effects.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Flag, auto
from functools import cache, reduce
from operator import or_


class Trait(Flag):
    """A claim about an op; the table below lists the traits of each op."""

    # How results depend on operands.
    ELEMENTWISE = auto()  # each element from the operands' at the same position; scalars broadcast
    UNARY = auto()  # elementwise, with one operand
    LAYOUT = auto()  # moves all elements of its one operand, and may repeat them
    BIJECTIVE = auto()  # a layout op that has each element once
    PIECE = auto()  # selects elements of the first operand; the others say which
    JOIN = auto()  # all elements of its operands, adjacent, or one inside of another
    INDEXED = auto()  # operands give source or target positions
    CONTRACTION = auto()  # sums of products
    REDUCTION = auto()  # a region combines the elements along dimensions or in windows
    RETYPE = auto()  # converts the elements, or reinterprets their bits, as another type
    COMPLEX_PART = auto()  # builds complex numbers from their parts, or returns a part

    # Algebra.
    COMMUTATIVE = auto()  # f(a, b) = f(b, a)
    ASSOCIATIVE = auto()  # f(f(a, b), c) = f(a, f(b, c)), for floats except for rounding
    IDEMPOTENT = auto()  # f(a, a) = a
    BITWISE = auto()  # on the bits of integers, or on booleans
    SHIFT = auto()  # by more than the width is left to the implementation
    PREDICATE = auto()  # the result is boolean
    INTEGRAL = auto()  # rounds to a whole number
    LINEAR_IN_FIRST = auto()  # f(a + b) = f(a) + f(b); the other operands are only positions
    LINEAR_IN_ALL = auto()  # f(a + c, b + d) = f(a, b) + f(c, d)
    LINEAR_IN_EACH = auto()  # f(a + b, c) = f(a, c) + f(b, c), likewise in the second, not in both
    ZERO_OF_ZERO = auto()  # +0 if its one source of elements is +0
    ZERO_OF_ZEROS = auto()  # +0 if all operands are
    OF_POSITIVE = auto()  # NaN or infinite if its operand is below zero
    OF_UNIT = auto()  # NaN if its operand is outside of -1 to 1
    IRREVERSIBLE = auto()  # compilers never recompute its operand from its result

    # Rounding.
    EXACT = auto()  # no rounding: equal bits with every compiler
    CORRECTLY_ROUNDED = auto()  # the float nearest to the true result, as IEEE 754 requires
    TRANSCENDENTAL = auto()  # also roots: by polynomials or Newton steps, which differ by compiler

    # Sources of values.
    SOURCE = auto()  # has no operands
    CONSTANT = auto()  # a source whose elements are in an attribute
    DEVICE_ID = auto()  # a source that differs by device
    TOKEN = auto()  # returns only tokens
    RANDOM = auto()

    # Effects and costs.
    EFFECT = auto()  # its order among other ops with effects must stay
    OPAQUE = auto()  # its semantics are defined elsewhere: a custom call
    MAY_FAIL = auto()  # may stop the program, or never end: must not run where it did not
    COSTLY = auto()  # must not run twice, however small its result
    LIBRARY = auto()  # compilers call a routine for it, whose operations are not counted

    # Communication.
    COLLECTIVE = auto()  # all devices of a group take part
    GROUPED = auto()  # a collective with `replica_groups`, not with pairs
    EXCHANGE = auto()  # a collective that only moves elements
    ACROSS_DEVICES = auto()  # a collective that combines the devices' elements by a reducer
    SAME_ON_GROUP = auto()  # a collective with the same result on all devices of a group
    TRANSFER = auto()  # to or from one other device, or the host

    # Structure.
    REGIONS = auto()
    BRANCH = auto()  # runs one of its regions
    LOOP = auto()
    COMPUTATION = auto()  # runs its one region once; an op of Shardy
    CALLS = auto()  # runs a function
    TERMINATOR = auto()
    SHARDING_ONLY = auto()  # only states the sharding of its one operand
    RESHARDING = auto()  # Shardy's ops that move shards between devices


# One op a line: its name and its traits.
_TABLE = """
stablehlo.abs                  elementwise unary exact zero_of_zero
stablehlo.add                  elementwise commutative associative correctly_rounded linear_in_all zero_of_zeros
stablehlo.after_all            token
stablehlo.all_gather           collective grouped exchange same_on_group
stablehlo.all_reduce           collective grouped across_devices same_on_group regions
stablehlo.all_to_all           collective grouped exchange
stablehlo.and                  elementwise commutative associative idempotent bitwise exact zero_of_zeros
stablehlo.async_done
stablehlo.async_start          regions
stablehlo.atan2                elementwise transcendental
stablehlo.batch_norm_grad      library
stablehlo.batch_norm_inference library
stablehlo.batch_norm_training  library
stablehlo.bitcast_convert      retype exact
stablehlo.broadcast
stablehlo.broadcast_in_dim     layout exact linear_in_first zero_of_zero
stablehlo.case                 regions branch costly
stablehlo.cbrt                 elementwise unary transcendental
stablehlo.ceil                 elementwise unary integral exact zero_of_zero
stablehlo.cholesky             library costly
stablehlo.clamp                elementwise exact
stablehlo.collective_broadcast collective grouped exchange same_on_group
stablehlo.collective_permute   collective exchange
stablehlo.collective_reduce    regions
stablehlo.compare              elementwise predicate exact
stablehlo.complex              elementwise complex_part exact linear_in_all
stablehlo.composite            calls
stablehlo.concatenate          join exact linear_in_all
stablehlo.constant             source constant
stablehlo.convert              elementwise unary retype correctly_rounded zero_of_zero
stablehlo.convolution          contraction linear_in_each irreversible costly
stablehlo.cosine               elementwise unary transcendental irreversible
stablehlo.count_leading_zeros  elementwise unary exact
stablehlo.create_token         source token
stablehlo.cross-replica-sum    collective grouped same_on_group
stablehlo.custom_call          opaque may_fail library costly
stablehlo.divide               elementwise correctly_rounded
stablehlo.dot                  contraction linear_in_each irreversible costly
stablehlo.dot_general          contraction linear_in_each irreversible costly zero_of_zeros
stablehlo.dynamic_broadcast_in_dim
stablehlo.dynamic_conv
stablehlo.dynamic_gather
stablehlo.dynamic_iota
stablehlo.dynamic_pad
stablehlo.dynamic_reshape
stablehlo.dynamic_slice        piece indexed exact linear_in_first
stablehlo.dynamic_update_slice join indexed exact
stablehlo.einsum
stablehlo.exponential          elementwise unary transcendental
stablehlo.exponential_minus_one elementwise unary transcendental
stablehlo.fft                  library costly
stablehlo.floor                elementwise unary integral exact zero_of_zero
stablehlo.gather               piece indexed exact linear_in_first
stablehlo.get_dimension_size
stablehlo.get_tuple_element
stablehlo.if                   regions branch costly
stablehlo.imag                 elementwise unary complex_part exact linear_in_first
stablehlo.infeed               transfer effect may_fail
stablehlo.iota                 source exact
stablehlo.is_finite            elementwise unary predicate exact
stablehlo.log                  elementwise unary transcendental of_positive
stablehlo.log_plus_one         elementwise unary transcendental
stablehlo.logistic             elementwise unary transcendental irreversible
stablehlo.map                  regions
stablehlo.maximum              elementwise commutative associative idempotent exact
stablehlo.minimum              elementwise commutative associative idempotent exact
stablehlo.multiply             elementwise commutative associative correctly_rounded linear_in_each zero_of_zeros
stablehlo.negate               elementwise unary exact linear_in_first
stablehlo.not                  elementwise unary bitwise exact
stablehlo.optimization_barrier
stablehlo.or                   elementwise commutative associative idempotent bitwise exact zero_of_zeros
stablehlo.outfeed              transfer effect may_fail
stablehlo.pad                  join exact
stablehlo.partition_id         source device_id
stablehlo.popcnt               elementwise unary exact
stablehlo.power                elementwise transcendental
stablehlo.real                 elementwise unary complex_part exact linear_in_first
stablehlo.real_dynamic_slice
stablehlo.recv                 transfer effect may_fail
stablehlo.reduce               reduction regions
stablehlo.reduce_precision     elementwise unary correctly_rounded
stablehlo.reduce_scatter       collective grouped across_devices regions
stablehlo.reduce_window        reduction regions
stablehlo.remainder            elementwise correctly_rounded
stablehlo.replica_id           source device_id
stablehlo.reshape              layout bijective exact linear_in_first zero_of_zero
stablehlo.return               terminator
stablehlo.reverse              layout bijective exact linear_in_first zero_of_zero
stablehlo.rng                  random effect
stablehlo.rng_bit_generator    random costly
stablehlo.round_nearest_afz    elementwise unary integral exact
stablehlo.round_nearest_even   elementwise unary integral exact
stablehlo.rsqrt                elementwise unary transcendental irreversible of_positive
stablehlo.scatter              indexed regions costly
stablehlo.select               elementwise exact
stablehlo.select_and_scatter   regions costly
stablehlo.send                 transfer effect may_fail
stablehlo.set_dimension_size
stablehlo.shift_left           elementwise shift exact
stablehlo.shift_right_arithmetic elementwise shift exact
stablehlo.shift_right_logical  elementwise shift exact
stablehlo.sign                 elementwise unary exact
stablehlo.sine                 elementwise unary transcendental irreversible
stablehlo.slice                piece exact linear_in_first zero_of_zero
stablehlo.sort                 regions costly
stablehlo.sqrt                 elementwise unary correctly_rounded transcendental of_positive
stablehlo.subtract             elementwise correctly_rounded linear_in_all zero_of_zeros
stablehlo.tan                  elementwise unary transcendental irreversible
stablehlo.tanh                 elementwise unary transcendental irreversible
stablehlo.torch_index_select
stablehlo.transpose            layout bijective exact linear_in_first zero_of_zero
stablehlo.triangular_solve     library costly
stablehlo.tuple
stablehlo.unary_einsum
stablehlo.uniform_dequantize
stablehlo.uniform_quantize
stablehlo.while                regions loop costly may_fail
stablehlo.xor                  elementwise commutative associative bitwise exact

chlo._asin_acos_kernel
chlo.acos                      elementwise unary transcendental of_unit
chlo.acosh                     elementwise unary transcendental
chlo.asin                      elementwise unary transcendental of_unit
chlo.asinh                     elementwise unary transcendental
chlo.atan                      elementwise unary transcendental
chlo.atanh                     elementwise unary transcendental of_unit
chlo.bessel_i1e                elementwise unary transcendental
chlo.broadcast_add
chlo.broadcast_and
chlo.broadcast_atan2
chlo.broadcast_compare
chlo.broadcast_complex
chlo.broadcast_divide
chlo.broadcast_maximum
chlo.broadcast_minimum
chlo.broadcast_multiply
chlo.broadcast_next_after
chlo.broadcast_or
chlo.broadcast_polygamma
chlo.broadcast_power
chlo.broadcast_remainder
chlo.broadcast_select
chlo.broadcast_shift_left
chlo.broadcast_shift_right_arithmetic
chlo.broadcast_shift_right_logical
chlo.broadcast_subtract
chlo.broadcast_xor
chlo.broadcast_zeta
chlo.conj                      elementwise unary
chlo.constant
chlo.constant_like
chlo.cosh                      elementwise unary transcendental
chlo.digamma                   elementwise unary transcendental irreversible of_positive
chlo.erf                       elementwise unary transcendental irreversible
chlo.erf_inv                   elementwise unary transcendental of_unit
chlo.erfc                      elementwise unary transcendental irreversible
chlo.is_inf                    elementwise unary predicate
chlo.is_neg_inf                elementwise unary predicate
chlo.is_pos_inf                elementwise unary predicate
chlo.lgamma                    elementwise unary transcendental irreversible of_positive
chlo.mulhi
chlo.next_after                elementwise
chlo.polygamma                 elementwise transcendental of_positive
chlo.ragged_dot                library
chlo.scan                      regions
chlo.sinh                      elementwise unary transcendental
chlo.square                    elementwise unary irreversible
chlo.tan                       elementwise unary transcendental
chlo.top_k                     library
chlo.zeta                      elementwise transcendental of_positive

sdy.all_gather                 resharding
sdy.all_reduce                 resharding
sdy.all_slice                  resharding
sdy.all_to_all                 resharding
sdy.collective_permute         resharding
sdy.constant                   source constant
sdy.data_flow_edge
sdy.func_data_flow_edge
sdy.manual_computation         regions computation
sdy.mesh
sdy.named_computation          regions computation
sdy.propagation_barrier        sharding_only
sdy.reduce_scatter             resharding
sdy.replicated_to_unreduced    resharding
sdy.reshard                    sharding_only
sdy.return                     terminator
sdy.sharded_to_unreduced       resharding
sdy.sharding_constraint        sharding_only
sdy.sharding_group

func.call                      calls may_fail
func.return                    terminator
"""  # noqa: E501


# Plain integers: combining members of a Flag costs microseconds each, at every start.
_VALUES = {trait.name.lower(): trait.value for trait in Trait if trait.name is not None}
_ROWS = {
    name: reduce(or_, (_VALUES[trait] for trait in traits), 0)
    for name, *traits in (line.split() for line in _TABLE.splitlines() if line)
}
KNOWN = frozenset(_ROWS)  # the ops that have a row


def traits_of(name: str) -> Trait:
    """Returns the traits of an op; none if it has no row."""
    return Trait(_ROWS.get(name, 0))


@cache
def ops_with(traits: Trait) -> frozenset[str]:
    """Returns the full names of the ops with all of these traits."""
    asked = traits.value
    return frozenset(name for name, row in _ROWS.items() if row & asked == asked)


@cache
def ops_with_any(traits: Trait) -> frozenset[str]:
    """Returns the full names of the ops with at least one of these traits."""
    asked = traits.value
    return frozenset(name for name, row in _ROWS.items() if row & asked)


def short_names(names: Iterable[str]) -> frozenset[str]:
    """Returns names without their dialect, such as `add` for `stablehlo.add`."""
    return frozenset(name.partition(".")[2] for name in names)


def full_names(names: str) -> frozenset[str]:
    """Returns the full names of StableHLO ops from a text of short names, separated by spaces."""
    return frozenset(f"stablehlo.{name}" for name in names.split())


# Sets that several modules use.
STABLEHLO = frozenset(name for name in KNOWN if name.startswith("stablehlo."))
ELEMENTWISE = ops_with(Trait.ELEMENTWISE)
LAYOUT = ops_with(Trait.LAYOUT)
BRANCHES = ops_with(Trait.BRANCH)
COMPUTATIONS = ops_with(Trait.COMPUTATION)
CALLS = ops_with(Trait.CALLS)
CARRIERS = ops_with_any(Trait.BRANCH | Trait.LOOP | Trait.COMPUTATION | Trait.CALLS)
DEVICE_IDS = ops_with(Trait.DEVICE_ID)
TERMINATORS = ops_with(Trait.TERMINATOR)
# The collectives that StableHLO specifies; `cross-replica-sum` is an older form of all_reduce.
COLLECTIVES = ops_with(Trait.COLLECTIVE) - {"stablehlo.cross-replica-sum"}
