"""Orders that need little memory: where the scheduler starts from, and what it falls back on.

While a task runs, all is alive that something before it made and something after it uses, where
"before" and "after" are what the dependences force. The most of that over the tasks is a bound; an
order that needs no more than that is the leanest.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator

import numpy as np

from stablehlo_tools.overlap.scheduling.problem import COMPUTE, Problem
from stablehlo_tools.overlap.scheduling.reserve import Bytes, Plan, Reserve

_GIB = 2**30
_DIGITS = 6


def least_bytes(problem: Problem) -> float:
    """No order of the tasks needs fewer bytes than this at its peak."""
    kept = _bits(problem.kept)
    made = [_bits(allocs) for allocs in problem.allocs]
    used = [_bits(reads) | kept for reads in problem.reads]
    before = _bits(problem.before)
    for task in range(problem.size):
        made[task] |= before
        for dep in problem.deps[task]:
            made[task] |= made[dep]
    for task in reversed(range(problem.size)):
        for user in problem.users[task]:
            used[task] |= used[user]
    sizes = np.array(problem.sizes, np.float64)
    least = _total(before, sizes)
    for task in range(problem.size):
        alive = _total(made[task] & used[task], sizes)
        least = max(least, alive + problem.within[task])
    return least


def gib(count: float) -> str:
    """Bytes in GiB with six digits, rounded up: as a limit it is enough."""
    if not count:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(count / _GIB)) + 1 - _DIGITS)
    digits = math.ceil(count / _GIB / unit)
    while float(f"{digits * unit:.{_DIGITS}g}") * _GIB < count:
        digits += 1
    return f"{digits * unit:.{_DIGITS}g}"


def _bits(storages: Iterable[int]) -> int:
    bits = 0
    for storage in storages:
        bits |= 1 << storage
    return bits


def _total(bits: int, sizes: Bytes) -> float:
    """The bytes of a set of storages."""
    packed = np.frombuffer(bits.to_bytes(len(sizes) // 8 + 1, "little"), np.uint8)
    return float(np.unpackbits(packed, bitorder="little")[: len(sizes)] @ sizes)


_WINDOW = 24  # ready tasks that are compared at a time
_ROUNDS = 6
_SLACKS = (0.0, 1e-4, 1e-2)  # of the peak: what a task may take that moves up with givers


def plain_plan(problem: Problem) -> Plan:
    """The graph's own order, with each transfer issued right before it is waited for.

    That takes no more memory than the graph's order does, and nothing overlaps.
    """
    order = list(problem.inputs)
    issued = set(order)
    for task in range(problem.size):
        start = problem.starts[task]
        if start is not None and start not in issued:
            issued.add(start)
            order.append(start)
        if task not in issued and not _is_only_waited_for(problem, task):
            issued.add(task)
            order.append(task)
    return Plan(problem, order)


def lean_plan(problem: Problem, plan: Plan, limit: float) -> Plan:
    """A plan within a limit, from a plan to begin with; the leanest that is found, if none is.

    Tasks that free memory move up and tasks that take it move down, by turns; then a pass takes of
    the tasks that are ready the one that leaves least alive.
    """
    best = plan
    for attempt in _attempts(problem, plan):
        if attempt.peak < best.peak:
            best = attempt
        if best.peak <= limit:
            break
    return best


def _attempts(problem: Problem, plan: Plan) -> Iterator[Plan]:
    current = plan
    for round_ in range(_ROUNDS):
        slack = plan.peak * _SLACKS[round_ % len(_SLACKS)]
        current = Plan(problem, _takers_later(problem, current))
        yield current
        current = Plan(problem, _givers_earlier(problem, current, slack))
        yield current
    for _ in range(_ROUNDS):
        current = Plan(problem, _least_alive(problem, current))
        yield current


def _is_only_waited_for(problem: Problem, task: int) -> bool:
    users = problem.users[task]
    waited = users and all(problem.starts[user] == task for user in users)
    return problem.stream[task] != COMPUTE and bool(waited)


def _takers_later(problem: Problem, plan: Plan) -> list[int]:
    """Each task that takes more memory than it frees, moved to its first user."""
    net = _net(problem, plan)
    key = list(plan.turn)
    for task in reversed(plan.order):
        users = problem.users[task]
        if users and net[task] > 0:
            key[task] = min(key[user] for user in users)
    return sorted(plan.order, key=lambda task: (key[task], plan.turn[task]))


def _givers_earlier(problem: Problem, plan: Plan, slack: float) -> list[int]:
    """Each task that frees memory, or takes at most `slack`, moved to the last it depends on.

    What frees most often hangs on others that take next to nothing.
    """
    net = _net(problem, plan)
    key = list(plan.turn)
    for task in plan.order:
        deps = problem.deps[task]
        if deps and net[task] <= slack:
            key[task] = max(key[dep] for dep in deps)
    return sorted(plan.order, key=lambda task: (key[task], plan.turn[task]))


def _net(problem: Problem, plan: Plan) -> list[float]:
    """What each task takes less what it frees, in bytes."""
    net = [sum(problem.sizes[u] for u in allocs) for allocs in problem.allocs]
    for storage, uses in enumerate(plan.uses):
        if uses and storage not in problem.kept:
            net[plan.order[uses[-1]]] -= problem.sizes[storage]
    return net


def _least_alive(problem: Problem, plan: Plan) -> list[int]:
    """An order that always takes, of the ready tasks that come next, the one that frees most."""
    reserve = Reserve(problem, plan, plan.peak)
    left = [len(deps) for deps in problem.deps]
    ready = sorted(plan.turn[task] for task in range(problem.size) if not left[task])
    order: list[int] = []
    while ready:
        window = [plan.order[turn] for turn in ready[:_WINDOW]]
        fitting = [task for task in window if reserve.fits(task)]
        task = min(fitting, key=lambda task: (reserve.net(task), plan.turn[task]))
        ready.remove(plan.turn[task])
        reserve.run(task)
        order.append(task)
        for user in problem.users[task]:
            left[user] -= 1
            if not left[user]:
                insort(ready, plan.turn[user])
    return order
