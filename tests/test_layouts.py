# SPDX-License-Identifier: Apache-2.0
"""The same files work flat, inside a package, and with the core alone; and what keeps it so: imports, and lines.

The vendored copy is given what it will meet in torch_tpu's folder: neighbours whose names are those of standard
modules, and strangers on `sys.path` with the names of our own modules. All of them raise when they are imported.
"""

import ast
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from layout import FOLDER, PACKAGE, PROJECT, TESTS, child_environment, run
from rank_process import RankProcess

pytestmark = [
    pytest.mark.flat_only,
    pytest.mark.skipif(bool(PACKAGE) or FOLDER != PROJECT, reason="reads the checkout's own files"),
]

# Lines, all of them, that each file may have. A file that needs more has something in it that should not be there.
CORE = {
    "handshake.py": 800,
    "_vocabulary.py": 470,
    "_protocol.py": 390,
    "_consensus.py": 600,
    "_coordinator.py": 700,
    "_client.py": 640,
    "_rendezvous.py": 390,
}
EXTRAS = {
    "_observe.py": 200,
    "_graph.py": 1170,
    "_graph_plan.py": 1250,
    "_graph_diff.py": 1090,
    "_graph_report.py": 1005,
    "_graph_text.py": 600,
    "_graph_explain.py": 440,
}
TOOLS = {"bench.py": 700}
MOST_LINES_OF_THE_CORE = 3970
MOST_LINES = 9700

MODULES = sorted(path for path in PROJECT.glob("*.py") if path.name not in TOOLS)
PURE_MODULES = ("_protocol", "_consensus")
IMPURE_IMPORTS = frozenset(
    {"asyncio", "multiprocessing", "select", "selectors", "socket", "subprocess", "threading", "time"}
)

# The tests that are run once more in another layout: what knows the layout at all, and is quick.
VENDORED_TESTS = ("vocabulary", "protocol", "consensus_scenarios", "client_coordinator", "handshake")
CORE_TESTS = ("client_coordinator", "handshake")
SUITE_WITHIN_S = 240
PROGRAM_WITHIN_S = 60


# ---------------------------------------------------------------------- other layouts


@pytest.fixture(scope="module")
def vendored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put on `sys.path` which holds our files as `vendored.internal.distributed`, among decoys."""
    root = tmp_path_factory.mktemp("vendored")
    package = root.joinpath(*VENDORED.split("."))
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[: VENDORED.count(".")]):
        folder.joinpath("__init__.py").write_text("")
    for name in ("multiprocessing", "distributed", "logging", "socket", "select", "selectors", "struct", "tempfile"):
        _write_decoy(package / f"{name}.py")
    for module in MODULES:
        shutil.copy(module, package)
        _write_decoy(root / module.name)
    return root


VENDORED = "vendored.internal.distributed"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the core, and nothing else."""
    folder = tmp_path_factory.mktemp("core")
    for name in CORE:
        shutil.copy(PROJECT / name, folder)
    return folder


def _write_decoy(path: Path) -> None:
    path.write_text(f"raise AssertionError('a stranger was imported: ' + {str(path)!r})\n")


def _run_suite(tests: Sequence[str], cwd: Path, **variables: str) -> str:
    """Runs these test files; returns what pytest said. A failure of theirs is one here."""
    command = [
        *(sys.executable, "-P", "-m", "pytest", "-c", str(PROJECT / "pyproject.toml"), "--rootdir", str(PROJECT)),
        *("-q", "-x", "-p", "no:cacheprovider", "-m", "not flat_only"),
        *(str(TESTS / f"test_{name}.py") for name in tests),
    ]
    ran = run(command, SUITE_WITHIN_S, cwd=cwd, env=child_environment(**variables))
    assert ran.returncode == 0, "\n".join(ran.stdout.splitlines()[-80:])
    return ran.stdout


def test_the_suite_passes_on_a_vendored_copy(vendored: Path, tmp_path: Path) -> None:
    said = _run_suite(VENDORED_TESTS, tmp_path, PYTHONPATH=str(vendored), HANDSHAKE_PACKAGE=VENDORED)
    assert " passed" in said


def test_the_suite_passes_on_the_core_alone(core: Path, tmp_path: Path) -> None:
    said = _run_suite(CORE_TESTS, tmp_path, PYTHONPATH="", HANDSHAKE_FOLDER=str(core))
    assert "there is no _graph_plan.py" in said, "it is the core alone that was tested"


def test_the_core_alone_does_all_but_plans_and_reports_which_is_said_once(core: Path, tmp_path: Path) -> None:
    pair = [0, 1]
    variables = {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(core)]),
        "HANDSHAKE_FOLDER": str(core),
        "TORCH_TPU_INTERNAL_HANDSHAKE_DEBUG": str(tmp_path / "reports"),
        "TORCH_TPU_INTERNAL_HANDSHAKE_STAGE": "DISPATCH_STAGE",
    }

    def both(command: str, *arguments: dict[str, object]) -> list[object]:
        for process, of_one in zip(ranks, arguments, strict=True):
            process.send(command, **of_one)
        return [process.answer().get("value") for process in ranks]

    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(tmp_path / "log", "w+b"))
        ranks = [stack.enter_context(RankProcess(variables, cwd=tmp_path, stderr=log)) for _ in pair]
        about = ranks[0].make(0, 0, world_size=2)
        ranks[1].make(1, about["address"][1], world_size=2, timeout_s=1.0)
        assert both("dispatch", *[{"ranks": pair}] * 2) == [True, True]
        for _ in range(3):
            assert both("dispatch", *({"ranks": pair, "fingerprint": name} for name in "ab")) == [False, False]
        for turn in (4, 5):
            votes = [{"spans": [[pair, turn, 1]], "fingerprint": name, "partial": True} for name in "ab"]
            assert both("submit", *votes) == [False, False]
        assert ranks[1].call("submit", spans=[[pair, 6, 1]])["error"] == "HandshakeTimeoutError"
        for process in ranks:
            process.call("close")
        text = Path(log.name).read_text(encoding="utf-8")
    assert text.count("_graph_report.py is not beside") == 1, text
    assert text.count("_graph_plan.py is not beside") == len(ranks), "once for each process that was to look for a plan"


_LIST_STRANGERS = """
import sys
before = set(sys.modules)
{statement}
assert handshake.Handshake
strangers = sorted(
    name for name in set(sys.modules) - before
    if name.partition(".")[0] not in sys.stdlib_module_names and name not in {own!r}
)
assert not strangers, strangers
"""


@pytest.mark.parametrize("layout_name", ["flat", "core", "package"])
def test_import_takes_the_core_and_the_standard_library_alone(
    layout_name: str, vendored: Path, core: Path, tmp_path: Path
) -> None:
    own = {name.removesuffix(".py") for name in CORE}
    folder, statement = (PROJECT if layout_name == "flat" else core), "import handshake"
    if layout_name == "package":
        folder, statement = vendored, f"from {VENDORED} import handshake"
        own = {"vendored", "vendored.internal", VENDORED, *(f"{VENDORED}.{stem}" for stem in own)}
    program = _LIST_STRANGERS.format(statement=statement, own=own)
    environment = child_environment(PYTHONPATH=str(folder))
    ran = run([sys.executable, "-c", program], PROGRAM_WITHIN_S, cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stdout


_IMPORT_ALL = """
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
assert "torch" not in sys.modules, "torch is imported where a graph is at hand"
"""


@pytest.mark.parametrize("layout_name", ["flat", "package"])
def test_every_module_can_be_imported_without_torch(
    layout_name: str, vendored: Path, tmp_path: Path
) -> None:
    folder, prefix = (PROJECT, "") if layout_name == "flat" else (vendored, f"{VENDORED}.")
    program = _IMPORT_ALL.format(names=[f"{prefix}{path.stem}" for path in reversed(MODULES)])
    environment = child_environment(PYTHONPATH=str(folder))
    ran = run([sys.executable, "-c", program], PROGRAM_WITHIN_S, cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stdout


# ---------------------------------------------------------------------- lines


def _lines(*names: str) -> int:
    return sum(len((PROJECT / name).read_text(encoding="utf-8").splitlines()) for name in names)


@pytest.mark.parametrize(("name", "most"), (CORE | EXTRAS | TOOLS).items())
def test_a_file_keeps_its_budget_of_lines(name: str, most: int) -> None:
    assert _lines(name) <= most


def test_all_files_together_keep_their_budget_of_lines() -> None:
    assert {path.name for path in MODULES} == CORE.keys() | EXTRAS.keys(), "a new file needs a budget"
    assert _lines(*CORE) <= MOST_LINES_OF_THE_CORE
    assert _lines(*CORE, *EXTRAS) <= MOST_LINES


# ---------------------------------------------------------------------- imports


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _statements(tree: ast.AST, only_at_import: bool = False) -> Iterator[ast.stmt]:
    """The statements of a module; only those that run at import: not the bodies of functions, and of
    `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if only_at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if only_at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.stmt):
            yield node
        waiting.extend(ast.iter_child_nodes(node))


def _imported(*statements: ast.stmt) -> set[str]:
    """The modules that `statements` import, without what follows the first dot; our own ones, relative or not, by
    their bare name."""
    names: set[str] = set()
    for node in statements:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.name for alias in node.names)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("name", PURE_MODULES)
def test_protocol_and_consensus_touch_no_socket_thread_or_clock(name: str) -> None:
    own = {path.stem: path for path in MODULES}
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            imported = _imported(*_statements(_parse(own[module])))
            assert not imported & IMPURE_IMPORTS, f"{module}.py"
            waiting.extend(imported & own.keys())
    assert seen == {name, "_vocabulary"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_imports_the_standard_library_and_its_own_kind(path: Path) -> None:
    own = {module.stem for module in MODULES}
    imported = _imported(*_statements(_parse(path), only_at_import=True))
    assert imported <= sys.stdlib_module_names | own
    if path.name in CORE:
        assert imported & own <= {name.removesuffix(".py") for name in CORE}, "the core works alone"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_own_modules_are_imported_by_layout_not_by_trial(path: Path) -> None:
    own = {module.stem for module in MODULES}
    tree = _parse(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type is not None)
            if "ImportError" in caught or "ModuleNotFoundError" in caught:
                assert not _imported(*_statements(node)) & own, f"line {node.lineno}: branch on `if __package__:`"
    # Every import of our own is in one of the two branches, relative in the first and absolute in the second. What is
    # for the type checker alone is never run.
    tests = {"__package__": (set[int](), set[int]()), "TYPE_CHECKING": (set[int](), set[int]())}
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in tests:
            for ids, branch in zip(tests[ast.unparse(node.test)], (node.body, node.orelse), strict=True):
                ids.update(id(child) for statement in branch for child in ast.walk(statement))
    relative, absolute = tests["__package__"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert id(node) in relative, f"line {node.lineno}: a relative import outside `if __package__:`"
        elif isinstance(node, ast.Import | ast.ImportFrom) and _imported(node) & own:
            known = absolute | tests["TYPE_CHECKING"][0]
            assert id(node) in known, f"line {node.lineno}: an absolute import of our own outside its `else:`"


# Modules that CPython has gained since 3.11, which `sys.stdlib_module_names` of an older interpreter does not list.
# A flat module of such a name is never found: the interpreter has imported its own before it looks at the path.
NEWER_STANDARD_MODULES = frozenset(
    {"_colorize", "_hmac", "_interpreters", "_opcode_metadata", "_types", "_zstd", "annotationlib", "compression"}
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_module_has_the_name_of_a_standard_one(path: Path) -> None:
    assert path.stem not in sys.stdlib_module_names | NEWER_STANDARD_MODULES


@pytest.mark.parametrize(
    "path",
    sorted([*PROJECT.glob("*.py"), *TESTS.glob("*.py"), *PROJECT.glob("examples/*.py")]),
    ids=lambda path: path.relative_to(PROJECT).as_posix(),
)
def test_every_file_names_its_licence_first(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")
