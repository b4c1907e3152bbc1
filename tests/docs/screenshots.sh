#!/usr/bin/env bash
# Makes the screenshots of the docs with Chromium: tests/docs/screenshots.sh MODEL [PHOTOS [OUT]]
# MODEL is a model bundle. PHOTOS are those of the demo and OUT is docs/assets unless given.
# OUT/screenshots.sha256 is the digest of the files that the pictures show; a test compares it with the current ones.
set -euo pipefail
repo=$(cd "$(dirname "$0")/../.." && pwd)
model=$(realpath "$1")
photos=${2:-$(python -c 'import pathlib, skimage; print(pathlib.Path(skimage.__file__).parent / "data")')}
out=$(realpath "${3:-$repo/docs/assets}")
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$work"' EXIT
export PYTHONPATH=$repo
cd "$work"

edje() { python -m pipelines.cli "$@" >> "$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }; }
shoot() {
    # Chromium leaves the lowest part of its window white, so the window is higher than the picture.
    chromium --headless --no-sandbox --hide-scrollbars --user-data-dir="$work/profile" --window-size="1280,$(($3 + 150))" \
        --virtual-time-budget=30000 --screenshot="$work/$1.png" "$2" >> "$work/log" 2>&1
    python -c 'import sys; from PIL import Image; Image.open(sys.argv[1]).crop((0, 0, *map(int, sys.argv[3:]))).save(sys.argv[2])' \
        "$work/$1.png" "$out/$1.webp" "${4:-1280}" "$3"
}

edje build "$photos" --out photos.edje --model "$model" --engine inline
edje search photos.edje "a motorcycle" -k 5 --html before-after.html
edje explain photos.edje 20 --out explain.html
python -c 'from edje_index import TokenIndex; print(TokenIndex.open("photos.edje").search("a motorcycle", k=3)._repr_html_())' > hits.html
python -m pipelines.cli serve photos.edje --port 0 > address 2>> log &
server=$!
until [ -s address ]; do kill -0 "$server"; sleep 0.2; done
shoot page "$(cat address)/?q=a+motorcycle" 760
shoot before-after "file://$work/before-after.html" 620
shoot explain "file://$work/explain.html" 620
shoot hits "file://$work/hits.html" 370 370  # without the column of the paths
cat "$repo"/pipelines/service/static/*.* "$repo"/pipelines/pages/templates/*.{html,css} "$repo"/edje_index/search/hits.html | sha256sum > "$out/screenshots.sha256"
