"""The commands and the Python code of README, tutorial and guides run, in order, on
a tiny model and small photos.
"""

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from importlib.util import find_spec

import click
import numpy as np
import pytest
import torch

from pipelines.cli.main import cli
from tests.command_line import environment
from tests.conftest import REPO

pytestmark = pytest.mark.slow
GUIDES = (
    "tutorial install build video change quantize search fetch evaluate own-encoder"
    " train serve sources object-store integrations cluster"
)
PAGES = [REPO / "README.md", *(REPO / "docs" / f"{name}.md" for name in GUIDES.split())]
# beginnings of the commands that are left out here
NOT_RUN = (
    # tests/smoke.py runs it
    "model get",
    # test_services.py and tests/pipelines/service run them; they do not end
    "serve",
    "show",
    # tests/benchmarks run the benchmarks
    "bench",
    # models from a hub
    "model import checkpoint.pth",
    "model features",
    "build dataset_coco.json --out data.edje",
    "build photos --out siglip2.edje",
    "eval siglip2.edje",
    # tests/integration train tiny models; the guides take hours
    "train data.edje",
    "build captions_",
    "train more.edje",
    "build photos --out tuned.edje",
    "search tuned.edje",
    # the embeddings of the tiny model have 24 values
    "ann build photos.edje --ann IVF4096,PQ96x4fs",
    # tests/integration start a Ray cluster
    "build ~/photos --out photos.edje --model model --address",
    "build /shared/photos",
)


def blocks(page):
    """Indented code blocks of a page, with the indentation removed."""
    for match in re.finditer(r"(?:^(?:    .*|)\n)+", page.read_text(), re.MULTILINE):
        if match[0].strip():
            yield textwrap.dedent(match[0]).strip("\n")


def commands(page):
    """Lines `edje-index ...` of the code blocks of a page, and lines that pass the
    output of another program to it.
    """
    text = "\n".join(blocks(page)).replace("\\\n", " ")
    return [
        line
        for line in text.splitlines()
        if line.startswith("edje-index ") or " | edje-index " in line
    ]


def python_code(page):
    """Code blocks of a page that are Python, as far as they import what they use."""
    return [
        text
        for text in blocks(page)
        if re.search(r"^(from|import) \w", text, re.MULTILINE)
        and not re.search(r"^(edje-index|pip|make) ", text, re.MULTILINE)
    ]


def left_out(line):
    rest = line.removeprefix("edje-index ").strip() + "\n"
    return rest.startswith(NOT_RUN)


def words_of(line, home):
    """Arguments of a command, as the shell gives them, without Ray."""
    words = [
        re.sub(r"^(~|/mnt)/", f"{home}/", word)
        for word in shlex.split(line, comments=True)[1:]
    ]
    command = cli.get_command(click.Context(cli), words[0])
    options = [name for each in command.params for name in each.opts]
    if "--engine" in options and "--engine" not in words:
        words += ["--engine", "inline"]
    return words


def run_pipe(line, home):
    """Run a line with a pipe as a shell does, without Ray."""
    own = (
        f'edje-index() {{ {shlex.quote(sys.executable)} -m pipelines.cli "$@" --engine'
        " inline; }\n"
    )
    subprocess.run(
        ["bash", "-c", f"set -o pipefail\n{own}{line}"],
        cwd=home,
        env=environment(),
        check=True,
    )


def run_line(line, home, run):
    if " | edje-index " in line:
        return run_pipe(line, home)
    words = words_of(line, home)
    if words[0] in ("build", "merge", "import-arrays"):
        shutil.rmtree(home / words[words.index("--out") + 1], ignore_errors=True)
    run.ok(*words)


NEED_SERVERS = {"sources", "object-store"}
WITH_COMMANDS = [page for page in PAGES if not all(map(left_out, commands(page)))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page, home, run, request):
    if page.stem in NEED_SERVERS:
        request.getfixturevalue("servers")
    for line in commands(page):
        if not left_out(line):
            run_line(line, home, run)


NAMES = {
    "fetch": {"pools": [[1, 2], [3, 17]]},
    "own-encoder": {
        "batches": [
            (
                np.ones((2, 64, 384), np.float32),
                np.eye(2, 512, dtype=np.float32),
                ["a", "b"],
            )
        ],
        "query_vectors": np.ones((3, 384), np.float32),
        "query_embedding": np.ones(512, np.float32),
    },
}
# those that the tests do without: what a block of code contains, and the module that it
# needs
LIBRARIES = [
    ("import sentence_transformers", "sentence_transformers"),
    ("import Dataset", "datasets"),
    ("to_pandas()", "pandas"),
    ("integrations.langchain", "langchain_core"),
    ("integrations.llama_index", "llama_index"),
]
# that of train trains for an hour, and test_services.py runs that of serve
WITH_PYTHON = [
    page for page in PAGES if python_code(page) and page.stem not in ("train", "serve")
]


def multi_vector_encoder(folder):
    """A tiny multi-vector model of sentence-transformers."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from transformers import BertConfig, BertModel, BertTokenizer

    torch.manual_seed(0)
    words = ["two", "dogs", "play", "in", "the", "snow", "a", "red", "canoe"]
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
    )
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    BertModel(BertConfig(vocab_size=len(words) + 5, **sizes)).save_pretrained(
        folder / "bert"
    )
    return MultiVectorEncoder(
        modules=[Transformer(str(folder / "bert")), MultiVectorMask(), Normalize()]
    )


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_the_python_code_of_a_page_runs(page, template, home, run, request):
    if page.stem in NEED_SERVERS:
        request.getfixturevalue("servers")
        run_line("edje-index copy photos.edje s3://my-bucket/photos.edje", home, run)
    if page.stem == "own-encoder":
        # the first block reads the index that the commands of the page write
        run.ok("import-arrays", "tokens.npy", "embeddings.npy", "--out", "pages.edje")
    names = dict(NAMES.get(page.stem, {}))
    for code in python_code(page):
        if any(text in code and not find_spec(name) for text, name in LIBRARIES):
            continue
        shutil.rmtree(home / "photos.edje", ignore_errors=True)
        if "IndexWriter.create(" in code:
            shutil.rmtree(home / "pages.edje", ignore_errors=True)
        if '"multi-vector-model"' in code:
            multi_vector_encoder(home).save("multi-vector-model")
        if "build_index(" not in code:
            shutil.copytree(template / "photos.edje", home / "photos.edje")
        code = code.replace("/photos/12.jpg", str(template / "photos/00012.png"))
        exec(compile(code, str(page), "exec"), names)
