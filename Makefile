# Needs only make and Python 3.12 or newer; `make help` lists the targets.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := $(PY) -m pip --disable-pip-version-check --quiet
# More than cores, for tests also wait for processes; a few, for each takes a GiB or two.
WORKERS := $(shell cores=$$(nproc); echo $$((cores < 3 ? cores + 2 : 4)))

# Proves that an interpreter runs, is new enough and can make an environment with pip.
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))

# Settings of the caller that would change what runs in $(VENV), or have it compiled each time anew.
unexport PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE
unexport PYRIGHT_PYTHON_FORCE_VERSION PYRIGHT_PYTHON_PYLANCE_VERSION

# Makes $(VENV), or makes it anew when its interpreter is gone or too old.
define MAKE_VENV
@$(PY) -c 'import pip; $(USABLE)' 2>/dev/null || { \
	for python in $(if $(PYTHON),"$(PYTHON)",python3.12 python3 python) ''; do \
		"$$python" -c '$(USABLE)' 2>/dev/null && break; \
	done; \
	if [ -z "$$python" ]; then \
		echo 'error: no Python 3.12 or newer (with its venv module) in $(or $(PYTHON),PATH);' \
			'name one: make PYTHON=/path/to/python3.12' >&2; \
		exit 1; \
	fi; \
	"$$python" -m venv --clear $(VENV); \
}
endef

.PHONY: help setup demo examples test lint types site lit pytest soak golden bench docs lock compat clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-8s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## build .venv from requirements.lock

$(STAMP): pyproject.toml requirements.lock
	$(MAKE_VENV)
	@echo 'setting up $(VENV) from requirements.lock: up to a few minutes the first time'
	@$(PIP) install --no-deps -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --check-build-dependencies -e .
	@$(PIP) check
	@touch $@
	@echo 'ready: source $(VENV)/bin/activate, then stablehlo-tools doctor'

demo: setup ## from an export to a faster program, with proof and page
	@$(PY) python/examples/demo.py

examples: setup ## one order, pipeline schedules, programs of ranks, simulation, inference
	@$(PY) python/examples/collective_order.py
	@$(PY) python/examples/pipeline_schedules.py
	@$(PY) python/examples/mpmd_training.py
	@$(PY) python/examples/scientific.py build/examples
	@$(PY) python/examples/decoding.py build/examples/decode.jax_export

# One recipe, so that the parts keep their order under -j and the first failure ends it. pyright
# takes one core, and so runs beside the site, the modules of tests (which else each of pytest's
# workers compiles for itself) and lit; it is waited for, and heard, before pytest.
test: setup ## lint, site, lit, types and pytest
	@$(MAKE) --no-print-directory lint
	@mkdir -p build
	@$(MAKE) --no-print-directory types >build/types.log 2>&1 & types=$$!; \
	{ \
		$(MAKE) --no-print-directory site && \
		{ $(PY) -m pytest --collect-only -qq >/dev/null 2>&1 || true; } && \
		$(MAKE) --no-print-directory lit; \
	} || { kill $$types 2>/dev/null; exit 1; }; \
	wait $$types; status=$$?; \
	cat build/types.log; \
	exit $$status
	@STABLEHLO_TOOLS_SITE=$(CURDIR)/build/site $(MAKE) --no-print-directory pytest

lint: setup ## ruff, the linter of test directives, the guard of prose and names
	@echo '--- lint'
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) lit_tests/lint_directives.py lit_tests
	@$(PY) python/style/guard.py

types: export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
types: setup ## pyright
	@echo '--- types'
	@$(PY) -m pyright

site: export NO_MKDOCS_2_WARNING = 1
site: setup ## the pages as a site in build/site; a link that leads nowhere fails
	@echo '--- site'
	@$(PY) -m mkdocs build --strict --quiet

lit: setup ## the lit tests; LIT_ARGS are passed on
	@echo '--- lit'
	@$(VENV)/bin/lit --print-result-after=failed --test-output=failed $(LIT_ARGS) lit_tests

pytest: setup ## the pytest tests; PYTEST_ARGS are passed on
	@echo '--- pytest'
	@$(PY) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
		$(PYTEST_ARGS)

soak: setup ## the long randomised tests
	@$(PY) -m pytest -m soak $(PYTEST_ARGS)

golden: setup ## the same bytes out as at the commit BASE; GOLDEN_ARGS are passed on
	@$(PY) python/golden/run.py $(if $(BASE),--base $(BASE)) $(GOLDEN_ARGS)

bench: setup ## every benchmark
	@for file in python/benchmarks/*.py; do echo "--- $$file"; $(PY) "$$file" || exit 1; done

docs: setup ## the reference pages, from docstrings, parsers and profiles
	@$(PY) python/docs/generate.py

# In an environment of its own, so that neither the old lock nor a leftover package has a say.
lock: ## resolve requirements.lock anew, to the newest versions allowed (Linux x86-64, Python 3.12)
	$(MAKE_VENV)
	@$(PY) -m venv --clear build/lock
	@echo 'resolving requirements.lock'
	@build/lock/bin/python -m pip --disable-pip-version-check --quiet install -e '.[aot,dev]'
	@{ sed -n '/^#/p' requirements.lock; build/lock/bin/python -m pip freeze --exclude-editable; } \
		>build/requirements.lock
	@mv build/requirements.lock requirements.lock
	@rm -rf build/lock

compat: setup ## which releases of jax work: docs/project/compatibility.md; COMPAT_ARGS are passed on
	@$(PY) python/compat/run.py $(COMPAT_ARGS)

clean: ## remove build outputs and caches; .venv stays
	@rm -rf build dist *.egg-info .hypothesis .pytest_cache .ruff_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
