# detjax serve, for CPUs or, with --build-arg ACCELERATOR=cuda13, for NVIDIA GPUs:
#
#   docker build --build-arg ACCELERATOR=cpu --tag detjax .
#   docker run --publish 8000:8000 --env DETJAX_API_KEY=... --volume /path/to/checkpoint:/model:ro detjax
#
# docs/serve/container.md says more.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS builder
ARG ACCELERATOR=cpu
WORKDIR /build
# Packages change more seldom than the code, so they are a layer of their own.
COPY requirements-serve-${ACCELERATOR}.lock requirements.lock
RUN python -m venv /opt/detjax \
    && /opt/detjax/bin/pip install --no-cache-dir --require-hashes --requirement requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY detjax ./detjax
RUN /opt/detjax/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM ${PYTHON_IMAGE}
# The directory of compiled programs has to belong to the server's user, and nobody else may write to it.
RUN useradd --uid 10001 --create-home detjax && install --directory --owner detjax --mode 700 /cache
COPY --from=builder /opt/detjax /opt/detjax
ENV PATH=/opt/detjax/bin:$PATH XDG_CACHE_HOME=/cache PYTHONUNBUFFERED=1
USER 10001
VOLUME /cache
EXPOSE 8000
# A large model takes minutes to load; the server answers as soon as it takes requests.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["detjax", "serve"]
CMD ["/model", "--host", "0.0.0.0", "--log-format", "json"]
