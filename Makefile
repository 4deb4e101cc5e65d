# make demo | demo-web | test | lint | bench | clean. Needs Python 3.11 or newer; PYTHON=... names another one.
PYTHON ?= python3
# Processes that share the tests; a file's tests stay together, and with them what they set up.
# Files come in their order: by their number of tests the slowest, which have few, would be last.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
CARDS := examples/media/cards/*.png
CLIPS := examples/media/clips/*.wav

# One question: media, text, what is right. On a CPU the default is float32, also for what is not
# packed yet; bfloat16 holds what a GPU would. Such small tensors gain nothing from threads.
define ask
	@printf '\n%s\n' '$$ oscar-mm ask $(1) --dtype bfloat16 --prompt "$(2)"'
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/oscar-mm ask $(1) --dtype bfloat16 --prompt "$(2)"
	@echo "Right is: $(3)"
endef

.PHONY: demo demo-web test lint bench clean

demo: $(RUN_STAMP)
	$(call ask,$(CARDS),What is the code in picture 7?,YH38)
	@printf '\nThe same pictures five times over, a longer conversation:\n'
	$(call ask,$(CARDS) $(CARDS) $(CARDS) $(CARDS) $(CARDS),What is the sum in picture 57?,45)
	$(call ask,$(CLIPS),What was said in clip 5?,19408)

# The same in a browser: http://127.0.0.1:7860
demo-web: $(RUN_STAMP)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/oscar-mm demo

test: $(RUN_STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

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
