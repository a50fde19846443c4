# make demo | test | test-slow | bench | torture | check | docs | docs-serve | release | lock : each does all set-up
# first, once.
PYTHON ?= python3
BIN := .venv/bin
INPUTS := pyproject.toml requirements.lock

ifneq ($(wildcard ../shared/data/.),)
export AFIELD_DATA ?= $(abspath ../shared/data)
endif

# A cache of compiled modules, even where the environment forbids it: tests start some fifty processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow bench torture check format docs docs-serve release lock clean

demo: .venv/.demo
	$(BIN)/afield demo

test: .venv/.dev
	$(BIN)/pytest -n 2 --dist worksteal # files stay together: each fits its models and imports once

test-slow: .venv/.dev
	$(BIN)/pytest -m slow

bench: .venv/.dev
	$(BIN)/python -m bench.speed

# FOR=600 (seconds), SEED=0: faults by the thousand (docs/reliability.md)
torture: .venv/.dev
	$(BIN)/python -m bench.torture --seconds $(or $(FOR),600) --seed $(or $(SEED),0)

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in site/; every warning is an error. Tutorials are written by `python -m bench.tutorials`.
docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Wheel and sdist, checked and tried in an environment of their own. CUT=1 cuts the changelog.
release:
	PYTHON=$(PYTHON) bash .ci/release

# requirements.lock constrains every install below to exact versions; `make lock` renews it from an empty environment.
# torch comes first and by exact version: pip then takes a CPU build where one lies on disk.
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check
define install
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; sys.exit("afield needs Python 3.11 or later, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(INSTALL) "$$(grep '^torch==' requirements.lock)" -c requirements.lock
	$(INSTALL) -e ".[$(1)]" -c requirements.lock
	touch $@
endef

.venv/.demo: $(INPUTS)
	$(call install,cli)

.venv/.dev: $(INPUTS)
	$(call install,dev)

lock:
	rm -rf build/lock && mkdir -p build && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet torch==2.13.0
	build/lock/bin/pip install --quiet -e ".[dev]"
	build/lock/bin/pip freeze --exclude-editable | sed 's/^\(torch==[0-9.]*\)+cpu$$/\1/' > requirements.lock
	rm -rf build/lock

clean:
	rm -rf .venv build dist site demo .pytest_cache .mypy_cache .ruff_cache
