# Everything a newcomer needs: make demo, make test. Nothing but Python, make and a package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
BROWSER_READY := $(VENV)/.browser-ready

# Many processes import the package, in tests too: it is compiled once.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo quick test unit test-slow test-browser test-device soak lint types package format docs bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	# torch first and alone: a later package may then not bring another build of it.
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,experiments,onnx]'
	touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

$(BROWSER_READY): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	touch $@

demo: $(READY)
	$(BIN)/conformallayers demo

# The inner loop: every layer of the house, in less than a minute on two cores.
QUICK := $(addprefix tests/,utils nn/test_registry.py nn/test_bounds.py recipe/test_recipe.py test_functional.py \
	nn/test_layers.py nn/test_activations.py nn/test_traced.py recipe/numpy integration/test_derivation.py \
	integration/test_contributing.py)

quick: lint
	$(BIN)/python -m pytest -q -n 2 $(QUICK)

# A minute of random attacks follows the tests; the seed of the day is printed.
test: $(READY)
	$(MAKE) --no-print-directory -j 2 lint package
	$(MAKE) --no-print-directory -j 2 types unit
	PYTHONPATH=tests $(BIN)/python -m soak --minutes 1 --jobs 2

unit: $(READY)
	$(BIN)/python -m pytest -q -n 2

MINUTES ?= 120
soak: $(READY)
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(MINUTES) --jobs 2

test-slow: $(READY)
	$(BIN)/python -m pytest -q -n 2 -m 'not browser'

# The playground in headless Chromium: apt-get install chromium chromium-driver.
test-browser: $(BROWSER_READY)
	$(BIN)/python -m pytest -q -m browser tests/browser

# Networks on an emulated Cortex-M4: apt-get install gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm.
# The images are those of conformallayers data.
DEVICE_NETWORKS ?= mnist-nano mnist-micro cifar10-micro cifar10-small \
	cifar10-relu-micro cifar10-resnet8 results/experiment5/StageNet-compact-cifar10.safetensors
test-device: $(READY)
	$(BIN)/python -m pytest -q tests/lab/devices tests/recipe/c/test_files.py
	$(BIN)/conformallayers device $(DEVICE_NETWORKS) --dtype int8

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# The package as it would be released.
package: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation > /dev/null
	$(BIN)/twine check --strict dist/*

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_READY)
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html
	$(BIN)/python docs/check_links.py docs/_build/html

bench: $(READY)
	$(BIN)/python benchmarks/train_step.py

clean:
	rm -rf $(VENV) dist docs/_build .pytest_cache .mypy_cache .ruff_cache
