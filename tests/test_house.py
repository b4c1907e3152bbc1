"""The rules of the source tree: which package may import which, and what its
messages may name.
"""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
ORDER = ["storage_formats", "edje_index", "pipelines", "benchmarks"]
# The only places that may import a library at all; a folder includes everything below
# it.
HOMES = {
    "ray": ["pipelines/engines"],
    "faiss": [
        "edje_index/indexing/faiss_build.py",
        "edje_index/indexing/faiss_index.py",
        "edje_index/search/duplicates.py",
    ],
    "click": ["pipelines/cli", "benchmarks/cli.py"],
    # storage_formats stays light: `TokenStore.fetch` imports torch when it is asked for
    # a tensor.
    "torch": ["storage_formats/token_store.py", "edje_index", "benchmarks"],
    "open_clip": ["edje_index"],
    "transformers": ["edje_index"],
    "rich": ["pipelines"],
    "langchain_core": ["edje_index/integrations/langchain.py"],
    "llama_index": ["edje_index/integrations/llama_index.py"],
    "pydantic": [
        "edje_index/integrations",
        "edje_index/training/config.py",
        "pipelines/jobs/training",
        "pipelines/service",
    ],
    "fastapi": ["pipelines/service"],
    "uvicorn": ["pipelines/service"],
    "mcp": ["pipelines/service/mcp.py"],
}


def modules():
    return sorted(path for package in ORDER for path in (REPO / package).rglob("*.py"))


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


@functools.cache
def imported_names(path):
    """Dotted names of everything that a file imports, at its top or inside its
    functions.
    """
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported(path):
    """Top-level names of everything that a file imports."""
    return {name.split(".")[0] for name in imported_names(path)}


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_one_way(package):
    above = {*ORDER[ORDER.index(package) + 1 :], "tests"}
    for path in (REPO / package).rglob("*.py"):
        assert not imported(path) & above, path
        for library in imported(path) & HOMES.keys():
            homes = [REPO / home for home in HOMES[library]]
            assert any(path == home or home in path.parents for home in homes), (
                f"{path} imports {library}"
            )


HEAVY = [
    "torch",
    "ray",
    "faiss",
    "zarr",
    "pyarrow",
    "numba",
    "open_clip",
    "transformers",
    "PIL",
    "rich",
    "pydantic",
]


IMPORTS = """
import sys, click
import storage_formats, edje_index, pipelines
from pipelines.cli.main import cli
def options(command):
    if not isinstance(command, click.Group):
        return len(command.params)
    names = command.list_commands(None)
    return sum(options(command.get_command(None, name)) for name in names)
print(options(cli) > 100, sorted(sys.modules))
"""


def test_packages_and_the_options_of_all_commands_load_nothing_heavy():
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.startswith("True")
    loaded = re.findall(r"'(\w+)'", done.stdout)
    assert not {*HEAVY, "numpy"} & {*loaded}


def part_of(module):
    """The second-level part that a module belongs to: `edje_index.models.adapter`
    is of `edje_index.models`.
    """
    return ".".join(module.split(".")[:2])


def imported_parts(path):
    """Second-level parts of the file's own top-level package that it imports,
    itself excluded.
    """
    relative = path.relative_to(REPO).with_suffix("").parts
    parts = {
        part_of(name)
        for name in imported_names(path)
        if name.startswith(f"{relative[0]}.")
    }
    return parts - {part_of(".".join(relative))}


@pytest.mark.parametrize("package", ORDER[:3])
def test_parts_of_a_package_import_one_another_without_cycles(package):
    parts: dict[str, set[str]] = {}
    for path in (REPO / package).rglob("*.py"):
        # exports the public names of all parts
        if path != REPO / package / "__init__.py":
            part = part_of(".".join(path.relative_to(REPO).with_suffix("").parts))
            parts.setdefault(part, set()).update(imported_parts(path))
    # raises CycleError
    graphlib.TopologicalSorter(parts).prepare()


FLAG = re.compile(r"(?<![\w-])--[a-z]")


def messages(path):
    """Every string of a file that is neither a docstring nor an argument of another
    program.
    """
    tree = parsed(path)
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if not is_text or id(node) in docstrings:
            continue
        if not re.fullmatch(r"--\S+", node.value):
            yield node.value


def test_messages_of_the_library_name_no_flag():
    """A library function is called from Python as well: its errors name parameters,
    the command line names flags.
    """
    naming = [
        (name, text)
        for path in modules()
        if not (name := str(path.relative_to(REPO))).startswith(
            ("pipelines/cli/", "benchmarks/")
        )
        for text in messages(path)
        if FLAG.search(text)
    ]
    assert naming == []


PARQUET_READERS = {
    "ParquetDataset",
    "ParquetFile",
    "read_metadata",
    "read_pandas",
    "read_schema",
    "read_table",
}


def test_one_module_reads_parquet_files():
    """Threads of pyarrow can abort the interpreter at its exit, so only the module
    that starts none reads Parquet.
    """
    home = REPO / "storage_formats" / "format" / "parquet.py"
    others = [
        path
        for path in modules()
        if path != home and REPO / "benchmarks" not in path.parents
    ]
    users = [
        (path, node.lineno)
        for path in others
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and node.attr in PARQUET_READERS
        and isinstance(node.value, ast.Name)
        and node.value.id in ("pq", "parquet")
    ]
    assert users == []
    names = set().union(*map(imported_names, others))
    assert not names & {f"pyarrow.parquet.{reader}" for reader in PARQUET_READERS}
    assert not {name for name in names if name.startswith("pyarrow.dataset")}
