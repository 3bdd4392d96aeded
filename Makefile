# Every target creates its own environment; nothing is installed outside .venv and .venv-sglang.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HELM := .tools/helm
SGLANG := .venv-sglang
SGLANG_LOCK := tests/support/sglang/requirements.lock
EXAMPLE := examples/recall
RUN := runs/recall
SEED ?= 0
TRANSACTIONS ?= 6

.DEFAULT_GOAL := help
.PHONY: help setup run test test-sglang test-gpu lint format pipeline locks images e2e-containers e2e-kind e2e-kind-lock bench-recall bench-store bench-rewards bench-engine bench-engine-short clean

help:            ## Show the targets
	@grep -hE '^[a-z0-9-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 16

setup: $(STAMP)  ## Create .venv with the pinned dependencies and the project itself

$(STAMP): requirements-dev.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("LongStraw needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements-dev.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $(STAMP)

$(EXAMPLE)/tiny-model: | $(STAMP)
	$(BIN)/longstraw model tiny --out $@

$(EXAMPLE)/rows.jsonl: examples/recall/generate.py | $(STAMP)
	$(BIN)/python examples/recall/generate.py --out $@

run: $(EXAMPLE)/tiny-model $(EXAMPLE)/rows.jsonl  ## Run the example: six real transactions on this machine
	OMP_NUM_THREADS=1 $(BIN)/longstraw run examples/recall/transaction.yaml --transactions $(TRANSACTIONS) \
		--set seed=$(SEED) --workdir $(RUN)-seed$(SEED)

$(HELM): charts/helm.lock charts/fetch_helm.py | $(STAMP)
	$(BIN)/python charts/fetch_helm.py --out $@

test: $(STAMP) $(HELM)   ## Run the tests
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/pytest -n 2 --dist loadfile

test-gpu: $(STAMP) ## Tests that need one GPU: bf16 parity, kernels, memory at 131,072 prompt tokens
	TOKENIZERS_PARALLELISM=false $(BIN)/pytest tests/gpu -rs

# The lock is complete; SGLang's own pins ask for a CUDA build that these tests replace, hence --no-deps.
$(SGLANG)/.installed: $(SGLANG_LOCK)
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --no-deps -r $(SGLANG_LOCK)
	touch $@

test-sglang: $(STAMP) $(SGLANG)/.installed  ## Run the tests of sampling with the real SGLang, on the CPU
	LONGSTRAW_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
		$(BIN)/pytest tests/sglang --durations=10

lint: $(STAMP)   ## Style, types and layer order
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP) ## Apply the code style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pipeline: $(STAMP) ## Compile the committed default pipeline again
	$(BIN)/longstraw compile pipelines/default.spec.yaml --images pipelines/example.images.lock.json \
		--out pipelines/longstraw.yaml

COMPILE := $(BIN)/pip-compile --quiet --strip-extras --no-header --no-annotate --allow-unsafe \
	--no-emit-find-links --no-emit-index-url --no-emit-trusted-host --no-emit-options

locks: $(STAMP)  ## Re-resolve the pinned requirements of every image role
	$(COMPILE) --generate-hashes --extra control -o images/control/requirements.lock pyproject.toml
	sed -n '/^kfp==/,/[^\\]$$/p' images/control/requirements.lock > images/executor.lock
	$(COMPILE) --generate-hashes --extra trainer -o images/trainer/requirements-cpu.lock pyproject.toml
	$(COMPILE) --generate-hashes --extra sampler -o images/sampler/requirements-cpu.lock pyproject.toml
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= \
		$(COMPILE) --generate-hashes --extra trainer --extra nf4 -o images/trainer/requirements-cuda.lock pyproject.toml
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= \
		$(COMPILE) --generate-hashes --extra sampler -o images/sampler/requirements-cuda.lock pyproject.toml
	$(COMPILE) --generate-hashes -o images/sampler/sglang-cuda.lock images/sampler/sglang.in
	$(BIN)/python images/hash_pins.py $(SGLANG_LOCK) --out images/sampler/sglang-cpu.lock
	$(COMPILE) --extra control --extra trainer --extra sampler --extra dev -o requirements-dev.lock pyproject.toml
	sed -i 's/+cpu$$//' requirements-dev.lock

images: $(STAMP)  ## Build the three images, push them, write images.lock.json: REGISTRY=host/path BASE=name@sha256:… VARIANT=cuda STORE=s3://…
	$(BIN)/python images/build.py --registry $(REGISTRY) --base $(BASE) --variant $(or $(VARIANT),cuda) \
		$(if $(STORE),--store $(STORE)) $(IMAGES_OPTIONS)

e2e-containers: $(STAMP)  ## Run the compiled pipeline in real containers (installs an engine where root on Debian has none)
	LONGSTRAW_E2E_CONTAINERS=1 $(BIN)/pytest -s tests/e2e/containers

e2e-kind: $(STAMP) $(HELM)  ## Run the compiled pipeline for two teams on a kind cluster of its own
	LONGSTRAW_E2E_CLUSTER=1 $(BIN)/pytest -s tests/e2e/cluster

e2e-kind-lock: $(STAMP)  ## Resolve the digests of the images that the kind cluster takes from others
	$(BIN)/python -m tests.e2e.cluster.upstream build/e2e-upstream
	$(BIN)/python -m tests.e2e.cluster.images build/e2e-upstream

bench-recall: $(EXAMPLE)/tiny-model $(EXAMPLE)/rows.jsonl  ## Measure that the reward rises, seeds 0 to 2
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/recall_reward.py

bench-store: $(STAMP)  ## Measure what hashing and S3 cost beside plain tools
	$(BIN)/python benchmarks/store.py

bench-rewards: $(STAMP)  ## Measure how fast math_verify scores, honest and hostile responses
	$(BIN)/python benchmarks/rewards.py

bench-engine: $(STAMP)  ## CPU time and memory of one update beside conventional training (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/engine.py

bench-engine-short: $(STAMP)  ## The same figures at small sizes, to see that they run (two minutes)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/engine.py --short

clean:           ## Remove the environment and everything that was built or run
	rm -rf $(VENV) $(SGLANG) .tools build runs $(EXAMPLE)/tiny-model $(EXAMPLE)/rows.jsonl
