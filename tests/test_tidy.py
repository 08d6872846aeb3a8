"""The code about itself: budgets, layers, and what may be used where.

Each rule has its exceptions beside it, each with its reason.
"""

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.support.sources import (
    ROOT,
    c_functions,
    imported_modules,
    module_name,
    python_functions,
    reads_environment,
    repository_files,
    text_of,
)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_LINE_COLUMNS = 100
MAX_FILE_BYTES = 1 << 20

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}

PRODUCT_FOLDERS = ("polyneuron", "actors", "kernels", "io", "scenarios")
LINKED_FOLDERS = ("actors", "io", "kernels", "scenarios")
TOP_LEVEL = {
    *PRODUCT_FOLDERS, "tests", "docs", ".ci", "README.md", "LICENSE", "CHANGELOG.md", "Makefile",
    "pyproject.toml", "setup.py", "MANIFEST.in", ".gitignore",
}  # fmt: skip

# Lowest first: a module imports from its own layer and those before it.
LAYERS = (
    {"errors", "clock", "config", "timeline", "timeline_events", "timeline_hold", "sizes"},
    {"host_memory", "cgroups", "cores", "core_use"},
    {"kernels"},
    {"backends"},
    {"io"},
    {"model"},
    {"synth"},
    {"planning"},
    {"actors"},
    {"", "engine", "mode"},  # the package itself only re-exports the engine
    {"measure", "profiling", "tracing"},
    {"serve", "cli", "__main__"},
)
LAYER_OF = {name: index for index, names in enumerate(LAYERS) for name in names}

RAY_MODULES = {
    "actors/shells.py": "the actors' Ray side",
    "actors/coordinator_shell.py": "the coordinator's Ray side, apart from the others for its size",
    "actors/launch.py": "makes actors of the shells",
    "actors/readers.py": "the I/O actor's endless calls as the coordinator sees them",
    "actors/cluster.py": "starts and stops Ray",
    "actors/ray_internals.py": "the one place that leans on Ray's private names",
    "actors/worker_entry.py": "what Ray's worker processes run first",
    "actors/worker_nursery.py": "imports Ray once for all workers",
    "scenarios/ray_turns.py": "tasks of somebody's own cluster",
}
IMPURE_ACTOR_MODULES = {
    **RAY_MODULES,
    "actors/arena.py": "maps shared memory",
    "actors/guards.py": "environment and signals while Ray runs",
    "actors/pending_change.py": "wakes the coordinator's loop",
    "actors/private_dir.py": "Ray's folder on disk",
    "actors/process_stats.py": "reads /proc",
    "actors/supervisor.py": "watches and ends processes",
}
NOT_IN_STATES = {"ray", "time", "random", "asyncio", "threading", "os"}
ENVIRONMENT_READERS = {
    "polyneuron/config.py": "the twins of the command-line flags",
    "kernels/isa.py": "the instruction set a test forces",
    "actors/guards.py": "Ray's own variables, set for one cluster and taken back",
    "actors/ray_internals.py": "hands Ray's workers their script",
    "actors/worker_entry.py": "takes the script handed over",
    "actors/worker_nursery.py": "gives each worker the environment it was started with",
}
C_ENVIRONMENT_READERS = {"kernels/src/dispatch.c": "the instruction set a test forces"}

# Written so that neither pattern finds itself.
LEFT_OPEN = re.compile(r"\b(?:TOD[O]|FIXM[E]|XX[X])\b", re.IGNORECASE)
MACHINE_PATH = re.compile(r"(?<![\w.~>)}-])/(?:work|home|root|farm)(?![\w-])")

FILES = repository_files()
SOURCES = [path for path in FILES if path.split("/")[0] in (*PRODUCT_FOLDERS, "tests")]
PYTHON = [path for path in SOURCES if path.endswith(".py")]
STUBS = [path for path in SOURCES if path.endswith(".pyi")]
C_CODE = [path for path in SOURCES if path.endswith((".c", ".h"))]
PAGE_CODE = [path for path in SOURCES if path.endswith((".css", ".html", ".js"))]
PRODUCT_PYTHON = [path for path in PYTHON if not path.startswith("tests/")]
ACTOR_MODULES = [path for path in PYTHON if path.startswith("actors/")]


def source(path: str) -> str:
    return (ROOT / path).read_text()


def expect_none(found: Iterable[str]) -> None:
    """Fail with all that was found, one a line."""
    listing = sorted(found)
    assert not listing, "\n" + "\n".join(listing)


def layer_name(module: str) -> str:
    """The part of the package a dotted name belongs to; empty for the package itself."""
    parts = module.split(".")
    known = len(parts) > 1 and (parts[1] in LAYER_OF or parts[1] == "scenarios")
    return parts[1] if known else ""


def package_imports(path: str) -> Iterator[str]:
    """The parts of polyneuron that a module imports from."""
    for name in imported_modules(source(path)):
        if name.split(".")[0] == "polyneuron":
            yield layer_name(name)


class TestBudgets:
    def test_files_are_short(self) -> None:
        lengths = {path: source(path).count("\n") for path in PYTHON + STUBS + C_CODE + PAGE_CODE}
        too_long = {path for path, lines in lengths.items() if lines > MAX_FILE_LINES}
        expect_none(too_long ^ LONG_FILES.keys())

    def test_functions_are_short(self) -> None:
        scans = [(PYTHON, python_functions), (C_CODE, c_functions)]
        too_long = {
            f"{path}:{name}"
            for paths, functions in scans
            for path in paths
            for name, lines in functions(source(path))
            if lines > MAX_FUNCTION_LINES
        }
        expect_none(too_long ^ LONG_FUNCTIONS.keys())

    def test_lines_are_short(self) -> None:
        too_long = [
            f"{path}:{number}: {len(line)}"
            for path in PYTHON + STUBS + C_CODE + PAGE_CODE
            for number, line in enumerate(source(path).splitlines(), 1)
            if len(line) > MAX_LINE_COLUMNS
        ]
        expect_none(too_long)

    def test_public_modules_say_what_they_are(self) -> None:
        public = [path for path in PYTHON if not re.search(r"/_(?!_)[^/]*$", path)]
        # An empty __init__.py, which only makes a folder of tests a package, says nothing.
        trees = {path: ast.parse(source(path)) for path in public}
        expect_none(
            path for path in public if trees[path].body and not ast.get_docstring(trees[path])
        )


class TestLayout:
    def test_top_level_holds_nothing_else(self) -> None:
        expect_none({path.split("/")[0] for path in FILES} - TOP_LEVEL)

    def test_io_is_no_regular_package(self) -> None:
        # With an __init__.py, mypy takes the folder for the standard library's io.
        assert "io/__init__.py" not in FILES

    def test_test_folders_hide_no_library(self) -> None:
        assert not any(path.startswith(("tests/io/", "tests/ray/")) for path in FILES)

    @pytest.mark.parametrize("name", LINKED_FOLDERS)
    def test_package_links_are_relative(self, name: str) -> None:
        # Type checkers know nothing of setuptools' package-dir; they follow these links.
        link = ROOT / "polyneuron" / name
        assert str(link.readlink()) == f"../{name}"
        assert link.is_dir()

    def test_make_runs_every_test(self) -> None:
        line = re.search(r"^TEST_FOLDERS := (.*)$", source("Makefile"), re.MULTILINE)
        assert line
        apart = {"tests/test_tidy.py", "tests/bench"}  # run first; run by hand
        run = {*(f"tests/{name}" for name in line.group(1).split()), *apart}
        tests = [path for path in PYTHON if path.rpartition("/")[2].startswith("test_")]
        expect_none(path for path in tests if not run & {path, "/".join(path.split("/")[:2])})


class TestImports:
    @pytest.mark.parametrize("path", PRODUCT_PYTHON)
    def test_layers_import_downwards(self, path: str) -> None:
        own = layer_name(module_name(path))
        # A scenario is replayed on a whole engine, with a model profiled for it.
        height = LAYER_OF["profiling" if own == "scenarios" else own]
        for name in package_imports(path):
            if name == "scenarios":
                assert own in {"scenarios", "cli"}
            else:
                assert LAYER_OF[name] <= height, f"{own} imports {name}"

    def test_kernels_know_only_errors(self) -> None:
        kernels = [path for path in PYTHON if path.startswith("kernels/")]
        expect_none(f"{path}: {name}" for path in kernels for name in _above_errors(path))

    def test_io_is_imported_by_module(self) -> None:
        # `from polyneuron import io` would hide the standard library's io in that module.
        expect_none(path for path in PYTHON if "polyneuron.io" in imported_modules(source(path)))

    def test_ray_stays_in_its_modules(self) -> None:
        expect_none(_importers(PRODUCT_PYTHON, {"ray"}) - RAY_MODULES.keys())

    def test_states_are_pure(self) -> None:
        expect_none(_importers(ACTOR_MODULES, NOT_IN_STATES) - IMPURE_ACTOR_MODULES.keys())

    def test_environment_is_read_in_few_places(self) -> None:
        readers = {path for path in PRODUCT_PYTHON if reads_environment(source(path))}
        expect_none(readers - ENVIRONMENT_READERS.keys())
        c_product = [path for path in C_CODE if not path.startswith("tests/")]
        c_readers = {path for path in c_product if "getenv" in source(path)}
        expect_none(c_readers - C_ENVIRONMENT_READERS.keys())


def _above_errors(path: str) -> set[str]:
    return set(package_imports(path)) - {"errors", "kernels"}


def _importers(paths: list[str], modules: set[str]) -> set[str]:
    """Which of these files import one of these modules or something inside it."""
    return {
        path
        for path in paths
        if modules & {name.split(".")[0] for name in imported_modules(source(path))}
    }


class TestRepository:
    def test_files_are_small(self) -> None:
        expect_none(path for path in FILES if (ROOT / path).lstat().st_size > MAX_FILE_BYTES)

    def test_nothing_is_left_open(self) -> None:
        expect_none(_lines_with(LEFT_OPEN, [*PYTHON, *STUBS, *C_CODE, *PAGE_CODE, "Makefile"]))

    def test_no_path_of_a_machine(self) -> None:
        expect_none(_lines_with(MACHINE_PATH, FILES))


def _lines_with(pattern: re.Pattern[str], paths: list[str]) -> Iterator[str]:
    for path in paths:
        for number, line in enumerate((text_of(path) or "").splitlines(), 1):
            if pattern.search(line):
                yield f"{path}:{number}: {line.strip()[:80]}"


class TestScanners:
    """The rules above are worth what these see."""

    def test_c_functions_are_measured(self) -> None:
        code = (
            "#define NOT(a) \\\n    do { a; } while (0)\nstruct s { int a; };\nint t[] = {1};\n"
            '/* { */\n__attribute__((target("avx2"))) static int\nf(int a)\n{\n'
            "    if (a) {\n        return '{';\n    }\n    return 0;\n}\n"
            "int g(void) { return 1; }\n"
        )
        assert list(c_functions(code)) == [("f", 8), ("g", 1)]

    def test_python_functions_are_measured(self) -> None:
        code = (
            "def f():\n    def g(): pass\n    return g\nclass A:\n    async def h(self):\n        1"
        )
        assert sorted(python_functions(code)) == [("f", 3), ("g", 1), ("h", 2)]

    def test_imports_are_found_anywhere(self) -> None:
        code = "import os.path\ndef f():\n    from polyneuron import io\n    import ray as r\n"
        assert list(imported_modules(code)) == ["os.path", "polyneuron.io", "ray"]

    @pytest.mark.parametrize(
        "code", ["os.environ['A']", "os.getenv('A')", "from os import environ"]
    )
    def test_environment_reads_are_found(self, code: str) -> None:
        assert reads_environment(code)

    @pytest.mark.parametrize("prefix", ["", "see ", '"', "file://"])
    def test_machine_paths_are_found(self, prefix: str) -> None:
        assert MACHINE_PATH.search(prefix + "/ho" + "me/someone/a.gguf")
        assert not MACHINE_PATH.search(prefix + "a/ho" + "me/someone")

    def test_open_ends_are_found(self) -> None:
        assert LEFT_OPEN.search("# TO" + "DO: later")
        assert not LEFT_OPEN.search("today's method")


class TestExceptions:
    def test_exceptions_are_still_there(self) -> None:
        listed = {*RAY_MODULES, *IMPURE_ACTOR_MODULES, *ENVIRONMENT_READERS, *C_ENVIRONMENT_READERS}
        expect_none(listed - set(FILES))
