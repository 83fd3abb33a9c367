# make serve | test | tpu_compile | check | bench | venv, each from a fresh clone. BUILD.md says more.
#   ARGS=...    more arguments, as: make serve ARGS="--http_port=8080 --max_num_seqs=16"
#   WORKERS=    flags of pytest-xdist for make test; empty: one process
#   PYTHON=...  interpreter to make .venv with; EXTRAS=dev,cuda13 or dev,tpu for accelerators

MODEL ?= smollm2-135m
ARGS ?=
VENV ?= .venv
WORKERS ?= -n logical --maxprocesses=4 --dist=loadfile
PYTHON_BIN := $(VENV)/bin/python
export VENV

.PHONY: help venv model serve test tpu_compile check bench clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

venv:
	@tools/make_venv

model: venv
	@$(PYTHON_BIN) -c "from jaxserve.loading import resolve_model; resolve_model('$(MODEL)')"

serve: venv
	@exec $(PYTHON_BIN) -m jaxserve.server --model=$(MODEL) $(ARGS)

# The whole suite in two runs: interpreted kernels leave thousands of callbacks and programs behind. A file of tests stays
# with one worker, so that its fixtures are made once.
test: model
ifeq ($(strip $(ARGS)),)
	@$(PYTHON_BIN) -m pytest $(WORKERS) tests/kernels
	@$(PYTHON_BIN) -m pytest $(WORKERS) --ignore=tests/kernels
else
	@$(PYTHON_BIN) -m pytest $(ARGS)
endif

# Apart from .venv's own packages: where libtpu is installed, jax looks for a TPU at every start.
tpu_compile: venv
	@test -d $(VENV)/libtpu || $(PYTHON_BIN) -m pip install --quiet --no-deps --target $(VENV)/libtpu 'libtpu>=0.0.40'
	@JAX_PLATFORMS=cpu PYTHONPATH=$(VENV)/libtpu $(PYTHON_BIN) -m pytest -q \
		-m "tpu_compile and not slow" tests/kernels tests/plan tests/runtime $(ARGS)

check: venv
	@tools/check

bench: venv
	@$(PYTHON_BIN) -m jaxserve.bench offline $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
