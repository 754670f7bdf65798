# Every command works from a fresh clone: what is missing is installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
TOOLS := $(VENV)/installed-tools
RESOLVE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra server pyproject.toml \
	--generate-hashes --no-emit-index-url --no-header --no-annotate
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_USER := 0
# Tests start hundreds of processes; without bytecode files each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup serve test check fmt docs recording bench soak lock release clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

setup: $(TOOLS) ## install the exact versions of requirements-dev.lock into .venv

# The mark is written last and names the directory.  An environment without it was left half-made,
# and one with another name was moved, which its programs do not survive: both are made anew.
ifneq ($(shell test -x $(BIN)/python && cat $(INSTALLED) 2>/dev/null),$(CURDIR))
.PHONY: $(INSTALLED)
ANEW := --clear
endif

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "Restante needs Python 3.11 or newer, and $(PYTHON) is not;" \
			"say which one to take with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@rm -f $@
	@$(PYTHON) -m venv $(ANEW) $(VENV) \
		|| { echo "This Python cannot make virtual environments;" \
			"on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@pwd -P > $@

# Somebody who only runs a server does not wait for the tools of development.
$(TOOLS): $(INSTALLED) requirements-dev.lock
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-dev.lock
	@touch $@

serve: $(INSTALLED) ## run a Restante on 127.0.0.1:8080 with its own Postgres
	@exec $(BIN)/restante serve

test: check ## lint, types, import rules and all tests
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

check: setup ## lint, types and import rules, without the tests
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/basedpyright --level error
	$(BIN)/lint-imports --no-cache

fmt: setup ## format the code and mend what the linter can
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

docs: setup ## write the generated parts of the documents, and build them as a site into build/docs/site
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/site/build.py

recording: setup ## record the picture in the README again; needs tmux, and the port 8080
	$(BIN)/python docs/recording.py

bench: setup ## measure, and print each figure as a ratio
	$(BIN)/python -m bench

soak: setup ## the long crash and oracle runs; SOAK_RUNS and SOAK_SEED choose how many and which
	SOAK_RUNS=$${SOAK_RUNS:-300} $(BIN)/python -m pytest -m soak --numprocesses 0 --timeout 0 --capture no

lock: setup ## resolve the dependencies anew into requirements.lock and requirements-dev.lock
	$(RESOLVE) --upgrade --group dev -o requirements-dev.lock
	$(RESOLVE) --upgrade --group build --constraint requirements-dev.lock -o requirements.lock

release: setup ## build packages and image from the last commit, and check them; RELEASE has options
	$(BIN)/python deploy/release.py $(RELEASE)

clean: ## remove what the other commands made
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .schemathesis build dist
