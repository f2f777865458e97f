# Recipes for https://just.systems; each is one command that runs without it, too.

# servers under everything at once for so many hours: bench/README.md
soak HOURS='1' *OPTIONS:
    python bench/soak.py --hours {{HOURS}} --json soak.json --plot soak.png {{OPTIONS}}

# 10⁸ operations of the KV cache's pages against a model
pages OPERATIONS='1e8':
    python bench/page_operations.py --operations {{OPERATIONS}}

# the documentation site, in build/site; warnings are errors
docs:
    python -m mkdocs build --strict
