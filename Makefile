# make demo    install, fetch a small real model, answer eight chat prompts at once
# make test    install, run the tests (what .ci/run calls)
# make acceptance  programs that nobody here wrote drive the server (installs them; acceptance-short is what CI runs)
# make lint    ruff and pyright, and buf over the .proto files, as CI does
# make audit   which of the pinned versions have known vulnerabilities (asks advisory services on the internet)
# make models  fetch the model that the demo and some tests use
# make vocabs  fetch vocabularies of other models, for more tests of tokenizers (77 MB)
# make protos  make the code in serving/proto anew, after its .proto files changed
# make aot     compile kernels and whole steps for TPU and GPU, without one (0.8 GB of compilers; make aot-short is what CI runs)
# make kernels all cases of the kernels in their interpreters (two hours of a core and more)
# make gpu-checks  on a machine with a GPU: the kernels' tests and benchmark; docs/kernels/<device>.json has what was measured
# make faults  ten minutes of too much load on a server, with clients that misbehave; make fuzz: 100,000 requests that are wrong
# make bench   bench/offline.py on the demo's model
# make experiments  replay traffic through the scheduler for docs/scheduling.md: figures and pictures (three quarters of an hour, no model)
# make clean   remove all that these made

SHELL := /bin/bash
.DELETE_ON_ERROR:
# The uv on the PATH, or else our own, which the rule below makes with any Python that can.
UV := $(shell command -v uv 2>/dev/null || echo .tools/bin/uv)
OWN_UV := $(filter .tools/bin/uv,$(UV))
PY := .venv/bin/python
GGUF := .models/SmolLM2-135M-Instruct.Q4_1.gguf
# Trust what the system trusts: some networks have a certificate of their own.
export UV_SYSTEM_CERTS ?= true

.PHONY: demo test acceptance acceptance-short lint audit models vocabs install protos aot aot-short kernels gpu-checks bench faults fuzz \
  experiments clean

# --- environment ---------------------------------------------------------------------------------------------------------

.tools/bin/uv:
	@for python in python3.12 python3 python; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "pagedjax needs uv, or a Python >= 3.8 with venv to get it with; found neither" >&2; exit 1; fi; \
	echo "making .tools with uv"; \
	$$found -m venv .tools && .tools/bin/python -m pip install --quiet --disable-pip-version-check uv

.venv/ready: pyproject.toml constraints.txt .python-version | $(OWN_UV)
	@echo "making .venv"
	@$(UV) venv --quiet --allow-existing --python "$$(cat .python-version)" .venv
	@$(UV) pip install --quiet --python $(PY) --constraint constraints.txt --build-constraint constraints.txt --compile-bytecode --editable . --group dev
	@$(PY) -m compileall -q pagedjax pallas_kernels checkpoints serving
	@touch $@

install: .venv/ready

# --- model ---------------------------------------------------------------------------------------------------------------

$(GGUF): | .venv/ready
	@$(PY) -m examples.fetch_smollm2 --uv "$(UV)" $@

models: $(GGUF)

vocabs: .venv/ready
	$(PY) tests/golden/fetch_vocabs.py --uv "$(UV)"

# --- programs of others that drive the server -----------------------------------------------------------------------------

.venv/ready-acceptance: .venv/ready
	@$(UV) pip install --quiet --python $(PY) --constraint constraints.txt --build-constraint constraints.txt --group acceptance
	@touch $@

.tools/inference-perf/ready: tests/acceptance/inference_perf.txt .python-version | $(OWN_UV)
	@echo "making .tools/inference-perf"
	@$(UV) venv --quiet --allow-existing --python "$$(cat .python-version)" .tools/inference-perf
	@$(UV) pip install --quiet --python .tools/inference-perf/bin/python --requirement $<
	@touch $@

# OpenAI's client for JavaScript.
NPM := tests/acceptance/openai_npm/node_modules
$(NPM)/ready: tests/acceptance/openai_npm/package.json
	@install="npm install --prefix $(<D) --no-audit --no-fund --no-package-lock --fetch-retries=0 --loglevel=error"; \
	if command -v npm >/dev/null && { NODE_OPTIONS=--use-openssl-ca $$install 2>/dev/null || $$install; }; then touch $@; \
	else echo "npm cannot install it here: the tests of OpenAI's client for JavaScript will be skipped"; fi

# Tests are written for CPU (they simulate several devices); the rest runs on what JAX finds.
test acceptance acceptance-short lint aot aot-short kernels faults fuzz: export JAX_PLATFORMS ?= cpu

# --- what people run -----------------------------------------------------------------------------------------------------

demo: .venv/ready $(GGUF)
	@$(PY) -m examples.demo $(GGUF)

test: .venv/ready
	$(PY) -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile --cov --cov-report=term:skip-covered

acceptance: .venv/ready-acceptance .tools/inference-perf/ready $(NPM)/ready
	$(PY) -m pytest tests/acceptance --durations=10

# What CI runs of it: nothing that needs an environment of its own, or a program of the system.
acceptance-short: .venv/ready-acceptance $(NPM)/ready
	$(PY) -m pytest $(patsubst %,tests/acceptance/test_%.py,buf http_schema lm_eval smg) --durations=10

lint: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright
	.venv/bin/buf lint
	.venv/bin/buf breaking --against tests/golden/pagedjax_v1.binpb

# AUDIT=--may-be-unreachable: says so, and goes on, where no advisory service answers.
audit: .venv/ready
	$(PY) .ci/audit.py $(AUDIT) constraints.txt $(UV) tool run --quiet --python $(PY) --from pip-audit==2.10.1 pip-audit

bench: .venv/ready $(GGUF)
	$(PY) -m bench.offline $(GGUF)

STORIES := tests/golden/stories260K
faults: .venv/ready
	$(PY) -m bench.faults $(STORIES)

fuzz: .venv/ready
	$(PY) -m bench.fuzz $(STORIES)

# What docs/scheduling.md says, measured anew: bench/results has the lines, docs/img the pictures.
RESULTS := bench/results
experiments: .venv/ready
	@mkdir -p $(RESULTS)
	$(PY) -m bench.fairness > $(RESULTS)/fairness.jsonl
	$(PY) -m bench.replay reserve --limit 2000 > $(RESULTS)/reserve.jsonl
	$(PY) -m bench.replay rate --limit 400 --latency 0.1 > $(RESULTS)/rate.jsonl
	$(PY) -m bench.replay swap --limit 2000 > $(RESULTS)/swap.jsonl
	$(PY) -m bench.replay deadline --limit 2000 --rates 3 4 6 --policies first_come deadline shortest_work > $(RESULTS)/deadline.jsonl
	for trace in code:500 conv:400 conversation:400 synthetic:400; do \
	  $(PY) -m bench.replay reserve --trace $${trace%:*} --limit $${trace#*:}; done > $(RESULTS)/reserve-raw.jsonl
	$(PY) -m bench.replay cache --blocks > $(RESULTS)/cache-ideal.jsonl
	$(PY) -m bench.replay cache --speed 0.5 --policies first_come longest_prefix shortest_work priority deadline \
	  > $(RESULTS)/cache.jsonl
	$(PY) -m bench.plots $(RESULTS) docs/img

protos: .venv/ready
	$(PY) -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --pyi_out=. $(wildcard serving/proto/pagedjax/v1/*.proto)

kernels: .venv/ready
	$(PY) -m pytest tests/kernels -m 'kernels_full and not aot_tpu and not aot_gpu' --numprocesses=auto --maxprocesses=4 --dist=worksteal

# Compilers for chips that are not here.
.venv/ready-aot: .venv/ready
	@$(UV) pip install --quiet --python $(PY) --constraint constraints.txt --build-constraint constraints.txt --editable '.[aot-tpu,aot-gpu]'
	@touch $@

# What needs a GPU: kernels against the portable path on the device itself, then the benchmark.
gpu-checks: .venv/ready
	@$(UV) pip install --quiet --python $(PY) --constraint constraints.txt --build-constraint constraints.txt --editable '.[gpu,plots]'
	$(PY) -m bench.gpu_checks docs/kernels

aot-short: .venv/ready-aot
	$(PY) -m pytest -m '(aot_tpu or aot_gpu) and not kernels_full'
	$(PY) -m pallas_kernels.aot --short

aot: .venv/ready-aot
	$(PY) -m pytest -m 'aot_tpu or aot_gpu'
	$(PY) -m pallas_kernels.aot --json aot.json

clean:
	rm -rf .venv .tools .models $(NPM)
