"""Imports go one way, between folders and between files: no module imports from a folder above its own."""

import ast

import pytest

LAYERS = (
    "trainables.choices",
    "trainables.errors",
    "trainables.plugin_errors",
    "trainables.lazy",
    "trainables.files",
    "trainables.urls",
    "trainables.limited_yaml",
    "trainables.spec",
    "trainables.privacy",
    "trainables.data",
    "trainables.plugins",
    "trainables.metrics",
    "trainables.code_identity",
    "trainables.models",
    "trainables.methods",
    "trainables.federation",
    "trainables.ray_actors",
    "trainables.audit",
    "search_spaces",
    "orchestrator.current_folder",
    "orchestrator.one_thread",
    "orchestrator.console",
    "orchestrator.version",
    "orchestrator.section",
    "orchestrator.search",
    "orchestrator.study",
    "orchestrator.results",
    "orchestrator.report",
    "orchestrator.reproduction",
    "orchestrator.execution",
    "orchestrator.bench",
    "orchestrator.commands",
    "orchestrator.cli",
    "fedsweep",
    "benchmarks",
)
"""From the bottom up. A module may import from its own layer and from those before it."""

FREE_OF_RAY = ("trainables.federation", "trainables.methods", "trainables.models", "trainables.privacy",
               "trainables.data", "orchestrator.study", "orchestrator.search", "orchestrator.results")  # fmt: skip


def layer(module):
    return next((name for name in LAYERS if module == name or module.startswith(f"{name}.")), None)


def imported(tree, modules):
    """The modules a file imports, when it is loaded or later, and None-free: `from a import b` names a.b if that is
    a module, else a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def type_checking_only(tree):
    """The tree without blocks under `if TYPE_CHECKING`."""

    class Drop(ast.NodeTransformer):
        def visit_If(self, node):
            return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node

    return Drop().visit(tree)


@pytest.fixture(scope="module")
def graph(repository):
    """module -> modules of this repository that it imports."""
    tops = {name.partition(".")[0] for name in LAYERS}
    files = {
        ".".join(file.relative_to(repository).with_suffix("").parts).removesuffix(".__init__"): file
        for top in tops
        for file in (repository / top).rglob("*.py")
    }
    assert len(files) > 150
    trees = {module: type_checking_only(ast.parse(file.read_text())) for module, file in files.items()}
    return {module: set(imported(tree, files)) for module, tree in trees.items()}


def test_every_module_belongs_to_a_layer(graph):
    packages = {"trainables", "orchestrator"}
    assert not [module for module in graph if layer(module) is None and module not in packages]


def test_imports_go_down(graph):
    for module, targets in graph.items():
        for target in filter(layer, targets):
            assert LAYERS.index(layer(target)) <= LAYERS.index(layer(module)), f"{module} imports {target}, above it"


def test_no_file_is_part_of_an_import_cycle(graph):
    """Repeatedly remove modules that import nothing left: what remains is a cycle or depends on one."""
    left = {module: {t for t in targets if t in graph and t != module} for module, targets in graph.items()}
    while free := [module for module, targets in left.items() if not targets]:
        for module in free:
            del left[module]
        for targets in left.values():
            targets.difference_update(free)
    assert not left, f"cycle among {sorted(left)}"


def test_only_the_ray_layers_import_ray(graph):
    for module, targets in graph.items():
        if layer(module) in FREE_OF_RAY:
            assert not [t for t in targets if t.partition(".")[0] == "ray"], f"{module} imports Ray"


def test_tests_do_not_import_tests(repository):
    """Shared code belongs in a helper module: importing a test module runs its fixtures and marks twice."""
    tests = repository / "tests"
    not_importable = {file.stem for file in tests.glob("test_*.py")} | {"conftest"}
    for file in tests.glob("*.py"):
        imports = set(imported(ast.parse(file.read_text()), ()))
        assert not imports & not_importable, f"{file.name} imports {imports & not_importable}"


def test_the_list_of_long_tests_names_tests(repository):
    for line in (repository / "tests" / "long_tests.txt").read_text().splitlines():
        file, _, name = line.partition("::")
        assert f"def {name.partition('[')[0]}(" in (repository / "tests" / file).read_text(), line
