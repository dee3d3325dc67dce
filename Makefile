# Everything starts from Python 3.11+ and make: each target does its own set-up, in virtual environments in this folder.

PYTHON    ?= python3
VENV      ?= .venv
DEMO_VENV ?= .venv-demo
# Installed first and exactly: a looser request may pull another build, gigabytes larger.
TORCH     ?= torch==2.13.0
# Tests share the cores, as compiling a kernel takes one; each worker takes tests that lie together.
WORKERS   ?= auto
PIP        = -m pip --disable-pip-version-check install

# A complete environment serves the demo as well.
DEMO_READY := $(if $(wildcard $(VENV)/.stamp-all),$(VENV)/.stamp-all,$(DEMO_VENV)/.stamp-demo)

.PHONY: help setup demo test lint format notebooks pages docs package clean distclean
.DELETE_ON_ERROR:

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(VENV)/.stamp-all ## .venv with every extra

demo: $(DEMO_READY) ## train a small ViT on handwritten digits with a solved layout plan (no torch)
	$(dir $(DEMO_READY))bin/layoutopt demo

test: setup ## every tier of tests
	$(VENV)/bin/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal

lint: setup ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: setup ## let ruff mend what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

notebooks: setup ## execute every notebook (the files stay as they are)
	$(VENV)/bin/jupyter execute --timeout=600 notebooks/*.ipynb

pages: setup ## execute every notebook into docs/notebooks, with pictures
	$(VENV)/bin/python docs/render_notebooks.py

package: setup ## the wheel and the sdist in dist/, checked as an index would
	rm -rf dist
	$(VENV)/bin/python -m build --no-isolation
	$(VENV)/bin/python -m twine check --strict dist/*

docs: setup ## the documentation site, in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

clean: ## remove caches, demo output and the demo's environment
	rm -rf $(DEMO_VENV) demo runs build dist .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf $(VENV)

%/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit("layoutopt needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": call make with PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(@D)
	touch $@

$(VENV)/.stamp-torch: $(VENV)/.stamp-venv
	$(VENV)/bin/python $(PIP) '$(TORCH)'
	touch $@

$(VENV)/.stamp-all: $(VENV)/.stamp-torch pyproject.toml
	$(VENV)/bin/python $(PIP) --editable '.[all]'
	touch $@

$(DEMO_VENV)/.stamp-demo: $(DEMO_VENV)/.stamp-venv pyproject.toml
	$(DEMO_VENV)/bin/python $(PIP) --editable '.[demo]'
	touch $@

.PRECIOUS: %/.stamp-venv
