# make demo   install, then train the tiny world end to end on the CPU
# make agent-demo   install, then train a tiny agent with a tool on the CPU
# make pictures   the demo, then draw the README's pictures of it
# make test   install, then run the tests of every part
# make test-all   install, then run all tests: the matrices, every recipe, clusters; Hypothesis draws its examples afresh
# make lint   install, then ruff and pyright
# Each works from a fresh clone; what is done is not done again.

KIND := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
PACKAGES := .venv/packages-$(KIND)
ROLL := .venv/roll-$(KIND)

.PHONY: demo agent-demo pictures test test-all lint install
.DEFAULT_GOAL := install

install: $(ROLL)

demo: $(ROLL)
	@.venv/bin/python examples/tiny/demo.py

agent-demo: $(ROLL)
	@.venv/bin/python examples/tiny/demo.py --agent

pictures: demo
	@.venv/bin/python examples/tiny/pictures.py

test: $(ROLL)
	.venv/bin/python -m pytest -m "not full" --durations=20

test-all: $(ROLL)
	.venv/bin/python -m pytest --hypothesis-profile=random

lint: $(ROLL)
	.venv/bin/ruff check .
	.venv/bin/pyright --pythonpath .venv/bin/python

$(PACKAGES): requirements/$(KIND).lock requirements/install.sh
	@requirements/install.sh $(KIND)
	@touch $@

$(ROLL): $(PACKAGES) pyproject.toml
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-deps --no-build-isolation --editable .
	@touch $@
