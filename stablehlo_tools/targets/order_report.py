"""The verdicts on a job by several compilers, as text and as JSON."""

from __future__ import annotations

from typing import Any

from stablehlo_tools.order.report import as_json, as_text
from stablehlo_tools.targets.job_schedules import JobOrder, OrderAnswer


def order_text(order: JobOrder) -> str:
    """The verdicts, the first that is not `ordered` before the others."""
    answers = sorted(order.answers, key=lambda each: each is not order.worst)
    lines = [line for answer in answers for line in _lines(answer)]
    lines += [
        f"  {target.title} is left out: {error.diagnostic.message}"
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
            "  another compiler or version may order otherwise (align-order forces one order): "
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
