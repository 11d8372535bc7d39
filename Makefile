# On a fresh machine `make demo` and `make test` are all it takes: every target prepares $(VENV) first.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check
# PyTorch's CUDA build allows this Triton alone, its CPU build any.
CUDA_TRITON := 3.7.1
EXTRAS := kda-tpu,moe-gpu,bench,demo,test,lint

.PHONY: env demo test test-all lint bench-tpu bench-gpu clean

env: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "accelerator-ops needs Python >= 3.11, got " + sys.version.split()[0] + "; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt -e '.[$(EXTRAS)]' || { \
	  echo "Trying the Triton that PyTorch's CUDA build pins, $(CUDA_TRITON)"; \
	  sed 's/^triton==.*/triton==$(CUDA_TRITON)/' constraints.txt > $(VENV)/constraints.txt; \
	  $(INSTALL) -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]'; }
	touch $@

demo: env
	$(BIN)/python -m demo

test: env
	$(BIN)/pytest -n $(WORKERS) -m 'not slow and not gpu and not tpu'

test-all: env
	$(BIN)/pytest -n $(WORKERS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-tpu: env
	$(BIN)/python -m bench.kda_tpu

bench-gpu: env
	$(BIN)/python -m bench.moe_comm_gpu

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
