"""Compare the outputs of the working tree with those of a commit; see `__init__.py`.

Exit code 0: all records are equal, but for the differences that `differences.toml` names.
1: they are not, or differ between two seeds of hashes. 2: the harness cannot run.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import compare, corpus, trees
from golden.corpus import LitFile, Unit
from golden.session import LATE, Blobs, Records, Session, opened, run_all
from golden.trees import ROOT, Tree

SEEDS = (0, 1, 2)
DIFFERENCES = Path(__file__).with_name("differences.toml")
SAVED_EVERY = 20  # seconds
SHOWN = 60  # differences


def main(words: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; return the exit status."""
    arguments = _arguments(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _run(arguments)
    except subprocess.CalledProcessError as error:
        print(f"{error}\n{error.stderr or ''}", end="", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    cache = arguments.cache.resolve()
    after = trees.of_working_tree(cache)
    only = arguments.only + ([arguments.diff] if arguments.diff else [])
    units = corpus.units(after, only)
    if arguments.list:
        print("\n".join(digests(units)))
        return 0
    if not units:
        print(f"no case has {' or '.join(only)} in its id", file=sys.stderr)
        return 2
    corpus.export(cache, units)
    base = trees.of_commit(arguments.base or trees.default_base(), cache)
    sides = [base] if arguments.base_only else [base, after]
    records = {
        (tree.key, seed): recorded(tree, seed, units, cache, arguments)
        for tree in sides
        for seed in arguments.seeds
    }
    if arguments.diff:
        return _show(arguments, records, base, after, cache)
    named = compare.read_named(DIFFERENCES)
    return report(records, base, sides[-1], arguments.seeds, named, filtered=bool(only))


def recorded(
    tree: Tree, seed: int, units: list[Unit], cache: Path, arguments: argparse.Namespace
) -> Records:
    """The records of all units: those that are kept, and of the others new ones."""
    slow = arguments.all_slow or seed == arguments.seeds[0]
    path = cache / "records" / tree.key[:16] / f"{seed}.json"
    asked = digests(units)
    kept = {} if arguments.again else _read(path, asked)
    missing = [unit for unit in units if not _has(unit, kept, slow=slow)]
    new: Records = {}
    start = time.monotonic()
    if missing:
        said = _reporter(f"{tree.name}, seed {seed}", len(missing))
        with opened(tree, seed, cache, slow=slow) as session:
            new = _run_saving(session, missing, arguments.jobs, path, said)
        took = time.monotonic() - start
        figures = compare.totals(new)
        print(
            f"{tree.name}, seed {seed}: {figures['cases']} cases, {figures['commands']} commands"
            f" in {took:.0f} s",
            file=sys.stderr,
        )
    return kept | new


def digests(units: list[Unit]) -> dict[str, str]:
    """The digests of cases by their ids; all RUN lines of a lit test have the one of the file."""
    return {
        part.id: part.digest
        for unit in units
        for part in ([unit] if isinstance(unit, LitFile) else unit.commands)
    }


def _of_line(identity: str) -> str:
    return re.sub(r":\d+$", "", identity) if identity.startswith("lit/") else identity


def _has(unit: Unit, kept: Records, *, slow: bool) -> bool:
    """Whether records have all cases of the unit, and their slow commands, if these are to run."""
    if isinstance(unit, LitFile):
        cases = {f"{unit.id}:{number}": unit.digest for number in range(1, unit.lines + 1)}
    else:
        cases = {command.id: command.digest for command in unit.commands}
    records = [kept.get(identity, {"digest": ""}) for identity in cases]
    if [record["digest"] for record in records] != list(cases.values()):
        return False
    if any(command.get("status") == LATE for record in records for command in record["commands"]):
        return False  # the machine was busy
    return not slow or not any(record.get("quick") for record in records)


def _run_saving(
    session: Session, units: list[Unit], jobs: int, path: Path, said: Callable[[int], None]
) -> Records:
    """Run the units, and now and then keep what is done."""
    new: Records = {}
    saved = time.monotonic()
    try:
        for identity, record in run_all(session, units, jobs, said):
            new[identity] = record
            if time.monotonic() - saved > SAVED_EVERY:
                _save(path, new)
                saved = time.monotonic()
    finally:
        _save(path, new)
    return new


def _save(path: Path, new: Records) -> None:
    """Add records to the file, which runs in other worktrees may add to at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        part = path.with_suffix(f".{os.getpid()}")
        # Another worktree may have the same cases with other inputs.
        keyed = {f"{identity} {record['digest'][:12]}": record for identity, record in new.items()}
        part.write_text(json.dumps(_all(path) | keyed, indent=0, sort_keys=True))
        part.rename(path)


@contextmanager
def _locked(path: Path) -> Generator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path, asked: dict[str, str]) -> Records:
    """The records of these cases that were made of the same inputs."""
    return {
        identity: record
        for key, record in _all(path).items()
        if asked.get(_of_line(identity := key.rpartition(" ")[0])) == record["digest"]
    }


def _all(path: Path) -> Records:
    return json.loads(path.read_text()) if path.exists() else {}


def report(
    records: dict[tuple[str, int], Records],
    base: Tree,
    after: Tree,
    seeds: Sequence[int],
    named: list[compare.Named],
    *,
    filtered: bool,
) -> int:
    """Print what differs, and return the exit status."""
    bad = 0
    occurred: set[compare.Named] = set()
    for tree in {base.key: base, after.key: after}.values():
        first = records[tree.key, seeds[0]]
        for seed in seeds[1:]:
            for identity, parts in compare.differing(first, records[tree.key, seed]):
                print(
                    f"nondeterministic: {identity}: {', '.join(parts)}"
                    f" (seeds {seeds[0]} and {seed} of {tree.name})"
                )
                bad += 1
    for seed in seeds:
        pair = records[base.key, seed], records[after.key, seed]
        for identity, parts in compare.differing(*pair):
            listed = compare.name_of(identity, named)
            if listed:
                occurred.add(listed)
                continue
            bad += 1
            if bad <= SHOWN:
                print(f"differs: {identity}: {', '.join(parts)} (seed {seed})")
    for difference in named:
        cases = [i for i in records[after.key, seeds[0]] if compare.name_of(i, [difference])]
        if difference not in occurred and (cases or not filtered):
            print(f"named, but did not occur: {difference.cases}")
    figures = compare.totals(records[after.key, seeds[0]])
    if bad > SHOWN:
        print(f"... and {bad - SHOWN} more")
    print(
        f"{figures['cases']} cases, {figures['commands']} commands, seeds"
        f" {' '.join(map(str, seeds))}: {after.name} against {base.name}: "
        + (f"{bad} differences" if bad else "equal")
        + (f", {len(occurred)} named differences" if occurred else "")
    )
    if bad:
        print("--diff ID shows what differs; --again --only ID runs it anew on both trees")
    return 1 if bad else 0


def _show(
    arguments: argparse.Namespace,
    records: dict[tuple[str, int], Records],
    base: Tree,
    after: Tree,
    cache: Path,
) -> int:
    seed = arguments.seeds[0]
    before, now = records[base.key, seed], records[after.key, seed]
    differences = 0
    for identity, _ in compare.differing(before, now):
        if arguments.diff in identity and identity in before and identity in now:
            differences += 1
            print(f"=== {identity} (seed {seed})")
            for line in compare.shown(before[identity], now[identity], Blobs(cache), after):
                print(line)
    return 1 if differences else 0


def _reporter(what: str, total: int) -> Callable[[int], None]:
    def report_done(done: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r{what}: {done} of {total}", end=end, file=sys.stderr, flush=True)

    return report_done


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    import golden

    parser = argparse.ArgumentParser(
        description=golden.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(os.environ.get("GOLDEN_CACHE") or ROOT / "build" / "golden")
    add = parser.add_argument
    add("--base", metavar="COMMIT", help=trees.default_base.__doc__)
    add("--only", metavar="PART", action="append", default=[], help="cases with this in their id")
    add("--seeds", type=_seeds, default=SEEDS, help="of hashes: 0,1,2 (the default)")
    add("--jobs", type=int, default=2, help="cases at a time (2)")
    add("--list", action="store_true", help="print the ids, of lit tests without their RUN lines")
    add("--diff", metavar="ID", help="show how the outputs of these cases differ")
    add("--cache", type=Path, default=default, metavar="DIR", help="where records are kept")
    add("--again", action="store_true", help="run what has records, too")
    add("--base-only", action="store_true", help="run the base, and compare its seeds")
    add("--all-slow", action="store_true", help="run slow commands under every seed")
    return parser.parse_args(words)


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
