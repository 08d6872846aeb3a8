"""Reads the repository's own source text: which files, which functions, which imports."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_C_NOT_CODE = re.compile(
    r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:\\\n|[^\n])*",
    re.DOTALL | re.MULTILINE,
)


def repository_files() -> list[str]:
    """Paths of what git holds or would add, links included, relative to the root."""
    # The repository may belong to another user than the one who runs the tests.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    return sorted(path for path in set(listing.split("\0")) if path and _exists(ROOT / path))


def _exists(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def text_of(path: str) -> str | None:
    """A file's text, or None for a link or a binary file."""
    if (ROOT / path).is_symlink():
        return None
    content = (ROOT / path).read_bytes()
    return None if b"\0" in content else content.decode()


def python_functions(source: str) -> Iterator[tuple[str, int]]:
    """Name and length in lines of every function, nested ones too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def c_functions(source: str) -> Iterator[tuple[str, int]]:
    """Name and length in lines of every function definition, from its type to its last brace."""
    code = _C_NOT_CODE.sub(lambda match: "\n" * match.group().count("\n"), source)
    depth, declared_at, begins_at, name = 0, 0, 0, ""
    for mark in re.finditer(r"[{};]", code):
        if mark.group() == "{":
            if depth == 0:
                declaration = code[declared_at : mark.start()]
                name = _declared_function(declaration)
                begins_at = mark.start() - len(declaration.lstrip())
            depth += 1
        elif mark.group() == "}":
            depth -= 1
            if depth == 0 and name:
                yield name, code.count("\n", begins_at, mark.start()) + 1
        if depth == 0:
            declared_at = mark.end()


def _declared_function(declaration: str) -> str:
    """The function that this text before a brace declares, or nothing."""
    without_attributes = re.sub(r"__attribute__\s*\(\(.*?\)\)", "", declaration, flags=re.DOTALL)
    match = re.search(r"(\w+)\s*\([^{}]*\)\s*$", without_attributes)
    return match.group(1) if match else ""


def imported_modules(source: str) -> Iterator[str]:
    """Names of everything imported anywhere in a module; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reads_environment(source: str) -> bool:
    """Whether a Python module touches the environment through `os`."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    return any(
        (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.alias) and node.name in names)
        for node in ast.walk(ast.parse(source))
    )


def module_name(path: str) -> str:
    """The dotted name under which a source file of the package is imported."""
    parts = list(Path(path).with_suffix("").parts)
    if parts[0] != "polyneuron" and parts[0] != "tests":
        parts.insert(0, "polyneuron")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
