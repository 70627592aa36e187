"""Decides the order of a job's programs on the schedules that their compilers make.

A compiler rewrites, deletes, merges and reorders the collectives of a program's text. Only the
scheduled module states the collectives that a device issues. So each distinct program of the job is
compiled once, ahead of time, for all devices of the job. Its schedule is then read like any
scheduled HLO text.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from stablehlo_tools.analysis.collectives import GRID, stated_grid
from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.artifacts.artifact import Artifact, parse
from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob, equal_arguments
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.hlo_input.instructions import TAG_MARK, parse_instruction
from stablehlo_tools.order.communicators import COMPONENTS
from stablehlo_tools.order.program import CollectiveIssue, CompiledOrder, issues_of, rebuilt
from stablehlo_tools.order.simulation import LoopMismatchError
from stablehlo_tools.order.verdict import Decided, decide, judge_origins, judge_rewriting
from stablehlo_tools.order.verdict_report import as_json, as_text
from stablehlo_tools.targets.chips import Target
from stablehlo_tools.targets.compilation import DEFAULT_TIMEOUT, Compilation, compile_artifact
from stablehlo_tools.targets.compiler_options import NO_OPTIONS, CompilerOptions
from stablehlo_tools.targets.topologies import compiler_version, missing_package

_TRANSFERS = "a compiled schedule does not state the devices of a send or recv: use --target none"
_MARKS = re.compile(rf"{TAG_MARK}(\d+)")
_OP_NAME = re.compile(r'(op_name="[^"]*)"')


@dataclass(frozen=True)
class OrderAnswer:
    """The verdict on a job, and the compiler of the schedules; "" if none was used.

    `open_in_text` states the orders that the programs' texts leave open but the schedules do not.
    """

    decided: Decided
    target: Target | None = None
    compiler: str = ""
    options: CompilerOptions = NO_OPTIONS
    open_in_text: str = ""


@dataclass(frozen=True)
class JobOrder:
    """The verdicts on a job by several compilers, and those compilers that refused a program."""

    answers: tuple[OrderAnswer, ...]
    refused: tuple[tuple[Target, ToolError], ...] = ()

    @property
    def worst(self) -> OrderAnswer:
        """The first answer that is not `ordered`, or else the first."""
        failed = (each for each in self.answers if each.decided.finding is not None)
        return next(failed, self.answers[0])

    @property
    def holds(self) -> bool:
        """Returns True if every answer is `ordered`."""
        return self.worst.decided.finding is None


def decide_order(
    artifacts: Sequence[Artifact],
    options: JobOptions,
    targets: Sequence[Target] | None,
    compiler_options: CompilerOptions = NO_OPTIONS,
    timeout: float = DEFAULT_TIMEOUT,
) -> JobOrder:
    """Decides the order of a job on the schedules of the targets' compilers.

    If `targets` is None, it is `default_targets`, without compilers that reject a program. No
    compiler runs if all programs are schedules already, or (by default) if one program runs on all
    devices. Raises ToolError if a program cannot be read or a chosen compiler rejects one. Raises
    UndecidedError as `decide` does.
    """
    is_final = all(artifact.is_scheduled for artifact in artifacts)
    if is_final or (targets is None and len(artifacts) == 1 and not options.strict):
        return JobOrder((OrderAnswer(decide(_programs(artifacts, options)[0])),))
    asked = default_targets(artifacts, options.platform) if targets is None else targets
    if any(a.exported is not None and len(a.exported.platforms) > 1 for a in artifacts) and asked:
        options = replace(options, platform=options.platform or asked[0].platform)
    programs, grids = _programs(artifacts, options)
    # The orders that the programs' texts leave open; empty if they force a single order.
    try:
        finding = decide(programs, strict=options.strict).finding
        left_open = "" if finding is None else finding.message
    except LoopMismatchError:
        left_open = "loops of the program texts were not followed"
    has_transfers = any(issue.transfer for p in programs for issue in issues_of(p.block))
    sources: list[tuple[str, Artifact]] = []  # to compile, each with a key that equal ones share
    if asked and not has_transfers:
        for artifact, grid in zip(artifacts, grids, strict=True):
            # A copy that states its grid, which is otherwise inferred from the module.
            copy = artifact.copy()
            if stated_grid(copy.module) is None:
                i32 = ir.IntegerType.get_signless(32, copy.module.context)
                for name, count in zip(GRID, (grid.num_replicas, grid.num_partitions), strict=True):
                    copy.module.operation.attributes[name] = ir.IntegerAttr.get(i32, count)
            sources.append((_hash_text(copy), copy))
    answers: list[OrderAnswer] = []
    refused: list[tuple[Target, ToolError]] = []
    for target in asked:
        try:
            if has_transfers:
                raise ToolError(_TRANSFERS)
            scheduled = _schedule_job(sources, options, target, compiler_options, timeout)
        except ToolError as error:
            if targets is not None:
                raise
            refused.append((target, error))
            continue
        decided = judge_origins(decide(scheduled, strict=options.strict))
        open_in_text = left_open if decided.finding is None else ""
        compiler = compiler_version(target)
        answers.append(OrderAnswer(decided, target, compiler, compiler_options, open_in_text))
    if not answers:
        answers = [OrderAnswer(decide_without_compilers(artifacts, options))]
    return JobOrder(tuple(answers), tuple(refused))


def _programs(
    artifacts: Sequence[Artifact], options: JobOptions
) -> tuple[list[CompiledOrder], list[ProcessGrid]]:
    """Returns the program that each text issues, and its grid of processes."""
    copies = tuple(artifact.copy() for artifact in artifacts)  # reading changes them
    issued = ProgramJob(copies, options).read()
    return [each.program for each in issued], [each.grid for each in issued]


def decide_without_compilers(artifacts: Sequence[Artifact], options: JobOptions) -> Decided:
    """Returns the verdict on a job that holds for any compiler.

    A compiler emits equal modules for equal texts. So an order is decided only if all texts are
    equal; otherwise the verdict accounts for rewriting.
    """
    programs, _ = _programs(artifacts, replace(options, judges_rewriting=True))
    decided = decide(programs, strict=options.strict)
    is_one = len(artifacts) == 1 or len(set(map(_hash_text, artifacts))) == 1
    return decided if is_one else judge_rewriting(decided)


def default_targets(artifacts: Sequence[Artifact], platform: str | None) -> list[Target]:
    """The installed compilers of the platforms that programs were exported for; all installed ones
    if the programs name no platform."""
    named = {p for a in artifacts if a.exported is not None for p in a.exported.platforms}
    if platform is not None:
        named = {platform}
    chosen = [each for each in Target if not named or each.platform in named]
    return [each for each in chosen if missing_package(each) is None]


def _hash_text(artifact: Artifact) -> str:
    text = artifact.module.operation.get_asm(enable_debug_info=False, large_elements_limit=None)
    return hashlib.sha256(str(text).encode()).hexdigest()


def _schedule_job(
    sources: Sequence[tuple[str, Artifact]],
    options: JobOptions,
    target: Target,
    compiler_options: CompilerOptions,
    timeout: float,
) -> list[CompiledOrder]:
    """Compiles each distinct program for a target and reads the schedules.

    `timeout` is that of one compilation, in seconds.
    """
    distinct: dict[str, Artifact] = {}
    for key, artifact in sources:
        distinct.setdefault(key, artifact)

    def compile_text(artifact: Artifact) -> str:
        if artifact.hlo is not None and artifact.is_scheduled:
            return artifact.hlo.text
        compiled = compile_artifact(artifact, target, timeout, options=compiler_options)
        return _mark_collectives(compiled)

    # Threads suffice, because each compiler runs in a process of its own.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = dict(zip(distinct, pool.map(compile_text, distinct.values()), strict=True))
    scheduled = tuple(parse(texts[key].encode(), artifact.name) for key, artifact in sources)
    numbered = [
        f"{program}:{number}"
        for program, (_, artifact) in enumerate(sources)
        for number in equal_arguments(artifact, program, options.equal)
    ]
    issued = ProgramJob(scheduled, replace(options, platform=None, equal=tuple(numbered))).read()
    on_gpu = target is Target.GPU
    return [
        replace(
            each.program,
            may_run_on_gpu=on_gpu,
            permutes_on_components=on_gpu and (COMPONENTS, True) in compiler_options.values,
            block=rebuilt(each.program.block, _with_origins),
        )
        for each in issued
    ]


def _mark_collectives(compilation: Compilation) -> str:
    """Returns the schedule's text, with marks at the ends of the op_names of its collectives.

    The marks are the ids of the collectives of the program's text that an instruction represents.
    """
    ids = {event.instruction: event.ids for event in compilation.schedule.events if event.ids}

    def mark(line: str) -> str:
        instruction = parse_instruction(line)
        if instruction is None or instruction.name not in ids:
            return line
        marks = "".join(f"{TAG_MARK}{number}" for number in ids[instruction.name])
        return _OP_NAME.sub(lambda found: f'{_MARKS.sub("", found[1])}{marks}"', line)

    return "\n".join(map(mark, compilation.text.split("\n")))


def _with_origins(issue: CollectiveIssue) -> CollectiveIssue:
    """Returns an issue of a schedule with the program's collectives that it represents."""
    function, name = issue.place.function, issue.place.name
    marks = dict.fromkeys(int(number) for number in _MARKS.findall(f"{function} {name}"))
    place = replace(issue.place, function=_MARKS.sub("", function), name=_MARKS.sub("", name))
    return replace(issue, place=place, origins=tuple(marks))


def order_text(order: JobOrder) -> str:
    """The verdicts, the first that is not `ordered` before the others."""
    answers = sorted(order.answers, key=lambda each: each is not order.worst)
    lines = [line for answer in answers for line in _lines(answer)]
    lines += [
        f"  {target.title} is omitted: {error.diagnostic.message}"
        for target, error in order.refused
    ]
    return "\n".join(lines)


def _lines(answer: OrderAnswer) -> list[str]:
    first, *rest = as_text(answer.decided, is_scheduled=answer.target is not None).splitlines()
    if answer.target is None:
        return [first, *rest]
    options = f", with {answer.options}" if answer.options.values else ""
    lines = [first, f"  as scheduled by {answer.compiler}{options}", *rest]
    if answer.open_in_text:
        lines.append(
            "  another compiler or version may choose another order (align-order forces one): "
            f"{answer.open_in_text}"
        )
    return lines


def order_json(order: JobOrder) -> dict[str, Any]:
    """The worst verdict with its proof or counterexample, then each compiler's."""
    compilers = [
        {
            "target": answer.target.value,
            "compiler": answer.compiler,
            "compiler_options": dict(answer.options.values),
            "open_in_text": answer.open_in_text,
            **as_json(answer.decided, is_scheduled=True),
        }
        for answer in order.answers
        if answer.target is not None
    ]
    refused = [
        {"target": target.value, "message": error.diagnostic.message}
        for target, error in order.refused
    ]
    worst = as_json(order.worst.decided, is_scheduled=order.worst.target is not None)
    return {**worst, "compilers": compilers, "refused": refused}
