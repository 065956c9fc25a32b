# make install      install into .venv (default)
# make demo         install, then train a tiny model end to end on the CPU
# make agent-demo   install, then train a tiny agent with a tool on the CPU
# make picture-demo install, then train a tiny model that sees pictures on the CPU
# make smollm2      install, then fetch a real small model and train it on sums for a few steps on the CPU
# make pictures     run the demo, then draw the README's pictures of it
# make test         install, then run the tests of every part, in two halves side by side: test-parts and test-engines
# make test-all     install, then run all tests, including test matrices, every recipe and clusters; Hypothesis draws new random examples
# make docs         install, then compare the pages with the source and run their commands and code
# make lint         install, then run ruff and pyright
# make site         build the site of the documentation into site/, with MkDocs in .venv-site
# make release-check install, then build a source distribution and a wheel into dist/, and try the wheel in a new environment
# Every target works in a fresh clone. Steps that are done already are skipped.

KIND := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
PACKAGES := .venv/packages-$(KIND)
ROLL := .venv/roll-$(KIND)
TASKS := .venv/tasks
SITE := .venv-site/packages

# The two halves of `make test`. One starts engines, which wait for each other and leave a core idle, and the other does not.
PARTS := tests/unit tests/bad_input
ENGINES := tests/engines tests/integration tests/hosts tests/gpu
# Tests of `make test-all` that the second half runs as well: make test FULL="tests/engines/test_split.py"
FULL :=

.PHONY: demo agent-demo picture-demo smollm2 pictures test test-parts test-engines test-all docs lint site release-check install
.DEFAULT_GOAL := install

install: $(ROLL)

demo: $(ROLL)
	@.venv/bin/python examples/tiny/demo.py

agent-demo: $(ROLL)
	@.venv/bin/python examples/tiny/demo.py --agent

picture-demo: $(ROLL)
	@.venv/bin/python examples/tiny/demo.py --pictures

smollm2: $(ROLL) $(TASKS)
	@.venv/bin/python -m roll.models.fetch smollm2-135m
	@[ -e data/digit_sums ] || .venv/bin/python -m roll.data.prepare reasoning_gym:chain_sum --output data/digit_sums \
		--settings min_terms=2 max_terms=3 min_digits=1 max_digits=1 --rows 500 --validation 64
	@.venv/bin/python -m roll.pipeline --config-name smollm2_sums_cpu

pictures: demo
	@.venv/bin/python examples/tiny/pictures.py

test: $(ROLL)
	@echo "Two halves of the tests run side by side: each prints its report at its end."
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-parts test-engines

test-parts: $(ROLL)
	.venv/bin/python -m pytest $(PARTS) -m "not full" --durations=20

test-engines: $(ROLL)
	.venv/bin/python -m pytest $(ENGINES) -m "not full" --durations=20
	$(if $(FULL),.venv/bin/python -m pytest $(FULL) -m full --durations=20)

test-all: $(ROLL)
	.venv/bin/python -m pytest --hypothesis-profile=random

docs: $(ROLL)
	.venv/bin/python -m pytest tests/unit/docs

lint: $(ROLL)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --threads 2 --pythonpath .venv/bin/python

$(TASKS): requirements/tasks.lock $(ROLL)
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-deps -r $<
	@touch $@

site: $(SITE)
	@NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict
	@echo "site/index.html"

release-check: $(ROLL)
	@.venv/bin/python benchmarks/release.py

$(SITE): docs/site/requirements.txt
	@python3 -m venv .venv-site
	@.venv-site/bin/python -m pip install -qq --disable-pip-version-check --no-input --requirement $<
	@touch $@

$(PACKAGES): requirements/$(KIND).lock requirements/install.sh
	@requirements/install.sh $(KIND)
	@touch $@

$(ROLL): $(PACKAGES) pyproject.toml
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-deps --no-build-isolation --editable .
	@touch $@
