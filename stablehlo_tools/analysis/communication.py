"""Finds where a module communicates: a tree of sites in program order, function by function.

A site is a communicating op, a call of a function that communicates, or a control-flow op with such
a site in one of its regions. Passes that order communication can ignore all other ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from stablehlo_tools.analysis.collectives import Collective, classify_communication
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import BRANCHES, CALLS, COMPUTATIONS
from stablehlo_tools.ir.walk import FUNCTION, callee_name, functions_by_name, symbol_name, walk

_CONTROL_FLOW = BRANCHES | COMPUTATIONS | {WHILE}
_CALLED_COMPUTATIONS = "called_computations"
_FUNCTION_CONSTANT = "func.constant"


@dataclass(eq=False)
class Site:
    """One place where a block communicates.

    Exactly one holds: `collective` is set; `callee` is set; `regions` lists the sites of each
    region of a control-flow op (an empty list for a region that does not communicate).
    """

    op: ir.Operation
    collective: Collective | None = None
    callee: str | None = None
    regions: list[list[Site]] = field(default_factory=list["list[Site]"])


@dataclass(eq=False)
class CommunicatingFunction:
    """A function that communicates, and its sites in program order."""

    op: ir.Operation
    name: str
    is_public: bool
    sites: list[Site] = field(default_factory=list[Site])


def communicating_functions(
    module: ir.Module, counts: Callable[[Collective], bool] | None = None
) -> list[CommunicatingFunction]:
    """Returns the functions that communicate, callees before callers.

    With `counts`, only the collectives that it accepts are communication.

    Raises a located ToolError if the program order of the communication is not understood. Reasons
    are a recursive call, or a communicating op in a region that is not control flow. Others are a
    function of several blocks, and a public function that the module calls, too.
    """
    return _CommunicationTree(module, counts).build()


def iterate_collectives(sites: list[Site]) -> Iterator[Collective]:
    """Yields the collectives of a list of sites, also nested ones, but not those of calls."""
    for site in sites:
        if site.collective is not None:
            yield site.collective
        for region in site.regions:
            yield from iterate_collectives(region)


class _CommunicationTree:
    """Walks the module once, then keeps the ops on a path to a communicating op."""

    def __init__(
        self, module: ir.Module, counts: Callable[[Collective], bool] | None = None
    ) -> None:
        self.module = module
        self.counts = counts
        self.functions = functions_by_name(module)
        self.entries: list[Collective | ir.Operation] = []  # collectives and calls, in order
        self.calls: dict[str, list[ir.Operation]] = {}
        self.references: dict[str, ir.Operation] = {}
        self.callees: dict[str, list[str]] = {name: [] for name in self.functions}

    def build(self) -> list[CommunicatingFunction]:
        self._collect()
        communicating = self._communicating()
        for name in communicating:
            self._check_references(name)
        built: dict[str, CommunicatingFunction] = {}
        for name in communicating:
            function = self.functions[name]
            if len(function.regions[0].blocks) != 1:
                raise ToolError(
                    f"@{name} communicates and has several blocks: only structured control flow "
                    "is supported",
                    function.location,
                )
            built[name] = CommunicatingFunction(function, name, is_public(function))
        lists: dict[ir.Block, list[Site]] = {}  # by block: an op's hash reads all its operands
        for entry in self.entries:
            if isinstance(entry, Collective):
                self._place(Site(entry.op, collective=entry), lists, built)
            elif callee_name(entry) in communicating:
                self._place(Site(entry, callee=callee_name(entry)), lists, built)
        return list(built.values())

    def _collect(self) -> None:
        classify = classify_communication(self.module.context)

        def visit(op: ir.Operation) -> ir.WalkResult:
            name = op.name
            if name in CALLS:
                self.entries.append(op)
                self.calls.setdefault(callee_name(op), []).append(op)
                self.callees[self._enclosing(op)].append(callee_name(op))
                return ir.WalkResult.ADVANCE
            referenced: Iterable[ir.Attribute] = ()
            if name == _FUNCTION_CONSTANT:
                referenced = (op.attributes["value"],)
            elif _CALLED_COMPUTATIONS in op.attributes:
                referenced = ir.ArrayAttr(op.attributes[_CALLED_COMPUTATIONS])
            for symbol in referenced:
                self.references.setdefault(ir.FlatSymbolRefAttr(symbol).value, op)
            collective = classify(op)
            if collective is None or not (self.counts is None or self.counts(collective)):
                return ir.WalkResult.ADVANCE
            self.entries.append(collective)
            # Collectives and calls in a reduction are found, too, and refused later.
            return ir.WalkResult.SKIP if collective.is_async else ir.WalkResult.ADVANCE

        walk(self.module.operation, visit)

    def _enclosing(self, op: ir.Operation) -> str:
        """Returns the name of the top-level function around an op."""
        top = op
        while (parent := top.parent) is not None and parent != self.module.operation:
            top = parent
        if top.name != FUNCTION:
            raise ToolError(f"{op.name} is outside any function", op.location)
        return symbol_name(top)

    def _communicating(self) -> list[str]:
        """Returns functions that communicate themselves or through calls, callees before callers.

        Raises a located ToolError for a cycle of calls among them.
        """
        # The functions from which calls lead to a communicating op.
        callers: dict[str, list[str]] = {name: [] for name in self.functions}
        for name, callees in self.callees.items():
            for callee in callees:
                callers.setdefault(callee, []).append(name)
        talking = {self._enclosing(c.op) for c in self.entries if isinstance(c, Collective)}
        pending = list(talking)
        while pending:
            new = [caller for caller in callers[pending.pop()] if caller not in talking]
            talking.update(new)
            pending += new
        order: list[str] = []
        finished: set[str] = set()

        def visit(name: str, path: tuple[str, ...]) -> None:
            if name in path:
                raise ToolError(
                    f"@{name} communicates and calls itself: the order of collectives in a "
                    "recursive program cannot be determined",
                    self.functions[name].location,
                )
            if name in finished:
                return
            for callee in self.callees[name]:
                if callee in talking:
                    visit(callee, (*path, name))
            finished.add(name)
            order.append(name)

        for name in self.functions:
            if name in talking:
                visit(name, ())
        return order

    def _check_references(self, name: str) -> None:
        """Refuses a function whose signature cannot change together with its callers'."""
        function = self.functions[name]
        if name in self.references:
            raise ToolError(
                f"@{name} communicates, but {self.references[name].name} refers to it and cannot "
                "pass it a token",
                function.location,
                (note("referred to here", self.references[name].location),),
            )
        if not is_public(function) or name not in self.calls:
            return
        raise ToolError(
            f"@{name} communicates, is public and is also called inside the module, so its "
            "signature cannot change: call a private copy instead",
            function.location,
            (note("called here", self.calls[name][0].location),),
        )

    def _place(
        self,
        site: Site,
        lists: dict[ir.Block, list[Site]],
        functions: dict[str, CommunicatingFunction],
    ) -> None:
        """Adds a site to the list of its block, and creates missing sites around it."""
        while site.op.block not in lists:
            parent = site.op.parent
            assert parent is not None
            if parent.name == FUNCTION:
                name = symbol_name(parent)
                lists[site.op.block] = functions[name].sites
                break
            if parent.name not in _CONTROL_FLOW:
                raise ToolError(
                    f"{site.op.name} inside {parent.name}: the order of collectives is undefined "
                    "there",
                    site.op.location,
                    (note(f"the {parent.name} is here", parent.location),),
                )
            if any(len(region.blocks) != 1 for region in parent.regions):
                raise ToolError(f"{parent.name} with a region of several blocks", parent.location)
            above = Site(parent, regions=[[] for _ in parent.regions])
            for region, inner in zip(parent.regions, above.regions, strict=True):
                lists[region.blocks[0]] = inner
            lists[site.op.block].append(site)
            site = above
        lists[site.op.block].append(site)


def is_public(function: ir.Operation) -> bool:
    """Returns True if a function can be called from outside the module."""
    visibility = function.attributes.get("sym_visibility")
    return visibility is None or ir.StringAttr(visibility).value == "public"
