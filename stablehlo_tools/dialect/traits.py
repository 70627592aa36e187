"""What each op is, written once: a table of traits, and the sets of ops that follow from it.

A trait is a claim about an op whatever its operands are, and no trait is no claim (only `EFFECT`
and `MAY_FAIL` are complete): who asks for a set treats every op outside of it as one of which
nothing is known. So an op of which nobody has thought yet, such as `chlo.mulhi`, has an empty row.

A client that needs a set which differs from the traits (because a compiler does something of its
own, or because a rule is not written for an op) says so where it uses it:

    _COPIED = ops_with(Trait.LAYOUT) - {BROADCAST} | {CONVERT}  # a broadcast makes more of it

The traits are of names alone and this module is pure Python, for the readers of HLO's text too.
What depends on types or attributes (whether a `convert` rounds, whether a custom call has effects)
is asked elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Flag, auto
from functools import cache


class Trait(Flag):
    """A claim about an op; the names of those that make it are in the table below."""

    # How results are made of operands.
    ELEMENTWISE = auto()  # each element from the operands' at its own place; scalars count for all
    UNARY = auto()  # elementwise, of one operand
    LAYOUT = auto()  # all elements of the one operand, elsewhere, perhaps several times
    BIJECTIVE = auto()  # a layout that has each element once
    PIECE = auto()  # some of the first operand's elements, the others say which
    JOIN = auto()  # all elements of its operands side by side, or of one inside of another
    INDEXED = auto()  # operands say from where, or to where
    CONTRACTION = auto()  # sums of products
    REDUCTION = auto()  # a region combines the elements along dimensions or in windows
    RETYPE = auto()  # the same elements, or their bits, as another type
    COMPLEX_PART = auto()  # makes complex numbers of their parts, or takes them apart

    # What is computed.
    COMMUTATIVE = auto()  # f(a, b) = f(b, a)
    ASSOCIATIVE = auto()  # f(f(a, b), c) = f(a, f(b, c)), of floats but for the rounding
    IDEMPOTENT = auto()  # f(a, a) = a
    BITWISE = auto()  # of the bits of integers, or of booleans
    SHIFT = auto()  # by more than the width is left to the implementation
    PREDICATE = auto()  # the result is of booleans
    INTEGRAL = auto()  # rounds to a whole number
    LINEAR_IN_FIRST = auto()  # f(a + b) = f(a) + f(b); the other operands say where, not what
    LINEAR_IN_ALL = auto()  # f(a + c, b + d) = f(a, b) + f(c, d)
    LINEAR_IN_EACH = auto()  # f(a + b, c) = f(a, c) + f(b, c), likewise in the second, not in both
    ZERO_OF_ZERO = auto()  # +0 where its one source of elements is +0
    ZERO_OF_ZEROS = auto()  # +0 where all operands are
    OF_POSITIVE = auto()  # not a number, or infinite, where its operand is below zero
    OF_UNIT = auto()  # not a number where its operand is outside of -1 to 1
    IRREVERSIBLE = auto()  # no rewrite of compilers makes its operand of its result

    # With which bits.
    EXACT = auto()  # nothing is rounded: equal bits, whoever compiles it
    CORRECTLY_ROUNDED = auto()  # the float nearest to the true result, as IEEE 754 asks
    TRANSCENDENTAL = auto()  # a root, too: by polynomials or Newton steps, as each compiler has it

    # Where values come from.
    SOURCE = auto()  # has no operands
    CONSTANT = auto()  # a source whose elements an attribute says
    DEVICE_ID = auto()  # a source that differs by device
    TOKEN = auto()  # only makes tokens
    RANDOM = auto()

    # What happens besides.
    EFFECT = auto()  # its order among others with effects must stay
    OPAQUE = auto()  # what it computes, another says: a custom call
    MAY_FAIL = auto()  # may stop the program, or never end: not to be run where it was not
    COSTLY = auto()  # not to be run twice, however small its result
    LIBRARY = auto()  # compilers call a routine for it, whose operations nobody counts

    # Communication.
    COLLECTIVE = auto()  # devices of a group meet in it
    GROUPED = auto()  # a collective of `replica_groups`, not of pairs
    EXCHANGE = auto()  # a collective that moves elements and computes none
    ACROSS_DEVICES = auto()  # a collective that combines the devices' elements by a reducer
    SAME_ON_GROUP = auto()  # a collective that gives all of a group the same
    TRANSFER = auto()  # to or from one other device, or the host

    # Structure.
    REGIONS = auto()
    BRANCH = auto()  # runs one of its regions
    LOOP = auto()
    COMPUTATION = auto()  # runs its one region once, for Shardy
    CALLS = auto()  # runs a function
    TERMINATOR = auto()
    SHARDING_ONLY = auto()  # of its one operand, all that it says is where it lies
    RESHARDING = auto()  # Shardy's ops that move shards between devices


# One op a line: its name, and what it is.
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


def _row(line: str) -> tuple[str, int]:
    name, *traits = line.split()
    row = 0
    for trait in traits:
        row |= _VALUES[trait]
    return name, row


# In plain integers: to combine members of a Flag takes microseconds each, at every start.
_VALUES = {trait.name.lower(): trait.value for trait in Trait if trait.name is not None}
_ROWS = dict(_row(line) for line in _TABLE.splitlines() if line)
KNOWN = frozenset(_ROWS)  # the ops that have a row


def traits_of(name: str) -> Trait:
    """All that is claimed of an op; of one without a row, nothing."""
    return Trait(_ROWS.get(name, 0))


@cache
def ops_with(traits: Trait) -> frozenset[str]:
    """The ops that have every one of some traits, by their full names."""
    asked = traits.value
    return frozenset(name for name, row in _ROWS.items() if row & asked == asked)


@cache
def ops_with_any(traits: Trait) -> frozenset[str]:
    """The ops that have at least one of some traits, by their full names."""
    asked = traits.value
    return frozenset(name for name, row in _ROWS.items() if row & asked)


def short_names(names: Iterable[str]) -> frozenset[str]:
    """`add` of `stablehlo.add`: names as the kinds of collectives and reducers are written."""
    return frozenset(name.partition(".")[2] for name in names)


def full_names(names: str) -> frozenset[str]:
    """The ops of StableHLO in a text of short names, for a client's own exceptions."""
    return frozenset(f"stablehlo.{name}" for name in names.split())


# Sets that many ask for.
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
