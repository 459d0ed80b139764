# The two commands that matter on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
# The steps of one command run in order; each uses every core by itself.
.NOTPARALLEL:
.PHONY: help setup setup-python setup-dist setup-arm64 build build-tests build-and-fetch demo demo-pipeline demo-engine test test-full \
        test-nightly test-release test-sanitize test-install test-torch-versions bench lint format dist dist-tests dist-arm64 wheel \
        wheel-arm64 clean

JOBS ?= $(shell nproc)
# Warnings are errors where CI is set; elsewhere a newer compiler's new warning must not stop anyone.
PRESET ?= $(if $(CI),ci,release)
# How much of the tests runs: quick, full or nightly, each with what the one before it has. CONTRIBUTING.md says how a test gets its level.
LEVEL ?= $(if $(CI),full,quick)
export FLCE_TEST_LEVEL = $(LEVEL)
# Quick needs no benchmarks.
TESTED := $(if $(filter quick,$(LEVEL)),--target flce_tests)
LEFT_OUT := $(if $(filter quick,$(LEVEL)),-LE '^(full|nightly)$$',$(if $(filter full,$(LEVEL)),-LE '^nightly$$'))
# One compiler cache serves every build tree and every checkout: paths in it are relative.
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
# Precompiled headers are cached by their contents, comments included: the compiler recognises a header in one by its bytes.
export CCACHE_SLOPPINESS ?= pch_defines,time_macros,include_file_mtime,include_file_ctime
export CCACHE_COMMENTS ?= 1
# What a source includes is taken from what the compiler says of it, not from preprocessing it once more before it is compiled.
export CCACHE_DEPEND ?= 1
CTEST = ctest --output-on-failure --no-tests=error -j $(JOBS)

# ctest in a tree, with further arguments. Where tests failed, the end of the log says which and why.
run_tests = (cd $(1) && $(CTEST) $(2) 2>&1 | tee ctest.log) || { status=$$?; tools/test_summary.sh $(1); exit $$status; }

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  \1\t/' | expand -t 18

setup: ## install what is missing (says what, before it does it)
	@tools/setup.sh

setup-python: ## setup, and torch with what else the Python tests need, where they are missing
	@tools/setup.sh --python

build: setup ## build/bin/flce, and everything beside it
	@tools/configure.sh $(PRESET)
	cmake --build --preset $(PRESET) -j $(JOBS)

build-tests: setup
	@tools/configure.sh $(PRESET)
	cmake --build --preset $(PRESET) -j $(JOBS) $(TESTED)

# What only the tests need is fetched while the compilers run; what goes wrong with it is told when they are done.
build-and-fetch: setup
	@errors=$$(mktemp) status=0
	tools/setup.sh --python --servers $(if $(filter-out quick,$(LEVEL)),--trainers) 2>"$$errors" & fetching=$$!
	trap 'rm -f "$$errors"' EXIT
	trap 'kill $$fetching; exit 130' INT TERM
	{ tools/configure.sh $(PRESET) && cmake --build --preset $(PRESET) -j $(JOBS) $(TESTED); } || status=$$?
	wait $$fetching || status=$$?
	cat "$$errors" >&2
	exit $$status

demo: setup ## build, then train the last stage of a small language model with flce's kernels
	@tools/configure.sh $(PRESET)
	cmake --build --preset $(PRESET) -j $(JOBS) --target flce_cli
	build/bin/flce demo

demo-pipeline: setup-python ## train two pipeline stages on real text, the last stage's loss materialised and with flce
	@tools/configure.sh $(PRESET)
	cmake --build --preset $(PRESET) -j $(JOBS) --target flce
	@tools/python.sh examples/pipeline_last_stage.py

demo-engine: setup-python ## train a small model from a checkpoint in stages with the pipeline engine, and generate with it
	@tools/configure.sh $(PRESET)
	cmake --build --preset $(PRESET) -j $(JOBS) --target flce
	@tools/python.sh examples/engine_demo.py

# Where memory is handled; the command and the parts that only write source code are left to `cmake --build --preset sanitize`. Matrices
# and properties meet in every combination the code that cpu meets.
SANITIZED := badinput c_api cache cpu $(if $(filter nightly,$(LEVEL)),matrix properties) parallel session
# Full has the sanitizers where something of theirs changed of late: within eight hours, which hold a landing and the one before. Without a
# history everything has.
OF_SANITIZERS := Makefile CMakePresets.json cache generator runtime templates tests/support $(addprefix tests/,$(SANITIZED))
of_late = $(shell git log -1 --since='8 hours ago' --format=%h -- $(1) 2>/dev/null || echo no history; \
    git status --porcelain -- $(1) 2>/dev/null)
BEYOND_QUICK := $(if $(filter full,$(LEVEL)),$(if $(call of_late,$(OF_SANITIZERS)),test-sanitize)) \
    $(if $(filter nightly,$(LEVEL)),test-sanitize test-torch-versions)
test: build-and-fetch test-release test-install $(BEYOND_QUICK) ## a case of every kind; LEVEL=full is CI's
	@tools/test_summary.sh build $(if $(filter test-sanitize,$(BEYOND_QUICK)),build-sanitize)

test-full: ## further combinations, trainers, and sanitizers where their files changed: what CI runs
	@$(MAKE) test LEVEL=full

# Nothing else stands in a recipe that calls make: `make -n` runs all of it.
test-nightly: ## at length, on top of that: trainers, every variant of the CUDA source, other torchs; an hour and more
	@$(MAKE) test LEVEL=nightly

test-release: build-tests
	@$(call run_tests,build,$(LEFT_OUT))

test-torch-versions: build-tests
	@tools/test_torch_versions.sh build/lib/libflce.so

test-install: build-tests
	@tools/test_install.sh build

test-sanitize: setup ## the CPU tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@tools/configure.sh sanitize
	cmake --build --preset sanitize -j $(JOBS) --target $(addprefix test_,$(SANITIZED))
	export FLCE_TEST_LEVEL=$(if $(filter nightly,$(LEVEL)),nightly,quick)
	$(call run_tests,build-sanitize,-L '^($(shell echo $(SANITIZED) | tr ' ' '|'))$$' $(LEFT_OUT))

bench: build ## every benchmark (build/bin/bench_*)
	@shopt -s nullglob
	for bench in build/bin/bench_*; do echo "== $$bench"; "$$bench"; done

lint: setup-python ## clang-format as a check, clang-tidy, the structure tests, ruff, mypy
	@tools/lint.sh

format: ## clang-format in place
	@tools/format.sh

setup-dist:
	@tools/setup.sh --dist

dist: setup-dist ## dist/: a release tree that runs from glibc 2.28 on
	@tools/dist.sh

dist-tests: setup-dist ## the same with the test binaries in it
	@tools/dist.sh --tests

setup-arm64:
	@tools/setup.sh --arm64

dist-arm64: setup-arm64 ## dist/aarch64/: the same for 64-bit Arm (GH200, GB200, GB10, Graviton), from any machine
	@tools/dist.sh --arm64

# A wheel of a release tree: its folder, and the architecture that pip's tag names.
make_wheel = tools/setup.sh --python && rm -f dist/*_$(2).whl && tools/python.sh -m pip wheel --quiet --no-deps --no-build-isolation \
    --config-settings cmake.define.FLCE_WHEEL_LIBRARIES=$(CURDIR)/$(1)/lib \
    --config-settings wheel.tags=py3-none-manylinux_2_28_$(2) -w dist .

wheel: dist ## dist/*.whl: the Python package with the release tree's libflce, for every Linux that PyTorch's wheels are for
	@$(call make_wheel,dist/flce,$(shell cc -dumpmachine | cut -d- -f1))

wheel-arm64: dist-arm64 ## dist/*aarch64.whl: the same for 64-bit Arm
	@$(call make_wheel,dist/aarch64/flce,aarch64)

clean: ## remove every build tree (what setup installed stays)
	rm -rf build build-dev build-sanitize build-asan build-ubsan build-tsan build-dist build-dist-aarch64 build-wheel dist
