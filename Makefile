# One command each: `make demo` sets everything up, trains a small model and shows it; `make test` sets
# everything up and runs the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Slow tests that take minutes each: `make test-all` alone runs them.
MINUTES := tests/test_demo.py \
  tests/hf/test_models.py::test_every_shape_of_the_registry_is_the_run \
  tests/tools/test_studies.py::test_every_planned_run_trains \
  tests/tools/test_studies.py::test_every_slice_goes_from_run_to_page \
  tests/tools/test_grow_study.py::test_a_slice_takes_texts_as_they_are_carried_and_packs_its_results \
  tests/model/test_compiled.py::test_compiled_blocks_have_the_gradients_of_plain_ones[dropout \
  tests/hf/test_exporting.py::test_branches_travel_without_their_base[bfloat16-experts] \
  tests/hf/test_exporting.py::test_branches_travel_without_their_base[orthogonal] \
  tests/hf/test_exporting.py::test_branches_travel_without_their_base[full] \
  tests/glass/inspect/test_projections.py::test_umap_is_finite_and_repeats_itself[8] \
  tests/glass/inspect/test_association.py::test_skewed_draws_pass_no_more_often_than_the_level_says \
  tests/glass/inspect/test_guilds.py::test_of_20_models_without_guilds_at_most_one_reports_one \
  tests/live/test_limits.py::test_memory_is_flat_while_a_run_grows \
  tests/live/test_limits.py::test_twenty_pages_slow_training_by_less_than_a_twentieth \
  tests/glass/inspect/test_guilds.py::test_of_200_models_without_guilds_hardly_any_reports_one

# The long campaigns: how many mutated files, how many kills; the random seed decides every one of them.
CASES ?= 100000
KILLS ?= 1000
SEED ?= 0
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: setup setup-dev demo docs docs-check site test test-ci test-all fuzz kills lint types clean

setup: $(VENV)/.installed

setup-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e ".[analysis]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/some demo

docs: setup
	$(BIN)/python -m tools.documents
	$(BIN)/python -m tools.studies pages
	$(BIN)/python -m tools.grow_study page

docs-check: setup
	$(BIN)/python -m tools.documents --check
	$(BIN)/python -m tools.studies pages --check
	$(BIN)/python -m tools.grow_study page --check

# The documentation as pages, in build/site.
site: setup-dev
	$(BIN)/python -m tools.site

test: setup-dev lint types
	$(BIN)/python -m pytest -n auto -m "not slow and not gpu"

test-ci: setup-dev docs-check
	timeout 2400 $(BIN)/python -m pytest -n auto -m "slow and not gpu" $(MINUTES:%=--deselect %)

test-all: setup-dev lint types
	$(BIN)/python -m pytest -n auto

# Files of every kind mutated, and every command that reads them judged.
fuzz: setup-dev
	$(BIN)/python -m tests.fuzz.campaign --cases $(CASES) --seed $(SEED) --jobs $(JOBS)

# Every command that writes, killed at every kind of moment: what it leaves must be whole, and end with the same bits.
kills: setup-dev
	$(BIN)/python -m tests.kills.campaign --kills $(KILLS) --seed $(SEED) --jobs $(JOBS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info
