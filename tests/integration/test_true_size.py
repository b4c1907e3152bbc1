"""The paper's model at its true size, with random weights: from a repository of
transformers to a search, in the memory and time of a laptop.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from edje_index.bundles.random_bundle import untrained_tokenizer
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.filesystem import write_json
from tests.command_line import command, environment
from tests.edje_index.published_cases import Case, _config, _state
from tests.edje_index.siglip_cases import write_siglip
from tests.pipelines.conftest import write_photo

prepare_torchvision()

from transformers import SiglipConfig, SiglipModel  # noqa: E402

PHOTOS = 8
TEXTS = ["a red dog", "car on the beach"]
GIB = 1 << 30
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
}


def write_towers(folder, tower, size, words):
    """SigLIP2 towers as transformers saves them, with random weights."""
    width = tower["hidden_size"]
    config = SiglipConfig(
        text_config={**tower, "vocab_size": words, "projection_size": width},
        vision_config={**tower, "image_size": size, "patch_size": 16},
    )
    torch.manual_seed(0)
    write_siglip(folder, SiglipModel(config).eval(), size=size)


def write_published(folder, tower):
    """MiniLM-L12-H384 with an adapter of 64 tokens, as the published trainer saves."""
    tokenizer = untrained_tokenizer(30_000)
    case = Case(
        tokens=64,
        vision_dim=tower["hidden_size"],
        width=384,
        heads=12,
        layers=12,
        hidden=8192,
        positions=512,
        words=len(tokenizer),
    )
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(folder / "tokenizer")
    write_json(folder / "tokenizer" / "config.json", _config(case).to_dict())
    state = _state(case)
    # that state is for narrow layers; tokens of NVFP4 are at most 336
    for name, tensor in state.items():
        if name.startswith("vision_projection.") and tensor.ndim == 2:
            state[name] = torch.randn_like(tensor) / tensor.shape[1] ** 0.5
    torch.save({"model": state, "config": {"k": 10}}, folder / "edje.pth")


def measured(*arguments):
    """Run `edje-index ARGUMENTS --json`. Return its object, and its seconds and peak
    memory in GiB.
    """
    started = time.monotonic()
    with started_command(*arguments, "--json") as process:
        printed = process.stdout.read()
        usage = ended(process)
    return json.loads(printed), {
        "seconds": round(time.monotonic() - started, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gib": peak_gib(usage),
    }


def started_command(*arguments):
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, text=True, env=environment()
    )


def ended(process):
    """What a process has used, which ends without an error."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage


def peak_gib(usage):
    return round(usage.ru_maxrss * 1024 / GIB, 2)


@pytest.mark.slow
def test_the_paper_s_model_at_its_true_size(tmp_path):
    # a process starts with the peak memory of the one that starts it, so that large
    # models are made elsewhere
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
        elsewhere.submit(
            write_towers, tmp_path / "siglip2", LARGE, 384, 256_000
        ).result()
        elsewhere.submit(write_published, tmp_path / "run", LARGE).result()
    photos = tmp_path / "photos"
    for seed in range(PHOTOS):
        write_photo(photos / f"{seed}.jpg", seed)
    bundle = tmp_path / "model"
    index = tmp_path / "photos.edje"
    source = (tmp_path / "run/edje.pth", "--vision", tmp_path / "siglip2")
    options = ("--model", bundle, "--out", index, "--engine", "inline")
    search = (TEXTS[0], "-k", str(PHOTOS), "--precision", "nvfp4")
    figures = {}
    imported, figures["import"] = measured("model", "import", *source, "--out", bundle)
    assert imported["trained"]
    files = (each for each in bundle.rglob("*") if each.is_file())
    figures["import"]["bundle_bytes"] = sum(each.stat().st_size for each in files)
    built, figures["build"] = measured("build", photos, *options)
    assert built["indexed"] == PHOTOS
    figures["build"]["seconds_per_photo"] = 1 / built["images_per_second"]
    _, figures["quantize"] = measured("quantize", index, "--to", "nvfp4")
    found, figures["search"] = measured("search", index, *search)
    assert len(found["hits"]) == PHOTOS
    figures["serve"] = served(index)
    print(json.dumps(figures, indent=1))
    for step, each in figures.items():
        assert each["peak_gib"] < 24, step
    assert figures["build"]["seconds"] < 600


def served(index):
    """Seconds of a search in a running service, after the first one, and its peak
    memory.
    """
    with started_command("serve", index, "--port", "0") as process:
        url = process.stdout.readline().strip()
        times = []
        for query in ("a dog", *TEXTS, "snow"):
            started = time.monotonic()
            assert len(hits_of(url, query)) == PHOTOS
            times.append(time.monotonic() - started)
        process.send_signal(signal.SIGTERM)
        usage = ended(process)
    seconds = round(sorted(times[1:])[1], 3)
    return {"seconds_per_search": seconds, "peak_gib": peak_gib(usage)}


def hits_of(url, query):
    """The hits of a query, from a service."""
    body = json.dumps({"query": query}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/search", body, headers)
    with urllib.request.urlopen(request) as answer:
        return list(json.load(answer)["hits"])
