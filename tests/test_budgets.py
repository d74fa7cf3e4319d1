"""The budgets of the code: sizes, complexity, arguments, cycles, types and docstrings.

Each test prints its worst offenders (`pytest -rP` shows them), so that one sees what comes next.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median

import grimp
import pytest
from radon.complexity import cc_visit

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "diptych").rglob("*.py"))
OTHERS = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")])

MAX_FILE_LINES, MEDIAN_FILE_LINES = 500, 200
MAX_FUNCTION_LINES, P95_FUNCTION_LINES = 80, 40
MAX_COMPLEXITY, P95_COMPLEXITY = 15, 8
MAX_ARGUMENTS = 8


@dataclass(frozen=True)
class Function:
    """A function of the sources; its name is where to find it."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    is_public: bool

    @property
    def num_lines(self) -> int:
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1

    @property
    def arguments(self) -> list[ast.arg]:
        named = self.node.args
        every = [*named.posonlyargs, *named.args, *named.kwonlyargs]
        return [each for each in every if each.arg not in ("self", "cls")]


def functions_of(path: Path) -> Iterator[Function]:
    def walk(node: ast.AST, *, prefix: str, is_public: bool) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", "")
            shown = is_public and (not name.startswith("_") or name.startswith("__"))
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(f"{prefix}:{child.lineno} {name}", child, shown)
                yield from walk(child, prefix=prefix, is_public=False)
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, prefix=prefix, is_public=shown)
            else:
                yield from walk(child, prefix=prefix, is_public=is_public)

    place = path.relative_to(ROOT / "src").as_posix()
    yield from walk(ast.parse(path.read_text()), prefix=place, is_public=True)


FUNCTIONS = [function for path in SOURCES for function in functions_of(path)]


def hold(sizes: dict[str, int], *, most: int, middle: float, share: float) -> None:
    """Check the largest value and a quantile; print the five largest."""
    worst = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    at = sorted(sizes.values())[int(share * (len(sizes) - 1))]
    print(f"quantile {share}: {at} (of {middle}); largest (of {most}):")
    for name, size in worst:
        print(f"  {size:4} {name}")
    over = [f"{name}: {size}" for name, size in worst if size > most]
    assert not over, f"above {most}: {over}"
    assert at <= middle, f"quantile {share} is {at}, at most {middle}; the largest: {worst}"


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_are_short():
    sizes = {path.relative_to(ROOT).as_posix(): num_lines(path) for path in SOURCES}
    hold(sizes, most=MAX_FILE_LINES, middle=MEDIAN_FILE_LINES, share=0.5)
    assert median(sizes.values()) <= MEDIAN_FILE_LINES
    long = [path.name for path in OTHERS if num_lines(path) > MAX_FILE_LINES]
    assert not long, f"tests and benchmarks above {MAX_FILE_LINES} lines: {long}"


def test_functions_are_short():
    sizes = {function.name: function.num_lines for function in FUNCTIONS}
    hold(sizes, most=MAX_FUNCTION_LINES, middle=P95_FUNCTION_LINES, share=0.95)


def test_functions_are_simple():
    sizes = {
        f"{path.relative_to(ROOT / 'src')}:{block.lineno} {block.name}": block.complexity
        for path in SOURCES
        for block in cc_visit(path.read_text())
        if block.letter in "FM"
    }
    hold(sizes, most=MAX_COMPLEXITY, middle=P95_COMPLEXITY, share=0.95)


def test_functions_take_few_arguments():
    sizes = {function.name: len(function.arguments) for function in FUNCTIONS}
    hold(sizes, most=MAX_ARGUMENTS, middle=MAX_ARGUMENTS, share=0.95)


def test_no_module_imports_itself_through_others():
    graph = grimp.build_graph("diptych", exclude_type_checking_imports=True, cache_dir=None)
    edges = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(edges) >= len(SOURCES)
    # Raises CycleError, which names the modules.
    list(TopologicalSorter(edges).static_order())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_is_public_is_typed_and_documented(path: Path):
    tree = ast.parse(path.read_text())
    missing = [] if ast.get_docstring(tree) else ["the module has no docstring"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            missing += [] if ast.get_docstring(node) else [f"{node.name} has no docstring"]
    for function in functions_of(path):
        if not function.is_public:
            continue
        # Magic methods are described by their class.
        if not function.node.name.startswith("__") and not ast.get_docstring(function.node):
            overload = any("overload" in ast.dump(each) for each in function.node.decorator_list)
            missing += [] if overload else [f"{function.name} has no docstring"]
        if function.node.returns is None:
            missing.append(f"{function.name} has no return type")
        missing += [
            f"{function.name}: {argument.arg} has no type"
            for argument in function.arguments
            if argument.annotation is None
        ]
    assert not missing, missing
