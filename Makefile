# make demo | demo-web | test | nightly | lint | bench | docs | release | clean
# Needs Python 3.11 or newer; PYTHON=... names another one.
PYTHON ?= python3
# Processes that share the tests. The tests of a file stay together, and so do their fixtures. Files
# run in their own order: ordered by number of tests, the slowest, which have few, would be last.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is written also where the environment forbids it, as in many containers: without it pytest
# rewrites the assertions of each file anew, and each process that tests start compiles the package.
PYTEST = PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(JOBS) \
  --dist loadfile --no-loadscope-reorder
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs

.PHONY: demo demo-web test nightly lint bench docs release clean

demo: $(RUN_STAMP)
	@HF_HUB_OFFLINE=1 $(BIN)/python examples/first_run.py

# The demo in a browser: http://127.0.0.1:7860
demo-web: $(RUN_STAMP)
	@HF_HUB_OFFLINE=1 $(BIN)/oscar-mm demo

test: $(RUN_STAMP)
	$(PYTEST)

# What `make test` leaves out: commands as processes, snippets of docs/, and more cases of its tests.
nightly: $(RUN_STAMP)
	$(PYTEST) -m slow

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

bench: $(RUN_STAMP)
	$(BIN)/python -m benchmarks

# The documentation as a site: build/site/index.html
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file .mkdocs.yml

# make release VERSION=1.2.3
release: $(DEV_STAMP)
	$(BIN)/python .ci/release.py $(VERSION)

# The environment stays, because it takes minutes to make. `rm -r .venv` removes it.
clean:
	rm -rf .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# venv writes pip's own script last, so an interrupted venv is made again.
$(BIN)/pip:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "$(PYTHON) not found: install Python 3.11 or newer, or pass PYTHON=/path/to/python" >&2; \
	  exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$("$(PYTHON)" -V 2>&1): 3.11 or newer is needed; pass PYTHON=/path/to/python" >&2; \
	  exit 2; }
	@"$(PYTHON)" -m venv $(VENV)

# pip shows its progress over installed packages too since 25.1.
# A stamp is written last, so that a broken install is repeated, and so is an install after
# pyproject.toml has changed.
$(RUN_STAMP): pyproject.toml | $(BIN)/pip
	@echo "installing into $(VENV) (several minutes, about 6.9 GB)"
	@$(BIN)/python -m pip install --disable-pip-version-check --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --disable-pip-version-check -e ".[audio,test]"
	@echo "compiling loops for this CPU"
	@$(BIN)/python -m oscar_mm.apps.operation_checks
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev]"
	@touch $@

$(DOCS_STAMP): $(RUN_STAMP)
	@$(BIN)/python -m pip install --disable-pip-version-check -e ".[docs]"
	@touch $@
