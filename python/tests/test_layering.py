"""The rooms of the package stand one upon the other: no import upwards, and none in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tree import ROOT

PACKAGE = "stablehlo_tools"
# The lowest first. Rooms of one line know nothing of each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("bindings",),
    ("diagnostics",),
    ("files", "processes"),
    ("dialect",),
    ("ir",),
    ("cost", "order"),
    ("schedules", "overlap"),
    ("hlo_input",),
    ("analysis",),
    ("artifacts",),
    ("passes",),
    ("targets",),
    ("transforms",),
    ("verify",),
    ("mpmd",),
    ("report",),
    ("advice",),
    ("optimization",),
    ("testing",),
    ("api",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}
# What knows no MLIR, so that a pure planner loads none.
PURE = ("cost", "order", "schedules", "overlap", "files")


@cache
def imports() -> dict[str, tuple[tuple[str, int], ...]]:
    """What each module imports of the package, with the line; for types and in functions, too."""
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }

    def of(tree: ast.Module) -> Iterator[tuple[str, int]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield full if full in names else str(node.module), node.lineno
            elif isinstance(node, ast.Import):
                yield from ((a.name, node.lineno) for a in node.names if a.name in names)

    return {name: tuple(of(ast.parse(path.read_text()))) for name, path in names.items()}


def room_of(module: str) -> str:
    """The first part of the name behind the package's; the package itself is above all."""
    return module.split(".")[1] if "." in module else ""


def test_every_room_has_its_height():
    rooms = {room_of(module) for module in imports()} - {""}
    assert rooms == set(HEIGHT)


def test_no_import_points_upwards():
    upwards = [
        f"{module}:{line} imports {imported}"
        for module, lines in imports().items()
        for imported, line in lines
        if room_of(module) and room_of(module) != room_of(imported)
        if HEIGHT[room_of(imported)] >= HEIGHT[room_of(module)]
    ]
    assert not upwards, "\n".join(upwards)


def test_no_modules_import_each_other_in_a_circle():
    remaining = {name: {to for to, _ in lines} for name, lines in imports().items()}
    while True:
        wanted = set[str]().union(*remaining.values())
        kept = {
            name: names & remaining.keys()
            for name, names in remaining.items()
            if names & remaining.keys() and name in wanted
        }
        if kept == remaining:
            break
        remaining = kept
    assert not remaining, f"a circle is among {sorted(remaining)}"


def test_planners_know_no_mlir():
    foreign = [
        f"{module}:{line} imports {imported}"
        for module, lines in imports().items()
        for imported, line in lines
        if room_of(module) in PURE and imported == f"{PACKAGE}.bindings"
    ]
    assert not foreign, "\n".join(foreign)


def test_the_parts_of_a_pass_have_its_name():
    transforms = ROOT / PACKAGE / "transforms"
    passes = {path.stem for path in transforms.glob("*.py")}
    rooms = {path.parent.name for path in (transforms / "parts").glob("*/__init__.py")}
    assert rooms <= passes


def test_mpmd_imports_passes_and_none_of_their_parts():
    parts = [
        f"{module}:{line} imports {imported}"
        for module, lines in imports().items()
        for imported, line in lines
        if room_of(module) == "mpmd" and imported.startswith(f"{PACKAGE}.transforms.parts")
    ]
    assert not parts, "\n".join(parts)


def test_loose_parts_serve_several_passes():
    """A file in `parts/` itself is imported by at least two passes or by another such file."""
    transforms = f"{PACKAGE}.transforms."
    loose = {path.stem for path in (ROOT / PACKAGE / "transforms" / "parts").glob("*.py")}
    users = {
        name: {
            module.removeprefix(transforms).removeprefix("parts.").split(".")[0]
            for module, lines in imports().items()
            if any(imported == f"{transforms}parts.{name}" for imported, _ in lines)
        }
        for name in loose - {"__init__"}
    }
    alone = {name for name, of in users.items() if len(of) < 2 and not of & loose}
    assert not alone
