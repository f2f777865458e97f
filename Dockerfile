# `tinygrad-nv serve` on a CPU. Every package is installed by its hash (requirements/serve.txt).
#   docker build -t tinygrad-nv .
#   docker run --rm -p 127.0.0.1:8000:8000 -e NV_API_KEY=secret -v "$PWD/model:/model:ro" tinygrad-nv /model
FROM python:3.11-slim
RUN useradd --create-home --uid 10001 serve
WORKDIR /app
COPY requirements/serve.txt requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/serve.txt
COPY pyproject.toml README.md LICENSE ./
COPY tinygrad_nv tinygrad_nv
COPY models models
RUN pip install --no-cache-dir --no-deps --no-build-isolation . && rm -r /app
USER serve
WORKDIR /home/serve
ENV HF_HUB_OFFLINE=1 NV_CACHE_DIR=/home/serve/cache
RUN mkdir -m 700 "$NV_CACHE_DIR"
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["tinygrad-nv", "serve", "--host", "0.0.0.0"]
