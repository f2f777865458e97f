# Recipes for https://just.systems (`pip install rust-just`); each is a command or two that run without it, too.
# `just` lists them.

export NV_SPEC := "1"
export HF_HUB_OFFLINE := "1"

_list:
    @just --list --unsorted

# the environment of tests, with packages by their hashes
setup:
    pip install --no-deps --require-hashes -r requirements/tests.txt
    pip install -e '.[cpu,test,bench,docs]'
    python tests/support/models/trained.py

# tests without the slow ones: `just test tests/unit/cpu -k gemv`
test *OPTIONS:
    python -m pytest -n auto -m "not slow" {{OPTIONS}}

# style, types, words
lint:
    ruff check .
    mypy tinygrad_nv bench
    python -m pytest -q tests/unit/test_words.py tests/unit/test_names.py tests/unit/test_architecture.py

# all that takes long: from an empty cache, in random order, slow tests, sanitizers, the wheel on 3.11 to 3.13
nightly SEED=`date +%s`:
    CI_CACHE=$(mktemp -d) .ci/run
    XDG_CACHE_HOME=$(mktemp -d) .venv/bin/python -m pytest -n auto -p no:cacheprovider --shuffle {{SEED}}
    .ci/nightly
    just wheel python3.11 python3.12 python3.13

# the documentation site, into build/site
docs:
    mkdocs build --strict

# the wheel and the source archive, tried with each Python
wheel *PYTHONS='python3':
    rm -rf dist
    python -m build
    twine check --strict dist/*
    .ci/wheel dist/*.whl {{PYTHONS}}

# a server: `just serve path/to/model --port 8000`; without a model the one in the box
serve *OPTIONS:
    tinygrad-nv serve {{OPTIONS}}

# a server in containers, with Prometheus and Grafana: deploy/README.md
monitored MODEL:
    MODEL={{MODEL}} docker compose --file deploy/compose.yaml up --build

# measurements of a GPU, or with --emulate of none: bench/README.md
bench *OPTIONS:
    python bench/gpu/run.py {{OPTIONS}}

# servers under everything at once for so many hours: bench/README.md
soak HOURS='1' *OPTIONS:
    python bench/serving/soak.py --hours {{HOURS}} --json soak.json --plot soak.png {{OPTIONS}}

# 10⁸ operations of the KV cache's pages against a model
pages OPERATIONS='1e8':
    python bench/serving/page_operations.py --operations {{OPERATIONS}}
