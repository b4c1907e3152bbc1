"""Files that the guides take for granted: photos, captions, lists, arrays, and an
index of them by a tiny model.
"""

import json
import shutil
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from pipelines import build_index, delete_rows, quantize_index
from tests.conftest import REPO
from tests.edje_index.clip_cases import clip, panned

# guides fetch row 1023
ROWS = 1100


def write_guide_files(folder, bundle):
    """Photos, captions, a model, and an index with metadata and three snapshots."""
    rng = np.random.default_rng(0)
    photos = folder / "photos"
    for path in (photos / "2019", photos / "2026", folder / "shards"):
        path.mkdir(parents=True)
    paths = [
        photos / ("2019" if row < 3 else "") / f"{row:05}.png" for row in range(ROWS)
    ]
    for path in [*paths, photos / "2026/new.png", photos / "2026/lake.jpg"]:
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
    paths[9].write_bytes(b"no image")
    (folder / "some-photos").mkdir()
    for path in paths[10:50]:
        shutil.copy(path, folder / "some-photos")
    for name in ("canoe.jpg", "new.jpg"):
        shutil.copy(paths[5], folder / name)
    write_texts(folder, paths[10:50])
    write_clips(folder / "clips")
    write_tables(folder, paths)
    write_packed(folder)
    shutil.copytree(bundle, folder / "model")
    index = folder / "photos.edje"
    build_index(
        folder / "list.parquet",
        index,
        folder / "model",
        engine="inline",
        threads=1,
        column="image_path",
    )
    quantize_index(index, ["fp8", "nvfp4"])
    for row in (1001, 1002, 1003):
        delete_rows(index, rows=[row])
    shutil.copytree(index, folder / "local.edje")
    # other tokens than those of the other indexes
    quantize_index(folder / "local.edje", drop=["bf16", "fp8"])


def write_texts(folder, captioned):
    records = [
        {
            "image": str(path),
            "captions": [f"photo {path.stem} of a canoe"],
            "split": ["dev", "test"][number % 2],
        }
        for number, path in enumerate(captioned)
    ]
    (folder / "captions.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    images = [
        {
            "filename": record["image"],
            "split": record["split"],
            "sentences": [{"raw": record["captions"][0]}],
        }
        for record in records
    ]
    (folder / "dataset_coco.json").write_text(
        json.dumps({"images": images, "dataset": "coco"})
    )
    # The captions of the tutorial, whose index has the photos in `folder`.
    described = {**records[0], "image": f"photos/{captioned[0].name}"}
    (folder / "described.jsonl").write_text(json.dumps(described) + "\n")
    (folder / "queries.txt").write_text("a red canoe\ntwo dogs\n")


def write_clips(folder):
    folder.mkdir()
    for name in ("beach.mp4", "harbour.mp4"):
        (folder / name).write_bytes(clip(panned(12)))
    (folder / "beach.txt").write_text("a red canoe on a beach\n")


def write_tables(folder, paths):
    columns = {
        "image_path": [str(path) for path in paths],
        "licence": ["cc0"] * ROWS,
        "captions": [["a lake"]] * ROWS,
        "taken": pa.array([0] * ROWS, pa.timestamp("us")),
    }
    pq.write_table(pa.table(columns), folder / "list.parquet")
    with tarfile.open(folder / "shards/0000.tar", "w") as archive:
        for path in paths[10:14]:
            archive.add(path, path.name)
    for number in range(1, 128):
        shutil.copy(folder / "shards/0000.tar", folder / f"shards/{number:04}.tar")
    rng = np.random.default_rng(1)
    np.save(folder / "tokens.npy", rng.standard_normal((8, 64, 384), np.float32))
    np.save(folder / "embeddings.npy", rng.standard_normal((8, 512), np.float32))
    pq.write_table(
        pa.table({"uri": [f"page-{row}" for row in range(8)]}), folder / "rows.parquet"
    )


def write_packed(folder):
    """What other tools write: COCO captions, Hugging Face Datasets, and img2dataset."""
    golden = REPO / "tests/golden/sources"
    for name in ("coco", "data", "laion"):
        (folder / name).mkdir()
    shutil.copy(folder / "dataset_coco.json", folder / "coco")
    shutil.copy(golden / "hugging_face.parquet", folder / "data/train-00000.parquet")
    shutil.copytree(golden / "img2dataset_webdataset", folder / "out")
    shutil.copy(folder / "shards/0000.tar", folder / "laion")
