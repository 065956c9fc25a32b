# The NVIDIA environment of requirements/gpu.lock: docker build --tag roll .
# The devel image has nvcc, with which DeepSpeed compiles its CPU optimizer and its asynchronous I/O on first use.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# python3 is 3.12. The compiler and the headers are for DeepSpeed and Triton, git for the commits that a run records.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libaio-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The packages first, as `make install` installs them: this layer is kept until the lock changes.
WORKDIR /opt/roll
COPY requirements/ requirements/
ENV PIP_NO_CACHE_DIR=1
RUN requirements/install.sh gpu

COPY pyproject.toml README.md LICENSE ./
COPY examples/ examples/
COPY roll/ roll/
RUN .venv/bin/python -m pip install --no-deps --no-build-isolation .

ENV PATH=/opt/roll/.venv/bin:$PATH
WORKDIR /workspace
# Rarely, because the check uses the GPUs for a moment.
HEALTHCHECK --interval=1h --timeout=5m --start-period=5m --retries=1 CMD ["python", "-m", "roll.doctor"]
CMD ["python", "-m", "roll.doctor"]
