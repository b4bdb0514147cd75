# Two commands for everybody: `make demo` and `make test`. Each makes what it needs, in .venv, from the committed pins.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := build/peers
FLOWER := build/flower
# packages are installed without compiling them all (see below), so what is loaded must be kept once it is compiled
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-flower test-attacks quick lint docs bits peers wheel clean

demo: $(VENV)/ready
	$(BIN)/weft demo

test: $(VENV)/ready-to-test lint
	$(BIN)/pytest -q -n 2 -m "not long"

# also the 100,000 damaged messages, 24 clients with faults, every mode killed, whole benchmarks, exported models, all docs
test-all: $(VENV)/ready-to-test lint
	$(BIN)/pytest -q -n 2

# real hubs and sites on loopback, killed and refused, and all that a message may do to them; Flower pins what others need
# newer, so in an environment of its own
test-flower: $(FLOWER)/ready
	$(FLOWER)/bin/pytest -q -n 2 --dist loadgroup tests/flower tests/test_fuzz.py tests/test_faults.py \
		tests/test_supervisor.py tests/test_site_state.py

# what a lying hub, a lying site, a hostile folder or a failing disk could do, and the long tests of damaged files; those that
# need Flower run in its environment
test-attacks: $(VENV)/ready-to-test $(FLOWER)/ready
	$(BIN)/pytest -q -n 2 -m attack
	$(FLOWER)/bin/pytest -q -n 2 --dist loadgroup -m attack tests/flower

quick: $(VENV)/ready-to-test
	$(BIN)/pytest -q -n 2 -m "not slow and not long"

lint: $(VENV)/ready-to-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# the documentation site, into build/site; the variable turns off mkdocs-material's announcement of its successor
docs: $(VENV)/ready-to-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# run the same small plans with commit BASE and with this tree: accuracies and tensors must be equal to the bit
bits: $(VENV)/ready
	@[ -n "$(BASE)" ] || { echo "make bits: name the commit to compare with: make bits BASE=COMMIT" >&2; exit 2; }
	rm -rf build/bits && git worktree prune
	git worktree add --quiet --detach build/bits/base "$(BASE)"
	$(BIN)/python tests/bits.py run build/bits/base build/bits/old
	$(BIN)/python tests/bits.py run . build/bits/new
	$(BIN)/python tests/bits.py compare build/bits/old build/bits/new
	git worktree remove --force build/bits/base

# --no-compile: what is loaded is compiled then, and most of torch never is; it saves a minute
# torch first and by itself, at its exact version: an open range would bring gigabytes of CUDA packages along
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("weft needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt hatchling editables
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable .
	$(BIN)/python -c "import torch, weft.cli.app, weft.runs.session, weft.core.client"
	touch $@

$(VENV)/ready-to-test: $(VENV)/ready
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt \
		pytest pytest-xdist hypothesis pandas scipy matplotlib tensorboard selenium onnx onnxscript onnxruntime ruff mypy \
		mkdocs mkdocs-material "mkdocstrings[python]"
	@command -v chromedriver > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null \
		&& apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core > /dev/null; } \
		|| echo "no Chromium here (Debian: apt-get install chromium chromium-driver): the pages are not tested in a browser" >&2
	touch $@

$(FLOWER)/ready: pyproject.toml constraints-flower.txt
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints-flower.txt \
		"$$(grep '^torch==' constraints-flower.txt)" hatchling editables
	$(FLOWER)/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints-flower.txt \
		--no-build-isolation --editable ".[flower]" pytest pytest-xdist hypothesis
	@command -v nginx > /dev/null || [ -x /usr/sbin/nginx ] || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null \
		&& apt-get update -qq && apt-get install -y -qq --no-install-recommends nginx-light > /dev/null; } \
		|| echo "no nginx here (Debian: apt-get install nginx-light): what it hides is NOT tested" >&2
	touch $@

# a wheel as `python -m build` makes it, installed where there is nothing else, running the demo from an empty folder
wheel: $(VENV)/ready
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt build
	rm -rf dist build/wheel build/empty
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt \
		"$$(grep '^torch==' constraints.txt)"
	build/wheel/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt dist/weft-*.whl
	mkdir -p build/empty
	cd build/empty && ../wheel/bin/weft demo
	cd build/empty && ../wheel/bin/python -c "import weft.benchmarks.suite"  # from the wheel, not from the source tree

# what users would pick instead, in an environment of its own: for `weft bench --peers`
peers: $(PEERS)/ready

$(PEERS)/ready: constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --no-compile --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(PEERS)/bin/pip install --quiet --no-compile --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" "flwr[simulation]==1.41.0"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
