# `tinygrad-nv serve` in a container: `--target cpu` (the default) or `--target cuda`. Every package is installed by
# its hash (requirements/serve.txt, requirements/cuda.txt).
#   docker build -t tinygrad-nv .
#   docker run --rm -p 127.0.0.1:8000:8000 -e NV_API_KEY=secret -v "$PWD/model:/model:ro" tinygrad-nv /model
# The target cuda needs nvidia-container-toolkit on the host, and `--gpus all`; the driver's libraries come from there.
FROM python:3.11-slim AS base
RUN useradd --create-home --uid 10001 serve
WORKDIR /app
COPY requirements/serve.txt requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/serve.txt
COPY pyproject.toml README.md LICENSE ./
COPY tinygrad_nv tinygrad_nv
COPY models models
RUN pip install --no-cache-dir --no-deps --no-build-isolation . && rm -r /app/*
WORKDIR /home/serve
ENV HF_HUB_OFFLINE=1 NV_CACHE_DIR=/home/serve/cache
RUN install -d -m 700 -o serve -g serve "$NV_CACHE_DIR"
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["tinygrad-nv", "serve", "--host", "0.0.0.0"]

FROM base AS cuda
COPY requirements/cuda.txt requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/cuda.txt && rm -r requirements
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001

FROM base AS cpu
USER 10001
