"""How two artifacts will be run: their common signature, the devices, and a program for each side.

Two jax.export artifacts are called as their users call them. Where one is a bare module, both
modules are run below JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stablehlo_tools import bindings
from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.verify.device_grid import inferred_grid, is_partitioned, stated_grid
from stablehlo_tools.verify.interpreter_program import interpreter_grid, interpreter_module
from stablehlo_tools.verify.job import SIDES, Form, Run, Side
from stablehlo_tools.verify.signatures import (
    Signature,
    check_agreement,
    entry_function,
    exported_signature,
    module_signature,
)


@dataclass(frozen=True)
class Plan:
    """A run on one backend, and the bytes of its two programs."""

    run: Run
    programs: Mapping[Side, bytes]


class Pair:
    """Two artifacts, and what can be asked of both. Every ToolError names the file it is about."""

    def __init__(self, before: Artifact, after: Artifact) -> None:
        self.artifacts: dict[Side, Artifact] = {"before": before, "after": after}

    def plan(self, backend: str) -> Plan:
        """How to run the two on `cpu` or `interpreter`. Raises ToolError where they cannot be."""
        if backend == "interpreter":
            return self._interpreted()
        if all(artifact.exported is not None for artifact in self.artifacts.values()):
            return self._called()
        return self._bare()

    def _called(self) -> Plan:
        signature = self._agreed({s: _about(a, exported_signature, a) for s, a in self._items()})
        counts = [a.exported.nr_devices for a in self.artifacts.values() if a.exported]
        if counts[0] != counts[1]:
            raise self._disagreement("number of devices", *map(str, counts))
        forms: dict[Side, Form] = {"before": "exported", "after": "exported"}
        run = Run("cpu", forms, signature.inputs, signature.outputs, 1, counts[0], 1)
        return Plan(run, {s: _about(a, _flat_exported, a) for s, a in self._items()})

    def _bare(self) -> Plan:
        modules = {s: _about(a, self._runnable, a) for s, a in self._items()}
        signature = self._module_signature(modules)
        grid = self._grid(modules)
        forms: dict[Side, Form] = {
            s: "partitioned" if is_partitioned(m) else "per_device" for s, m in modules.items()
        }
        instances = {
            s: grid.num_replicas if form == "partitioned" else grid.size
            for s, form in forms.items()
        }
        if instances["before"] != instances["after"]:
            meanings = ("what each device runs", "divided by its shardings")
            raise self._disagreement(
                "meaning of the inputs", *(meanings[forms[s] == "partitioned"] for s in SIDES)
            )
        run = Run(
            "cpu",
            forms,
            signature.inputs,
            signature.outputs,
            grid.num_replicas,
            grid.num_partitions,
            instances["before"],
        )
        return Plan(run, {s: bindings.write_bytecode(m) for s, m in modules.items()})

    def _interpreted(self) -> Plan:
        modules = {s: _about(a, self._runnable, a) for s, a in self._items()}
        signature = self._module_signature(modules)
        whole = self._grid(modules)
        grids = {s: _about(a, interpreter_grid, modules[s], whole) for s, a in self._items()}
        if grids["before"] != grids["after"]:
            raise self._disagreement("number of devices", *(str(grids[s].size) for s in SIDES))
        grid = grids["before"]
        forms: dict[Side, Form] = {"before": "interpreter", "after": "interpreter"}
        run = Run(
            "interpreter",
            forms,
            signature.inputs,
            signature.outputs,
            grid.num_replicas,
            grid.num_partitions,
            grid.size,
        )
        return Plan(run, {s: interpreter_module(m, signature, grid) for s, m in modules.items()})

    def _module_signature(self, modules: Mapping[Side, ir.Module]) -> Signature:
        return self._agreed({s: _about(a, module_signature, modules[s]) for s, a in self._items()})

    def _agreed(self, signatures: Mapping[Side, Signature]) -> Signature:
        """The signature of `before`, with the names that only `after` knows."""
        before, after = signatures["before"], signatures["after"]
        try:
            check_agreement(before, after, self._names())
        except ToolError as error:
            raise _named(error, self.artifacts["after"]) from None
        if not any(value.role != "nothing" for value in before.outputs):
            raise _named(ToolError("no outputs: nothing to compare"), self.artifacts["before"])
        return Signature(
            before.inputs,
            tuple(
                replace(one, name=one.name or other.name)
                for one, other in zip(before.outputs, after.outputs, strict=True)
            ),
        )

    def _grid(self, modules: Mapping[Side, ir.Module]) -> ProcessGrid:
        stated = {s: stated_grid(module) for s, module in modules.items()}
        grids = {s: stated[s] or _about(a, inferred_grid, modules[s]) for s, a in self._items()}
        before, after = grids["before"], grids["after"]
        if stated["before"] is None and stated["after"] is None:
            return ProcessGrid(
                max(before.num_replicas, after.num_replicas),
                max(before.num_partitions, after.num_partitions),
            )
        known = stated["before"] or stated["after"] or before
        if any(_exceeds(grid, known) for grid in grids.values()) or (
            None not in stated.values() and before != after
        ):
            raise self._disagreement(
                "number of devices",
                *(
                    f"{g.num_replicas} × {g.num_partitions} (replicas × partitions)"
                    for g in (before, after)
                ),
            )
        return known

    def _runnable(self, artifact: Artifact) -> ir.Module:
        """A copy whose entry is `main`, with the platform's index made a constant.

        XLA:CPU ends the process on a choice between platforms that is left open.
        """
        context = bindings.new_context()
        module = bindings.parse_module(bindings.write_bytecode(artifact.module), context)
        entry = entry_function(module)
        with context, ir.Location.unknown():
            if ir.StringAttr(entry.attributes["sym_name"]).value != "main":
                ir.SymbolTable.replace_all_symbol_uses(
                    ir.StringAttr(entry.attributes["sym_name"]).value, "main", module.operation
                )
                ir.SymbolTable.set_symbol_name(entry, "main")
            for i, value in enumerate(module_signature(module).inputs):
                if value.role == "platform":
                    _fix_input(entry, i, self._platform())
        return module

    def _platform(self) -> int:
        """The CPU's index among the platforms of an artifact that lists them, 0 without."""
        for artifact in self.artifacts.values():
            if artifact.exported is not None and "cpu" in artifact.exported.platforms:
                return artifact.exported.platforms.index("cpu")
        return 0

    def _disagreement(self, what: str, before: str, after: str) -> ToolError:
        names = self._names()
        message = f"the two differ in the {what}: {before} in {names[0]}, {after} in {names[1]}"
        return _named(ToolError(message), self.artifacts["after"])

    def _names(self) -> tuple[str, str]:
        return self.artifacts["before"].name, self.artifacts["after"].name

    def _items(self) -> list[tuple[Side, Artifact]]:
        return [(side, self.artifacts[side]) for side in SIDES]


def _about[**P, T](
    artifact: Artifact, function: Callable[P, T], *args: P.args, **kw: P.kwargs
) -> T:
    """Calls a function; a ToolError that it raises is about `artifact`."""
    try:
        return function(*args, **kw)
    except ToolError as error:
        raise _named(error, artifact) from None
