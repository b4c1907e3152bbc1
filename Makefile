# These commands do everything on a machine that has Python 3.11 or newer, git and make:
#   make demo      index a folder of photos with a trained model, then quantize, verify, fetch and search
#   make test      run the linters and the tests
#   make docs      build the site of the documentation in site/; a broken link is an error
#   make release   build wheel and sdist in dist/, and try them with each extra
#   make gpu-check compare results of a GPU with those of the CPU, and its rates with its limits
#   make image     build the container image of the service with docker, and try it
# They create the virtual environment .venv and install the extras that they need; pip shows each package as it comes.

PYTHON ?= python3
VENV ?= .venv
DEMO ?= .demo
CONTAINER_TOOL ?= docker
BIN := $(VENV)/bin
# scikit-image ships photos with its wheel, so the demo needs no network beyond the package registry.
PHOTOS = $$($(BIN)/python -c "import pathlib, skimage; print(pathlib.Path(skimage.__file__).parent / 'data')")

.PHONY: demo docs release gpu-check image test suite test-slow oracles lint clean

$(VENV)/bin/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'error: Python 3.11 or newer is needed, not ' + \
	  sys.version.split()[0] + '; name it: make PYTHON=python3.12 $(MAKECMDGOALS)')"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV), once: torch, Ray, FAISS and others"
	$(BIN)/python -m pip install --editable '.[demo]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV), once: torch, Ray, FAISS, linters, oracles"
	$(BIN)/python -m pip install --editable '.[demo,test]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV), once: MkDocs and others"
	$(BIN)/python -m pip install --editable '.[docs]'
	@touch $@

$(VENV)/.release: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV), once: build, twine, uv"
	$(BIN)/python -m pip install --editable '.[release]'
	@touch $@

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html in a browser."

# 14 photos of scikit-image, and four crops of each, because 14 candidates are too few to re-rank.
demo: $(VENV)/.demo
	test -d $(DEMO)/model || $(BIN)/edje-index model get --out $(DEMO)/model
	test -d $(DEMO)/crops || $(BIN)/python -c "from pathlib import Path; from models.crops import write_crops; \
	  write_crops(Path('models/demo.jsonl'), images=Path('$(PHOTOS)'), size=384, out=Path('$(DEMO)/crops'))"
	$(BIN)/edje-index build $(DEMO)/crops/list.jsonl --out $(DEMO)/photos.edje --model $(DEMO)/model --engine inline
	$(BIN)/edje-index quantize $(DEMO)/photos.edje --to fp8 --to nvfp4
	$(BIN)/edje-index verify $(DEMO)/photos.edje
	$(BIN)/edje-index info $(DEMO)/photos.edje
	$(BIN)/python -c "from storage_formats import TokenStore; store = TokenStore.open('$(DEMO)/photos.edje', 'fp8'); \
	  blocks = store.fetch([3, 0]); print('fetched', blocks.shape, blocks.dtype, 'of', len(store), 'rows')"
	$(BIN)/edje-index search $(DEMO)/photos.edje "a tower at night" -k 8 --html $(DEMO)/tower.html
	@echo
	@echo "Open $(DEMO)/tower.html in a browser: by embedding, a brick wall comes first; re-ranking moves a rocket and the"
	@echo "towers of its launch site to the top. The query was chosen because re-ranking helps it. It spoils others of these 14 photos and 56 crops:"
	@echo "models/flickr8k-dinov2-small/MODEL_CARD.md says how often it helps. Then try:"
	@echo "  $(BIN)/edje-index search $(DEMO)/photos.edje \"a man in black\" --html man.html"
	@echo "  $(BIN)/edje-index build ~/Pictures --out pictures.edje --model $(DEMO)/model"

# Takes about ten minutes. Without a GPU, everything runs on the CPU, and the report says so.
gpu-check: $(VENV)/.demo
	$(BIN)/edje-index bench gpu $(PHOTOS) --report benchmarks/results

# Each extra has a clean environment, in which commands run that need the extra.
release: $(VENV)/.release
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m tests.smoke dist/*.whl
	$(BIN)/python -m tests.smoke dist/*.tar.gz --extra ''

# The image, and a search of the index of the first release in it, with the options that docs/serve.md gives.
# `make image CONTAINER_TOOL=podman` uses podman.
image:
	$(CONTAINER_TOOL) build --file deploy/Dockerfile --tag edje-index .
	rm -rf build/image
	mkdir -p build
	cp -r tests/golden/release_0_1 build/image
	$(BIN)/edje-index upgrade build/image/index
	$(CONTAINER_TOOL) run --rm --read-only --tmpfs /tmp --cap-drop ALL --volume "$(CURDIR)/build/image:/data:ro" \
	  --entrypoint /opt/edje-index/bin/edje-index edje-index search /data/index "a dog" --model /data/model -k 2

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint suite

# The tests without the linters, for further versions of Python:
# make suite VENV=.venv-newest PYTHON=python3.13
suite: oracles
	$(BIN)/python -m pytest

# torchao is an oracle of the block formats. It stays out of the environment, because transformers would load it.
oracles: $(VENV)/.test
	test -d $(VENV)/torchao || $(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/torchao 'torchao==0.18.*'
	PYTHONPATH=$(VENV)/torchao TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1 $(BIN)/python -m pytest -q tests/storage_formats/test_codecs_oracles.py

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) .venv-newest $(DEMO)
