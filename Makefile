# make demo    install, fetch a small real model, answer eight chat prompts at once
# make test    install, run the tests (what .ci/run calls)
# make lint    ruff and pyright, as CI does
# make models  fetch the model that the demo and some tests use
# make aot     compile the whole step for TPU v5e, without a TPU
# make bench   bench/offline.py on the demo's model

SHELL := /bin/bash
.DELETE_ON_ERROR:
UV := $(shell command -v uv 2>/dev/null || echo .tools/bin/uv)
PY := .venv/bin/python
GGUF := .models/SmolLM2-135M-Instruct.Q4_1.gguf
export JAX_PLATFORMS ?= cpu

.PHONY: demo test lint models install aot bench clean

# --- environment ---------------------------------------------------------------------------------------------------------

.tools/bin/uv:
	@for python in python3.12 python3 python; do command -v $$python >/dev/null && $$python -c 'import venv' 2>/dev/null && break; done; \
	  $$python -m venv .tools && .tools/bin/python -m pip install --quiet --disable-pip-version-check uv

.venv/ready: pyproject.toml constraints.txt .python-version | $(if $(filter .tools/bin/uv,$(UV)),.tools/bin/uv)
	$(UV) venv --quiet --allow-existing --python "$$(cat .python-version)" .venv
	$(UV) pip install --quiet --python $(PY) --constraint constraints.txt --editable . --group dev
	@touch $@

install: .venv/ready

# --- model ---------------------------------------------------------------------------------------------------------------

$(GGUF): | .venv/ready
	@mkdir -p .models
	$(PY) -m examples.fetch_smollm2 --uv "$(UV)" $@

models: $(GGUF)

# --- what people run -----------------------------------------------------------------------------------------------------

demo: .venv/ready $(GGUF)
	$(PY) -m examples.demo $(GGUF)

test: .venv/ready
	$(PY) -m pytest --cov --cov-report=term:skip-covered

lint: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright

bench: .venv/ready $(GGUF)
	$(PY) -m bench.offline $(GGUF)

aot: .venv/ready
	$(UV) pip install --quiet --python $(PY) --constraint constraints.txt --editable '.[aot-tpu]'
	$(PY) -m pytest -m aot_tpu

clean:
	rm -rf .venv .tools .models
