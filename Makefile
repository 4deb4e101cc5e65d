# make demo | test | lint | bench | clean. Needs Python 3.11 or newer; PYTHON=... names another one.
PYTHON ?= python3
# Processes that share the tests; a file's tests stay together, and with them what they set up.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
TINY := .cache/tiny-qwen3-vl
# Three pictures, eight times: a page holds 128 tokens, and the tiny model makes 56 of a picture.
THREE := examples/media/receipt.jpg examples/media/chart.png examples/media/street_sign.png
PICTURES := $(foreach round,1 2 3 4 5 6 7 8,$(THREE))

.PHONY: demo test lint bench clean

demo: $(RUN_STAMP)
	@echo "The model's weights are random, so its words mean nothing; the path is real:" \
	  "image files -> packed 2-bit cache -> answer -> memory table."
	@HF_HUB_DISABLE_PROGRESS_BARS=1 $(BIN)/python -m tests.checkpoints qwen3_vl $(TINY) >/dev/null
	@HF_HUB_OFFLINE=1 $(BIN)/oscar-mm ask $(PICTURES) --model $(TINY) --dtype bfloat16 \
	  --prompt "What does the receipt total?" --max-new-tokens 24

test: $(RUN_STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(RUN_STAMP)
	$(BIN)/python -m benchmarks

# The environment stays: it takes minutes to make. `rm -r .venv` removes it.
clean:
	rm -rf .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# pip's own script is what venv writes last, so an interrupted venv is made again.
$(BIN)/pip:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "$(PYTHON) not found: install Python 3.11 or newer, or pass PYTHON=/path/to/python" >&2; \
	  exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$("$(PYTHON)" -V 2>&1): 3.11 or newer is needed; pass PYTHON=/path/to/python" >&2; \
	  exit 2; }
	@"$(PYTHON)" -m venv $(VENV)

# A stamp is written last, so that a broken install is tried again, and anew when pyproject.toml
# asks for something else.
$(RUN_STAMP): pyproject.toml | $(BIN)/pip
	@echo "installing into $(VENV) (several minutes, about 6 GB)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[audio,test]"
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@
