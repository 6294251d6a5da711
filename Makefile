# Two commands for a newcomer: `make run` and `make test`. Both set up .venv first. `make help` lists the rest.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := operator,rpc,env,http,mujoco,box2d,atari,wandb,torch,onnx,video,ui,objectstore,local,docs,dev
RUN_EXTRAS := rpc,env,torch,local
PINNED := $(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
STAMP := $(VENV)/.setup-$(PINNED)
# The variable switches off an advertisement.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
RUN_STAMP := $(VENV)/.setup-run-$(PINNED)

# If this is set, each of the many short processes compiles all our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run s3-server system-tools images test e2e e2e-full test-slow bench bench-report paired lint format protos crd dashboards docs site clean

help:  ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Disk in GB: what hack/install_bytes.py measures, and what has to be free.
$(STAMP): INSTALLED := $(EXTRAS)
$(STAMP): TAKEN := 6.3
$(STAMP): FREE := 8
$(RUN_STAMP): INSTALLED := $(RUN_EXTRAS)
$(RUN_STAMP): TAKEN := 5.1
$(RUN_STAMP): FREE := 7

# On a terminal pip shows what it downloads: that takes minutes.
$(STAMP) $(RUN_STAMP):
	@echo "setup: downloads about 3 GB (PyTorch's Linux build brings CUDA) and takes $(TAKEN) GB of disk in $(VENV)"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"setup: Python 3.11 or newer is needed, {sys.executable} is {v[0]}.{v[1]}: set PYTHON=/path/to/python3.11")'
	@$(PYTHON) -c 'import shutil, sys; free = shutil.disk_usage(".").free / 1e9; sys.exit(0 if free > $(FREE) else f"setup: $(FREE) GB of free disk are needed here, there are {free:.1f}")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $$([ -t 2 ] || echo --quiet) --constraint constraints.txt --editable '.[$(INSTALLED)]'
	rm -f $(VENV)/.setup-*
	touch $@

setup: $(STAMP)  ## Create .venv with the pinned dependencies of all targets

# What training needs and nothing else; .venv may have more already.
run: $(if $(wildcard $(STAMP)),$(STAMP),$(RUN_STAMP))  ## Train CartPole to 475 on this machine
	$(BIN)/rlsrl run examples/cartpole.yaml

s3-server:  ## Build the S3 server of the tests once (needs Go)
	@hack/s3-server >/dev/null

system-tools:
	@hack/system-tools

images:  ## Build the images of workers and operator; print their archives
	@hack/images

# Three workers on two cores: they wait for processes a quarter of the time. Without the reorder the long files come first.
# A dead worker ends the run: its replacement would wait for work for ever (pytest-dev/pytest-xdist#1378).
test: setup s3-server system-tools  ## The tests that need no cluster and not much time
	$(BIN)/python -m pytest -m 'not slow and not e2e' -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

e2e: setup system-tools  ## Start a real cluster of two nodes, run the tests on it, remove it (root)
	@hack/e2e tests/e2e -m 'not full'

e2e-full: setup system-tools  ## All tests on clusters, in shards (SHARD=name for one), and the report
	@hack/system-tools chromium chromedriver
	@hack/e2e-full $(SHARD)

test-slow: setup s3-server  ## Fault tests and training runs that are too long for `make test`
	@hack/system-tools chromium chromedriver
	$(BIN)/python -m pytest -m slow -n 2

bench: setup  ## Measure a workload against peers (W=W1; the first run creates their environments, 5 GB each)
	$(BIN)/python benchmarks/bench.py $(W)

bench-report: setup  ## Update the table and plot of the benchmarks in docs/benchmarks and README
	$(BIN)/python benchmarks/report.py

paired: setup  ## Compare the speed of HEAD with older commits on a workload (BASE=REV W=W1; 20 minutes a commit)
	$(BIN)/python benchmarks/paired.py $(BASE) $(W)

lint: setup  ## ruff, mypy, layers, class names, sizes, drift of generated files, links of the site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=benchmarks $(BIN)/mypy benchmarks/*.py
	MYPYPATH=hack/dashboards.d $(BIN)/mypy hack/dashboards.d/main.py
	$(BIN)/lint-imports --no-logo
	$(BIN)/python hack/class_names.py
	$(BIN)/python hack/sizes.py
	@drift=$$(mktemp -d); trap 'rm -rf "$$drift"' EXIT; hack/protos "$$drift"; \
	  diff -r -x __init__.py -x __pycache__ "$$drift/rlsrl/rpc/v1" worker/rlsrl/rpc/v1 \
	  || { echo "lint: the stubs differ from protos/: run \`make protos\` and commit"; exit 1; }
	@diff <(hack/crd /dev/stdout) charts/templates/crd.yaml \
	  || { echo "lint: the CRD differs from the models: run \`make crd\` and commit"; exit 1; }
	@drift=$$(mktemp -d); trap 'rm -rf "$$drift"' EXIT; hack/dashboards "$$drift"; diff -r "$$drift" charts/dashboards \
	  || { echo "lint: the dashboards differ from the metrics: run \`make dashboards\` and commit"; exit 1; }
	@diff <(hack/crd-reference /dev/stdout) docs/kubernetes/reference.md && diff <(hack/chart-readme /dev/stdout) charts/README.md \
	  && diff <(hack/monitoring-page /dev/stdout) docs/kubernetes/monitoring.md \
	  && diff <(hack/operations-page /dev/stdout) docs/kubernetes/operations.md \
	  && diff <(hack/failures-page /dev/stdout) docs/failures.md \
	  && diff <(hack/python-reference /dev/stdout) docs/python-reference.md \
	  || { echo "lint: a generated page is out of date: run \`make docs\` and commit"; exit 1; }
	@built=$$(mktemp -d); trap 'rm -rf "$$built"' EXIT; $(MKDOCS) --quiet --site-dir "$$built"
	@hack/actionlint

format: setup  ## Format the code and apply ruff's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: setup  ## Generate the gRPC stubs from protos/
	hack/protos

crd: setup  ## Generate the chart's CustomResourceDefinition from the models
	hack/crd

dashboards: setup  ## Generate Grafana's dashboards from the metric declarations
	hack/dashboards

docs: setup  ## Generate both references, the pages monitoring, operations and failures, the chart's README
	hack/crd-reference
	hack/chart-readme
	hack/monitoring-page
	hack/operations-page
	hack/failures-page
	hack/python-reference

site: setup  ## Build the documentation as a site, in site/, and check its links
	$(MKDOCS)

clean:  ## Remove files that make created, except runs/
	rm -rf site $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
