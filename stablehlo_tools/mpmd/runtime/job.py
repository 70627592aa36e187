"""Runs training steps on a set of rank programs.

jax.distributed.initialize()                  # a process for each rank; or none for all of them
with stablehlo_tools.mpmd.load("set") as job:
    state = job.init(state)                   # the state as the original program takes it
    for tokens in batches:
        state, results = job.step(state, tokens)
    job.save("checkpoint", state)             # as the original program loads it
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.mpmd.manifest import NAME, ManifestEntry, ManifestPiece
from stablehlo_tools.mpmd.rank_set import load as load_set
from stablehlo_tools.mpmd.running.functions import Parts
from stablehlo_tools.mpmd.running.localisation import Index, localise_rank
from stablehlo_tools.mpmd.running.rank_child import element_of, index_of, value_of
from stablehlo_tools.mpmd.runtime.all_ranks import AllRanks
from stablehlo_tools.mpmd.runtime.carried import (
    carried_of,
    check_devices,
    keys_of,
    next_values,
    with_copies,
)
from stablehlo_tools.mpmd.runtime.checkpoints import restore, save
from stablehlo_tools.mpmd.runtime.engine import Engine, PreparedSet
from stablehlo_tools.mpmd.runtime.one_rank import OneRank
from stablehlo_tools.mpmd.runtime.signature import Leaves, Need, StepSignature, rows_of
from stablehlo_tools.mpmd.runtime.watch import Watch

type _ByRank = dict[int, dict[int, Parts]]  # by rank and number


@dataclass
class State:
    """The part of the state that this process holds; a step consumes it.

    `arguments` are those of the ranks, and `beside` are results that no rank reads as arguments.
    `rest` has, by path, the leaves that no rank reads or computes. `step` is the number of steps so
    far.
    """

    leaves: Leaves = field(repr=False)
    step: int = 0
    arguments: _ByRank = field(default_factory=dict[int, dict[int, Parts]], repr=False)
    beside: _ByRank = field(default_factory=dict[int, dict[int, Parts]], repr=False)
    rest: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray], repr=False)
    is_consumed: bool = False


class Results(Mapping[str, np.ndarray]):
    """The results of a step that are not state, by path, if they are on this process.

    Reading one waits for the step.
    """

    def __init__(self, job: Job, parts: dict[str, tuple[ManifestPiece, Parts]], step: int) -> None:
        self._job, self.parts, self.step = job, parts, step

    def __getitem__(self, path: str) -> np.ndarray:
        if path not in self.parts:
            entry = self._job.signature.results.get(path)
            if entry is None:
                known = ", ".join(self._job.signature.results) or "none"
                raise KeyError(f"there is no result {path}: {known}")
            ranks = sorted({piece.rank for piece in entry.pieces})
            raise KeyError(f"result {path} is on rank {', '.join(map(str, ranks))}")
        return self._job.read(f"{path} of step {self.step}", *self.parts[path])

    def later(self, path: str) -> Callable[[], np.ndarray] | None:
        """Returns a function that reads a result when called, so that the next steps need not wait.

        Returns None if the result is on another process.
        """
        return None if path not in self.parts else lambda: self[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def load(
    directory: str | os.PathLike[str],
    *,
    carried: Mapping[str, str] | None = None,
    silence: float = 15.0,
    patience: float = 600.0,
) -> Job:
    """Returns the job of this process.

    It runs one rank if `jax.distributed` was initialized with a process for each rank (or several,
    for ranks of many devices). Otherwise it runs all ranks.

    `carried` maps results to the state arguments that they are next, by paths: `{"[0]": "[0]"}`.
    Without it they are matched by their names. A process ends with a message if another one has
    been silent for `silence` seconds, or in the same step for `patience` seconds. Raises ToolError
    for an invalid set, one that differs from that of other processes, and devices that do not fit
    it.
    """
    with naming(os.fspath(directory)):
        ranks = load_set(directory)
        digest = hashlib.sha256()  # of all files of the set
        for name in (NAME, *(rank.program for rank in ranks.manifest.ranks)):
            data = (Path(directory) / name).read_bytes()
            digest.update(f"{name} {len(data)} ".encode() + data)
        watch = Watch(ranks.name, digest.hexdigest(), silence, patience)
        watch.agree()
        with watch.during("compiling"):
            # per-device programs, which also copy the state that other ranks read
            local = tuple(localise_rank(ranks, rank) for rank in range(ranks.ranks))
            programs = tuple(
                Artifact(program.name, program.form, of.module)
                for program, of in zip(ranks.programs, local, strict=True)
            )
            signature = StepSignature(ranks.manifest, carried_of(ranks.manifest, carried))
            values = next_values(ranks.manifest, signature.carried)
            check_devices(ranks.manifest, local, values)
            written, following = with_copies(replace(ranks, programs=programs), values)
            prepared = PreparedSet(written, local, following)
            is_whole = ranks.ranks == 1 or jax.process_count() > 1
            engine: Engine = OneRank(prepared) if is_whole else AllRanks(prepared)
        return Job(prepared, engine, signature, watch)


class Job:
    """The part of a set that this process runs.

    Every process calls the same methods in the same order. Leaving its context closes the job.
    """

    def __init__(
        self, prepared: PreparedSet, engine: Engine, signature: StepSignature, watch: Watch
    ) -> None:
        self.signature = signature
        self._local, self._following = prepared.local, prepared.following
        self._engine, self._watch = engine, watch

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process."""
        return self._engine.ranks

    @property
    def carried(self) -> dict[str, str]:
        """The results that are arguments of the next step, as a map of paths. Only arguments that
        the step reads are listed."""
        manifest = self.signature.manifest
        pairs = self.signature.carried.items()
        return {manifest.outputs[o].path: manifest.inputs[i].path for i, o in pairs}

    @property
    def data_spec(self) -> dict[str, Need]:
        """The rows of the data that ranks need, by path. A rank that is missing needs none."""
        return self.signature.needs

    def init(self, *arguments: Any, **named: Any) -> State:
        """Places the state, given as the arguments of the original program, by position or by name.

        Leaves are whole arrays; this process copies its part of each. Raises ToolError if a leaf
        is missing, or has another type.
        """
        with self._watch.during("placing the state"):
            return self._build_state(self.signature.state_leaves(arguments, named))

    def step(self, state: State, *data: Any, **named: Any) -> tuple[State, Results]:
        """Runs a step on the data, in the order of its arguments, and consumes the state.

        A leaf of the data is the whole array, or the rows that this process needs. It may be None
        if no rank of this process reads it. Raises ToolError if data does not fit; then nothing has
        run, and the state is still valid.
        """
        with self._watch.during(f"step {state.step}", state.step):
            if state.is_consumed:
                raise ToolError("a step consumed this state: use the state that it returned")
            given = self._placed_data(data, named)
            self._engine.wait()
            arguments = {
                rank: [parts for _, parts in sorted((numbered | given[rank]).items())]
                for rank, numbered in state.arguments.items()
            }
            after = replace(state, step=state.step + 1, beside={}, arguments={})
            numbers = {rank: set(numbered) for rank, numbered in state.arguments.items()}
            beside = {rank: set(numbered) for rank, numbered in state.beside.items()}
            # the state that no step changes
            constants = {
                rank: {n: parts for n, parts in numbered.items() if n not in self._following[rank]}
                for rank, numbered in state.arguments.items()
            }
            # From here on only the engine refers to the donated values, so that it can free them.
            state.is_consumed, state.arguments, state.beside = True, {}, {}
            results = self._engine.run(arguments)
            for rank, given_back in results.items():
                following = self._following[rank]
                after.arguments[rank] = constants[rank] | {
                    n: given_back[following[n]] for n in numbers[rank] if n in following
                }
                after.beside[rank] = {n: given_back[n] for n in beside[rank]}
            found = {
                path: (piece, results[piece.rank][piece.number])
                for path, entry in self.signature.results.items()
                for piece in entry.pieces
                if piece.rank in results
            }
            return after, Results(self, found, state.step)

    def share(self, results: Results) -> dict[str, np.ndarray]:
        """Returns the results of a step on every process; meant for scalars, a loss or a norm."""
        found: dict[str, np.ndarray] = {}
        with self._watch.during(f"sharing results of step {results.step}"):
            for path, entry in self.signature.results.items():
                homes = [(p, self._local[p.rank].outputs[p.number]) for p in entry.pieces]
                found[path] = self._whole(entry, homes, lambda _, at=path: results.parts[at][1])
        return found

    def gather(self, state: State) -> Any:
        """Returns the whole state on every process, as NumPy arrays in the structure given to
        `init`.

        Several arguments yield a tuple.
        """
        with self._watch.during("gathering the state", state.step):
            if state.is_consumed:
                raise ToolError("a step consumed this state: use the state that it returned")
            leaves = [self._gather_leaf(state, path) for path in state.leaves.of]
            arguments, named = jax.tree.unflatten(state.leaves.structure, leaves)
            given = (*arguments, *named.values())
            return given[0] if len(given) == 1 else given

    def save(self, directory: str | os.PathLike[str], state: State) -> None:
        """Writes the whole state as an Orbax checkpoint of the original's pytree.

        The checkpoint is complete or absent. Every process calls this method. Raises ToolError if
        the directory exists.
        """
        whole = self.gather(state)
        with self._watch.during(f"writing {os.fspath(directory)}", state.step):
            save(directory, whole)

    def restore(self, directory: str | os.PathLike[str], step: int = 0) -> State:
        """Places the state of an Orbax checkpoint, from any program, number of ranks and schedule.

        `step` is the number of steps so far. Raises ToolError for an invalid checkpoint.
        """
        with self._watch.during(f"reading {os.fspath(directory)}"):
            whole = restore(directory)
        several = isinstance(whole, tuple | list)
        return replace(self.init(*whole) if several else self.init(whole), step=step)

    def close(self) -> None:
        """Declares that this process is done, so that its end is not a fault for the others."""
        self._watch.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None:
            self.close()
        else:
            self._watch.report_failure(error)

    def read(self, what: str, piece: ManifestPiece, parts: Parts) -> np.ndarray:
        """Returns a result of a rank from this process's devices. `what` names it in messages."""
        with self._watch.during(f"reading {what}"):
            local = self._local[piece.rank]
            indices = local.outputs[piece.number]
            if len(indices) == 1:
                return np.asarray(parts[0])
            value = value_of(local.types[1][piece.number])
            whole = np.zeros(value.shape, element_of(value).dtype)
            places = [place for place, _ in self._engine.devices(piece.rank)]
            for place, part in reversed(list(zip(places, parts, strict=True))):
                whole[indices[place]] = np.asarray(part)
            return whole

    def _build_state(self, leaves: Leaves) -> State:
        state = State(leaves)
        for rank in self.ranks:
            state.arguments[rank], state.beside[rank] = {}, {}
        for path, leaf in leaves.of.items():
            keys = keys_of(path)
            if not self.signature.is_held(keys):
                state.rest[path] = np.asarray(leaf)
            for piece in self.signature.read_by(keys):
                if piece.rank in self.ranks:
                    indices = self._local[piece.rank].inputs[piece.number]
                    parts = self._engine.copy_to_devices(piece.rank, leaf[index_of(piece)], indices)
                    state.arguments[piece.rank][piece.number] = parts
            for piece, is_argument in self.signature.homes(keys).items():
                if piece.rank in self.ranks and not is_argument:
                    indices = self._local[piece.rank].outputs[piece.number]
                    parts = self._engine.copy_to_devices(piece.rank, leaf[index_of(piece)], indices)
                    state.beside[piece.rank][piece.number] = parts
        # Only the paths of the leaves are needed from here on.
        state.leaves = Leaves(dict.fromkeys(leaves.of), leaves.structure)
        return state

    def _placed_data(self, data: Sequence[Any], named: Mapping[str, Any]) -> _ByRank:
        leaves = self.signature.data_leaves(data, named)
        placed: _ByRank = {rank: {} for rank in self.ranks}
        for number in self.signature.data:
            entry = self.signature.manifest.inputs[number]
            for piece in entry.pieces:
                if piece.rank not in self.ranks:
                    continue
                array = leaves.get(keys_of(entry.path))
                if array is None:
                    raise ToolError(f"rank {piece.rank} reads {entry.path}, which is missing")
                indices = self._local[piece.rank].inputs[piece.number]
                placed[piece.rank][piece.number] = self._engine.copy_to_devices(
                    piece.rank, rows_of(array, entry, piece), indices
                )
        return placed

    def _gather_leaf(self, state: State, path: str) -> np.ndarray:
        if path in state.rest:
            return state.rest[path]
        keys = keys_of(path)
        homes = self.signature.homes(keys)

        def parts_of(piece: ManifestPiece) -> Parts:
            held = state.arguments if homes[piece] else state.beside
            return held[piece.rank][piece.number]

        placed: list[tuple[ManifestPiece, tuple[Index, ...]]] = []
        for piece, is_argument in homes.items():
            local = self._local[piece.rank]
            indices = local.inputs if is_argument else local.outputs
            placed.append((piece, indices[piece.number]))
        return self._whole(self.signature.entry(keys), placed, parts_of)

    def _whole(
        self,
        entry: ManifestEntry,
        homes: Sequence[tuple[ManifestPiece, tuple[Index, ...]]],
        parts_of: Callable[[ManifestPiece], Parts],
    ) -> np.ndarray:
        """Returns a whole value on every process, assembled from the parts on devices."""
        value = value_of(entry.type, entry.path)
        whole = np.zeros(value.shape, element_of(value).dtype)
        for piece, indices in homes:
            mine: dict[int, jax.Array] = {}
            if piece.rank in self.ranks:
                places = [place for place, _ in self._engine.devices(piece.rank)]
                mine = dict(zip(places, parts_of(piece), strict=True))
            rows = whole[index_of(piece)]  # a view
            for place in (at for at, index in enumerate(indices) if indices.index(index) == at):
                owner = self._engine.process_of(piece.rank, place)
                shape = rows[indices[place]].shape
                rows[indices[place]] = from_owner(mine.get(place), owner, shape, whole.dtype)
        return whole


def from_owner(part: Any, owner: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Broadcasts the part of process `owner`. All processes call it; other parts are ignored."""
    if jax.process_count() == 1:
        return np.asarray(part)
    from jax.experimental import multihost_utils

    is_owner = jax.process_index() == owner
    given = np.asarray(part) if is_owner else np.zeros(shape, dtype)
    return np.asarray(multihost_utils.broadcast_one_to_all(given, is_source=is_owner))
