# The first `make demo` or `make test` sets up a virtual environment in .venv: torch as pinned in constraints.txt, then this
# package with its native core, built against that torch.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint readme docs wheel test-wheel bench asan fuzz soak clean

demo: .venv/ready
	$(BIN)/manyclass demo

# Small tensors gain little from threads, so two processes with one thread each take half the time of one with two threads.
test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Rewrite the generated tables of the README and the docs; a test fails while they differ from classes and results.
readme: .venv/ready
	$(BIN)/python tests/readme.py

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

# An sdist, and a wheel that is built from it. libtorch_cpu is loaded by `import torch` before the native core.
wheel: .venv/ready
	rm -rf build/wheel dist
	$(BIN)/python -m build --no-isolation --outdir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libtorch_cpu.so -w dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist

# Test the wheel in a new environment without a compiler.
test-wheel: wheel
	$(PYTHON) -m venv --clear build/env
	build/env/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	build/env/bin/python -m pip install --quiet -c constraints.txt torch
	build/env/bin/python -m pip install --quiet -c constraints.txt --group test "$$(ls dist/*.whl)[cli]"
	PATH=build/env/bin build/env/bin/python tests/wheel.py

bench: .venv/ready
	$(BIN)/manyclass bench draws
	$(BIN)/manyclass bench tree
	$(BIN)/manyclass bench step
	$(BIN)/manyclass bench bias
	$(BIN)/manyclass bench distributed
	$(BIN)/manyclass bench retrieval
	$(BIN)/manyclass bench optim

.venv/torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	touch $@

# The development install lists the modules by name, so it is repeated when a folder below src changes.
.venv/ready: .venv/torch pyproject.toml CMakeLists.txt $(wildcard csrc/*) $(shell find src -type d -not -name __pycache__)
	$(BIN)/python -m pip install --quiet -c constraints.txt --group dev
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation --editable '.[cli]'
	touch $@

# The native kernels under the address and the undefined behaviour sanitizer, on the tests that reach them, …
SANITIZERS := -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-sanitize=vptr -fno-omit-frame-pointer
SANITIZED := LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so) $$(g++ -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 MANYCLASS_NATIVE=build/asan/_native.so $(BIN)/python

asan: build/asan/_native.so
	$(SANITIZED) -m pytest tests/test_blocks.py tests/test_fused.py tests/test_native.py tests/test_optim.py tests/test_samplers.py tests/test_tree.py

# … and under random calls of the native operations and of the Python interface.
fuzz: build/asan/_native.so
	$(SANITIZED) tests/fuzz.py --calls $(CALLS) --seed $(SEED)

# Runs that are killed at random moments and resumed, for an hour.
soak: .venv/ready
	$(BIN)/python tests/soak.py --seconds $(SECONDS) --seed $(SEED)

JOBS ?= 2
SECONDS ?= 3600
CALLS ?= 20000
SEED ?= 0

build/asan/_native.so: .venv/ready CMakeLists.txt $(wildcard csrc/*)
	cmake -S . -B build/asan -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_BUILD_TYPE=Debug \
	  -DCMAKE_CXX_FLAGS="$(SANITIZERS)"
	cmake --build build/asan

clean:
	rm -rf .venv build dist out
