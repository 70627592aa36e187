"""Divides the arguments of a step into state and data, with the home of each part.

An argument of the original step is state if a result is the next value of one of its leaves. All
other arguments are data. This follows from the manifest and from the carried results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.manifest import Manifest, ManifestEntry, ManifestPiece
from stablehlo_tools.mpmd.rank_set import piece_type
from stablehlo_tools.mpmd.running.rank_child import element_of, index_of, value_of
from stablehlo_tools.mpmd.runtime.carried import CarriedState, Keys, keys_of


@dataclass(frozen=True)
class Need:
    """The rows that ranks read of a data argument: the type of the whole array, and the rows of
    each rank that reads any."""

    path: str
    type: str
    rows: Mapping[int, tuple[slice, ...]]


@dataclass(frozen=True)
class Leaves:
    """The leaves of a state by their paths, and their pytree structure."""

    of: Mapping[str, Any]
    structure: Any


class StepSignature:
    """The signature of the original step.

    `state` and `data` are numbers of inputs. `carried` has, by the number of an input, the output
    that is its next value.
    """

    def __init__(self, manifest: Manifest, known: CarriedState) -> None:
        if manifest.inputs and not manifest.inputs[0].path:
            raise ToolError("this program was exported for several platforms: export it for one")
        self.manifest, self.carried, self._unread = manifest, known.inputs, known.unread
        keys = [keys_of(entry.path) for entry in manifest.inputs]
        of_state = {keys[number][:1] for number in self.carried}
        self.state = tuple(n for n, each in enumerate(keys) if each[:1] in of_state)
        self.data = tuple(n for n, each in enumerate(keys) if each[:1] not in of_state)
        self.number = {keys[n]: n for n in self.state}
        self._places, self._names = _split(each[0] for each in of_state if each)
        self._data_places, self._data_names = _split(keys[n][0] for n in self.data if keys[n])

    @property
    def results(self) -> dict[str, ManifestEntry]:
        """The outputs that are not state, by their paths."""
        state = {*self.carried.values(), *self._unread.values()}
        outputs = enumerate(self.manifest.outputs)
        return {entry.path: entry for number, entry in outputs if number not in state}

    @property
    def needs(self) -> dict[str, Need]:
        """The rows of the data that ranks need, by path."""
        entries = [self.manifest.inputs[number] for number in self.data]
        return {
            entry.path: Need(
                entry.path, entry.type, {piece.rank: index_of(piece) for piece in entry.pieces}
            )
            for entry in entries
        }

    def entry(self, keys: Keys) -> ManifestEntry:
        """Returns the manifest's entry of a leaf of the state that devices hold."""
        if keys in self._unread:
            return self.manifest.outputs[self._unread[keys]]
        return self.manifest.inputs[self.number[keys]]

    def read_by(self, keys: Keys) -> tuple[ManifestPiece, ...]:
        """Returns the pieces of a leaf of the state that ranks read."""
        number = self.number.get(keys)
        return () if number is None else self.manifest.inputs[number].pieces

    def homes(self, keys: Keys) -> dict[ManifestPiece, bool]:
        """Returns the pieces that hold a leaf of the state between steps, each row once.

        The value is True for a piece of an argument, and False for a piece of a result that no rank
        reads in the same form.
        """
        if keys in self._unread:
            return dict.fromkeys(self.entry(keys).pieces, False)
        number = self.number.get(keys)
        if number is None:
            return {}
        entry = self.manifest.inputs[number]
        if number not in self.carried:
            return dict.fromkeys(_once(entry), True)
        own = {(p.rank, p.dim, p.start, p.limit): p for p in entry.pieces}
        homes: dict[ManifestPiece, bool] = {}
        for piece in self.manifest.outputs[self.carried[number]].pieces:
            argument = own.get((piece.rank, piece.dim, piece.start, piece.limit))
            homes[argument or piece] = argument is not None
        return homes

    def is_held(self, keys: Keys) -> bool:
        """Returns True if devices hold all of a leaf of the state."""
        number = self.number.get(keys)
        if number is None:
            return keys in self._unread
        entry = self.manifest.inputs[number]
        return number in self.carried or _is_all(entry, _once(entry))

    def state_leaves(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> Leaves:
        """Returns the leaves of the state's arguments. Raises ToolError if one is missing or
        misfits."""
        _check_given("the state has", self._places, arguments, self._names, named)
        flat, structure = jax.tree_util.tree_flatten_with_path((tuple(arguments), dict(named)))
        leaves: dict[str, Any] = {}
        for (side, first, *rest), leaf in flat:
            start = f"[{self._places[first.idx]}]" if side.idx == 0 else f"[{first.key!r}]"
            leaves[start + jax.tree_util.keystr(tuple(rest))] = leaf
        found = {keys_of(path) for path in leaves}
        missing = next((n for each, n in self.number.items() if each not in found), None)
        if missing is not None:
            raise ToolError(f"{self.manifest.inputs[missing].path} is missing from the state")
        for path, leaf in leaves.items():
            keys = keys_of(path)
            if keys in self.number or keys in self._unread:
                leaves[path] = convert_leaf(leaf, self.entry(keys).type, path)
        return Leaves(leaves, structure)

    def data_leaves(self, data: Sequence[Any], named: Mapping[str, Any]) -> dict[Keys, Any]:
        """Returns the leaves of a step's data. Raises ToolError if an argument is missing."""
        _check_given("a step takes", self._data_places, data, self._data_names, named)
        found: dict[Keys, Any] = {}
        for place, tree in (*zip(self._data_places, data, strict=True), *named.items()):
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                found[(place, *keys_of(jax.tree_util.keystr(path)))] = leaf
        return found


def _split(keys: Any) -> tuple[list[str], list[str]]:
    """Returns the positional arguments, and those by name."""
    known = dict.fromkeys(keys)
    return sorted((k for k in known if k.isdecimal()), key=int), [
        k for k in known if not k.isdecimal()
    ]


def _check_given(
    what: str,
    places: Sequence[str],
    arguments: Sequence[Any],
    names: Sequence[str],
    named: Mapping[str, Any],
) -> None:
    if len(arguments) != len(places) or set(names) != set(named):
        wanted = ", ".join([*(f"[{place}]" for place in places), *names]) or "none"
        given = ", ".join([*(f"[{place}]" for place in range(len(arguments))), *named]) or "none"
        count = f"{len(arguments) + len(named)}: {given}" if arguments or named else "none"
        raise ToolError(f"{what} the arguments {wanted} of the original, but got {count}")


def _is_all(entry: ManifestEntry, pieces: Sequence[ManifestPiece]) -> bool:
    """Returns True if pieces, sorted by row, cover all of an argument."""
    if any(piece.dim is None for piece in pieces):
        return True
    if not pieces or pieces[0].dim is None:
        return False
    dim, end = pieces[0].dim, 0
    for piece in pieces:
        if piece.dim != dim or piece.start > end:
            return False
        end = max(end, piece.limit)
    return end == value_of(entry.type).shape[dim]


def _once(entry: ManifestEntry) -> list[ManifestPiece]:
    """Returns pieces of an argument that cover its rows without redundant pieces."""
    whole = [piece for piece in entry.pieces if piece.dim is None]
    if whole:
        return whole[:1]
    taken: list[ManifestPiece] = []
    end = 0
    for piece in sorted(entry.pieces, key=lambda piece: (piece.start, -piece.limit)):
        if piece.limit > end:
            taken.append(piece)
            end = piece.limit
    return taken


def convert_leaf(leaf: Any, type_: str, path: str) -> Any:
    """Returns a leaf as an array of a type. Raises ToolError for another shape or element type."""
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    value = value_of(type_, path)
    dtype = element_of(value).dtype
    if array.dtype != dtype and jax.dtypes.canonicalize_dtype(array.dtype) == dtype:
        array = array.astype(dtype)  # as jax converts 64-bit inputs if x64 is disabled
    if array.shape != value.shape or array.dtype != dtype:
        raise ToolError(f"{path} is {array.dtype}{list(array.shape)}, but the set has {type_}")
    return array


def rows_of(array: Any, entry: ManifestEntry, piece: ManifestPiece) -> Any:
    """Returns the rows of a piece from an array of all rows, or of these alone.

    Raises ToolError for an array that is neither.
    """
    own = piece_type(entry, piece)
    shape = value_of(own, entry.path).shape
    if np.shape(array) == shape != value_of(entry.type, entry.path).shape:
        return convert_leaf(array, own, entry.path)
    return convert_leaf(array, entry.type, entry.path)[index_of(piece)]
